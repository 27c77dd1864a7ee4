"""The simulated world around the real pipeline: an engine, environments, a trainer and a disk that fail.

Tokens are code points.  What an engine says depends on the request's seed alone and is said once: so a
rollout that is trained twice, altered, never sampled, or sampled for another request is seen by ``Truth``.
The canary depends on the weights, so that an engine with other weights is seen by the real canary check.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import math
import zlib
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from attrs import evolve, field, frozen
from safetensors.numpy import save

from grpo_core.contracts.advantages import normalize
from grpo_core.contracts.errors import (
    ChildDied,
    DeadlineExceeded,
    EngineError,
    PluginError,
    TrainerError,
    Unavailable,
    WeightSyncError,
)
from grpo_core.contracts.events import GroupFiltered
from grpo_core.contracts.protocols import Description, Trainer, ValidationContext
from grpo_core.contracts.records import (
    AgentClient,
    Batch,
    Canary,
    Completion,
    Episode,
    Feedback,
    FinishReason,
    GenerationRequest,
    Group,
    Judgement,
    Message,
    Prompt,
    Rollout,
    SessionStart,
    StepResult,
    TensorInfo,
    Weights,
)
from grpo_core.contracts.tokens import Ids, Tokens
from grpo_core.environments.feedback import as_feedback
from grpo_core.loop.laws import Violation
from grpo_core.processes.aio import cancel
from grpo_core.storage.copies import WeightsLease
from grpo_core.testing.fakes import FakeRenderer
from simulation.agents import AgentError, AgentLedger, LimitError, Play, SimulatedAgent, SimulatedEndpoint
from simulation.disk import Dead, FaultyDisk
from simulation.faults import NONE, Dice

T = TypeVar("T")

Tell = Callable[[str], None]
"""Adds a line to the story."""

Die = Callable[[], None]
"""From now on nothing that happens counts."""

ENGINE_DEADLINE = 120.0
TRAINER_DEADLINE = 600.0
ENVIRONMENT_DEADLINE = 30.0
AWAY, GONE = 300.0, 660.0
"""Seconds for which a service does not answer."""
BETWEEN = 60.0
"""Seconds for which it answers after that, more than the longest pause of one who waits for it."""
RESTART = 5.0
"""Seconds until a new engine process holds the weights."""

HELD_OUT = "held out"
"""Beginning of the ids of prompts for validation."""

HELD_OUT_SET = "bench"
"""Name of the validation set."""

TEMPERATURE = 0.7

DIFFERENCE = 0.5
"""Hard limit of ``logprob_diff_mean``."""

NO_NUMBERS = b"nan"


def never() -> asyncio.Future[Any]:
    return asyncio.get_running_loop().create_future()


@frozen(kw_only=True)
class Rules:
    """The options of a run that decide what is trained, and how."""

    turns: Mapping[str, int]
    """Turns of each task."""
    compared: Mapping[str, bool]
    """Whether the environment of a task compares the rollouts of a group."""
    truncated: Literal["train", "mask", "unscored"] = "train"
    truncated_factor: float = 1.0
    token_price: float = 0.0
    differ: bool = False
    """Only groups whose rewards differ are trained."""
    highest_pass_rate: float = 1.0
    shortest: float = 0.0
    """Smallest mean length of the rollouts of a group that is trained."""
    agents: Mapping[str, int] = field(factory=dict)
    """Largest number of completions of each task that agents play."""
    quota: Callable[[int], Mapping[str, int]] | None = None
    """Returns the number of groups of each task in a step, if it is exact."""

    def shaped(self, reward: float, length: int, *, cut: bool) -> float:
        return reward * (self.truncated_factor if cut else 1.0) - self.token_price * length


class Truth:
    """Record what was really said and judged; what is trained is compared with it."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self._cut: set[bytes] = set()
        """The completions that a token limit cut off."""
        self._filtered: Counter[tuple[str, str]] = Counter()
        """Number of groups by task and filter that were filtered since the last step."""
        self.violations: list[Violation] = []
        self.published: dict[int, Mapping[str, bytes]] = {}
        """The weights of each version."""
        self._said: dict[bytes, list[tuple[bytes, Tokens]]] = {}
        """The tokens of each completion, and the ids that they continued, by the completion's ids.

        A slot that is played again after a resume gets the same ids, with other versions.
        """
        self._of_other_weights: set[bytes] = set()
        self._trained: set[bytes] = set()
        self._newest: dict[int, list[bytes]] = {}
        """Ids that the newest step trains, by slot."""
        self._due: list[tuple[bytes, float]] = []
        self.carried: set[int] = set()
        """Slots of the groups that were finished before the run was resumed."""
        self.trains_carried = False
        """Whether the step trains some of them: its health only warns."""
        self.ledger = AgentLedger(self.law)
        self._cuts: dict[int, set[bytes]] = {0: set()}
        """List what was trained before a step: it is the same for all cuts at this step."""

    def says(self, request: GenerationRequest, completion: Completion, weights: Mapping[str, bytes]) -> None:
        """An engine may sample from other weights than it says, until the canary ends the run."""
        tokens = completion.tokens
        said = self._said.setdefault(tokens.ids.tobytes(), [])
        said.append((request.prompt_ids.tobytes(), tokens))
        was_cut = completion.finish_reason == "length"
        (self._cut.add if was_cut else self._cut.discard)(tokens.ids.tobytes())
        others = self.published[int(tokens.versions[-1])] != weights
        (self._of_other_weights.add if others else self._of_other_weights.discard)(tokens.ids.tobytes())

    def saving(self, step: int) -> None:
        self.ledger.saving(step)
        self._cuts[step] = set(self._trained)

    def resumed(self, step: int) -> None:
        self.ledger.begin_life(step)
        self._trained = set(self._cuts[step])
        self._filtered.clear()

    def filtered(self, event: GroupFiltered) -> None:
        self.ledger.settled(event.slot)
        self._filtered[event.task, event.filter] += 1

    def returned(self, slots: Sequence[int]) -> None:
        """These groups are not trained after all."""
        for slot in slots:
            self._trained.difference_update(self._newest.pop(slot, ()))

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """The step counts the groups that were filtered since the one before."""
        told = {
            name: n for name, n in metrics.items() if name.startswith(("filtered/", "filtered_by_")) and n
        }
        counts: Counter[str] = Counter()
        by_filter = self.rules.highest_pass_rate < 1.0 or self.rules.shortest > 0.0
        for (task, name), n in self._filtered.items():
            counts[f"filtered/{task}"] += n
            if by_filter:
                counts[f"filtered_by_{name}/{task}"] += n
        self.law(told == counts, step, f"the metrics count {told} filtered groups, there were {dict(counts)}")
        self._filtered.clear()

    def _won(self, group: Group) -> list[float | None]:
        """Return what each rollout of a group deserves."""
        rules, task = self.rules, group.prompt.environment
        judged = [task in rules.agents or rollout.turns == rules.turns[task] for rollout in group.rollouts]
        won = [
            self._earned(group, rollout) if done else 0.0
            for rollout, done in zip(group.rollouts, judged, strict=True)
        ]
        if rules.compared[task]:
            places = [i for i, done in enumerate(judged) if done]
            for i, rank in zip(places, ranks([won[i] for i in places]), strict=True):
                won[i] = rank
        unscored = rules.truncated == "unscored"
        return [
            None if unscored and self._is_cut(group, rollout) else value
            for rollout, value in zip(group.rollouts, won, strict=True)
        ]

    def _earned(self, group: Group, rollout: Rollout) -> float:
        """Return what an agent says of itself, or what the last completion is worth."""
        play = self._play(group, rollout)
        if play is not None and play.claims is not None:
            return play.claims
        return reward(self._last(group, rollout).tolist())

    def _play(self, group: Group, rollout: Rollout) -> Play | None:
        """Return what an agent did, if one has played the rollout."""
        agents = group.prompt.environment in self.rules.agents
        return self.ledger.plays[rollout.seed] if agents else None

    def _last(self, group: Group, rollout: Rollout) -> Ids:
        """Return the ids of the completion that was sampled last."""
        if (play := self._play(group, rollout)) is not None:
            return play.said[-1].token_ids
        return last_completion(rollout.segments[-1].tokens)

    def _is_cut(self, group: Group, rollout: Rollout) -> bool:
        play = self._play(group, rollout)
        limited = play is not None and play.limited
        return not limited and self._last(group, rollout).tobytes() in self._cut

    def _check_filters(self, step: int, group: Group, won: Sequence[float | None]) -> None:
        """Check that no filter should have rejected a group that is trained."""
        rules, who = self.rules, f"prompt {group.prompt.id!r}"
        scored = [value for value in won if value is not None]
        if rules.differ:
            self.law(len(set(scored)) > 1, step, f"{who} is trained with equal rewards")
        if rules.highest_pass_rate < 1.0:
            rate = sum(value >= 1.0 for value in scored) / max(1, len(scored))
            fits = bool(scored) and rate <= rules.highest_pass_rate
            self.law(fits, step, f"{who} is trained with the pass rate {rate}")
        length = sum(rollout.n_sampled for rollout in group.rollouts) / len(group.rollouts)
        self.law(length >= rules.shortest, step, f"{who} is trained with the mean length {length}")

    def _advantages(self, group: Group, won: Sequence[float | None]) -> list[float | None]:
        """Return the advantage of each rollout that is trained."""
        cut = [self._is_cut(group, rollout) for rollout in group.rollouts]
        shaped = [
            None if value is None else self.rules.shaped(value, rollout.n_sampled, cut=was_cut)
            for value, rollout, was_cut in zip(won, group.rollouts, cut, strict=True)
        ]
        scores = iter(normalize([value for value in shaped if value is not None]))
        found = [None if value is None else next(scores) for value in shaped]
        masks = self.rules.truncated != "train"
        return [None if masks and was_cut else score for score, was_cut in zip(found, cut, strict=True)]

    def groups(self, step: int, groups: Sequence[Group]) -> None:
        """The groups of a step are about to be trained."""
        self._due, self._newest = [], {group.slot: [] for group in groups}
        self.trains_carried = any(group.slot in self.carried for group in groups)
        if self.rules.quota is not None:
            counts, quota = Counter(group.prompt.environment for group in groups), self.rules.quota(step)
            self.law(+counts == +Counter(quota), step, f"it trains {dict(counts)}, its quota is {quota}")
        for group in groups:
            self.ledger.settled(group.slot)
            for rollout in group.rollouts if group.prompt.environment in self.rules.agents else ():
                self.ledger.complete(step, rollout)
            won = self._won(group)
            self._check_filters(step, group, won)
            for rollout, expected in zip(group.rollouts, won, strict=True):
                who = f"prompt {group.prompt.id!r}: a rollout"
                ids = b"".join(segment.tokens.ids.tobytes() for segment in rollout.segments)
                self.law(ids not in self._trained, step, f"{who} counts twice")
                kept = sum(completions(segment.tokens) for segment in rollout.segments)
                self.law(kept == rollout.turns, step, f"{who} has {kept} of {rollout.turns} completions")
                self._trained.add(ids)
                self._newest[group.slot].append(ids)
                self.law(rollout.reward == expected, step, f"{who} has {rollout.reward}, won {expected}")
            pairs = zip(group.rollouts, self._advantages(group, won), strict=True)
            self._due += [
                (segment.tokens.ids.tobytes(), score)
                for rollout, score in pairs
                if score
                for segment in rollout.segments
            ]

    def batch(self, batch: Batch) -> None:
        """Token by token what was sampled, with the advantage that its group gives it."""
        rows = [(row.tokens.ids.tobytes(), row.advantage) for row in batch.rows]
        self.law(rows == self._due, batch.step, "the rows are not the rollouts of the step's groups")
        for row in batch.rows:
            self.row(batch.step, row.prompt_ids, row.tokens)

    def row(self, step: int, prompt_ids: Ids, tokens: Tokens) -> None:
        """Each completion is what the engine said to this request, not to another."""
        whole, place = np.concatenate([prompt_ids, tokens.ids]), 0
        for sampled, run in itertools.groupby(tokens.sampled.tolist()):
            first, place = place, place + len(list(run))
            if not sampled:
                continue
            part = slice(first, place)
            ids = tokens.ids[part].tobytes()
            same = [
                before
                for before, said in self._said.get(ids, ())
                if said.logprobs.tobytes() == tokens.logprobs[part].tobytes()
                and said.versions.tobytes() == tokens.versions[part].tobytes()
            ]
            self.law(bool(same), step, "a row is not what the engine said")
            self.law(ids not in self._of_other_weights, step, "a row was sampled from other weights")
            mine = whole[: len(prompt_ids) + first].tobytes() in same
            self.law(mine or not same, step, "a completion is the answer to another request")

    def law(self, holds: bool, step: int, what: str) -> None:
        if not holds:
            self.violations.append(Violation("truth", step, what))


def last_completion(tokens: Tokens) -> Ids:
    """Return the last unbroken run of sampled tokens of a segment that ends with one."""
    others = np.flatnonzero(~tokens.sampled)
    return tokens.ids[others[-1] + 1 if others.size else 0 :]


def completions(tokens: Tokens) -> int:
    """Return the number of unbroken runs of sampled tokens."""
    return sum(sampled for sampled, _ in itertools.groupby(tokens.sampled.tolist()))


def ranks(values: Sequence[float]) -> list[float]:
    """Return for each value the share of all values that are smaller."""
    return [sum(other < value for other in values) / len(values) for value in values]


def reward(token_ids: Sequence[int]) -> float:
    """0, 0.25, ... 1: of the last completion."""
    return sum(token_ids) % 5 / 4


def changed(completion: Completion, **changes: Any) -> Completion:
    tokens = completion.tokens
    said = {"token_ids": tokens.ids, "logprobs": tokens.logprobs, "versions": tokens.versions}
    return Completion(**{**said, **changes}, finish_reason=completion.finish_reason)


def next_token(weights: Mapping[str, bytes], prompt_ids: Sequence[int]) -> tuple[int, float]:
    """Return the likeliest token after a prompt, with its logprob, as a function of the weights."""
    if NO_NUMBERS in weights.values():
        return 0x10000, math.nan
    seed = zlib.crc32(repr((sorted(weights.items()), list(prompt_ids))).encode())
    return 0x10000 + seed % 0x10000, -(seed % 997) / 100


def logprob_of(token: Any, temperature: float) -> Any:
    """Return the logprob of a token, or of an array of them."""
    return -(token % 256) / 64 / temperature


class Memory:
    """Where the trainer publishes and engines read: named tensors of bytes."""

    def __init__(self) -> None:
        self._published: Mapping[str, bytes] = {}
        self._copies: dict[int, Mapping[str, bytes]] = {}

    def publish(self, version: int, tensors: Mapping[str, bytes]) -> Weights:
        self._published = dict(tensors)
        infos = tuple(
            TensorInfo(name=n, dtype="uint8", shape=(len(b),), offset=0, checksum=zlib.crc32(b))
            for n, b in tensors.items()
        )
        return Weights(version=version, location="published", nbytes=0, tensors=infos)

    async def hold(self, weights: Weights) -> WeightsLease:
        """Copy the weights for the members of a pool that are late."""
        self._copies = {weights.version: self._published, **dict(list(self._copies.items())[:3])}
        return WeightsLease(weights=evolve(weights, location="copy"))

    def read(self, weights: Weights, fault: str | None) -> Mapping[str, bytes]:
        """Raises WeightSyncError if a tensor is lost or altered, as ``weights.reading.read`` does."""
        copy = weights.location == "copy"
        tensors = dict(self._copies[weights.version] if copy else self._published)
        name = weights.tensors[0].name
        if fault == "tensor_dropped":
            tensors.pop(name)
        elif fault == "tensor_corrupted":
            tensors[name] = b"other bytes"
        for info in weights.tensors:
            if zlib.crc32(tensors.get(info.name, b"")) != info.checksum:
                raise WeightSyncError(f"version {weights.version}: tensor {info.name!r} is not what was sent")
        return tensors


class SimulatedEngine:
    """Keeps the contract of ``protocols.Engine``, unless the dice say otherwise.

    Args:
        node: the engines of a pool that run on the same machine; None without a pool.
        warmth: multiplies the temperature at which it samples.
        cuts: whether some completions are cut off by a token limit.
        starts: seconds until its process can answer.
    """

    def __init__(
        self,
        dice: Dice,
        memory: Memory,
        truth: Truth,
        tell: Tell,
        *,
        node: list[SimulatedEngine] | None = None,
        warmth: float = 1.0,
        cuts: bool = False,
        starts: float = 0.0,
    ) -> None:
        self._dice, self._memory, self._truth, self._tell = dice, memory, truth, tell
        self._node, self._warmth, self._cuts = node, warmth, cuts
        self.version: int | None = None
        self.weights: Mapping[str, bytes] = {}
        self._running: dict[asyncio.Future[None], GenerationRequest] = {}
        self._lost = False
        self._unanswered: Counter[int] = Counter()
        """Canaries of a version that were left unanswered."""
        self._outdated: int | None = None
        """The version whose weights it should have, if it has those of before."""
        self._up_at = asyncio.get_running_loop().time() + starts if starts else 0.0
        if node is not None:
            node.append(self)

    def running(self, *, canaries: bool) -> int:
        return sum(canaries or request.max_tokens > 1 for request in self._running.values())

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        self._check_alive()
        if self.version is None:
            raise EngineError("engine simulated: generate before the first update_weights")
        if self._node is not None and self._dice.happens("node_loss"):
            self._tell(f"node: its {len(self._node)} engines are lost")
            self._lose_node()
            self._check_alive()
        first, canary = self.version, requests[0].max_tokens == 1
        validation = requests[0].group.startswith("validation")
        faults = _OF_CANARIES if canary else _OF_VALIDATION if validation else _OF_CALLS
        fault = self._dice.pick(*faults)
        seconds = self._dice.random.lognormvariate(0.0, 0.6)
        if fault is not None:
            self._tell(f"engine: {fault}")
        if fault == "canary_unanswered":
            self._unanswered[first] += 1
            if self._node is not None or self._unanswered[first] == 2:  # it is asked twice
                self._ends(fault)
        silent = fault in ("silent", "canary_unanswered")
        others = list(self._running.values())
        try:
            await self._work(requests[0], seconds * (100 if fault == "straggle" else 1), silent=silent)
            if fault == "engine_death":
                self._die()
            if fault in ("engine_error", "engine_death"):
                raise EngineError("engine simulated: asked again, please")
        except (EngineError, ChildDied):
            if fault == "canary_unanswered":  # its death ends the wait
                self._unanswered[first] -= 1
                if self._unanswered[first] == 1 and self._node is None:
                    self._dice.fatal.remove(fault)
            if canary:  # the run ends after some in a row
                self._dice.doubtful.append("a canary without an answer")
            raise
        if canary:
            said = [self._say_next(request) for request in requests]
        else:
            said = [self._say(request, first) for request in requests]
        if fault == "doubled":
            said = [said[0]] * len(said)
        elif fault == "reordered":
            said = said[::-1] if len(said) > 1 or not others else [self._say(others[0], first)]
        elif fault == "engine_garbage":
            self._ends(fault)
            said = self._garbage(said)
        return said

    def _ends(self, fault: str) -> None:
        """The run ends by this fault, or, in a pool, perhaps."""
        (self._dice.fatal if self._node is None else self._dice.doubtful).append(fault)

    async def _work(self, request: GenerationRequest, seconds: float, *, silent: bool) -> None:
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        self._running[done] = request
        wait = max(self._up_at - loop.time(), 0.0) + seconds
        timer = None if silent else loop.call_later(wait, _finish, done)
        try:
            await done
        finally:
            del self._running[done]
            if timer is not None:
                timer.cancel()

    def _die(self) -> None:
        self._up_at = asyncio.get_running_loop().time() + RESTART
        self._fail_calls(EngineError("engine simulated: its process died"))

    def _fail_calls(self, error: Exception) -> None:
        for call in self._running:
            if not call.done():
                call.set_exception(error)

    def _lose_node(self) -> None:
        assert self._node is not None
        for engine in self._node:
            engine._lost = True
            engine._fail_calls(ChildDied("engine simulated: its machine is lost"))
        self._node.clear()

    def _check_alive(self) -> None:
        if self._lost:
            raise ChildDied("engine simulated: its machine is lost")

    def _say(self, request: GenerationRequest, first: int) -> Completion:
        assert self.version is not None
        seed = request.seed
        n = 3 + seed % 3
        tokens = tuple(0x10000 + (seed >> 12 * i) % 0x10000 for i in range(n))
        versions = tuple(first if i < n // 2 else self.version for i in range(n))
        temperature = request.temperature * self._warmth
        logprobs = tuple(logprob_of(token, temperature) for token in tokens)
        reason: FinishReason = "length" if self._cuts and seed % 7 == 0 else "stop"
        said = Completion(token_ids=tokens, logprobs=logprobs, versions=versions, finish_reason=reason)
        self._truth.says(request, said, self.weights)
        return said

    def _say_next(self, request: GenerationRequest) -> Completion:
        token, logprob = next_token(self.weights, request.prompt_ids.tolist())
        assert self.version is not None
        return Completion(
            token_ids=[token], logprobs=[logprob], versions=[self.version], finish_reason="length"
        )

    def _garbage(self, completions: list[Completion]) -> list[Completion]:
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
        fault = self._dice.pick("sync_unanswered", "tensor_corrupted", "tensor_dropped", "old_weights")
        if fault == "old_weights" and self.version == weights.version:
            fault = None  # weights that are sent again: the old ones are the right ones
        if fault is not None:
            self._tell(f"sync of version {weights.version}: {fault}")
            self._ends(fault)
        self._check_alive()
        loop = asyncio.get_running_loop()
        await asyncio.sleep(0.1 + max(self._up_at - loop.time(), 0.0))
        if fault == "sync_unanswered":
            await asyncio.sleep(ENGINE_DEADLINE)
            raise WeightSyncError(f"engine simulated: version {weights.version} was not acknowledged")
        self._check_alive()
        tensors = self._memory.read(weights, fault)
        self.version = weights.version
        if fault == "old_weights":
            self._outdated = weights.version
            return
        if self._outdated == weights.version and self._node is None:  # sent again: its canary had no answer
            self._dice.fatal.remove("old_weights")
        self._outdated = None
        self.weights = tensors

    async def aclose(self) -> None:
        self._lost = True


_OF_CALLS = (
    "straggle", "silent", "engine_error", "engine_death", "engine_garbage", "doubled", "reordered",
)  # fmt: skip
_OF_VALIDATION = tuple(fault for fault in _OF_CALLS if fault != "silent")  # it would end the run
_OF_CANARIES = ("engine_error", "engine_death", "engine_garbage", "canary_unanswered")


def _finish(call: asyncio.Future[None]) -> None:
    if not call.done():
        call.set_result(None)


class SimulatedEnvironment:
    """An ``EnvironmentClient`` that turns the faults of its environment into feedback, as a process does.

    With two turns, the first is answered and the second is judged.  A compared group is judged as a whole.
    With an endpoint, agents play the rollouts; they are judged at their ends, or say by themselves what they
    have won.
    """

    def __init__(
        self,
        task: str,
        dice: Dice,
        truth: Truth,
        tell: Tell,
        *,
        max_turns: int,
        needs_group: bool,
        poisoned: set[str],
        group_size: int,
        endpoint: SimulatedEndpoint | None = None,
    ) -> None:
        self.task = task
        self.about = Description(
            max_turns=max_turns,
            needs_group=needs_group,
            success=1.0,
            agents=int(endpoint is not None),
            has_sessions=True,
        )
        self._dice, self._truth, self._tell, self._poisoned = dice, truth, tell, poisoned
        self._group_size = group_size
        self.player = endpoint
        self._playing: dict[asyncio.Task[Feedback | None], None] = {}
        """The agents that run."""
        self.sessions: set[str] = set()
        """Names of the open sessions."""
        self._lost: set[str] = set()
        self._away_until = self._here_until = 0.0

    async def start(self) -> None:
        """Do nothing: it runs."""

    async def open(self, prompts: Mapping[str, Prompt]) -> list[SessionStart]:
        self.sessions |= set(prompts)
        return [SessionStart()] * len(prompts)

    async def call(self, method: str, items: Sequence[Any], slots: int) -> Sequence[Any]:
        return await (self.evaluate(items) if method == "evaluate" else self.open(dict(items)))

    async def close(self, sessions: Sequence[str]) -> None:
        self.sessions.difference_update(sessions)

    async def aclose(self) -> None:
        """Do nothing: nothing runs."""

    def _is_away(self) -> bool:
        """Whether the service that judges is away; draws nothing where it never is."""
        now, chances = asyncio.get_running_loop().time(), self._dice.faults
        if now >= self._here_until and (chances.service_away or chances.service_gone):
            fault = self._dice.pick("service_away", "service_gone")
            if fault is not None:
                self._tell(f"environment {self.task}: {fault}")
                self._away_until = now + (AWAY if fault == "service_away" else GONE)
                self._here_until = self._away_until + BETWEEN
            if fault == "service_gone":  # the life may end before it has waited for so long
                self._dice.doubtful.append(fault)
        return now < self._away_until

    async def evaluate(self, episodes: Sequence[Episode]) -> list[Feedback]:
        if self._is_away():
            gone = Unavailable("Connection refused")
            return [Judgement(error=str(gone), unavailable=gone)] * len(episodes)
        slow = self._dice.happens("slow_feedback")
        await asyncio.sleep(ENVIRONMENT_DEADLINE if slow else 0.05)
        if self._dice.happens("environment_garbage", fatal=True):
            self._tell(f"environment {self.task}: wrong number of feedback")
            return [Judgement(reward=1.0)] * (len(episodes) + 1)
        if self._dice.happens("environment_death") and self.about.max_turns > 1:
            self._tell(f"environment {self.task}: its sessions are lost")
            self._lost |= self.sessions
        results = [self._environment(episode) for episode in episodes]
        if self.about.needs_group:
            results = self._compared(episodes, results)
        return as_feedback(results, len(episodes), self.task)

    async def run(self, session: str, prompt: Prompt, client: AgentClient) -> Feedback | None:
        """Play a rollout with an agent, whose process may die with all that it plays."""
        if not prompt.id.startswith(HELD_OUT) and self._dice.happens("agent_death"):
            self._tell(f"environment {self.task}: its {len(self._playing)} agents die")
            for other in self._playing:
                other.cancel()
        playing = asyncio.create_task(self._run(prompt, client), name="agent")
        self._playing[playing] = None
        try:
            await asyncio.wait([playing])
            if playing.cancelled():
                return Judgement(error="its agent died with its process", lost=True)
            return playing.result()
        finally:
            await cancel([playing])
            del self._playing[playing]

    async def _run(self, prompt: Prompt, client: AgentClient) -> Feedback | None:
        assert self.player is not None
        held_out = prompt.id.startswith(HELD_OUT)
        fault = None if held_out else self._dice.pick("agent_error", "agent_hang", "nan_reward")
        if prompt.id in self._poisoned and not held_out:
            self._dice.happened.add("poisoned")
            return Judgement(error="ValueError: bad row")
        session, play = self.player.sessions[client.api_key]
        agent = SimulatedAgent(session, play, self._truth.law, prompt.messages)
        try:
            reply = await agent.play()
        except AgentError as error:
            judged = isinstance(error, LimitError) and play.given.seed % 2
            return None if judged else Judgement(error=f"{type(error).__name__}: {error}")
        if fault == "agent_error":
            return Judgement(error="ValueError: the agent fails in the end")
        if fault == "agent_hang":
            await never()
        if play.given.seed % 2 or self.about.needs_group:
            return None  # the environment judges
        claims = math.nan if fault == "nan_reward" else reward(list(map(ord, reply)))
        (feedback,) = as_feedback([claims], 1, self.task)
        play.claims = feedback.reward
        return feedback

    def _environment(self, episode: Episode) -> float | Feedback | None:
        fault = self._dice.pick("unscored", "nan_reward")
        ended = episode.truncated and self._truth.rules.truncated == "unscored"  # shown for its group's sake
        if episode.session in self._lost and not ended:
            return Judgement(error="its session ended with its process", lost=True)
        if episode.prompt.id.startswith(HELD_OUT) or ended:
            fault = None
        if fault == "unscored":
            return None
        if fault == "nan_reward":
            return math.nan
        if episode.prompt.id in self._poisoned:
            self._dice.happened.add("poisoned")
            return Feedback(error="ValueError: bad row")
        if episode.turn + 1 < self.about.max_turns and self.player is None:
            return Feedback(done=False, messages=({"role": "user", "content": "go on"},))
        return reward(list(map(ord, episode.reply)))

    def _compared(
        self, episodes: Sequence[Episode], results: Sequence[float | Feedback | None]
    ) -> list[float | Feedback | None]:
        """Replace rewards by ranks within the group, which is here as a whole at its first turn."""
        places: dict[str, list[int]] = {}
        for i, episode in enumerate(episodes):
            places.setdefault(episode.group, []).append(i)
        for group, part in places.items():
            later = any(episodes[i].turn > 0 for i in part) or group.startswith("validation")
            whole = later or len(part) == self._group_size
            self._truth.law(whole, 0, f"{len(part)} rollouts of group {group} are compared")
        found = list(results)
        for part in places.values():
            won = {i: r for i in part if isinstance(r := results[i], float) and math.isfinite(r)}
            for i, rank in zip(won, ranks(list(won.values())), strict=True):
                found[i] = rank
        return found


class SimulatedValidation:
    """A validation strategy that fails or never returns when the dice say so."""

    def __init__(self, dice: Dice, truth: Truth, tell: Tell, mode: Any) -> None:
        self._dice, self._truth, self._tell, self._mode = dice, truth, tell, mode

    async def validate(self, context: ValidationContext) -> dict[str, dict[str, float]]:
        fault = self._dice.pick("validation_error", "validation_hang")
        if fault is not None:
            self._tell(f"validation: {fault}")
            self._dice.fatal.append(fault)
        if fault == "validation_error":
            raise PluginError("validation strategy 'simulated': no")
        if fault == "validation_hang":
            await never()
        results = {}
        for task, prompts in context.prompts.items():
            rollouts = await context.rollout(prompts, n=2, temperature=TEMPERATURE, mode=self._mode)
            self._look_at(context.version, task, rollouts)
            results[task] = {"reward": sum(rollout.reward or 0.0 for rollout in rollouts)}
        return results

    def _look_at(self, version: int, task: str, rollouts: Sequence[Rollout]) -> None:
        if task in self._truth.rules.agents:
            self._truth.ledger.ended(version, rollouts)
        for rollout in rollouts:
            for segment in rollout.segments:
                self._truth.row(version, segment.prompt_ids, segment.tokens)
            self._truth.law(
                rollout.reward is not None or rollout.lost, version, f"not validated: {rollout.error}"
            )
        if all(rollout.reward is None for rollout in rollouts):
            self._dice.doubtful.append("all rollouts of a validation are lost")


class SimulatedDisk(FaultyDisk):
    """Takes virtual time, and dies or fills up when the dice say so."""

    def __init__(self, root: Path, before: FaultyDisk | None, dice: Dice, tell: Tell, die: Die) -> None:
        room = dice.random.randrange(200, 60_000) if dice.happens("disk_full") else None
        dies_at = dice.random.randrange(1, 60) if dice.happens("kill_in_checkpoint") else 0
        super().__init__(root, before=before, dies_at=dies_at, room=room)
        self._dice, self._tell, self._told = dice, tell, die

    async def run(self, work: Callable[[], T]) -> T:
        await asyncio.sleep(60.0 if self._dice.happens("slow_disk") else 0.01)
        try:
            return work()
        except OSError as error:
            full = error.errno == errno.ENOSPC
            self._tell(f"disk: {error.strerror}: {Path(error.filename).name}")
            self._dice.fatal.append("disk_full" if full else "sync_error")
            self.room = None
            raise
        except Dead:
            self._tell("kill -9 in a checkpoint")
            self._told()
            await never()
            raise

    def sync(self, path: Path) -> None:
        if self._dice.happens("sync_error"):
            raise OSError(errno.EIO, "Input/output error", str(path))
        super().sync(path)


class SimulatedRenderer(FakeRenderer):
    """Rewrites history after some completions: the rollout continues in a new segment."""

    def continuation_ids(
        self, messages: Sequence[Message], *, said: Message, **others: Any
    ) -> tuple[int, ...] | None:
        rewrites = ord(said["content"][0]) % 2
        return None if rewrites else super().continuation_ids(messages)


class SimulatedTrainer(Trainer):
    """Its weights are a digest of everything that was trained, in order."""

    def __init__(
        self, dice: Dice, memory: Memory, truth: Truth, disk: SimulatedDisk, resume_from: Path | None
    ) -> None:
        self.dice, self._memory, self.truth, self._disk = dice, memory, truth, disk
        self.version, self.digest = 0, b"\0" * 16
        self._broken = False
        """Whether its weights are no numbers."""
        self._changed = False
        """Whether the newest step may have changed the weights."""
        self._far: deque[bool | None] = deque(maxlen=5)
        """Whether the engine's logprobs were far from its own in the last steps; None without rows."""
        if resume_from is not None:
            self._resume(resume_from / "trainer")

    def _resume(self, directory: Path) -> None:
        """Continue with what one process has saved, or several ranks, of which each has a part."""
        parts = [json.loads(path.read_bytes()) for path in sorted(directory.glob("*.json"))]
        self.truth.law(
            len({part["version"] for part in parts}) == 1 and len(parts) == parts[0].get("files", 1),
            parts[0]["version"],
            f"a checkpoint has {len(parts)} parts: {parts}",
        )
        digits = itertools.zip_longest(*(part["digest"] for part in parts), fillvalue="")
        self.version, self.digest = parts[0]["version"], bytes.fromhex("".join(map("".join, digits)))
        self.truth.law(not parts[0]["broken"], self.version, "the weights of a checkpoint are no numbers")

    async def step(self, batch: Batch) -> StepResult:
        await asyncio.sleep(self.dice.random.uniform(0.5, 1.5))
        fault = self.dice.pick("trainer_error", "trainer_hang", "nan_weights", "nan_metrics")
        self._changed = fault != "trainer_error" or self.version % 2 == 0
        if fault == "trainer_error":
            self.dice.fatal.append(fault)
            raise TrainerError(f"trainer simulated: step {batch.step} failed")
        if fault == "trainer_hang":
            await self._hang("step")
        if fault == "nan_weights":
            self.dice.fatal.append(fault)
            self._broken = True
        self.truth.law(batch.step == self.version, batch.step, f"trains version {self.version}")
        self.truth.batch(batch)
        rows = repr([(row.tokens.ids.tobytes(), row.advantage) for row in batch.rows]).encode()
        self.digest = blake2b(self.digest + rows, digest_size=16).digest()
        self.version += 1
        metrics = {"loss": 0.0, "time/train": 1.0, **self._difference(batch)}
        if fault == "nan_metrics" and batch.rows:
            self.dice.fatal.append(fault)
            metrics |= {"loss": math.nan, "logprob_diff_mean": math.nan}
        return StepResult(version=self.version, metrics=metrics)

    def _difference(self, batch: Batch) -> dict[str, float]:
        """Compare the engine's logprobs with its own; more than half of the last steps must be near."""
        if not batch.rows:
            self._far.append(None)
            return {}
        tokens = [row.tokens for row in batch.rows]
        sampled = np.concatenate([part.sampled for part in tokens])
        given = np.concatenate([part.logprobs for part in tokens])[sampled]
        ids = np.concatenate([part.ids for part in tokens])[sampled]
        difference = float(np.abs(given - logprob_of(ids, batch.temperature)).mean())
        if not self.truth.trains_carried:
            self._far.append(difference > DIFFERENCE)
        far = [step for step in self._far if step is not None]
        if 2 * sum(far) > len(far) and self.dice.faults != NONE:
            self.dice.fatal.append("wrong_temperature")
        elif difference > 0.001:
            self.dice.doubtful.append("wrong_temperature")
        return {"logprob_diff_mean": difference}

    async def _hang(self, what: str) -> None:
        self.dice.fatal.append("trainer_hang")
        await asyncio.sleep(TRAINER_DEADLINE)
        raise DeadlineExceeded(f"trainer simulated: no answer to {what!r} within {TRAINER_DEADLINE:g} s")

    async def unchanged(self) -> bool:
        return not self._changed

    async def publish(self, canary: Sequence[tuple[int, ...]] = ()) -> Weights:
        fault = self.dice.pick("publish_error", "trainer_hang")
        if fault == "publish_error":
            self.dice.fatal.append(fault)
            raise WeightSyncError(f"trainer simulated: version {self.version} cannot be published")
        if fault == "trainer_hang":
            await self._hang("publish")
        head, body = self.digest[:8], NO_NUMBERS if self._broken else self.digest[8:]
        tensors = {"head": head, "body": body}
        self.truth.published[self.version] = tensors
        likeliest = [next_token(tensors, prompt) for prompt in canary]
        return evolve(
            self._memory.publish(self.version, tensors),
            canary=tuple(
                Canary(prompt_ids=prompt, token_ids=(token, 0), logprobs=(logprob, logprob - 100.0))
                for prompt, (token, logprob) in zip(canary, likeliest, strict=True)
            ),
        )

    async def save(self, directory: Path) -> Callable[[], Awaitable[None]]:
        await asyncio.sleep(0.02)
        state = json.dumps(self.state()).encode()
        return lambda: self.write(directory / "trainer" / "state.json", state)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds."""
        return {"version": self.version, "digest": self.digest.hex(), "broken": self._broken}

    async def write(self, path: Path, data: bytes) -> None:
        """Write a file while training continues, perhaps for steps, and one with the weights as numbers."""
        number = np.array([math.nan if json.loads(data)["broken"] else 1.0], np.float32)
        await asyncio.sleep(self.dice.random.expovariate(1.0))
        await self._disk.run(lambda: self._disk.write(path, data))
        weights = path.with_suffix(".safetensors")
        await self._disk.run(lambda: self._disk.write(weights, save({"weights": number})))

    async def aclose(self) -> None:
        return None
