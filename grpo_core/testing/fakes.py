"""Fakes that keep the contracts, without a model, and rollouts, a small run and a validation with them.

The fakes work in characters (a token is a code point) and on the loop's clock, so that a whole run passes in
milliseconds under ``grpo_core.testing.run``.
"""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from grpo_core.contracts.errors import EngineError
from grpo_core.contracts.events import Event, GroupsReady, Validated, ValidationPlayed
from grpo_core.contracts.playing import EnvironmentClient, Player
from grpo_core.contracts.protocols import Description, Engine, Sampler, Trainer, ValidationStrategy
from grpo_core.contracts.records import (
    AgentClient,
    Batch,
    Completion,
    Episode,
    Feedback,
    GenerationRequest,
    Group,
    Judgement,
    Message,
    Prompt,
    Rollout,
    SampleRequest,
    SessionStart,
    StepResult,
    Weights,
)
from grpo_core.data.loaders import IndexedLoader
from grpo_core.data.samplers import PromptStream
from grpo_core.loop import canary
from grpo_core.loop.agreement import Tolerance
from grpo_core.loop.buffer import Buffer
from grpo_core.loop.pipeline import Learning, Pipeline, Playing, Schedule, Validate
from grpo_core.loop.rollout import RolloutRequest, SamplingParams, play
from grpo_core.loop.rows import group as group_advantages
from grpo_core.loop.versions import Interval
from grpo_core.testing import clock
from grpo_core.text.response_formats import parse_calls
from grpo_core.validation.runner import Context, Results, run_strategy

T = TypeVar("T")


def prompts(n: int, task: str = "task") -> list[Prompt]:
    """Make ``n`` prompts of a task."""
    return [Prompt(messages=f"prompt {i}", answer=str(i), id=str(i), environment=task) for i in range(n)]


class MemoryLoader(IndexedLoader):
    """A loader in memory that remembers the prompts it returned."""

    def __init__(self, task: str, n: int) -> None:
        offered = [Prompt(messages=f"{task} {i}", id=str(i), environment=task) for i in range(n)]
        super().__init__(task, offered, seed=0)
        self.drawn: list[Prompt] = []

    def take(self, n: int) -> list[Prompt]:
        found = super().take(n)
        self.drawn += found
        return found

    def skip(self, prompt: Prompt, reason: str) -> None:
        last = max(place for place, each in enumerate(self.drawn) if each is prompt)
        del self.drawn[last]

    def copy(self) -> MemoryLoader:
        """Return a copy that continues independently from here."""
        other = copy.copy(self)
        other.drawn = []
        return other


class FakePrompts(PromptStream):
    """The prompts of a pipeline, which a function draws.

    Args:
        draw: returns as many prompts as a request expects.
    """

    def __init__(self, draw: Callable[[SampleRequest], list[Prompt]]) -> None:
        super().__init__(sampler=cast(Sampler, object()), loaders={}, name="")
        self._draw = draw

    def draw(self, request: SampleRequest) -> list[Prompt]:
        return self._draw(request)


class FakeRenderer:
    """A token is a character."""

    stop_token_ids: tuple[int, ...] = ()

    context = vocabulary = tokens = 2**31

    async def run(self, work: Callable[[], T], size: int) -> T:
        return work()

    def check_turns(self, *, tools: bool) -> None:
        return None

    def prompt_ids(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> tuple[int, ...]:
        return tuple(map(ord, "".join(message["content"] for message in messages)))

    def continuation_ids(self, messages: Sequence[Message], **_: Any) -> tuple[int, ...] | None:
        return self.prompt_ids(messages)

    def message(self, text: str, *, tools: Sequence[Any] = (), **_: Any) -> Message:
        content, calls = parse_calls(text) if tools else (text, [])
        return {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}

    def text(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))

    def texts(self, rows: Sequence[Sequence[int]], before: Sequence[Sequence[int]] = ()) -> list[str]:
        return [self.text(row) for row in rows]


class FakeEngine:
    """Answers each request with ``reply(request)`` after ``latency(rng)`` seconds.

    The reply depends only on the request's seed; each token has the version held when it is sampled.
    ``fault(request)`` may return an exception to be raised.
    """

    def __init__(
        self,
        *,
        reply: Callable[[GenerationRequest, random.Random], str] = lambda request, rng: rng.choice("ab"),
        latency: Callable[[random.Random], float] = lambda rng: rng.expovariate(1.0),
        update_seconds: float = 0.1,
        fault: Callable[[GenerationRequest], Exception | None] = lambda request: None,
    ) -> None:
        self.reply, self.latency, self.update_seconds, self.fault = reply, latency, update_seconds, fault
        self.version: int | None = None
        self.running = 0
        self.closed = False

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        if self.version is None:
            raise EngineError("engine fake: generate before the first update_weights")
        return list(await asyncio.gather(*map(self._one, requests)))

    async def _one(self, request: GenerationRequest) -> Completion:
        rng = random.Random(request.seed)
        first = self.version
        assert first is not None
        self.running += 1
        try:
            await asyncio.sleep(self.latency(rng))
            if (fault := self.fault(request)) is not None:
                raise fault
        finally:
            self.running -= 1
        last = self.version
        assert last is not None
        text = self.reply(request, rng)
        versions = (first, *((last,) * (len(text) - 1)))
        return Completion(
            token_ids=tuple(map(ord, text)),
            logprobs=(-1.0,) * len(text),
            versions=versions[: len(text)],
            finish_reason="stop",
        )

    async def update_weights(self, weights: Weights) -> None:
        await asyncio.sleep(self.update_seconds)
        self.version = weights.version

    async def aclose(self) -> None:
        self.closed = True


class FakeTrainer(Trainer):
    """A trainer whose weights are a number that depends on all trained rows, in order."""

    def __init__(self, *, seconds: float = 1.0, version: int = 0) -> None:
        self.seconds = seconds
        self.version = version
        self.state = 0
        self.batches: list[Batch] = []

    async def step(self, batch: Batch) -> StepResult:
        await asyncio.sleep(self.seconds)
        assert batch.step == self.version, f"step {batch.step} given to version {self.version}"
        self.batches.append(batch)
        rows = tuple((tuple(row.tokens.ids.tolist()), row.advantage) for row in batch.rows)
        self.state = hash((self.state, rows))
        self.version += 1
        return StepResult(version=self.version, metrics={"loss": 0.0, "time/train": self.seconds})

    async def publish(self, canary: Sequence[tuple[int, ...]] = ()) -> Weights:
        return Weights(version=self.version, location="", nbytes=0, tensors=())

    async def save(self, directory: Path) -> Callable[[], Awaitable[None]]:
        async def written() -> None:
            return None

        return written


class FakeEnvironment:
    """Judges with ``feedback(episode)`` after ``seconds``; counts its calls."""

    def __init__(
        self,
        feedback: Callable[[Episode], Feedback] = lambda e: Feedback(reward=float(e.reply.startswith("a"))),
        *,
        max_turns: int = 1,
        seconds: float = 0.1,
        needs_group: bool = False,
        success: float | None = 1.0,
        combine: Mapping[str, str] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self.feedback, self.seconds = feedback, seconds
        self.about = Description(
            max_turns=max_turns, needs_group=needs_group, success=success, combine=combine or {}
        )
        self.player: Player | None = None
        self.tools = tuple(tools)
        self.calls: list[int] = []
        self.opened: list[str] = []
        self.closed: list[str] = []

    async def start(self) -> None:
        """Do nothing: it exists already."""

    async def prompts(self, split: str) -> list[Prompt]:
        return prompts(4)

    async def convert(self, rows: Sequence[Mapping[str, Any]]) -> list[Prompt] | None:
        return None

    async def solve(self, prompts: Sequence[Prompt]) -> list[str | None]:
        return [prompt.answer for prompt in prompts]

    async def open(self, prompts: Mapping[str, Prompt]) -> list[SessionStart]:
        self.opened += prompts
        return [SessionStart(tools=self.tools)] * len(prompts)

    async def evaluate(self, episodes: Sequence[Episode]) -> list[Judgement]:
        self.calls.append(len(episodes))
        await asyncio.sleep(self.seconds)
        return [Judgement.of(self.feedback(episode)) for episode in episodes]

    async def call(self, method: str, items: Sequence[Any], slots: int) -> Sequence[Any]:
        return await (self.evaluate(items) if method == "evaluate" else self.open(dict(items)))

    async def run(self, session: str, prompt: Prompt, client: AgentClient) -> Judgement | None:
        raise NotImplementedError("this environment runs no agents")

    async def close(self, sessions: Sequence[str]) -> None:
        self.closed += sessions

    async def aclose(self) -> None:
        """Do nothing: nothing runs."""


# ---------------------------------------------------------------------------------- rollouts and runs


async def play_rollouts(
    some: Sequence[Prompt],
    *,
    engine: Engine,
    environment: Any,
    deadline: float,
    first: int = 0,
    group: str = "",
    **limits: Any,
) -> list[Rollout]:
    """Play a rollout of each prompt with an engine whose tokens are characters.

    Args:
        some: the prompts, one of each rollout.
        engine: with its weights loaded.
        environment: as in a run; its ``player`` plays.
        deadline: seconds for each rollout.
        first: seed of the first rollout, and the group of its requests; the others count up from it.
        group: group of all requests, instead.
        limits: fields of ``rollout``, as ``max_tokens`` and ``max_turns``.
    """
    return await play(
        [
            RolloutRequest(prompt=prompt, seed=seed, group=group or str(seed))
            for seed, prompt in enumerate(some, first)
        ],
        engine=engine,
        environments={prompt.environment: environment for prompt in some},
        renderer=FakeRenderer(),
        sampling=SamplingParams(temperature=1.0, **limits),
        deadline=deadline,
    )


async def fake_run(
    stream: Iterator[Prompt],
    *,
    engine: Engine,
    environments: Mapping[str, EnvironmentClient],
    trainer: Trainer,
    steps: int = 3,
    prompts_per_step: int = 2,
    max_tokens: int = 8,
    validate: Validate | None = None,
    emit: Callable[[Event], None] = lambda event: None,
) -> None:
    """Train with the real pipeline, in order, and validate every other version.

    Args:
        stream: its prompts are drawn in turn.
        environments: by task.
        validate: measures a version.
        emit: receives the events.
    """
    buffer: Buffer[Prompt, Group] = Buffer(
        prompts_per_step=prompts_per_step, max_staleness=1, num_steps=steps, policy="in_order"
    )
    await Pipeline(
        buffer=buffer,
        prompts=FakePrompts(lambda request: [next(stream) for _ in range(request.expected_prompts)]),
        engine=engine,
        playing=Playing(
            environments=environments,
            renderer=FakeRenderer(),
            sampling=SamplingParams(temperature=1.0, max_tokens=max_tokens),
            group_size=4,
        ),
        learning=Learning(advantages=group_advantages),
        trainer=trainer,
        schedule=Schedule(validations=[Interval(2)], in_flight_updates=False),
        validate=validate,
        emit=emit,
    ).run()


def a_run() -> list[Event]:
    """Return the events of a run of three steps; the groups of the last one are validated, too."""
    events: list[Event] = []
    run = fake_run(
        iter(prompts(100)),
        engine=FakeEngine(),
        environments={"task": FakeEnvironment()},
        trainer=FakeTrainer(),
        emit=events.append,
    )
    clock.run(run)
    groups = [event.groups for event in events if isinstance(event, GroupsReady)][-1]
    return [
        *events,
        ValidationPlayed(step=3, version=3, groups=groups),
        Validated(step=3, version=3, results={"task": {"reward": 0.5, "accuracy": 0.5}}),
    ]


async def results_of(
    strategy: ValidationStrategy,
    held_out: Mapping[str, Sequence[Prompt]],
    *,
    engine: Engine,
    environments: Mapping[str, EnvironmentClient],
    version: int = 0,
    **limits: Any,
) -> Results:
    """Return a validation strategy's results for a version with these prompts, by task.

    Args:
        limits: fields of ``rollout``, as ``max_tokens`` and ``max_turns``.
    """
    context = Context(
        version=version,
        prompts=held_out,
        engine=engine,
        environments=environments,
        renderer=FakeRenderer(),
        sampling=SamplingParams(temperature=1.0, **limits),
        deadline=1e5,
    )
    return await run_strategy(type(strategy).__name__, strategy, context)


async def check_canary(engine: Engine, weights: Weights, *, tolerance: float) -> None:
    """Check an engine against the canary of weights, as a run does.  Raises WeightSyncError."""
    await canary.verify(engine, weights, tolerance=Tolerance(tolerance), deadline=None)
