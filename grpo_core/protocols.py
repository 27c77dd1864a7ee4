"""The contracts between the pipeline and everything that can be exchanged.

Batch in, batch out, order kept.  The pipeline awaits these and nothing else; threads, child processes,
Ray and sockets live in the adapters behind them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from grpo_core.records import (
    Batch,
    Completion,
    Episode,
    GenerationRequest,
    Prompt,
    Rollout,
    SampleRequest,
    StepResult,
    Verdict,
    Weights,
)

# ---------------------------------------------------------------------------------- written by plugin authors


class Environment:
    """Offers prompts and judges replies.  Subclassing is optional: any object with these will do."""

    max_turns: int = 1
    needs_group: bool = False
    """``evaluate`` only ever sees whole groups (relative rewards)."""
    tools: Sequence[Callable[..., Any]] = ()

    def prompts(self, split: str) -> Sequence[Prompt]:
        """The prompts of ``"train"`` or ``"validation"``: a sequence, computed on access if it is long.

        A generator is drawn to its end once, and may yield 100,000 prompts at most.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define prompts(split)")

    def evaluate(
        self, episodes: Sequence[Episode]
    ) -> Sequence[float | Verdict | None] | Awaitable[Sequence[float | Verdict | None]]:
        """One result for each episode, in order: a float is its reward and ends it; None is no verdict.

        May be ``async``.  A result must not depend on the episode's place in the batch.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define evaluate(episodes)")

    def solve(self, prompt: Prompt) -> str | None:
        """A reply worth full marks, or None if none is known.  Default: the answer, if it is a string."""
        return prompt.answer if isinstance(prompt.answer, str) else None

    def open(self, prompt: Prompt) -> Any:
        """Called at the start of each rollout; what it returns is ``episode.session``."""
        return None

    def close(self, session: Any) -> None:
        """Called exactly once for each ``open``, also when the rollout is aborted."""


@runtime_checkable
class Loader(Protocol):
    """The endless stream of one task's prompts: reshuffled each epoch, resumed exactly."""

    def take(self, n: int) -> list[Prompt]: ...
    def __len__(self) -> int: ...
    @property
    def epoch(self) -> float: ...


@runtime_checkable
class Sampler(Protocol):
    """Chooses the next prompts.

    Optional: ``observe(groups: Sequence[Group]) -> None``, called with what was finished, whether it was
    trained or filtered (late, out of order, or never); ``state_dict() -> dict`` of JSON values and
    ``load_state_dict(state)``.
    """

    def sample(self, loaders: Mapping[str, Loader], request: SampleRequest) -> list[Prompt]: ...


class ValidationContext(Protocol):
    """What a validation strategy works with."""

    version: int
    """The weights that are measured, the same from start to end."""
    prompts: Mapping[str, Sequence[Prompt]]
    """Held-out prompts of each task."""

    async def rollout(
        self,
        prompts: Sequence[Prompt],
        *,
        n: int = 1,
        temperature: float = 0.0,
        max_tokens: int | None = None,
        mode: Literal["batched", "pipelined"] = "batched",
    ) -> list[Rollout]:
        """``n`` rollouts of each prompt, those of a prompt side by side: ``len(prompts) * n`` in all."""
        ...


@runtime_checkable
class ValidationStrategy(Protocol):
    """Decides how held-out prompts are rolled out and measured; returns ``{task: {metric: value}}``."""

    async def validate(self, context: ValidationContext) -> Mapping[str, Mapping[str, float]]: ...


@runtime_checkable
class Engine(Protocol):
    """Generates completions.

    Its factory is called as ``factory(setup: EngineSetup, **options)`` and must return at once.
    ``update_weights`` is awaited before the first ``generate``.
    """

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """One completion for each request, in order.  Raises EngineError if they have to be asked again."""
        ...

    async def update_weights(self, weights: Weights) -> None:
        """Returns when every later token is sampled from ``weights``; running requests continue on them.

        Raises WeightSyncError if the engine does not hold them; it then still holds the version before.
        """
        ...

    async def aclose(self) -> None: ...


AdvantageFunction = Callable[..., list[list[float]]]
"""``(rewards: list of groups of floats, **options) -> advantages`` of the same shape."""

LossFunction = Callable[..., Any]
"""See ``grpo_core.loss``."""


# ---------------------------------------------------------------------------------- inside of the core


class Trainer(Protocol):
    """Owns the model and the optimizer."""

    async def step(self, batch: Batch) -> StepResult: ...

    async def publish(self) -> Weights:
        """The current weights; what was published before may be overwritten."""
        ...

    async def save(self, directory: Path) -> None:
        """Write everything that the trainer needs to continue."""
        ...

    async def aclose(self) -> None: ...


class Judge(Protocol):
    """An environment behind its process: what the rollout code calls."""

    max_turns: int
    needs_group: bool

    async def evaluate(self, episodes: Sequence[Episode]) -> list[Verdict]: ...
