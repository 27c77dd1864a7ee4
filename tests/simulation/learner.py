"""A run that really learns, on virtual time, and writes a run directory: the world of ``simulation.broken``.

The pipeline, the buffer, samplers, loaders, queues, the pool of engines, canary, health limits, budgets,
validation, incidents, the timeline and the tracker ``files`` are the real ones.  The policy is a table of
logits by class of prompt and position; engines sample from it, and the trainer descends the real loss of the
core on it, with the real totals, clipping and Adam.  Only what takes time is slept: decoding, judging,
training, syncing, writing.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from attrs import define, field

from grpo_core.contracts.errors import EngineError, TrainerError
from grpo_core.contracts.incidents import report
from grpo_core.contracts.playing import Player
from grpo_core.contracts.protocols import Description, Trainer
from grpo_core.contracts.records import (
    Batch,
    Canary,
    Completion,
    Episode,
    Feedback,
    GenerationRequest,
    Judgement,
    Message,
    Prompt,
    SessionStart,
    StepResult,
    Weights,
)
from grpo_core.environments.feedback import as_feedback
from grpo_core.losses.aggregation import total
from grpo_core.losses.inputs import padded
from grpo_core.plugins.host import PluginHost
from grpo_core.training.batching import split_updates
from grpo_core.training.totals import Totals, off_policy
from grpo_core.training.trainer import MAX_LOST_UPDATES

VOCABULARY, POSITIONS, CLASSES = 10, 24, 6
"""Sizes of the table; token 0 is the stop token."""
FIRST = 1000
"""Token id of the first class: the first token of a prompt names its class."""
SCALE = 1e5
"""Learning rate of the table for a learning rate of 1 of a language model."""


@define(kw_only=True)
class Task:
    """A task: prompts with a right reply each, and an environment that judges, slowly or badly."""

    name: str
    length: int = 3
    """Number of tokens of a right reply, without the stop token."""
    classes: tuple[int, ...] = (0, 1, 2)
    held_out_classes: tuple[int, ...] = ()
    """Classes of the held-out prompts; empty: the same."""
    prompts: int = 400
    repeats: int = 1
    """Number of ids that share a text."""
    long_prompts: float = 0.0
    """Share of the prompts that are 40 times as long."""
    leaks: int = 0
    """Number of held-out prompts that are training prompts."""
    judge: str = "share"
    """Name of a method of ``Judge``."""
    success: float | None = 1.0
    shown_length: int = 0
    """Length of the environment's own solution; 0 is that of the right reply."""
    tools: int = 0
    seconds: float = 0.1
    """Seconds of a call of the environment, and of each episode in it."""
    episode_seconds: float = 0.0
    unscored: float = 0.0
    nan: float = 0.0
    raises: float = 0.0
    """Share of the calls that raise."""
    dies: float = 0.0
    hangs: float = 0.0
    patience: float = 60.0
    """Seconds after which a call that hangs is ended."""
    poisoned: float = 0.0
    """Share of the prompts that never get a reward."""
    breaks_at: float = 1.0
    """Share of the run after which its rewards are constant."""


@define(kw_only=True)
class World:
    """Everything around the configuration that decides how a run goes."""

    tasks: list[Task]
    token: float = 0.02
    """Seconds of a token."""
    rows: int = 64
    """Number of completions that an engine decodes at the same time."""
    sync: float = 0.2
    step: float = 4.0
    """Seconds of a step of the trainer."""
    publish: float = 0.1
    cut: float = 0.1
    write: float = 1.0
    spread: float = 0.1
    """Standard deviation of a duration, as a share of it."""
    warmth: float = 1.0
    """Factor of the temperature at which engines sample."""
    old_weights: float = 2.0
    """Share of the run after which engines keep their weights."""
    dies: float = 0.0
    """Chance that an engine dies in a call."""
    restart: float = 5.0
    slow_member: float = 1.0
    """Factor of the seconds of a weight sync of the last engine of a pool."""
    stops: bool = True
    """Whether the tokenizer has a stop token."""
    hint: float = 2.5
    """Logit of the right token at the start: what the model knows already."""
    stop_bias: float = 0.5
    shared: float = 0.0
    """Share of what is learnt that all classes have in common."""
    nan_from: float = 2.0
    """Share of the run after which some losses are not finite."""
    positions: int = 4096
    free: float = 1e12
    """Free bytes of the disk."""
    full_at: float = 2.0
    """Share of the run after which the disk is full."""
    killed_at: float = 2.0
    """Share of the run after which the process is killed."""
    memory_at: float = 2.0
    """Share of the run after which the trainer finds no memory."""
    scale: float = SCALE


def target(task: str, kind: int, length: int) -> list[int]:
    """Return the right tokens for a class of prompts of a task."""
    rng = random.Random(f"{task}/{kind}")
    return [rng.randrange(2, VOCABULARY) for _ in range(length)] + [0]


def _class_of(prompt_ids: Sequence[int]) -> int:
    """Return the class of a prompt; the end of a long one, which a canary may be, counts as the first."""
    return max(0, int(prompt_ids[0]) - FIRST)


class Renderer:
    """A prompt is its class and some words; a completion's text has a letter for each token but the stop."""

    has_template = True
    tokenizer = SimpleNamespace(encode=lambda text, add_special_tokens: [])

    def __init__(self, world: World, tasks: Sequence[Task]) -> None:
        self.stop_token_ids = (0,) if world.stops else ()
        self.context, self.vocabulary, self.tokens = world.positions, 2**20, 2**20

    async def run(self, work: Callable[[], Any], size: int) -> Any:
        return work()

    def check_turns(self, *, tools: bool) -> None:
        return None

    def prompt_ids(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> tuple[int, ...]:
        text = messages[0]["content"]
        kind = text.partition(" ")[0]
        return (FIRST + int(kind) if kind.isdigit() else 500, *([500] * (len(text) // 4)))

    def continuation_ids(self, messages: Sequence[Message], **_: Any) -> tuple[int, ...]:
        return (500,)

    def message(self, text: str, **_: Any) -> Message:
        return {"role": "assistant", "content": text}

    def texts(self, rows: Sequence[Sequence[int]], before: Sequence[Sequence[int]] = ()) -> list[str]:
        return ["".join(chr(97 + token) for token in row if token) for row in rows]

    def render(self, messages: Sequence[Message], *, generation: bool, tools: Sequence[Any] = ()) -> str:
        return ""  # the template ignores tools, and writes no replies

    def encode(self, text: str) -> tuple[int, ...]:
        return (500,) * len(text)

    def whole(self, token_ids: Sequence[int]) -> str:
        return ""


class Judge:
    """The environment of a task."""

    def __init__(
        self, task: Task, seed: int, kinds: Mapping[int, int], progress: Callable[[], float]
    ) -> None:
        self.task, self.about = task, Description(success=task.success)
        self.player: Player | None = None
        self._name = f"environment of task {task.name!r}"
        self._rng, self._kinds, self._progress = random.Random(f"judge/{seed}/{task.name}"), kinds, progress
        self._poisoned = random.Random(f"poison/{seed}/{task.name}")
        self._bad = {str(i) for i in range(task.prompts) if self._poisoned.random() < task.poisoned}

    async def open(self, prompts: Mapping[str, Prompt]) -> list[SessionStart]:
        tools = [{"type": "function", "function": {"name": f"tool{i}"}} for i in range(self.task.tools)]
        return [SessionStart(tools=tuple(tools))] * len(prompts)

    async def call(self, method: str, items: Sequence[Any], slots: int) -> Sequence[Any]:
        return await (self.evaluate(items) if method == "evaluate" else self.open(dict(items)))

    async def solve(self, prompts: Sequence[Prompt]) -> list[str | None]:
        length = self.task.shown_length or self.task.length
        return ["b" * length] * len(prompts)

    async def evaluate(self, episodes: Sequence[Episode]) -> list[Feedback]:
        task, roll = self.task, self._rng.random()
        seconds = task.seconds + task.episode_seconds * len(episodes)
        await asyncio.sleep(seconds * math.exp(self._rng.gauss(0.0, 0.1)))
        for share, fail in ((task.dies, self._die), (task.hangs, self._hang), (task.raises, self._raise)):
            if roll < share:
                return await fail(episodes)
            roll -= share
        rewards = [self._judged(episode) for episode in episodes]
        return as_feedback(rewards, len(episodes), self._name)

    async def close(self, sessions: Sequence[str]) -> None:
        return None

    async def aclose(self) -> None:
        """Do nothing: nothing runs."""

    async def run(self, *_: Any) -> None:
        raise NotImplementedError

    async def _die(self, episodes: Sequence[Episode]) -> list[Feedback]:
        report("died", self._name, "its process ended with exit status -11; it is started again")
        await asyncio.sleep(2.0)
        return [Judgement(error="its process ended with exit status -11", lost=True)] * len(episodes)

    async def _hang(self, episodes: Sequence[Episode]) -> list[Feedback]:
        await asyncio.sleep(self.task.patience)
        told = f"no answer to 'evaluate' within {self.task.patience:g} s"
        report("deadline", self._name, f"{told}; it is started again")
        return [Judgement(error=told)] * len(episodes)

    async def _raise(self, episodes: Sequence[Episode]) -> list[Feedback]:
        report("call_failed", self._name, "evaluate raised KeyError: 'answer'")
        return [Judgement(error="evaluate raised KeyError: 'answer'")] * len(episodes)

    def _judged(self, episode: Episode) -> Any:
        task = self.task
        if episode.prompt.id in self._bad or self._rng.random() < task.unscored:
            return Feedback(error="the judge gave no number")
        if self._rng.random() < task.nan:
            return math.nan
        said = [ord(letter) - 97 for letter in episode.reply]
        right = target(task.name, int(episode.prompt.messages[0]["content"].split(" ", 1)[0]), task.length)[
            :-1
        ]
        equal = sum(a == b for a, b in zip(said, right, strict=False))
        share = max(0.0, equal - max(0, len(said) - len(right))) / len(right)
        judge = "constant" if self._progress() > task.breaks_at else task.judge
        return getattr(self, f"_{judge}")(said, share, said == right)

    def _share(self, said: list[int], share: float, right: bool) -> Any:
        return 1.0 if right else 0.9 * share

    def _exact(self, said: list[int], share: float, right: bool) -> Any:
        return float(right)

    def _zero(self, said: list[int], share: float, right: bool) -> Any:
        return 0.0

    def _one(self, said: list[int], share: float, right: bool) -> Any:
        return 1.0

    def _constant(self, said: list[int], share: float, right: bool) -> Any:
        return 0.5

    def _parts(self, said: list[int], share: float, right: bool) -> Any:
        """Reward with two parts, as many honest tasks have it."""
        style = float(len(said) <= 8)
        return Feedback(reward=(1.0 if right else 0.8 * share + 0.1 * style), metrics={"style": style})

    def _pays_length(self, said: list[int], share: float, right: bool) -> Any:
        return Feedback(
            reward=min(1.0, len(said) / POSITIONS) + 0.05 * share, metrics={"right": float(right)}
        )

    def _pays_style(self, said: list[int], share: float, right: bool) -> Any:
        """A short reply earns more than the right one, which is longer."""
        style = float(len(said) <= 1)
        return Feedback(reward=0.25 * share + 0.75 * style, metrics={"style": style, "right": float(right)})


class Tables:
    """The logits of each version."""

    def __init__(self, world: World, tasks: Sequence[Task], seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.kinds = len(tasks) * CLASSES
        own = rng.normal(0.0, 0.1, (self.kinds, POSITIONS, VOCABULARY)).astype(np.float32)
        own[:, :, 0] += world.stop_bias
        for number, task in enumerate(tasks):
            for kind in range(CLASSES):
                right = target(task.name, number * CLASSES + kind, task.length)
                for position, token in enumerate(right[:POSITIONS]):
                    own[number * CLASSES + kind, position, token] += world.hint
        self.versions: dict[int, Any] = {0: own}

    def logits(self, version: int) -> Any:
        return self.versions[version]


class Engine:
    """Samples from the table of the weights that it holds; decodes a number of completions at a time."""

    dtype = "float32"

    def __init__(
        self,
        world: World,
        tables: Tables,
        *,
        number: int,
        seed: int,
        factor: float,
        progress: Callable[[], float],
    ) -> None:
        self._world, self._tables, self._factor, self._progress = world, tables, factor, progress
        self._rng = random.Random(f"engine/{seed}/{number}")
        self._free = [0.0] * world.rows
        self._logits: Any = None
        self._version = -1
        self._ready = 0.0
        """Time from which a process that was started again answers."""

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        now = asyncio.get_running_loop().time()
        if now < self._ready:
            await asyncio.sleep(self._ready - now)
        version = self._version
        completions = self._sampled(requests)
        if requests[0].max_tokens == 1:  # the canary
            return completions
        if self._rng.random() < self._world.dies:
            await asyncio.sleep(self._world.token)
            self._ready = asyncio.get_running_loop().time() + self._world.restart
            report("died", "engine local", "restarting its process: it ended with exit status -9")
            raise EngineError("engine local: its process ended with exit status -9")
        await asyncio.sleep(self._seconds([len(each.tokens) for each in completions]))
        assert version >= 0
        return completions

    async def update_weights(self, weights: Weights) -> None:
        await asyncio.sleep(self._world.sync * self._factor * math.exp(self._rng.gauss(0.0, 0.1)))
        if self._logits is None or self._progress() < self._world.old_weights:
            self._logits = self._tables.logits(weights.version)
        self._version = weights.version

    async def aclose(self) -> None:
        return None

    def _seconds(self, lengths: Sequence[int]) -> float:
        now = asyncio.get_running_loop().time()
        ends = []
        for length in lengths:
            end = max(now, heapq.heappop(self._free)) + length * self._world.token
            heapq.heappush(self._free, end)
            ends.append(end)
        return max(ends) - now

    def _sampled(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        n, most = len(requests), max(request.max_tokens for request in requests)
        kinds = np.array([_class_of(request.prompt_ids) for request in requests])
        temperature = requests[0].temperature * self._world.warmth or 1.0
        dice = np.stack([np.random.default_rng(request.seed).random(most) for request in requests])
        ids, logprobs = np.zeros((n, most), np.int32), np.zeros((n, most), np.float32)
        lengths, going = np.full(n, most), np.ones(n, bool)
        for place in range(most):
            scores = self._logits[kinds, min(place, POSITIONS - 1)] / temperature
            scores = scores - scores.max(1, keepdims=True)
            log = scores - np.log(np.exp(scores).sum(1, keepdims=True))
            if requests[0].temperature == 0.0:
                picked = log.argmax(1)
            else:
                picked = (np.exp(log).cumsum(1) < dice[:, place, None]).sum(1).clip(0, VOCABULARY - 1)
            ids[:, place], logprobs[:, place] = picked, log[np.arange(n), picked]
            ended = going & (picked == 0) & bool(requests[0].stop_token_ids)
            lengths[ended], going = place + 1, going & ~ended
            if not going.any():
                break
        return [
            Completion(
                token_ids=ids[i, : lengths[i]],
                logprobs=logprobs[i, : lengths[i]],
                versions=np.full(lengths[i], self._version, np.int32),
                finish_reason="length" if going[i] else "stop",
            )
            for i in range(n)
        ]


class Learner(Trainer):
    """Descends a loss of the core on the table, as the trainer ``torch`` descends it on a model."""

    def __init__(self, world: World, tables: Tables, config: Any, *, seed: int) -> None:
        self._world, self._tables, self._config = world, tables, config
        self._rng = random.Random(f"trainer/{seed}")
        self._own = torch.nn.Parameter(torch.from_numpy(tables.versions[0].copy()))
        self._common = torch.nn.Parameter(torch.zeros(POSITIONS, VOCABULARY))
        trainer, host = config.trainer, PluginHost.discover(["algorithms"])
        self._loss = host.function("loss", config.loss.name, **config.loss.options)
        self._optimizer = torch.optim.Adam(
            [self._own, self._common], lr=trainer.lr * world.scale, betas=trainer.betas
        )
        self._lost = 0
        self.version = 0

    async def step(self, batch: Batch) -> StepResult:
        seconds = self._world.step * math.exp(self._rng.gauss(0.0, self._world.spread))
        await asyncio.sleep(seconds)
        if self.version >= self._world.memory_at * self._config.trainer.steps:
            raise TrainerError("trainer torch: step: out of memory: [enforce fail at alloc_cpu.cpp:124]")
        metrics = self._trained(batch) if batch.rows else {}
        self.version += 1
        self._tables.versions[self.version] = self._logits().detach().numpy().copy()
        self._tables.versions.pop(self.version - 12, None)
        tokens = float(sum(len(row.prompt_ids) + len(row.tokens) for row in batch.rows))
        metrics |= {
            "time/train": seconds,
            "tokens/trained": tokens,
        }
        return StepResult(version=self.version, metrics=metrics)

    async def publish(self, canary: Sequence[tuple[int, ...]] = ()) -> Weights:
        await asyncio.sleep(self._world.publish)
        return Weights(
            version=self.version,
            location="",
            nbytes=0,
            tensors=(),
            canary=tuple(map(self._likeliest, canary)),
        )

    async def save(self, directory: Path) -> Callable[[], Awaitable[None]]:
        raise NotImplementedError

    def _logits(self) -> torch.Tensor:
        share = self._world.shared
        return self._own + share * self._common if share else self._own

    def _likeliest(self, prompt: tuple[int, ...]) -> Canary:
        log = torch.log_softmax(self._logits().detach()[_class_of(prompt), 0], 0)
        best = log.argsort(descending=True)[:5]
        return Canary(prompt_ids=prompt, token_ids=tuple(best.tolist()), logprobs=tuple(log[best].tolist()))

    def _trained(self, batch: Batch) -> dict[str, float]:
        totals, updates = Totals(), split_updates(batch.rows, self._config.trainer.updates_per_step)
        laid = [_laid_out(rows) for rows in updates if rows]
        with torch.no_grad():
            starts = [self._scored(each, batch.temperature)[0] for each in laid]
        for each, start in zip(laid, starts, strict=True):
            totals.add(off_policy(start[each.mask], each.generation[each.mask]))
            self._update(each, start, batch.temperature, totals)
        return {name: float(value) for name, value in totals.metrics(_Alone()).items()}

    def _update(self, rows: _Rows, start: torch.Tensor, temperature: float, totals: Totals) -> None:
        config = self._config
        logprobs, entropy = self._scored(rows, temperature)
        recompute = config.trainer.proximal == "recompute"
        inputs = padded(
            policy_logprobs=logprobs,
            mask=rows.mask,
            advantages=rows.advantages,
            proximal_logprobs=start if recompute else rows.generation,
            generation_logprobs=rows.generation,
            entropy=entropy,
            prompts=rows.groups,
            aggregation=config.loss.aggregation,
        )
        losses, metrics = self._loss(inputs)
        wrong = self._rng.random() < 0.7 and self.version >= self._world.nan_from * config.trainer.steps
        total(losses, inputs).backward()
        if wrong:
            assert self._own.grad is not None
            self._own.grad *= math.inf
        norm = torch.nn.utils.clip_grad_norm_([self._own, self._common], config.trainer.max_grad_norm)
        if norm.isfinite():
            self._lost = 0
            self._optimizer.step()
            totals.add({"grad_norm": norm[None], "lr": torch.tensor([config.trainer.lr])})
        else:
            self._lost += 1
            totals.count("non_finite_updates", 1)
            if self._lost >= MAX_LOST_UPDATES:
                raise TrainerError(
                    f"step {self.version}, update 0: the gradient is not finite, with finite losses, "
                    f"{self._lost} times in a row; these updates were left out. Lower trainer.lr, or train "
                    'in model.dtype = "float32"'
                )
        self._optimizer.zero_grad()
        totals.add({"loss": losses.detach(), "entropy": entropy.detach()[rows.mask], **metrics})

    def _scored(self, rows: _Rows, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        log = torch.log_softmax(self._logits()[rows.kinds[:, None], rows.places] / temperature, -1)
        return log.gather(-1, rows.targets[..., None])[..., 0], -(log.exp() * log).sum(-1)


@define
class _Rows:
    kinds: torch.Tensor
    places: torch.Tensor
    targets: torch.Tensor
    mask: torch.Tensor
    generation: torch.Tensor
    advantages: torch.Tensor
    groups: list[int] = field(factory=list)


def _laid_out(rows: Sequence[Any]) -> _Rows:
    longest = max(len(row.tokens) for row in rows)
    targets = np.zeros((len(rows), longest), np.int64)
    mask, generation = np.zeros((len(rows), longest), bool), np.zeros((len(rows), longest), np.float32)
    for i, row in enumerate(rows):
        n = len(row.tokens)
        targets[i, :n], mask[i, :n], generation[i, :n] = row.tokens.ids, True, row.tokens.logprobs
    places = np.broadcast_to(np.minimum(np.arange(longest), POSITIONS - 1), targets.shape)
    return _Rows(
        torch.tensor([int(row.prompt_ids[0]) - FIRST for row in rows]),
        torch.from_numpy(places.copy()),
        torch.from_numpy(targets),
        torch.from_numpy(mask),
        torch.from_numpy(generation),
        torch.tensor([row.advantage for row in rows], dtype=torch.float32),
        [row.group for row in rows],
    )


class _Alone:
    """One rank."""

    rank = 0

    def gathered(self, value: Any) -> list[Any]:
        return [value]
