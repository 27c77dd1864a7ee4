"""The simulated world around the real pipeline: an engine, environments, a trainer and a disk that fail.

Tokens are code points.  What an engine says depends on the request's seed alone and is said once: so a
rollout that is trained twice, altered, or never sampled is seen by ``Truth``.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

from grpo_core.environments.feedback import as_feedback
from grpo_core.errors import EngineError, TrainerError, WeightSyncError
from grpo_core.loop.advantages import normalize
from grpo_core.loop.laws import Violation
from grpo_core.protocols import Trainer
from grpo_core.records import (
    Batch,
    Completion,
    Episode,
    Feedback,
    GenerationRequest,
    Group,
    Prompt,
    SessionStart,
    StepResult,
    TensorInfo,
    Weights,
)
from grpo_core.tokens import Tokens
from simulation.disk import Dead, FaultyDisk
from simulation.faults import Dice

T = TypeVar("T")

Tell = Callable[[str], None]
"""Adds a line to the story."""

Die = Callable[[], None]
"""From now on nothing that happens counts."""

ENGINE_DEADLINE = 120.0
ENVIRONMENT_DEADLINE = 30.0
RESTART = 5.0
"""Seconds until a new engine process holds the weights."""


def never() -> asyncio.Future[Any]:
    return asyncio.get_running_loop().create_future()


class Truth:
    """Record what was really said and judged; what is trained is compared with it."""

    def __init__(self) -> None:
        self.violations: list[Violation] = []
        self._said: dict[bytes, Tokens] = {}
        self._trained: set[bytes] = set()
        self._due: list[tuple[bytes, float]] = []
        self._cuts: dict[int, set[bytes]] = {0: set()}
        """List what was trained before a step: it is the same for all cuts at this step."""

    def says(self, completion: Completion) -> None:
        tokens = completion.tokens
        self._said[tokens.ids.tobytes()] = tokens

    def saving(self, step: int) -> None:
        self._cuts[step] = set(self._trained)

    def resumed(self, step: int) -> None:
        self._trained = set(self._cuts[step])

    def groups(self, step: int, groups: Sequence[Group]) -> None:
        """The groups of a step are about to be trained."""
        self._due = []
        for group in groups:
            for rollout in group.rollouts:
                who = f"prompt {group.prompt.id!r}: a rollout"
                tokens = rollout.tokens
                ids = tokens.ids.tobytes()
                self._law(ids not in self._trained, step, f"{who} counts twice")
                self._trained.add(ids)
                expected = reward(tokens.ids.tolist(), tokens.sampled.tolist())
                self._law(rollout.reward == expected, step, f"{who} has {rollout.reward}, won {expected}")
            scores = normalize([float(r or 0.0) for r in group.rewards])
            pairs = zip(group.rollouts, scores, strict=True)
            self._due += [(rollout.tokens.ids.tobytes(), score) for rollout, score in pairs if score]

    def batch(self, batch: Batch) -> None:
        """Token by token what was sampled, with the advantage that its group gives it."""
        rows = [(row.tokens.ids.tobytes(), row.advantage) for row in batch.rows]
        self._law(rows == self._due, batch.step, "the rows are not the rollouts of the step's groups")
        for row in batch.rows:
            tokens, place = row.tokens, 0
            for sampled, run in itertools.groupby(tokens.sampled.tolist()):
                first, place = place, place + len(list(run))
                part = slice(first, place)
                said = self._said.get(tokens.ids[part].tobytes())
                same = not sampled or (
                    said is not None
                    and said.logprobs.tobytes() == tokens.logprobs[part].tobytes()
                    and said.versions.tobytes() == tokens.versions[part].tobytes()
                )
                self._law(same, batch.step, "a row is not what the engine said")

    def _law(self, holds: bool, step: int, what: str) -> None:
        if not holds:
            self.violations.append(Violation("truth", step, what))


def reward(token_ids: Sequence[int], sampled: Sequence[bool] | None = None) -> float:
    """0, 0.25, ... 1: of the last completion."""
    last = list(token_ids)
    if sampled is not None and False in sampled:
        last = last[len(sampled) - list(sampled)[::-1].index(False) :]
    return sum(last) % 5 / 4


def changed(completion: Completion, **changes: Any) -> Completion:
    tokens = completion.tokens
    said = {"token_ids": tokens.ids, "logprobs": tokens.logprobs, "versions": tokens.versions}
    return Completion(**{**said, **changes}, finish_reason=completion.finish_reason)


class Memory:
    """Where the trainer publishes and the engine reads: named tensors of bytes."""

    def __init__(self) -> None:
        self.tensors: dict[str, bytes] = {}

    def publish(self, version: int, tensors: Mapping[str, bytes]) -> Weights:
        self.tensors = dict(tensors)
        infos = tuple(
            TensorInfo(name=n, dtype="uint8", shape=(len(b),), offset=0, checksum=zlib.crc32(b))
            for n, b in tensors.items()
        )
        return Weights(version=version, location="simulated", nbytes=0, tensors=infos)

    def read(self, weights: Weights) -> dict[str, bytes]:
        """Raises WeightSyncError if a tensor is lost or altered, as ``weights.reading.read`` does."""
        for info in weights.tensors:
            if zlib.crc32(self.tensors.get(info.name, b"")) != info.checksum:
                raise WeightSyncError(f"version {weights.version}: tensor {info.name!r} is not what was sent")
        return dict(self.tensors)


class SimulatedEngine:
    """Keeps the contract of ``protocols.Engine``, unless the dice say otherwise."""

    def __init__(self, dice: Dice, memory: Memory, truth: Truth, tell: Tell) -> None:
        self._dice, self._memory, self._truth, self._tell = dice, memory, truth, tell
        self.version: int | None = None
        self.weights: dict[str, bytes] = {}
        self._running: dict[asyncio.Future[None], None] = {}
        self._up_at = 0.0

    @property
    def running(self) -> int:
        return len(self._running)

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        if self.version is None:
            raise EngineError("engine simulated: generate before the first update_weights")
        first = self.version
        fault = self._dice.pick("straggle", "silent", "engine_error", "engine_death", "engine_garbage")
        seconds = self._dice.random.lognormvariate(0.0, 0.6)
        if fault is not None:
            self._tell(f"engine: {fault}")
        await self._work(seconds * (100 if fault == "straggle" else 1), silent=fault == "silent")
        if fault == "engine_death":
            self._die()
        if fault in ("engine_error", "engine_death"):
            raise EngineError("engine simulated: asked again, please")
        completions = [self._say(request, first) for request in requests]
        return self._garbage(completions) if fault == "engine_garbage" else completions

    async def _work(self, seconds: float, *, silent: bool) -> None:
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        self._running[done] = None
        wait = max(self._up_at - loop.time(), 0.0) + seconds
        timer = None if silent else loop.call_later(wait, done.set_result, None)
        try:
            await done
        finally:
            del self._running[done]
            if timer is not None:
                timer.cancel()

    def _die(self) -> None:
        self._up_at = asyncio.get_running_loop().time() + RESTART
        for call in self._running:
            if not call.done():
                call.set_exception(EngineError("engine simulated: its process died"))

    def _say(self, request: GenerationRequest, first: int) -> Completion:
        assert self.version is not None
        seed = request.seed
        n = 3 + seed % 3
        tokens = tuple(0x10000 + (seed >> 12 * i) % 0x10000 for i in range(n))
        versions = tuple(first if i < n // 2 else self.version for i in range(n))
        logprobs = tuple(-((seed >> 8 * i) % 256) / 64 for i in range(n))
        said = Completion(token_ids=tokens, logprobs=logprobs, versions=versions, finish_reason="stop")
        self._truth.says(said)
        return said

    def _garbage(self, completions: list[Completion]) -> list[Completion]:
        self._dice.fatal.append("engine_garbage")
        one, *others = completions
        match self._dice.random.randrange(4):
            case 0:
                return others
            case 1:
                return [changed(one, logprobs=[math.nan, *one.logprobs[1:]]), *others]
            case 2:
                return [changed(one, versions=one.versions[1:]), *others]
        return [changed(one, logprobs=[*one.logprobs[1:], -math.inf]), *others]

    async def update_weights(self, weights: Weights) -> None:
        fault = self._dice.pick("sync_unanswered", "tensor_corrupted", "tensor_dropped")
        if fault is not None:
            self._tell(f"sync of version {weights.version}: {fault}")
            self._dice.fatal.append(fault)
        await asyncio.sleep(0.1)
        if fault == "sync_unanswered":
            await asyncio.sleep(ENGINE_DEADLINE)
            raise WeightSyncError(f"engine simulated: version {weights.version} was not acknowledged")
        name = weights.tensors[0].name
        if fault == "tensor_dropped":
            self._memory.tensors.pop(name, None)
        elif fault == "tensor_corrupted":
            self._memory.tensors[name] = b"other bytes"
        self.weights = self._memory.read(weights)
        self.version = weights.version

    async def aclose(self) -> None:
        return None


class SimulatedEnvironment:
    """An ``EnvironmentClient`` that turns the faults of its environment into feedback, as a process does.

    With two turns, the first is answered and the second is judged.
    """

    needs_group = False
    success = 1.0

    def __init__(self, task: str, dice: Dice, tell: Tell, *, max_turns: int, poisoned: set[str]) -> None:
        self.task, self.max_turns = task, max_turns
        self._dice, self._tell, self._poisoned = dice, tell, poisoned

    async def open(self, prompts: Mapping[str, Prompt]) -> list[SessionStart]:
        return [SessionStart()] * len(prompts)

    async def close(self, sessions: Sequence[str]) -> None:
        return None

    async def evaluate(self, episodes: Sequence[Episode]) -> list[Feedback]:
        slow = self._dice.happens("slow_feedback")
        await asyncio.sleep(ENVIRONMENT_DEADLINE if slow else 0.05)
        if self._dice.happens("environment_garbage", fatal=True):
            self._tell(f"environment {self.task}: wrong number of feedback")
            return [Feedback(reward=1.0)] * (len(episodes) + 1)
        return as_feedback([self._environment(episode) for episode in episodes], len(episodes), self.task)

    def _environment(self, episode: Episode) -> float | Feedback | None:
        fault = self._dice.pick("unscored", "nan_reward")
        if fault == "unscored":
            return None
        if fault == "nan_reward":
            return math.nan
        if episode.prompt.id in self._poisoned:
            return Feedback(error="ValueError: bad row")
        if episode.turn + 1 < self.max_turns:
            return Feedback(done=False, messages=({"role": "user", "content": "go on"},))
        return reward(list(map(ord, episode.reply)))


class SimulatedDisk(FaultyDisk):
    """Takes virtual time, and dies or fills up when the dice say so."""

    def __init__(self, root: Path, before: FaultyDisk | None, dice: Dice, tell: Tell, die: Die) -> None:
        room = dice.random.randrange(200, 60_000) if dice.happens("disk_full") else None
        dies_at = dice.random.randrange(1, 60) if dice.happens("kill_in_checkpoint") else 0
        super().__init__(root, before=before, dies_at=dies_at, room=room)
        self._dice, self._tell, self._told = dice, tell, die

    async def run(self, work: Callable[[], T]) -> T:
        await asyncio.sleep(0.01)
        try:
            return work()
        except OSError as error:
            self._tell(f"disk: full while {Path(error.filename).name} is written")
            self._dice.fatal.append("disk_full")
            self.room = None
            raise
        except Dead:
            self._tell("kill -9 in a checkpoint")
            self._told()
            await never()
            raise


class SimulatedTrainer(Trainer):
    """Its weights are a digest of everything that was trained, in order."""

    def __init__(
        self, dice: Dice, memory: Memory, truth: Truth, disk: SimulatedDisk, resume_from: Path | None
    ) -> None:
        self._dice, self._memory, self._truth, self._disk = dice, memory, truth, disk
        self.version, self.digest = 0, b"\0" * 16
        if resume_from is not None:
            state = json.loads((resume_from / "trainer" / "state.json").read_bytes())
            self.version, self.digest = state["version"], bytes.fromhex(state["digest"])

    async def step(self, batch: Batch) -> StepResult:
        await asyncio.sleep(self._dice.random.uniform(0.5, 1.5))
        if self._dice.happens("trainer_error", fatal=True):
            raise TrainerError(f"trainer simulated: step {batch.step} failed")
        if batch.step != self.version:
            self._truth.violations.append(Violation("truth", batch.step, f"trains version {self.version}"))
        self._truth.batch(batch)
        rows = repr([(row.tokens.ids.tobytes(), row.advantage) for row in batch.rows]).encode()
        self.digest = blake2b(self.digest + rows, digest_size=16).digest()
        self.version += 1
        return StepResult(version=self.version, metrics={"loss": 0.0, "time/train": 1.0})

    async def publish(self, canary: Sequence[tuple[int, ...]] = ()) -> Weights:
        return self._memory.publish(self.version, {"head": self.digest[:8], "body": self.digest[8:]})

    async def save(self, directory: Path) -> Callable[[], Awaitable[None]]:
        await asyncio.sleep(0.02)
        state = json.dumps({"version": self.version, "digest": self.digest.hex()}).encode()

        async def written() -> None:
            await asyncio.sleep(self._dice.random.expovariate(1.0))  # while training goes on, steps perhaps
            await self._disk.run(lambda: self._disk.write(directory / "trainer" / "state.json", state))

        return written

    async def aclose(self) -> None:
        return None
