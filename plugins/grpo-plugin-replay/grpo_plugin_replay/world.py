"""Simulated parts of a run, which compute nothing and take their service times.

A completion's first token id is the index of its outcome in a list, plus one; all other ids are 0.  The
environment thus finds the outcome by the text of a completion.
"""

from __future__ import annotations

import asyncio
import bisect
import heapq
import itertools
import random
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from attrs import define, field

from grpo_core import (
    AgentClient,
    Batch,
    Completion,
    Episode,
    GenerationRequest,
    Message,
    Prompt,
    StepResult,
    Trainer,
    Weights,
)
from grpo_core.contracts.protocols import Description
from grpo_core.contracts.records import SessionStart
from grpo_core.kit import Judgement
from grpo_plugin_replay.times import (
    EngineTimes,
    EnvironmentTimes,
    Outcome,
    RolloutTimes,
    TrainerTimes,
    log_normal,
)

T = TypeVar("T")


class Plays:
    """Draws the outcome of each rollout at its first request."""

    def __init__(self, times: RolloutTimes, *, seed: int, group_size: int) -> None:
        self.times, self.seed, self._group_size = times, seed, group_size
        self._known: list[Outcome] = []
        self._open: dict[str, list[Outcome]] = {}
        """Outcomes of each group without a request so far."""

    def next(self, request: GenerationRequest) -> tuple[int, int]:
        """Return the index of a request's rollout, and the number of tokens to sample."""
        marks = np.flatnonzero(request.prompt_ids)
        if marks.size == 0:
            self._known.append(self._begin(request.group))
            number, turn = len(self._known), 0
        else:
            number, turn = int(request.prompt_ids[marks[0]]), int(marks.size)
        return number, self._known[number - 1].turn_tokens[turn]

    def of(self, reply: str) -> Outcome:
        """Return the outcome of the rollout with this reply."""
        return self._known[int(reply) - 1]

    def _begin(self, group: str) -> Outcome:
        waiting = self._open.get(group)
        if not waiting:
            rng = random.Random(f"{self.seed} {group}")
            size = 1 if group.startswith("validation") else self._group_size
            waiting = self._open[group] = [self.times.drawn(rng) for _ in range(size)]
        outcome = waiting.pop()
        if not waiting:
            del self._open[group]
        return outcome


@define(eq=False, order=False)
class _Call:
    """Completions of one call; the caller wakes when the last of them ends."""

    left: int
    """Number of unfinished completions."""
    ended: asyncio.Future[None]


@define(eq=False, order=False)
class _Row:
    """A running completion."""

    number: int
    tokens: int
    truncated: bool
    call: _Call
    begin: float = 0.0
    """Token count of the engine at the start of this row."""
    completion: Completion | None = None


class PlannedEngine:
    """An engine whose n rows each get a token every ``token + (n - 1) * row`` seconds."""

    def __init__(self, times: EngineTimes, plays: Plays) -> None:
        self.times, self._plays = times, plays
        self._rows: list[tuple[float, int, _Row]] = []
        """A heap of running rows by the token count at which they end."""
        self._waiting: deque[_Row] = deque()
        self._tokens = 0.0
        """Number of tokens that a row would have received since the start."""
        self._at = 0.0
        """Time up to which tokens are counted."""
        self._pause = 0.0
        """Seconds of a pause of decoding from that time on."""
        self._order = itertools.count()
        self._timer: asyncio.TimerHandle | None = None
        self._marks: list[float] = []
        self._versions: list[int] = []
        """Versions that start at each of these token counts."""
        self._logprobs = np.empty(0, dtype=np.float32)

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        call = _Call(len(requests), asyncio.get_running_loop().create_future())
        rows = [self._row(request, call) for request in requests]
        self._count()
        self._waiting.extend(rows)
        self._pause += self.times.prompt_token * sum(len(request.prompt_ids) for request in requests)
        self._begin_rows()
        try:
            await call.ended
        finally:
            if call.left:  # the caller was cancelled
                gone = {id(row) for row in rows}
                self._count()
                self._waiting = deque(row for row in self._waiting if id(row) not in gone)
                self._rows = [each for each in self._rows if id(each[2]) not in gone]
                heapq.heapify(self._rows)
                self._begin_rows()
        return [row.completion for row in rows if row.completion is not None]

    async def update_weights(self, weights: Weights) -> None:
        self._count()
        self._pause += self.times.sync
        self._go_on()
        await asyncio.sleep(self._pause)
        self._count()
        self._marks.append(self._tokens)
        self._versions.append(weights.version)
        await asyncio.sleep(self.times.canary)

    async def aclose(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _row(self, request: GenerationRequest, call: _Call) -> _Row:
        number, tokens = self._plays.next(request)
        return _Row(
            number=number,
            tokens=min(tokens, request.max_tokens),
            truncated=tokens >= request.max_tokens,
            call=call,
        )

    def _begin_rows(self) -> None:
        limit = self.times.rows or len(self._rows) + len(self._waiting)
        while self._waiting and len(self._rows) < limit:
            row = self._waiting.popleft()
            row.begin = self._tokens
            heapq.heappush(self._rows, (self._tokens + row.tokens, next(self._order), row))
        self._go_on()

    def _seconds(self) -> float:
        """Return the seconds for a token of each running row."""
        return self.times.token + self.times.row * (len(self._rows) - 1)

    def _count(self) -> None:
        """Count the tokens until now; the number of rows is constant since the last count."""
        now = asyncio.get_running_loop().time()
        passed, self._at = now - self._at, now
        paused = min(passed, self._pause)
        self._pause -= paused
        if self._rows:
            self._tokens = min(self._tokens + (passed - paused) / self._seconds(), self._rows[0][0])

    def _go_on(self) -> None:
        """Schedule the end of the next row."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._rows:
            left = self._pause + max(0.0, self._rows[0][0] - self._tokens) * self._seconds()
            self._timer = asyncio.get_running_loop().call_later(left, self._end_rows)

    def _end_rows(self) -> None:
        """End the next row, and all rows that end at the same time."""
        self._timer = None
        self._count()
        self._tokens = end = self._rows[0][0]
        while self._rows and self._rows[0][0] <= end + 1e-6:
            _, _, row = heapq.heappop(self._rows)
            row.completion = self._completion(row)
            row.call.left -= 1
            if not row.call.left and not row.call.ended.done():
                row.call.ended.set_result(None)
        self._begin_rows()

    def _completion(self, row: _Row) -> Completion:
        ids = np.zeros(row.tokens, dtype=np.int32)
        ids[0] = row.number
        first = max(0, bisect.bisect_right(self._marks, row.begin + 1e-6) - 1)
        versions = np.full(row.tokens, self._versions[first], dtype=np.int32)
        for mark, version in zip(self._marks[first + 1 :], self._versions[first + 1 :], strict=True):
            versions[int(np.ceil(mark - row.begin - 1e-6)) :] = version
        ids.flags.writeable = versions.flags.writeable = False  # read-only arrays are not copied
        if len(self._logprobs) < row.tokens:  # shared by all completions, read-only
            self._logprobs = np.full(2 * row.tokens, -1.0, dtype=np.float32)
            self._logprobs.flags.writeable = False
        return Completion(
            token_ids=ids,
            logprobs=self._logprobs[: row.tokens],
            versions=versions,
            finish_reason="length" if row.truncated else "stop",
        )


class PlannedTrainer(Trainer):
    """A trainer that takes its service times."""

    def __init__(self, times: TrainerTimes, *, seed: int) -> None:
        self.times, self.version = times, 0
        self._rng = random.Random(f"{seed} trainer")

    async def step(self, batch: Batch) -> StepResult:
        tokens = sum(len(row.prompt_ids) + len(row.tokens) for row in batch.rows)
        mean = self.times.step + self.times.token * tokens
        seconds = log_normal(self._rng, mean, self.times.spread)
        await asyncio.sleep(seconds)
        self.version += 1
        return StepResult(version=self.version, metrics={"loss": 0.0, "time/train": seconds})

    async def publish(self, canary: Sequence[tuple[int, ...]] = ()) -> Weights:
        await asyncio.sleep(self.times.publish if self.version else 0.0)
        return Weights(version=self.version, location="", nbytes=0, tensors=())

    async def save(self, directory: Path) -> Callable[[], Awaitable[None]]:
        raise NotImplementedError("a simulated trainer saves nothing")


class PlannedEnvironment:
    """An environment that returns the drawn outcomes."""

    player: Any = None

    def __init__(self, times: EnvironmentTimes, plays: Plays) -> None:
        self.times, self._plays = times, plays
        self.about = Description(max_turns=plays.times.turns)
        self._rng = random.Random(f"{plays.seed} environment")

    async def open(self, prompts: Mapping[str, Prompt]) -> list[SessionStart]:
        return [SessionStart()] * len(prompts)

    async def evaluate(self, episodes: Sequence[Episode]) -> list[Judgement]:
        await asyncio.sleep(log_normal(self._rng, self.times.turn, self.times.spread))
        return [self._feedback(episode) for episode in episodes]

    def _feedback(self, episode: Episode) -> Judgement:
        outcome = self._plays.of(episode.reply)
        if episode.turn + 1 < len(outcome.turn_tokens) and episode.finish_reason == "stop":
            return Judgement(done=False, messages=({"role": "user", "content": "-"},))
        return Judgement(reward=outcome.reward)

    async def run(self, session: str, prompt: Prompt, client: AgentClient) -> Judgement | None:
        raise NotImplementedError("a simulated environment runs no agents")

    async def close(self, sessions: Sequence[str]) -> None:
        return None


@define(eq=False)
class PlannedRenderer:
    """A renderer with prompts of constant length; the text of a completion is its first token id."""

    prompt_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    context: int = 2**31
    vocabulary: int = 2**31
    tokens: int = 2**31
    _ids: Any = field(init=False)

    @_ids.default
    def _zeros(self) -> Any:
        ids = np.zeros(self.prompt_tokens, dtype=np.int32)
        ids.flags.writeable = False
        return ids

    async def run(self, work: Callable[[], T], size: int) -> T:
        return work()

    def check_turns(self, *, tools: bool) -> None:
        return None

    def prompt_ids(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> Any:
        return self._ids

    def continuation_ids(self, messages: Sequence[Message], **_: Any) -> tuple[int, ...]:
        return (0,)

    def message(self, text: str, **_: Any) -> Message:
        return {"role": "assistant", "content": text}

    def texts(self, rows: Sequence[Sequence[int]], before: Sequence[Sequence[int]] = ()) -> list[str]:
        return [str(row[0]) for row in rows]
