"""The trainer aggregates, masks and refreshes its reference as its configuration says."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
import transformers
from test_trainer import batch, copied, ragged, row, same, save, scores, setup, with_tokens
from torch import Tensor

from grpo_core.app.make import make
from grpo_core.config import LossConfig, ScoreConfig, build
from grpo_core.contracts.errors import ConfigError
from grpo_core.contracts.records import Row
from grpo_core.demo import tiny
from grpo_core.plugins.host import PluginHost
from grpo_core.training.batching import length
from grpo_core.training.trainer import TorchTrainer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("models") / "m"
    tiny.make_tiny_model(directory, (), width=16, layers=1, warm_start_steps=0)
    tiny.make_tiny_model(directory.with_name("teacher"), (), width=16, layers=1, warm_start_steps=0, seed=1)
    return str(directory)


def of_two_segments() -> list[Row]:
    """Twelve rows of eight rollouts in three groups; every second rollout has two rows."""
    rows = ragged(groups=3, size=4, seed=5)
    numbers = [0, 0, 1, 2, 2, 3, 4, 4, 5, 6, 6, 7]
    advantage = {number: rows[place].advantage for place, number in enumerate(numbers)}
    group = {number: rows[place].group for place, number in enumerate(numbers)}
    return [
        attrs.evolve(
            each, rollout=number, advantage=advantage[number], group=group[number], correct=number % 3 == 0
        )
        for each, number in zip(rows, numbers, strict=True)
    ]


def scale(module: torch.nn.Module, factor: float) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(factor)


def trained(
    model: str,
    rows: Sequence[Row],
    *,
    name: str = "grpo",
    budget: int = 8192,
    config: Any = None,
    packing: Any = "auto",
    reference: float = 1.0,
    **options: Any,
) -> tuple[list[Tensor], float]:
    """The gradient of one step in float64, and the metric ``loss``; the reference is scaled by a factor."""
    given = attrs.evolve(
        setup(model, tokens_per_microbatch=budget, packing=packing, max_grad_norm=1e9, lr=1e-9),
        loss=LossConfig(name=name, options=options, **(config or {})),
    )
    if name == "distillation":
        given = attrs.evolve(
            given, scores={"teacher": ScoreConfig(weights=str(Path(model).with_name("teacher")))}
        )
    trainer = TorchTrainer(given)
    others = [each._scorer for each in trainer._scores.models.values()]
    for scorer in (trainer.model.policy, *trainer.model.kept.values(), *others):
        scorer.module.double()
    for scorer in trainer.model.kept.values():
        scale(scorer.module, reference)
    metrics = trainer.step(batch(rows)).metrics
    moments = [trainer.optimizers.state(parameter)["exp_avg"] for parameter in trainer._parameters]
    return [moment / (1 - 0.9) for moment in moments], metrics["loss"]


AGGREGATIONS: list[dict[str, Any]] = [
    {"aggregation": "token"},
    {"aggregation": "sequence"},
    {"aggregation": "prompt"},
    {"aggregation": "constant", "aggregation_constant": 12},
]
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("grpo", {"kl": {"coefficient": 0.1}, "correction": "sequence_truncate"}),
    ("gspo", {"nll_coefficient": 0.2}),
    ("cispo", {"mask": {"top_entropy": 0.4}, "entropy": {"coefficient": 0.05}}),
    ("sapo", {"correction": {"name": "geometric_mask", "floor": 0.5, "cap": 3.0}}),
    ("vespo", {"entropy": {"coefficient": 0.05}}),
    ("dppo", {}),
    ("self_distillation", {"teach": "mix"}),
    ("reinforce", {"mask": {"off_policy_limit": 0.4}}),
    ("distillation", {"nll_coefficient": 0.2, "teacher": {"reward_coefficient": 0.5}}),
]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "options", "aggregation"),
    [
        pytest.param(
            name,
            options,
            aggregation,
            marks=() if place == i % len(AGGREGATIONS) else pytest.mark.nightly,
            id=f"{name}-{aggregation['aggregation']}",
        )
        for i, (name, options) in enumerate(OPTIONS)
        for place, aggregation in enumerate(AGGREGATIONS)
    ],
)
def test_the_gradient_does_not_depend_on_how_an_update_is_split_or_ordered(
    model: str, name: str, options: dict[str, Any], aggregation: dict[str, Any]
) -> None:
    rows = of_two_segments()
    one, loss = trained(model, rows, name=name, config=aggregation, **options)
    assert max(float(gradient.abs().max()) for gradient in one) > 1e-4
    for order, budget in ((rows, 1), (rows[::-1], 40)):
        other, again = trained(model, order, name=name, budget=budget, config=aggregation, **options)
        assert again == pytest.approx(loss, abs=1e-6)
        for mine, theirs in zip(one, other, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize(("name", "options"), OPTIONS, ids=[name for name, _ in OPTIONS])
def test_packed_rows_have_the_gradient_of_padded_rows_with_every_loss(
    model: str, name: str, options: dict[str, Any]
) -> None:
    rows, config = of_two_segments(), {"aggregation": "sequence"}
    padded, loss = trained(model, rows, name=name, config=config, packing=False, **options)
    assert max(float(gradient.abs().max()) for gradient in padded) > 1e-4
    for budget in (1, 8192):
        packed, again = trained(model, rows, name=name, config=config, packing=True, budget=budget, **options)
        assert again == pytest.approx(loss, abs=1e-6)
        for mine, theirs in zip(padded, packed, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)


def test_every_loss_is_among_them() -> None:
    offered = {
        name for plugin in PluginHost.discover(["algorithms"]).plugins for name in plugin.offers["loss"]
    }
    assert {name for name, _ in OPTIONS} == offered


PLUGIN = """
def plain(inputs):
    return -inputs.advantages * inputs.policy_logprobs, {}
"""


@pytest.mark.long
@pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=lambda a: a["aggregation"])
def test_the_loss_of_a_plugin_is_aggregated_too(model: str, tmp_path: Path, aggregation: Any) -> None:
    (tmp_path / "mine.py").write_text(PLUGIN)
    rows = of_two_segments()
    theirs, _ = trained(model, rows, name=f"{tmp_path / 'mine.py'}:plain", config=aggregation)
    ours, loss = trained(model, rows, name="reinforce", correction="off", config=aggregation)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-9)
    logprobs = {
        id(r): torch.tensor(s.tokens.logprobs[s.tokens.sampled])
        for r, s in zip(rows, scores(model, rows), strict=True)
    }
    lengths = {n: sum(len(logprobs[id(r)]) for r in rows if r.rollout == n) for n in range(8)}
    of_prompt = {g: sum(len(logprobs[id(r)]) for r in rows if r.group == g) for g in range(3)}
    weight = {
        "token": lambda r: 1 / sum(lengths.values()),
        "sequence": lambda r: 1 / (8 * lengths[r.rollout]),
        "prompt": lambda r: 1 / (3 * of_prompt[r.group]),
        "constant": lambda r: 1 / (8 * 12),
    }[aggregation["aggregation"]]
    expected = sum(-r.advantage * float(logprobs[id(r)].sum()) * weight(r) for r in rows)
    assert loss == pytest.approx(expected, rel=1e-5)


@pytest.mark.long
def test_a_ratio_of_sequences_sees_all_segments_of_a_rollout(model: str) -> None:
    """Half of the tokens moved up and half of them down: the rollout has not moved, its rows have."""
    first, second = scores(model, [row("ab=", "good", 1.0), row("ab=good", "evil", 1.0)])
    first = with_tokens(first, logprobs=first.tokens.logprobs - 0.5)
    second = with_tokens(second, logprobs=second.tokens.logprobs + 0.5)
    options = {
        "name": "gspo",
        "correction": {"name": "geometric_mask", "floor": 0.99, "cap": 1.01},
    }
    together = [attrs.evolve(each, rollout=0) for each in (first, second)]
    apart = [attrs.evolve(each, rollout=i) for i, each in enumerate((first, second))]
    assert trained(model, together, budget=1, **options)[1] != 0
    assert trained(model, apart, budget=1, **options)[1] == 0


# ---------------------------------------------------------------------------------- logprobs that are wrong


# ---------------------------------------------------------------------------------- options as formulas


@attrs.frozen(eq=False)
class Said:
    """The models' logprobs of the tokens of one rollout, whatever rows they are in."""

    advantage: float
    correct: bool
    policy: Tensor
    generation: Tensor
    reference: Tensor
    teacher: Tensor
    entropy: Tensor

    @property
    def now(self) -> Tensor:
        return self.policy.detach()

    @property
    def ratio(self) -> Tensor:
        return (self.policy - self.now).exp()

    @property
    def drift(self) -> Tensor:
        return (self.now - self.generation).exp()


LOW, HIGH, MUCH = 0.6, 1.5, 0.7
BOUNDS = {"floor": LOW, "cap": HIGH}


def inside(number: Tensor) -> Tensor:
    return ((number >= LOW) & (number <= HIGH)).double()


def k3(policy: Tensor, other: Tensor) -> Tensor:
    return (other - policy).exp() - (other - policy) - 1


def highest(every: Sequence[Said], share: float) -> Tensor:
    return torch.cat([one.entropy.detach() for one in every]).quantile(1 - share)


def mean(every: Sequence[Said], of: Callable[[Said], Tensor]) -> Tensor:
    """The mean of a number of each token over all tokens."""
    return torch.cat([of(one) for one in every]).mean()


def rewarded(
    every: Sequence[Said],
    weight: Callable[[Said], Any] = lambda one: 1.0,
    advantage: Callable[[Said], Any] = lambda one: one.advantage,
) -> Tensor:
    return -mean(every, lambda one: one.ratio * weight(one) * advantage(one))


Formula = Callable[[Sequence[Said]], Tensor]
WEIGHTS: dict[str, Callable[[Said], Any]] = {
    "off": lambda one: 1.0,
    "token_truncate": lambda one: one.drift.clamp(LOW, HIGH),
    "token_mask": lambda one: one.drift * inside(one.drift),
    "sequence_truncate": lambda one: one.drift.prod().clamp(LOW, HIGH),
    "sequence_mask": lambda one: one.drift.prod() * inside(one.drift.prod()),
    "geometric_mask": lambda one: one.drift * inside(one.drift.log().mean().exp()),
}
KL_OF_REWARD: dict[str, Callable[[Said], Tensor]] = {
    "k1": lambda one: one.now - one.reference,
    "k2": lambda one: (one.now - one.reference).square() / 2,
    "k3": lambda one: k3(one.now, one.reference),
}
KL_WEIGHTS: dict[str, Callable[[Said], Any]] = {
    "score": lambda one: one.ratio,
    "none": lambda one: 1.0,
    "ratio": lambda one: one.ratio,
    "generation": lambda one: (one.policy - one.generation).exp(),
}
FORMULAS: dict[str, tuple[dict[str, Any], Formula]] = {
    **{
        kind: (
            {"correction": {"name": kind} | (BOUNDS if kind != "off" else {})},
            lambda every, weight=weight: rewarded(every, weight),
        )
        for kind, weight in WEIGHTS.items()
    },
    **{
        f"kl in reward, {kind}": (
            {"kl": {"coefficient": MUCH, "acts_on": "reward", "estimator": kind}},
            lambda every, kl=kl: rewarded(every, advantage=lambda one: one.advantage - MUCH * kl(one)),
        )
        for kind, kl in KL_OF_REWARD.items()
    },
    **{
        f"kl in loss, {kind}": (
            {"kl": {"coefficient": MUCH, "weight": kind}},
            lambda every, weight=weight: (
                rewarded(every) + MUCH * mean(every, lambda one: weight(one) * k3(one.policy, one.reference))
            ),
        )
        for kind, weight in KL_WEIGHTS.items()
    },
    "teacher in advantage": (
        {"teacher": {"coefficient": MUCH, "clip": 0.1, "reward_coefficient": 0.5}},
        lambda every: rewarded(
            every,
            advantage=lambda one: 0.5 * one.advantage + MUCH * (one.teacher - one.now).clamp(-0.1, 0.1),
        ),
    ),
    "teacher in loss": (
        {"teacher": {"coefficient": MUCH, "acts_on": "loss", "reward_coefficient": 1.0}},
        lambda every: (
            rewarded(every) + MUCH * mean(every, lambda one: one.ratio * k3(one.policy, one.teacher))
        ),
    ),
    "entropy": (
        {"entropy": {"coefficient": MUCH}},
        lambda every: rewarded(every) - MUCH * mean(every, lambda one: one.entropy),
    ),
    "top entropy": (
        {"mask": {"top_entropy": 0.4}},
        lambda every: rewarded(every, lambda one: (one.entropy.detach() >= highest(every, 0.4)).double()),
    ),
    "right replies": (
        {"nll_coefficient": MUCH},
        lambda every: (
            rewarded(every) - MUCH * mean([one for one in every if one.correct], lambda one: one.policy)
        ),
    ),
    "off-policy limit": (
        {"mask": {"off_policy_limit": 0.05}},
        lambda every: rewarded(
            every,
            lambda one: float(one.advantage >= 0 or (one.generation - one.now).mean() <= 0.05),
        ),
    ),
}


def said(model: str, rows: Sequence[Row], policy: torch.nn.Module) -> list[Said]:
    """Logprobs of policy, reference and teacher, by transformers alone, one row at a time."""

    def load(path: Path) -> torch.nn.Module:
        return transformers.AutoModelForCausalLM.from_pretrained(path).double()

    reference, teacher = load(Path(model)), load(Path(model).with_name("teacher"))
    scale(reference, 1.1)

    def logprobs(module: torch.nn.Module, row: Row) -> tuple[Tensor, Tensor]:
        ids = torch.tensor([*row.prompt_ids.tolist(), *row.tokens.ids.tolist()])
        log_p = torch.log_softmax(module(ids[None]).logits[0, len(row.prompt_ids) - 1 : -1], -1)
        return log_p.gather(1, ids[len(row.prompt_ids) :, None])[:, 0], -(log_p.exp() * log_p).sum(-1)

    every = []
    for number in sorted({each.rollout for each in rows}):
        own = [each for each in rows if each.rollout == number]
        found = [logprobs(policy, each) for each in own]
        with torch.no_grad():
            others = [torch.cat([logprobs(one, each)[0] for each in own]) for one in (reference, teacher)]
        every.append(
            Said(
                own[0].advantage,
                bool(own[0].correct),
                torch.cat([each for each, _ in found]),
                torch.cat([torch.tensor(each.tokens.logprobs).double() for each in own]),
                *others,
                entropy=torch.cat([each for _, each in found]),
            )
        )
    return every


def drifted(model: str, rows: Sequence[Row]) -> list[Row]:
    """The rows as weights have sampled them that were near to those of the trainer."""
    chance = random.Random(0)
    return [
        with_tokens(each, logprobs=[p + chance.gauss(0, 0.3) for p in each.tokens.logprobs])
        for each in scores(model, rows)
    ]


@pytest.mark.long
@pytest.mark.parametrize("case", FORMULAS)
def test_an_option_has_the_gradient_of_its_formula(model: str, case: str) -> None:
    """Its sign, and whether it looks at tokens, rollouts or the update: rollouts have one row or two."""
    options, formula = FORMULAS[case]
    rows = drifted(model, of_two_segments())
    name = "distillation" if "teacher" in options else "grpo"
    given = {"correction": "off"} | options
    gradient, _ = trained(model, rows, name=name, config={"aggregation": "token"}, reference=1.1, **given)
    policy = transformers.AutoModelForCausalLM.from_pretrained(model).double()
    formula(said(model, rows, policy)).backward()
    expected = [parameter.grad for parameter in policy.parameters()]
    assert max(float(each.abs().max()) for each in expected) > 1e-3
    for mine, plain in zip(gradient, expected, strict=True):
        torch.testing.assert_close(mine.double(), plain, rtol=1e-4, atol=1e-6)


@pytest.mark.long
def test_rollouts_on_which_engine_and_trainer_disagree_are_left_out(model: str) -> None:
    rows = [
        attrs.evolve(each, rollout=i, correct=i == 0) for i, each in enumerate(scores(model, ragged(2, 2)))
    ]
    wrong = [with_tokens(rows[0], logprobs=rows[0].tokens.logprobs - 1.0), *rows[1:]]
    given = setup(model)
    masking = attrs.evolve(given, loss=LossConfig(max_sequence_error=1.5))
    with_mask, without = TorchTrainer(masking), TorchTrainer(given)
    metrics = with_mask.step(batch(wrong)).metrics
    without.step(batch(rows[1:]))
    assert same(with_mask, without)
    assert metrics["sequence_error_masked"] == 1
    assert metrics["tokens/trained"] == sum(map(length, rows[1:]))
    assert 0 <= metrics["tokens/padding"] < 1
    assert metrics["sequence_error_masked_correct"] == 1
    assert metrics["sequence_error_max"] == pytest.approx(math.e, rel=1e-4)
    assert metrics["sequence_error_mean"] == pytest.approx((math.e + 3) / 4, rel=1e-4)
    broken = [with_tokens(rows[0], logprobs=rows[0].tokens.logprobs * math.nan), *rows[1:]]
    metrics = TorchTrainer(masking).step(batch(broken)).metrics
    assert metrics["sequence_error_masked"] == 1
    assert metrics["sequence_error_max"] == pytest.approx(1.0, rel=1e-4)
    calm = TorchTrainer(masking).step(batch(rows)).metrics
    assert "sequence_error_masked" not in calm


def test_a_step_whose_rollouts_are_all_left_out_raises_the_version_alone(model: str) -> None:
    trainer = TorchTrainer(attrs.evolve(setup(model), loss=LossConfig(max_sequence_error=1.01)))
    trainer.step(batch(ragged()))
    assert trainer.version == 1
    assert same(trainer, TorchTrainer(setup(model)))


def test_a_limit_that_would_leave_out_everything_is_refused() -> None:
    with pytest.raises(ConfigError, match="more than 1"):
        build([{"loss": {"max_sequence_error": 0.5}}])


# ---------------------------------------------------------------------------------- the entropy's target

HELD = {"target": 4.0, "coefficient": 0.05, "delta": 0.01}


@pytest.mark.long
def test_the_entropy_bonus_begins_when_the_entropy_is_below_its_target(model: str) -> None:
    """An untrained model has nearly the highest entropy, log 98 = 4.58."""
    trainer = TorchTrainer(setup(model, loss={"entropy": {**HELD, "target": 4.7}}, updates_per_step=2))
    first = trainer.step(batch(ragged())).metrics
    assert first["entropy_coefficient"] == pytest.approx((0 + 0.06) / 2)
    assert first["bonus_entropy"] == pytest.approx(first["entropy"], rel=1e-5)
    above = TorchTrainer(setup(model, loss={"entropy": HELD})).step(batch(ragged())).metrics
    assert above["bonus_entropy"] > 4.0
    assert above["entropy_coefficient"] == 0


def resumed_halfway(
    given: Callable[..., Any], directory: Path
) -> tuple[TorchTrainer, TorchTrainer, list[Mapping[str, float]]]:
    """A trainer of six steps, one that was saved after three and resumed, and the metrics of its others."""
    straight, first = TorchTrainer(given()), TorchTrainer(given())
    for step in range(6):
        straight.step(batch(ragged(seed=step), step))
    for step in range(3):
        first.step(batch(ragged(seed=step), step))
    save(first, directory)
    resumed = TorchTrainer(given(resume_from=directory))
    return straight, resumed, [resumed.step(batch(ragged(seed=step), step)).metrics for step in range(3, 6)]


@pytest.mark.long
def test_a_resumed_run_has_the_coefficient_that_it_had(model: str, tmp_path: Path) -> None:
    def given(**options: Any) -> Any:
        return setup(model, loss={"entropy": {**HELD, "target": 4.7}}, lr=1e-2, **options)

    straight, resumed, metrics = resumed_halfway(given, tmp_path)
    coefficients = [each["entropy_coefficient"] for each in metrics]
    assert coefficients == pytest.approx([0.08, 0.09, 0.10])
    assert same(straight, resumed)


@pytest.mark.long
def test_a_coefficient_that_a_resume_changes_counts(model: str, tmp_path: Path) -> None:
    first = TorchTrainer(setup(model, loss={"entropy": {**HELD, "target": 4.7}}))
    first.step(batch(ragged()))
    save(first, tmp_path)
    loss = {"entropy": {**HELD, "target": 4.7, "coefficient": 0.2}}
    resumed = TorchTrainer(setup(model, loss=loss, resume_from=tmp_path))
    assert resumed.step(batch(ragged(), 1)).metrics["entropy_coefficient"] == pytest.approx(0.2)


# ---------------------------------------------------------------------------------- the reference model


@pytest.mark.long
def test_the_reference_takes_the_trained_weights_every_few_steps(model: str) -> None:
    trainer = TorchTrainer(setup(model, lr=1e-2, loss={"kl": {"coefficient": 0.01}}, reference=copied(2)))
    kl = [trainer.step(batch(ragged(), step)).metrics["kl"] for step in range(5)]
    assert [value > 1e-6 for value in kl] == [False, True, False, True, False]


def test_a_moving_average_is_between_start_and_policy(model: str) -> None:
    trainer = TorchTrainer(
        setup(
            model, lr=1e-2, loss={"kl": {"coefficient": 0.01}}, reference=ScoreConfig(weights="ema", mix=0.25)
        )
    )
    start = {name: t.clone() for name, t in trainer.model.saved_kept().items()}
    trainer.step(batch(ragged()))
    policy = dict(trainer.model.policy.module.named_parameters())
    for name, tensor in trainer.model.saved_kept().items():
        moved = policy[name.removeprefix("reference/")]
        torch.testing.assert_close(tensor, 0.75 * start[name] + 0.25 * moved)


@pytest.mark.long
@pytest.mark.parametrize("share", [1.0, 0.3])
def test_a_resumed_run_has_the_reference_that_it_had(model: str, tmp_path: Path, share: float) -> None:
    def given(**options: Any) -> Any:
        return setup(
            model,
            loss={"kl": {"coefficient": 0.5}},
            lr=1e-2,
            reference=ScoreConfig(weights="ema", every=2, mix=share),
            **options,
        )

    straight, resumed, _ = resumed_halfway(given, tmp_path)
    assert same(straight, resumed)


@pytest.mark.parametrize(
    ("trainer", "options", "message"),
    [
        ({"proximal": "generation"}, {"correction": "token_mask"}, "does nothing with"),
    ],
)
def test_sections_that_contradict_each_other_are_refused(
    trainer: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    task = {"sort": {"env": "math:sort"}}
    config = build([{"tasks": task, "trainer": trainer, "loss": {"options": options}}])
    with pytest.raises(ConfigError, match=message):
        make(config, PluginHost.discover(["algorithms", "math"]))
