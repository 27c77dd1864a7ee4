"""Simulates runs on 1, 8, 64 and 512 GPUs: the real pipeline, on virtual time, with times from data sheets.

    python tests/benchmarks/bench_scaling.py            # prints the tables of docs/scaling.md
    python tests/benchmarks/bench_scaling.py --write    # and keeps their figures in docs/scaling.json

What is simulated: how long an engine decodes (its rows share the bandwidth of its memory), how long the
trainer computes, how long a sync sends.  What is real: pipeline, buffer, rollouts, token arrays, the pickles
on the run's side, the file of tokens, and the CPU time of all that.  The text of a completion is
decoded by a real tokenizer, which is measured apart.
"""

from __future__ import annotations

import asyncio
import heapq
import json
import pickle
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from attrs import asdict, define, evolve, field, frozen

from grpo_core.contracts.events import Event, GroupsReady, StepEnded
from grpo_core.contracts.records import (
    Batch,
    Completion,
    Feedback,
    GenerationRequest,
    Prompt,
    SampleRequest,
    StepResult,
    Weights,
)
from grpo_core.contracts.tokens import Tokens
from grpo_core.engines import wire
from grpo_core.loop.buffer import Buffer
from grpo_core.loop.pipeline import Learning, Pipeline, Playing, Schedule
from grpo_core.loop.rollout import SamplingParams
from grpo_core.loop.rows import group as advantages
from grpo_core.processes.served import Call
from grpo_core.reporting import stored
from grpo_core.testing import FakeEnvironment, FakeRenderer, FakeTrainer, prompts, run
from grpo_core.testing.fakes import FakePrompts

FIGURES = Path(__file__).parents[2] / "docs" / "scaling.json"
GROUP, PROMPT, MEAN, LONGEST = 16, 512, 3000, 8192
"""Rollouts of a group; tokens of a prompt, of a completion on average, and at most."""
STEPS = 6


@frozen(kw_only=True)
class Gpu:
    """NVIDIA's figures of an H200 (SXM), and the share of them that programs reach."""

    memory: float = 141e9
    bandwidth: float = 4.8e12
    flops: float = 989e12
    """bfloat16, dense."""
    reached_bandwidth: float = 0.8
    reached_flops: float = 0.3
    """MFU of eager transformers with FSDP2 and recomputed activations, between 0.2 and 0.4."""
    for_cache: float = 0.85
    """Share of the memory for weights, keys and values (``memory_fraction``)."""


@frozen(kw_only=True)
class Model:
    """The figures of a model's config.json."""

    name: str
    parameters: float
    layers: int
    kv_heads: int = 8
    head: int = 128

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values of a token, bfloat16."""
        return 2 * 2 * self.layers * self.kv_heads * self.head

    @property
    def nbytes(self) -> float:
        return 2 * self.parameters


SMALL = Model(name="Qwen3-0.6B", parameters=0.596e9, layers=28)
LARGE = Model(name="Qwen3-8B", parameters=8.19e9, layers=36)


@frozen(kw_only=True)
class Plan:
    """A run: its GPUs, and what a step trains."""

    gpus: int
    model: Model
    engines: int
    trainers: int
    groups: int
    max_staleness: int = 1
    link: float
    """Bytes a second of a GPU's connection, of the trainer's ranks as of engines: NVLink 450e9 on one
    machine, 50e9 by a network card of 400 Gb/s to other machines."""
    senders: int = 0
    """Ranks that send weights; 0 means all."""
    in_turns: bool = False
    """Engine and trainer share a GPU."""
    change: str = ""
    """Change from the first plan of as many GPUs."""


_64 = Plan(gpus=64, model=LARGE, engines=26, trainers=38, groups=256, link=50e9)
_512 = Plan(gpus=512, model=LARGE, engines=208, trainers=304, groups=1024, link=50e9)
PLANS = (
    Plan(gpus=1, model=SMALL, engines=1, trainers=1, groups=8, max_staleness=0, link=4e12, in_turns=True),
    Plan(gpus=8, model=LARGE, engines=3, trainers=5, groups=64, link=450e9),
    _64,
    evolve(_64, max_staleness=2, change="`max_staleness = 2`"),
    evolve(_64, engines=56, trainers=8, change="a trainer of one machine"),
    _512,
    evolve(_512, max_staleness=2, change="`max_staleness = 2`"),
    evolve(_512, senders=1, change="one rank sends all weights"),
)


def train_seconds(plan: Plan, tokens: float, gpu: Gpu) -> float:
    """Seconds of a step: three passes and a recomputed forward are 8 operations for each parameter and token.

    MFU counts 6 of them, as is usual.
    """
    return 6 * plan.model.parameters * tokens / (gpu.reached_flops * gpu.flops * plan.trainers)


def sync_seconds(plan: Plan) -> float:
    """Seconds until all engines have the weights: each receives them twice, a part from each rank.

    The side with fewer connections is the one that takes longest.
    """
    return 2 * plan.model.nbytes * max(1.0, plan.engines / (plan.senders or plan.trainers)) / plan.link


@define(eq=False)
class Decoder:
    """An engine whose rows share the bandwidth of its memory.

    All rows advance by one token in ``seconds(n)``, so they are done in the order of (tokens made when they
    came in) + (their own tokens).
    """

    plan: Plan
    gpu: Gpu
    made: float = 0.0
    """Tokens that a row would have that has been here from the start."""
    at: float = 0.0
    rows: list[tuple[float, int, asyncio.Future[None]]] = field(factory=list)
    waiting: list[tuple[int, asyncio.Future[None]]] = field(factory=list)
    timer: asyncio.TimerHandle | None = None
    busy: float = 0.0
    cpu: float = 0.0
    """CPU seconds of the model itself, which no run has."""

    @property
    def most(self) -> int:
        """Rows whose keys and values fit at their mean length."""
        room = self.gpu.for_cache * self.gpu.memory - self.plan.model.nbytes
        if self.plan.in_turns:  # weights, gradients and moments of the trainer: 16 bytes for each parameter
            room -= 16 * self.plan.model.parameters
        return min(256, int(room / ((PROMPT + LONGEST / 2) * self.plan.model.kv_bytes)))

    def seconds(self) -> float:
        """Seconds of a decoding step."""
        read = self.plan.model.nbytes + len(self.rows) * (PROMPT + MEAN / 2) * self.plan.model.kv_bytes
        return read / (self.gpu.reached_bandwidth * self.gpu.bandwidth)

    def decode(self, tokens: int) -> asyncio.Future[None]:
        """Begin a completion; the future is done when it is."""
        done = asyncio.get_running_loop().create_future()
        self._advance()
        self.waiting.append((tokens, done))
        self._arrange()
        return done

    def _advance(self) -> None:
        now = asyncio.get_running_loop().time()
        if self.rows:
            self.made += (now - self.at) / self.seconds()
            self.busy += now - self.at
        self.at = now

    def _arrange(self) -> None:
        """Take rows in, and set the timer of the one that is done next."""
        while self.waiting and len(self.rows) < self.most:
            tokens, done = self.waiting.pop(0)
            heapq.heappush(self.rows, (self.made + tokens, id(done), done))
        if self.timer is not None:
            self.timer.cancel()
        if self.rows:
            left = max(0.0, self.rows[0][0] - self.made) * self.seconds()
            self.timer = asyncio.get_running_loop().call_later(left, self._ended)

    def _ended(self) -> None:
        began = time.process_time()
        self._advance()
        while self.rows and self.rows[0][0] <= self.made + 1e-6:
            done = heapq.heappop(self.rows)[2]
            if not done.done():
                done.set_result(None)
        self._arrange()
        self.cpu += time.process_time() - began


class Engines:
    """The engines of a run; what they return crosses a process boundary, as a real engine's answer does."""

    def __init__(self, plan: Plan, gpu: Gpu) -> None:
        self.plan, self.decoders = plan, [Decoder(plan, gpu) for _ in range(plan.engines)]
        self.version, self.tokens, self.model_cpu = 0, 0, 0.0
        chance = np.random.default_rng(0)
        self.ids = chance.integers(32, 127, LONGEST).astype(np.int32)
        self.logprobs = -chance.random(LONGEST).astype(np.float32)

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Sample a group on the engine with the fewest rows."""
        began = time.process_time()
        decoder = min(self.decoders, key=lambda each: len(each.rows) + len(each.waiting))
        lengths = [self._length(request.seed) for request in requests]
        running = [decoder.decode(n) for n in lengths]
        self.model_cpu += time.process_time() - began
        first = self.version
        for each in running:
            await each
        self.tokens += sum(lengths)
        made = [
            Completion.of(
                Tokens.generated(self.ids[:n], self.logprobs[:n], np.full(n, first, np.int32)), "stop"
            )
            for n in lengths
        ]
        return wire.unpack_completions(pickle.loads(pickle.dumps(wire.pack_completions(made), protocol=5)))

    def _length(self, seed: int) -> int:
        """Lognormal: the median is about 0.7 of the mean."""
        return max(16, min(LONGEST, int(random.Random(seed).lognormvariate(0.0, 0.8) * MEAN / 1.3)))

    async def update_weights(self, weights: Weights) -> None:
        await asyncio.sleep(sync_seconds(self.plan))
        self.version = weights.version


class Ranks(FakeTrainer):
    """The trainer; a batch crosses a process boundary."""

    def __init__(self, plan: Plan, gpu: Gpu) -> None:
        super().__init__()
        self.plan, self.gpu, self.busy = plan, gpu, 0.0

    async def step(self, batch: Batch) -> StepResult:
        tokens = sum(len(row.prompt_ids) + len(row.tokens) for row in batch.rows)
        pickle.dumps(Call(1, "step", (batch,)), protocol=5)
        seconds = train_seconds(self.plan, tokens, self.gpu)
        self.busy += seconds
        await asyncio.sleep(seconds)
        self.version += 1
        return StepResult(version=self.version, metrics={})


class Silent(FakeRenderer):
    """Texts are decoded by ``decoding_seconds``: here they would be joined by Python."""

    def texts(self, rows: Sequence[Sequence[int]], before: Sequence[Sequence[int]] = ()) -> list[str]:
        return ["a"] * len(rows)


@frozen(kw_only=True)
class Outcome:
    """The figures of a plan."""

    gpus: int
    change: str
    model: str
    engines: int
    trainers: int
    rollouts: int
    """Rollouts of a step."""
    max_staleness: int
    seconds: float
    """A step, without the first two."""
    tokens_per_second: float
    """Trained completion tokens."""
    generating: float
    """Share of the time in which an engine decodes, on average."""
    training: float
    """Share of the time in which the trainer computes."""
    sync: float
    """Seconds of a sync."""
    cpu_us: float
    """CPU of the run's process for a rollout, in microseconds, without the tokenizer."""
    rollouts_per_second: float


def simulate(plan: Plan, gpu: Gpu) -> Outcome:
    """Run the pipeline on virtual time."""
    engines, trainer = Engines(plan, gpu), Ranks(plan, gpu)
    drawn = prompts(64)
    ended: list[tuple[float, float, float, int]] = []

    def draw(request: SampleRequest) -> list[Prompt]:
        return [drawn[i % len(drawn)] for i in range(request.expected_prompts)]

    def note(event: Event) -> None:
        if isinstance(event, GroupsReady):
            stored.tokens(event.groups)
        if isinstance(event, StepEnded):
            now = asyncio.get_running_loop().time()
            for each in engines.decoders:
                each._advance()
            busy = sum(each.busy for each in engines.decoders) / len(engines.decoders)
            ended.append((now, busy, trainer.busy, engines.tokens))

    pipeline = Pipeline(
        buffer=Buffer(prompts_per_step=plan.groups, max_staleness=plan.max_staleness, num_steps=STEPS),
        prompts=FakePrompts(draw),
        engine=engines,
        playing=Playing(
            environments={
                "task": FakeEnvironment(lambda episode: Feedback(reward=random.random()), seconds=0.2)
            },
            renderer=Silent(),
            sampling=SamplingParams(temperature=1.0, max_tokens=LONGEST),
            group_size=GROUP,
        ),
        learning=Learning(advantages=advantages),
        trainer=trainer,
        emit=note,
        schedule=Schedule(rollout_deadline=1e6, stall=1e6),
    )
    random.seed(0)
    began = time.process_time()
    run(pipeline.run())
    cpu = time.process_time() - began - engines.model_cpu - sum(each.cpu for each in engines.decoders)
    (begin, busy, computing, _), (end, last_busy, last_computing, _) = ended[1], ended[-1]
    steps, span = len(ended) - 2, end - begin
    rollouts = plan.groups * GROUP
    mean = engines.tokens / (rollouts * STEPS)
    return Outcome(
        gpus=plan.gpus,
        change=plan.change,
        model=plan.model.name,
        engines=plan.engines,
        trainers=plan.trainers,
        rollouts=rollouts,
        max_staleness=plan.max_staleness,
        seconds=span / steps,
        tokens_per_second=rollouts * mean * steps / span,
        generating=(last_busy - busy) / span,
        training=(last_computing - computing) / span,
        sync=sync_seconds(plan),
        cpu_us=cpu / (rollouts * STEPS) * 1e6,
        rollouts_per_second=rollouts * steps / span,
    )


def decoding_seconds() -> float:
    """Measure the CPU seconds in which a byte-level BPE decodes a completion of the mean length."""
    from tokenizers import ByteLevelBPETokenizer

    chance = random.Random(0)
    words = ["".join(chance.choices("etaoinshrdlu", k=chance.randint(2, 9))) for _ in range(5000)]
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        [" ".join(chance.choices(words, k=200)) for _ in range(50)], vocab_size=8000
    )
    ids = tokenizer.encode(" ".join(chance.choices(words, k=2 * MEAN))).ids[:MEAN]
    seconds = []
    for _ in range(50):
        began = time.process_time()
        tokenizer.decode(ids)
        seconds.append(time.process_time() - began)
    return min(seconds)  # other programs slow it down


HEAD = (
    "GPUs",
    "engines + trainer",
    "rollouts a step",
    "s a step",
    "completion tokens/s",
    "engines busy",
    "trainer busy",
    "a sync",
    "rollouts/s",
    "cores of the run's process",
)


def table(figures: dict[str, Any]) -> str:
    """Return the table of docs/scaling.md."""
    lines = [f"| {' | '.join(HEAD)} |", "|" + "---|" * len(HEAD)]
    for each in figures["plans"]:
        split = "in turns" if each["gpus"] == 1 else f"{each['engines']} + {each['trainers']}"
        cores = each["rollouts_per_second"] * (each["cpu_us"] + figures["decoding_us"]) / 1e6
        cells = (
            f"{each['gpus']}{', ' * bool(each['change'])}{each['change']}",
            split,
            f"{each['rollouts']:,}",
            f"{each['seconds']:.0f}",
            f"{each['tokens_per_second']:,.0f}",
            f"{each['generating']:.2f}",
            f"{each['training']:.2f}",
            f"{each['sync']:.2g} s" if each["sync"] < 10 else f"{each['sync']:.0f} s",
            f"{each['rollouts_per_second']:.1f}",
            f"{cores:.2f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def costs(figures: dict[str, Any]) -> str:
    """Return the table of the CPU time of the run's process."""
    lines = ["| GPUs | rollouts in flight, at most | CPU for a rollout, without its text |", "|---|---|---|"]
    for each in figures["plans"]:
        if not each["change"]:
            flight = each["rollouts"] * (1 + each["max_staleness"])
            lines.append(f"| {each['gpus']} | {flight:,} | {each['cpu_us']:.0f} us |")
    return "\n".join(lines)


def main() -> int:
    gpu = Gpu()
    plans = []
    for plan in PLANS:
        plans.append(asdict(simulate(plan, gpu)))
        print(f"{plan.gpus} GPUs {plan.change}: {Decoder(plan, gpu).most} rows an engine", flush=True)
    figures = {"decoding_us": decoding_seconds() * 1e6, "plans": plans}
    print(f"{figures['decoding_us']:.0f} us to decode the text of a completion of {MEAN} tokens")
    print(table(figures))
    print(costs(figures))
    if "--write" in sys.argv:
        FIGURES.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
