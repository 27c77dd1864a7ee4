"""The statistic of the canary: no noise ends a run, and each fault is found where it can be."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from test_lora import setup as lora_setup
from test_trainer import setup
from transformers import AutoTokenizer

from grpo_core.config.run import TrainerSetup
from grpo_core.contracts.errors import WeightSyncError
from grpo_core.contracts.protocols import Engine
from grpo_core.contracts.records import (
    Canary,
    Completion,
    EngineSetup,
    GenerationRequest,
    Group,
    Prompt,
    Rollout,
    Segment,
    Weights,
)
from grpo_core.contracts.tokens import Tokens
from grpo_core.demo import tiny
from grpo_core.loop import canary
from grpo_core.loop.agreement import EXPLAINED, POWER, Agreement, Known, Tolerance, agreement, difference
from grpo_core.loop.canary import CONTEXTS, FRESH, LENGTH, Canaries
from grpo_core.loop.rows import make_batch
from grpo_core.training import model as models
from grpo_core.training.model import Scorer
from grpo_core.training.trainer import TorchTrainer
from grpo_core.weights.names import checkpoint_tensors
from grpo_core.weights.reading import read_weights
from grpo_core.weights.shm import SharedMemoryWriter
from grpo_plugin_smollm2 import source

Tensors = Mapping[str, torch.Tensor]

Noise = Callable[[np.random.Generator], np.ndarray]

# ---------------------------------------------------------------------------------- noise


def laplace(chance: np.random.Generator) -> np.ndarray:
    """The upper end of the means that are published for engines in bfloat16."""
    return chance.laplace(0.0, 0.03, CONTEXTS)


def heavy_tailed(chance: np.random.Generator) -> np.ndarray:
    """The same mean, with single differences beyond 1."""
    return 0.03 / 1.1027 * chance.standard_t(3, CONTEXTS)


def routed(chance: np.random.Generator) -> np.ndarray:
    """A mixture of experts that routes one token of 300 differently, and changes its logprob by up to 2."""
    moved = np.where(chance.random(CONTEXTS) < 1 / 300, chance.uniform(-2, 2, CONTEXTS), 0.0)
    return moved + chance.laplace(0.0, 0.02, CONTEXTS)


def asked(
    chance: np.random.Generator, noise: Noise, *, step: float, kept: bool = False, stale: bool = False
) -> Agreement:
    """Compare a simulated engine in bfloat16 after a step that moves logprobs by ``step`` in the mean.

    Its noise is ``kept`` by contexts, as that of a deterministic engine, or drawn anew.
    """
    now = -0.3 - chance.exponential(0.5, CONTEXTS)
    before = np.minimum(now - chance.laplace(0.0, step, CONTEXTS), -0.1)
    first = before + noise(chance)
    again = first if kept else before + noise(chance)
    answers = again if stale else now + (first - before if kept else noise(chance))
    canaries = [
        said(new, before=said(old, answer=(1, answer)))
        for new, old, answer in zip(now.tolist(), before.tolist(), first.tolist(), strict=True)
    ]
    return agreement(canaries, [(1, answer) for answer in answers.tolist()], EXPLAINED["bfloat16"])


def said(logprob: float, **more: Any) -> Known:
    return Known(prompt_ids=(1,), token_ids=(1, 2), logprobs=(logprob, -30.0), **more)


@pytest.mark.long
@pytest.mark.parametrize("kept", [True, pytest.param(False, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("noise", [laplace, heavy_tailed, routed])
def test_ten_thousand_syncs_of_a_bfloat16_engine_end_no_run(noise: Noise, kept: bool) -> None:
    chance = np.random.default_rng(0)
    steps = (0.002, 0.02, 0.06, 0.3)
    found = [asked(chance, noise, step=steps[i % 4], kept=kept) for i in range(10_000)]
    assert [each.fault for each in found if each.fault] == []
    assert not any(each.proves for each in found[::4]), "nothing is proved by steps smaller than rounding"
    assert sum(each.proves for each in found[3::4]) > 2350, "large steps prove the sync, unless one is spared"


@pytest.mark.long
@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("noise", [laplace, heavy_tailed, routed])
def test_older_weights_are_found_at_each_sync_that_has_power(noise: Noise, kept: bool) -> None:
    chance = np.random.default_rng(1)
    steps = [0.002, 0.06, 0.3] * 300
    found = [asked(chance, noise, step=step, kept=kept, stale=True) for step in steps]
    assert not any(each.proves for each in found)
    assert all(each.fault for each in found if each.power >= POWER)
    assert sum(bool(each.fault) for each in found[2::3]) > 290
    assert not any(each.fault for each in found[::3]), "they cannot be distinguished"


def test_the_power_bounds_how_often_the_older_weights_are_mistaken() -> None:
    """Chernoff's bound holds: with the power of a few contexts errors happen, and less often than it says."""
    chance = np.random.default_rng(2)
    scale, n = EXPLAINED["bfloat16"].typical, 6
    for moved in (2.0, 4.0, 9.0):
        trials = chance.laplace(0.0, 1.0, (20_000, n))
        evidence = np.clip(np.abs(trials + moved) - np.abs(trials), -7.0, 7.0).sum(1)
        canaries = [said(-1.0, before=said(-1.0 - moved * scale))] * n
        power = agreement(canaries, [(1, -1.0)] * n, EXPLAINED["bfloat16"]).power
        assert (evidence <= 0).mean() <= math.exp(-power)
    assert power == pytest.approx(n * (3.5 - math.log(4.5))), "a context counts no more than two nats"


def test_an_engine_that_rounds_as_before_is_compared_by_what_has_moved() -> None:
    """The weights have moved by less than the engine always differs from the trainer."""
    tops = [-0.5 - i / 10 for i in range(CONTEXTS)]
    canaries = [said(top - 0.04, before=said(top, answer=(1, top - 0.05))) for top in tops]

    def found(moved: float) -> Agreement:
        return agreement(canaries, [(1, top - 0.05 - moved) for top in tops], EXPLAINED["bfloat16"])

    assert found(0.04).proves, "it has moved as the trainer, although its answer is far from the trainer's"
    assert not found(0.02).proves
    assert "nearer to older weights" in found(0.0).fault, "although the trainer's answer is as near"


@pytest.mark.parametrize(
    ("logprobs", "dtype", "shows"),
    [
        ([-3.9] * CONTEXTS, "bfloat16", False),
        ([-0.001] * CONTEXTS, "bfloat16", False),
        ([-3.9 - 0.002 * i for i in range(CONTEXTS)], "bfloat16", False),
        ([-3.9 - 0.002 * i for i in range(CONTEXTS)], "float32", True),
        ([-3.9] * (CONTEXTS - 2) + [-0.1] * 2, "bfloat16", False),
        ([-3.9] * (CONTEXTS - 3) + [-0.1] * 3, "bfloat16", True),
    ],
    ids=["flat", "sure", "nearly flat", "in float32", "two that are spared", "three"],
)
def test_where_one_answer_would_match_all_contexts_a_match_proves_nothing(
    logprobs: list[float], dtype: str, shows: bool
) -> None:
    """An engine that ignores its contexts, or has wrong tensors, would match as well."""
    canaries = [said(now, before=said(now - 1.0, answer=(1, now - 1.0))) for now in logprobs]
    right = agreement(canaries, [(1, now) for now in logprobs], EXPLAINED[dtype])
    assert right.power > POWER
    assert not right.fault
    assert right.proves == shows
    ignores = agreement(canaries, [(1, logprobs[0])] * CONTEXTS, EXPLAINED[dtype])
    assert bool(ignores.fault) == shows, "its answer is the same to all"
    assert not ignores.proves


def test_answers_with_different_tokens_show_that_the_contexts_are_read() -> None:
    sure = [Known(prompt_ids=(1,), token_ids=(i, 99), logprobs=(-0.001, -8.0)) for i in range(CONTEXTS)]
    older = [attrs.evolve(each, logprobs=(-1.0, -8.0), answer=(each.token_ids[0], -1.0)) for each in sure]
    canaries = [attrs.evolve(now, before=before) for now, before in zip(sure, older, strict=True)]
    assert agreement(canaries, [(i, -0.001) for i in range(CONTEXTS)], EXPLAINED["bfloat16"]).proves


def test_a_match_that_spares_a_context_proves_nothing() -> None:
    """It may be a near tie of experts, or a wrong tensor that matters there."""
    tops = [-0.5 - i / 10 for i in range(CONTEXTS)]
    canaries = [said(top, before=said(top - 1.0, answer=(1, top - 1.0))) for top in tops]
    for spared, proves in ((0.9, True), (1.1, False)):
        answers = [(1, tops[0] - spared), *((1, top) for top in tops[1:])]
        found = agreement(canaries, answers, EXPLAINED["bfloat16"])
        assert (found.fault, found.proves) == ("", proves)


# ---------------------------------------------------------------------------------- differences


def test_a_token_that_the_trainer_does_not_name_differs_by_at_least_what_is_known() -> None:
    known = Canary(prompt_ids=(1,), token_ids=(1, 2), logprobs=(-0.5, -4.0))
    assert difference(known, (1, -0.7)) == pytest.approx(0.2)
    assert difference(known, (3, -1.0)) == pytest.approx(3.0), "the trainer gives it less than -4"
    assert difference(known, (3, -5.0)) == pytest.approx(4.5), "the engine gives less than -5 to token 1"
    assert difference(known, (2, -3.9)) == pytest.approx(3.4), "and less than -3.9"


def test_of_many_tokens_that_are_alike_the_engine_may_find_another_one_likeliest() -> None:
    """A model that knows nothing yet, in bfloat16: the trainer names 16 of a thousand tokens."""
    flat = Canary(prompt_ids=(1,), token_ids=tuple(range(16)), logprobs=(-6.9,) * 16)
    assert difference(flat, (500, -6.88)) == pytest.approx(0.02)


def test_a_trainer_whose_logprobs_are_not_numbers_agrees_with_no_engine() -> None:
    broken = Canary(prompt_ids=(1,), token_ids=(1, 2), logprobs=(math.nan, math.nan))
    for token in (1, 3):
        assert agreement([broken], [(token, -1.0)], EXPLAINED["bfloat16"]).fault


@pytest.mark.parametrize(
    ("dtypes", "configured", "expected"),
    [
        (["float32"], "", "float32"),
        (["float32", ""], "", "float32"),
        (["float64"], "", "float32"),
        (["float32", "bfloat16"], "", "bfloat16"),
        (["float32"], "float16", "float16"),
        (["bfloat16"], "float16", "bfloat16"),
        (["float8_e4m3fn"], "", "bfloat16"),
    ],
)
def test_the_coarsest_dtype_decides(dtypes: list[str], configured: str, expected: str) -> None:
    assert Tolerance(dtype=configured).explained(dtypes) == EXPLAINED[expected]


def test_a_tolerance_of_the_configuration_limits_the_largest_difference_alone() -> None:
    canaries = [said(-1.0)] * CONTEXTS
    answers = [(1, -1.25)] * CONTEXTS
    assert agreement(canaries, answers, Tolerance().explained(["bfloat16"])).fault
    assert not agreement(canaries, answers, Tolerance(0.3).explained(["bfloat16"])).fault
    assert agreement(canaries, [*answers[1:], (1, -1.35)], Tolerance(0.3).explained(["bfloat16"])).fault


# ---------------------------------------------------------------------------------- contexts


def group(slot: int, replies: Mapping[str, float], *, trained: bool = True) -> Group:
    """A group with the rewards of its replies, whose tokens are equally undecided up to the last."""
    rollouts = tuple(
        Rollout(
            messages=(),
            segments=(
                Segment(
                    prompt_ids=tuple(map(ord, f"{slot}=")),
                    tokens=Tokens.generated(
                        tuple(map(ord, reply)), (-0.01,) * (len(reply) - 1) + (-0.7,), (0,) * len(reply)
                    ),
                ),
            ),
            finish_reason="stop",
            reward=reward,
            trained=trained,
        )
        for reply, reward in replies.items()
    )
    prompt = Prompt(messages=f"{slot}=", id=str(slot), environment="task")
    return Group(prompt=prompt, rollouts=rollouts, generation_version=0, target_version=0, slot=slot)


def text(context: Sequence[int]) -> str:
    return "".join(map(chr, context))


def test_contexts_are_beginnings_of_the_best_and_worst_replies_of_a_trained_group() -> None:
    canaries = Canaries([(1,)])
    step = [group(4, {"abc": 0.5, "xyz": 0.0, "klm": 1.0}), group(5, {"x" * 50: 1.0}), group(6, {"a": 0.0})]
    for each in [*step, group(7, {"later": 1.0})]:
        canaries.finished(each)
    canaries.trained([step[0], step[1], group(6, {"a": 0.0}, trained=False)])
    assert [text(context) for context in canaries.contexts[1:]] == ["4=xy", "x" * LENGTH, "4=kl"]


def test_contexts_that_move_least_make_room_for_those_of_the_next_step() -> None:
    canaries = Canaries([(i,) for i in range(CONTEXTS)])

    def publish(version: int, moved: float) -> None:
        known = [
            Canary(prompt_ids=c, token_ids=(1, 2), logprobs=(-5 - moved * c[0], -30.0))
            for c in canaries.contexts
        ]
        weights = Weights(version=version, location="", nbytes=0, tensors=(), canary=tuple(known))
        answers = ((1, -1.0),) * len(canaries.contexts)
        canaries.verified(canaries.published(weights), Agreement(answers=answers))

    publish(0, 0.0)
    publish(1, 0.1)
    later = [group(slot, {"ab": 0.0, "cd": 1.0}) for slot in range(FRESH)]
    for each in later:
        canaries.finished(each)
    canaries.trained(later)
    assert len(canaries.contexts) == CONTEXTS
    assert set(canaries.contexts) & {(i,) for i in range(CONTEXTS)} == {(i,) for i in range(FRESH, CONTEXTS)}
    publish(2, 0.1)
    canaries.trained([])
    assert len(canaries.contexts) == CONTEXTS, "a step that trains nothing exchanges nothing"


def test_movement_adds_up_over_the_steps_until_a_sync_is_proved() -> None:
    canaries = Canaries([(1,)])

    def before(version: int, *, proved: bool) -> float | None:
        known = Canary(prompt_ids=(1,), token_ids=(1, 2), logprobs=(-float(version) - 1, -90.0))
        weights = Weights(version=version, location="", nbytes=0, tensors=(), canary=(known,))
        weights = canaries.published(weights)
        canaries.verified(weights, Agreement(answers=((1, -1.0),), proves=proved))
        (published,) = weights.canary
        assert isinstance(published, Known)
        older = published.before
        return None if older is None else -older.logprobs[0] - 1

    assert before(0, proved=False) is None, "nothing precedes the first version"
    assert (canaries.proved, canaries.unproved) == (None, 0)
    assert before(1, proved=False) == 0
    assert before(2, proved=False) == 0
    assert (canaries.proved, canaries.unproved) == (None, 2)
    assert before(3, proved=True) == 0
    assert (canaries.proved, canaries.unproved) == (3, 0)
    assert before(4, proved=False) == 3
    assert (canaries.proved, canaries.unproved) == (3, 1)
    assert canaries.metrics()["canary/unproved"] == 1


# ---------------------------------------------------------------------------------- planted faults


class Planted:
    """An engine that computes with transformers, and uses other tensors than it was given."""

    def __init__(self, directory: str, dtype: torch.dtype) -> None:
        self.module = models.load(directory, device=torch.device("cpu")).to(dtype)
        self._scorer = Scorer(self.module)
        self._own = checkpoint_tensors(self.module)
        self.version, self.asked = -1, 0
        self.use: Callable[[tuple[int, ...]], Tensors] = lambda context: {}

    async def update_weights(self, weights: Weights) -> None:
        self.version = weights.version

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        self.asked += 1
        by_tensors: dict[int, tuple[Tensors, list[int]]] = {}
        contexts = [tuple(request.prompt_ids.tolist()) for request in requests]
        for i, context in enumerate(contexts):
            tensors = self.use(context)
            by_tensors.setdefault(id(tensors), (tensors, []))[1].append(i)
        found: dict[int, Completion] = {}
        for tensors, places in by_tensors.values():
            for name, tensor in tensors.items():
                self._own[name].detach().copy_(tensor)
            answers = self._scorer.next_tokens([contexts[i] for i in places], 1)
            for i, known in zip(places, answers, strict=True):
                found[i] = Completion(
                    token_ids=known.token_ids,
                    logprobs=known.logprobs,
                    versions=(self.version,),
                    finish_reason="length",
                )
        return [found[i] for i in range(len(requests))]

    async def aclose(self) -> None:
        return None


class Served(Planted):
    """A real engine beside the model of the test: it is given what a fault would leave it with."""

    def __init__(
        self, directory: str, dtype: torch.dtype, make: Callable[..., Engine], **options: Any
    ) -> None:
        super().__init__(directory, dtype)
        self.dtype, self.writer = dtype, SharedMemoryWriter()
        setup = EngineSetup(model=directory, log_directory=directory, deadline=600.0)
        self.engine = make(setup, dtype=str(dtype).removeprefix("torch."), **options)

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        await super().generate(requests)
        held = [(name, tensor.detach()) for name, tensor in self._own.items()]
        await self.engine.update_weights(self.writer.write(self.version, held, dtype=self.dtype))
        return list(await self.engine.generate(requests))

    async def aclose(self) -> None:
        await self.engine.aclose()


def made(directory: Path, *, width: int = 32, warm_start_steps: int = 120) -> str:
    """Write a model that knows the beginnings of some sequences."""
    letters = "abcdefgh"
    known = [(f"{i}=", "".join(letters[(i * k) % 8] for k in range(1, 9))) for i in range(12)]
    tiny.make_tiny_model(directory, known, width=width, layers=2, warm_start_steps=warm_start_steps)
    return str(directory)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return made(tmp_path_factory.mktemp("models") / "m")


Prompts = Sequence[tuple[int, ...]]
"""Prompts of one length."""


@torch.no_grad()
def played(module: torch.nn.Module, step: int, prompts: Prompts) -> list[Group]:
    """Groups that the model has sampled, with random rewards as advantages."""
    chance = torch.Generator().manual_seed(step)
    drawn = [prompts[i] for i in torch.randint(0, len(prompts), (8,), generator=chance).tolist()]
    ids, length = torch.tensor([prompt for prompt in drawn for _ in "12"]), len(prompts[0])
    logprobs = torch.zeros(len(ids), 0)
    for _ in range(8):
        log_p = torch.log_softmax(module(ids).logits[:, -1].float(), -1)
        token = torch.multinomial(log_p.exp(), 1, generator=chance)
        ids, logprobs = torch.cat([ids, token], 1), torch.cat([logprobs, log_p.gather(1, token)], 1)
    rollouts = [
        Rollout(
            messages=(),
            segments=(
                Segment(prompt_ids=row[:length], tokens=Tokens.generated(row[length:], its, (step,) * 8)),
            ),
            finish_reason="length",
            reward=(reward := float(number % 2) * 2 - 1),
            advantage=reward,
            trained=True,
        )
        for number, (row, its) in enumerate(zip(ids.tolist(), logprobs.tolist(), strict=True))
    ]
    prompt = Prompt(messages="", id="", environment="task")
    return [
        Group(
            prompt=prompt,
            rollouts=tuple(rollouts[2 * i : 2 * i + 2]),
            generation_version=step,
            target_version=step,
            slot=8 * step + i,
        )
        for i in range(8)
    ]


Use = Callable[[tuple[int, ...]], Tensors]
"""The tensors by which an engine answers a context."""


@attrs.frozen
class Around:
    """The tensors around a sync, and the contexts that were asked before."""

    now: Tensors
    older: Tensors
    first: Tensors
    blank: Tensors
    known: frozenset[tuple[int, ...]]
    version: int


Fault = Callable[[Around], Use]


def stale(around: Around) -> Use:
    return lambda context: around.older


def cached(around: Around) -> Use:
    """An answer to what was asked before is that of before."""
    return lambda context: around.older if context in around.known else around.now


def swapped(around: Around) -> Use:
    prefixes = "model.layers.0.", "model.layers.1."

    def other(name: str) -> str:
        for mine, its in (prefixes, prefixes[::-1]):
            if name.startswith(mine):
                return its + name.removeprefix(mine)
        return name

    used = {name: around.now[other(name)] for name in around.now}
    return lambda context: used


def not_loaded(around: Around) -> Use:
    matrices = [name for name, tensor in around.now.items() if tensor.dim() > 1]
    name = matrices[around.version % len(matrices)]
    used = {**around.now, name: around.blank[name]}
    return lambda context: used


def without_adapters(around: Around) -> Use:
    return lambda context: around.first


class Planting:
    """Weight syncs of a real trainer, each also with an engine that has a fault."""

    def __init__(self, trainer: TorchTrainer, engine: Planted, blank: Tensors, prompts: Prompts) -> None:
        self.trainer, self.engine, self.blank, self.prompts = trainer, engine, blank, prompts
        self.canaries = Canaries(prompts[:12])
        self.first: Tensors = {}
        self.older: Tensors = {}

    async def sync(self, faults: Sequence[Fault]) -> dict[str, str]:
        """Publish a version; say of each fault whether it is found, unproved, or taken for right."""
        known = frozenset(self.canaries.contexts) & frozenset(self.canaries._before)
        weights = self.canaries.published(self.trainer.publish(self.canaries.contexts))
        now = {name: tensor.clone() for name, tensor in read_weights(weights).items()}
        self.first, self.older = self.first or now, self.older or now
        around = Around(now, self.older, self.first, self.blank, known, weights.version)
        await self.engine.update_weights(weights)
        outcomes = {}
        for fault in faults:
            self.engine.use = fault(around)
            found = await self._verified(weights)
            outcomes[fault.__name__] = outcome(found)
        self.engine.use = lambda context: now
        right = await self._verified(weights)
        assert not right.fault
        outcomes["none"] = outcome(right)
        self.canaries.verified(weights, right)
        self.older = now if right.proves else self.older
        groups = played(self.engine.module, weights.version, self.prompts)
        for each in groups:
            self.canaries.finished(each)
        self.trainer.step(make_batch(groups, step=weights.version, temperature=1.0))
        self.canaries.trained(groups)
        return outcomes

    async def _verified(self, weights: Weights) -> Agreement:
        before = self.engine.asked
        try:
            return await canary.verify(self.engine, weights, tolerance=Tolerance(), deadline=None)
        except WeightSyncError as error:
            assert self.engine.asked == before + 2, "it is asked again before it ends a run"
            return Agreement(fault=str(error))


def outcome(found: Agreement) -> str:
    return "found" if found.fault else "right" if found.proves else "unproved"


SUMS = [tuple(tiny.encode(f"{i}=")) for i in range(9)]


def planted(
    given: TrainerSetup,
    faults: Sequence[Fault],
    dtype: torch.dtype,
    prompts: Prompts = SUMS,
    syncs: int = 100,
    make: Callable[[str, torch.dtype], Planted] = Planted,
) -> Counter[tuple[str, str]]:
    """Count the outcomes of some syncs, each of them also with an engine that has one of the faults."""
    torch.manual_seed(1)
    path = given.model.path
    own = checkpoint_tensors(models.load(path, device=torch.device("cpu")))
    blank = {name: torch.randn_like(tensor) * tensor.std() for name, tensor in own.items()}

    async def story() -> Counter[tuple[str, str]]:
        engine = make(path, dtype)
        planting = Planting(TorchTrainer(given), engine, blank, prompts)
        try:
            await planting.sync(())
            return Counter(
                [outcome for _ in range(syncs) for outcome in (await planting.sync(faults)).items()]
            )
        finally:
            await engine.aclose()

    return asyncio.run(story())


@pytest.mark.long
def test_in_float32_each_fault_is_found_at_each_of_a_hundred_syncs(model: str) -> None:
    found = planted(setup(model, lr=1e-3), (stale, cached, swapped, not_loaded), torch.float32)
    assert found.pop(("none", "right")) == 100
    assert found == {(fault, "found"): 100 for fault in ("stale", "cached", "swapped", "not_loaded")}


@pytest.mark.nightly
def test_in_bfloat16_older_weights_are_found_with_power_and_wrong_tensors_always(model: str) -> None:
    # with larger steps, random rewards may end in a model that is flat or sure after nearly
    # each context, where wrong tensors may match: such a sync is unproved
    given = setup(model, lr=7e-4)
    given = attrs.evolve(given, model=attrs.evolve(given.model, dtype="bfloat16"))
    found = planted(given, (stale, swapped, not_loaded), torch.bfloat16)
    assert found["swapped", "found"] == found["not_loaded", "found"] == 100
    assert found["none", "right"] > 50
    assert found["stale", "found"] > 50
    assert found["stale", "right"] == 0


@pytest.mark.long
def test_adapters_that_an_engine_leaves_out_are_found_at_each_sync(model: str) -> None:
    found = planted(lora_setup(model, lr=1e-3), (without_adapters,), torch.float32)
    assert found == {("without_adapters", "found"): 100, ("none", "right"): 100}


@pytest.fixture(scope="module")
def real() -> tuple[str, Prompts]:
    """SmolLM2, and prompts of its chat template."""
    directory = str(source.cached())
    tokenizer = AutoTokenizer.from_pretrained(directory)
    asked = [f"What is {a} plus {b}?" for a in range(10, 50, 3) for b in range(11, 50, 5)]
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
        )
        for text in asked
    ]
    prompts = [tuple(tokenizer(text, add_special_tokens=False).input_ids) for text in texts]
    return directory, [prompt for prompt in prompts if len(prompt) == len(prompts[0])]


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_on_a_real_model_in_bfloat16_no_fault_counts_as_right(real: tuple[str, Prompts]) -> None:
    directory, prompts = real
    given = setup(directory, lr=1e-4)  # random rewards move the weights little
    given = attrs.evolve(given, model=attrs.evolve(given.model, dtype="bfloat16"))
    found = planted(given, (stale, cached, swapped, not_loaded), torch.bfloat16, prompts, syncs=20)
    print(sorted(found.items()))
    assert found["none", "right"] > 0
    assert not any(found[fault, "right"] for fault in ("stale", "cached", "swapped", "not_loaded"))


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_on_a_real_model_adapters_that_an_engine_leaves_out_do_not_count_as_right(
    real: tuple[str, Prompts],
) -> None:
    directory, prompts = real
    given = lora_setup(directory, lr=2e-3, dtype="bfloat16")
    found = planted(given, (without_adapters,), torch.bfloat16, prompts, syncs=20)
    print(sorted(found.items()))
    assert found["without_adapters", "found"] > 0
    assert not found["without_adapters", "right"]
