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
    Feedback,
    GenerationRequest,
    Prompt,
    Rollout,
    SampleRequest,
    SessionStart,
    StepResult,
    Weights,
)

# ---------------------------------------------------------------------------------- written by plugin authors


class Environment:
    """Offers prompts and judges replies.  Subclassing is optional: any object with these will do."""

    max_turns: int = 1
    """Completions of a rollout at most, those that call tools included."""
    needs_group: bool = False
    """``evaluate`` only ever sees whole groups (relative rewards): when none of a group's rollouts calls a
    tool any more, and with those that have ended before the others."""
    tools: Sequence[Callable[..., Any]] = ()
    """Functions that the model may call, sync or async, with type hints and a docstring in Google's format.
    The core runs them and sends their results back as messages of the role "tool"; ``evaluate`` sees an
    episode when its last message calls none."""

    def prompts(self, split: str) -> Sequence[Prompt]:
        """The prompts of ``"train"`` or ``"validation"``: a sequence, computed on access if it is long.

        A generator is drawn to its end once, and may yield 100,000 prompts at most.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define prompts(split)")

    def evaluate(
        self, episodes: Sequence[Episode]
    ) -> Sequence[float | Feedback | None] | Awaitable[Sequence[float | Feedback | None]]:
        """One result for each episode, in order: a float is its reward and ends it; None is unscored.

        May be ``async``.  A result must not depend on the episode's place in the batch.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define evaluate(episodes)")

    def solve(self, prompt: Prompt) -> str | None:
        """A reply worth full marks, or None if none is known.  Default: the answer, if it is a string."""
        return prompt.answer if isinstance(prompt.answer, str) else None

    def open(self, prompt: Prompt) -> Any:
        """Called at the start of each rollout; what it returns is ``episode.session``.  May be ``async``.

        The public methods of an object are tools of its rollout, beside ``tools``.
        """
        return None

    def close(self, session: Any) -> None:
        """Called exactly once for each ``open``, also when the rollout is aborted.  May be ``async``.

        If the process dies, its sessions are gone: their rollouts are played again.
        """


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
        mode: Literal["batched", "pipelined"] = "pipelined",
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

    async def publish(self, canary: Sequence[tuple[int, ...]] = ()) -> Weights:
        """The current weights, and what they say of the canary's prompts (see ``grpo_core.engines.canary``).

        What was published before may be overwritten.
        """
        ...

    async def save(self, directory: Path) -> Callable[[], Awaitable[None]]:
        """Take a copy of everything that the trainer needs to continue.

        What is returned waits until the copy is written below ``directory``, and raises OSError if it cannot
        be; steps may follow before.  It is awaited before the next ``save``.
        """
        ...

    async def aclose(self) -> None: ...


class EnvironmentClient(Protocol):
    """An environment behind its process: what the rollout code calls."""

    max_turns: int
    needs_group: bool

    async def open(self, prompts: Mapping[str, Prompt]) -> list[SessionStart]:
        """Begin a session for each prompt, in order, under the name that is its key."""
        ...

    async def evaluate(self, episodes: Sequence[Episode]) -> list[Feedback]:
        """One for each episode, in order.

        An episode whose last message has ``tool_calls`` (and whose finish reason is "stop") is answered with
        the tools' results, ``Feedback(done=False)``, without asking the environment.
        """
        ...

    async def close(self, sessions: Sequence[str]) -> None:
        """End sessions by their names, each once; names that are not (or no longer) open are passed over.

        Returns at once; whoever owns the judge waits, when he closes it, until all sessions are closed.
        """
        ...
