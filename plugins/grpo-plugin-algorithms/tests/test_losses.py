"""The losses of the core keep their contract with every option, and the aggregation divides as it says."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import getdoc, signature
from math import inf, nan
from typing import Any

import attrs
import pytest
import torch
from attrs import evolve
from hypothesis import given as of_all
from hypothesis import strategies as st

from grpo_core import losses
from grpo_core.config import build, parse_setting
from grpo_core.config.meanings import meanings
from grpo_core.contracts.errors import ConfigError
from grpo_core.contracts.loss import LossInputs, LossSetting, Remark, check_options, needs_of
from grpo_core.plugins.host import PluginHost
from grpo_plugin_algorithms import losses as further
from grpo_plugin_algorithms.corrections import (
    GeometricMask,
    Off,
    SequenceMask,
    SequenceTruncate,
    TokenMask,
    TokenTruncate,
)
from grpo_plugin_algorithms.kl import Kl
from grpo_plugin_algorithms.losses import grpo
from grpo_plugin_algorithms.ratios import Sequence, SequenceToken
from grpo_plugin_algorithms.terms import Entropy, Mask, Teacher, off_policy_kept
from grpo_plugin_devkit.objectives import LossContract, check_loss

NAMED = (
    grpo,
    further.gspo,
    further.cispo,
    further.sapo,
    further.reinforce,
)
CLIPPED = (grpo, further.cispo, further.sapo)

SHARED: list[dict[str, Any]] = [
    {},
    {"correction": Off()},
    {"kl": Kl(coefficient=0.1)},
    {"kl": Kl(coefficient=0.1, estimator="k1", weight="none")},
    {"kl": Kl(coefficient=0.1, estimator="k2", weight="ratio", output_clamp=1.0)},
    {"kl": Kl(coefficient=0.1, weight="generation", input_clamp=0.1, output_clamp=10.0)},
    {"kl": Kl(coefficient=0.1, acts_on="reward")},
    {"teacher": Teacher(coefficient=0.5)},
    {"teacher": Teacher(coefficient=0.5, clip=0.1, reward_coefficient=0.3)},
    {"teacher": Teacher(coefficient=0.5, acts_on="loss")},
    {"entropy": Entropy(coefficient=0.01)},
    {"entropy": Entropy(coefficient=0.01), "mask": Mask(top_entropy=0.4)},
    {"entropy": Entropy(target=2.0)},
    {"entropy": Entropy(target=2.0), "mask": Mask(top_entropy=0.4)},
    {"nll_coefficient": 0.1},
    {"mask": Mask(top_entropy=0.5)},
    {"mask": Mask(off_policy_limit=0.05)},
]
ALL_TERMS: dict[str, Any] = {
    "kl": Kl(coefficient=0.1, weight="ratio"),
    "entropy": Entropy(coefficient=0.01),
    "nll_coefficient": 0.1,
    "mask": Mask(top_entropy=0.5, off_policy_limit=0.05),
}
CORRECTED: list[dict[str, Any]] = [
    {"correction": kind(floor=0.9, cap=1.1)}
    for kind in (TokenTruncate, TokenMask, SequenceTruncate, SequenceMask, GeometricMask)
]


def problems_of(loss: Any, options: dict[str, Any], setting: LossSetting) -> list[str]:
    return [each for each in check_options(loss, options, setting) if isinstance(each, str)]


def remarks_of(loss: Any, options: dict[str, Any], setting: LossSetting) -> list[Remark]:
    return [each for each in check_options(loss, options, setting) if isinstance(each, Remark)]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for tensors of this size several are slower
    yield
    torch.set_num_threads(threads)


def cases() -> list[Any]:
    made = [(grpo, options) for options in SHARED]
    made += [(loss, {}) for loss in NAMED if loss is not grpo]
    others = (further.distillation, further.self_distillation, further.vespo, further.dppo)
    made += [(loss, {}) for loss in others]
    made += [(further.vespo, ALL_TERMS), (further.self_distillation, {"teach": "mix", "on_policy": True})]
    made += [(loss, ALL_TERMS) for loss in NAMED]
    made += [(grpo, options) for options in (*CORRECTED, {"on_policy": True}, {"ratio_cap": 1.1})]
    made += [(grpo, {"ratio": SequenceToken(), "dual_clip": 1.1})]
    made += [(loss, {"ratio": Sequence()}) for loss in CLIPPED]
    return [
        pytest.param(loss, options, id=f"{loss.__name__}-{','.join(map(str, options.values()))}")
        for loss, options in made
    ]


@pytest.mark.long
@pytest.mark.parametrize(("loss", "options"), cases())
def test_a_loss_keeps_its_contract(loss: Any, options: dict[str, Any]) -> None:
    check_loss(loss, **options)


def inputs(loss: Any, options: dict[str, Any]) -> LossInputs:
    return LossContract(lambda given: loss(given, **options), needs_of(loss, options))._inputs()


@pytest.mark.parametrize("loss", NAMED)
@pytest.mark.parametrize("scale", [0.5, 3.0])
def test_the_objective_scales_with_the_advantages(loss: Any, scale: float) -> None:
    given = inputs(loss, {})
    once, _ = loss(given)
    scaled, _ = loss(evolve(given, advantages=scale * given.advantages))
    torch.testing.assert_close(scaled, scale * once)


@pytest.mark.parametrize("loss", NAMED)
def test_a_common_shift_of_all_logprobs_changes_no_ratio(loss: Any) -> None:
    given = inputs(loss, {})
    shifted = evolve(
        given,
        policy_logprobs=given.policy_logprobs - 0.7,
        proximal_logprobs=given.proximal_logprobs - 0.7,
        generation_logprobs=given.generation_logprobs - 0.7,
    )
    gradients = [
        torch.autograd.grad(loss(each)[0].sum(), given.policy_logprobs)[0] for each in (given, shifted)
    ]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("loss", [grpo, further.gspo, further.cispo, further.sapo, further.reinforce])
def test_on_policy_the_gradient_is_the_policy_gradient(loss: Any) -> None:
    given = inputs(loss, {})
    same = given.policy_logprobs.detach()
    given = evolve(given, proximal_logprobs=same, generation_logprobs=same)
    (gradient,) = torch.autograd.grad(loss(given)[0].sum(), given.policy_logprobs)
    expected = -given.advantages
    torch.testing.assert_close(gradient, expected)


# ---------------------------------------------------------------------------------- aggregation


def test_the_aggregations_average_over_what_they_are_named_after() -> None:
    tokens, rollouts, prompts = [3, 1, 2, 4], [0, 0, 1, 2], [7, 7, 7, 8]  # the first rollout has two rows

    def weights(aggregation: Any, constant: float | None = None) -> list[float]:
        return losses.row_weights(
            tokens, sequences=rollouts, prompts=prompts, aggregation=aggregation, constant=constant
        )

    assert weights("token") == pytest.approx([1 / 10] * 4)
    assert weights("sequence") == pytest.approx([1 / 12, 1 / 12, 1 / 6, 1 / 12])
    assert weights("prompt") == pytest.approx([1 / 12, 1 / 12, 1 / 12, 1 / 8])
    assert weights("constant", 50) == pytest.approx([1 / 150] * 4)
    with pytest.raises(ValueError, match="needs a constant"):
        weights("constant")


def test_an_entropy_bonus_and_the_term_for_right_rollouts_have_their_own_divisors() -> None:
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    given = {
        "policy_logprobs": -torch.arange(6.0, dtype=torch.float64).view(2, 3) - 1,
        "advantages": torch.zeros(2, dtype=torch.float64),
        "entropy": torch.tensor([[1.0, 2.0, 3.0], [8.0, 0.0, 0.0]], dtype=torch.float64),
        "correct": torch.tensor([True, False]),
    }
    for aggregation in ("token", "sequence", "prompt"):
        made = losses.padded(mask=mask, aggregation=aggregation, **given)  # type: ignore[arg-type]
        bonus = losses.total(further.reinforce(made, entropy=Entropy(coefficient=1.0))[0], made)
        right = losses.total(further.reinforce(made, nll_coefficient=1.0)[0], made)
        highest = {"entropy": Entropy(coefficient=1.0), "mask": Mask(top_entropy=0.5)}
        high = losses.total(further.reinforce(made, **highest)[0], made)
        assert bonus.item() == pytest.approx(-(1 + 2 + 3 + 8) / 4)
        assert right.item() == pytest.approx((1 + 2 + 3) / 3)
        assert high.item() == pytest.approx(-(3 + 8) / 2)


@pytest.mark.parametrize("aggregation", ["token", "sequence", "prompt", "constant"])
@pytest.mark.parametrize("empty_rows", [False, True])
def test_an_update_without_trained_tokens_has_the_loss_0(aggregation: str, empty_rows: bool) -> None:
    policy = torch.full((2, 3), -1.0, requires_grad=True)
    made = losses.padded(
        policy_logprobs=policy,
        mask=torch.zeros(2, 3),
        advantages=torch.ones(2),
        aggregation=aggregation,  # type: ignore[arg-type]
        constant=8.0,
        empty_rows=empty_rows,
    )
    assert losses.total(further.reinforce(made)[0], made).item() == 0.0


# ---------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("loss", "options", "setting", "message"),
    [
        (grpo, {"correction": TokenMask()}, {"proximal": "generation"}, "does nothing"),
        (grpo, {"on_policy": True}, {"updates_per_step": 2}, "nothing would bound 2 updates"),
        (further.reinforce, {"kl": Kl(coefficient=0.1, weight="ratio")}, {}, "has no ratio to weight"),
        (further.reinforce, {}, {"updates_per_step": 4}, "nothing would bound 4 updates"),
    ],
)
def test_options_that_make_no_sense_together_are_refused(
    loss: Any, options: dict[str, Any], setting: dict[str, Any], message: str
) -> None:
    (problem,) = problems_of(loss, options, LossSetting(**setting))
    assert message in problem


@pytest.mark.parametrize(
    ("loss", "option", "value", "expected"),
    [
        (grpo, "clip_low", -0.5, "0 to 1"),
        (grpo, "clip_low", 1.5, "0 to 1"),
        (further.gspo, "clip_low", -1e-4, "0 to 1"),
        (further.distillation, "clip_low", 2, "0 to 1"),
        (further.cispo, "clip_low", 1.5, "0 to 1"),
        (grpo, "clip_high", -0.1, "at least 0"),
        (further.gspo, "clip_high", -0.1, "at least 0"),
        (further.distillation, "clip_high", -0.1, "at least 0"),
        (further.cispo, "clip_high", -0.1, "at least 0"),
        (grpo, "dual_clip", 1.0, "above 1"),
        (grpo, "ratio_cap", 0.9, "above 1"),
        (further.sapo, "temperature_positive", 0.0, "a finite number above 0"),
        (further.sapo, "temperature_negative", -1.0, "a finite number above 0"),
        (further.sapo, "nll_coefficient", -1.0, "a finite number of at least 0"),
    ],
)
def test_an_option_out_of_its_range_is_refused(loss: Any, option: str, value: float, expected: str) -> None:
    (problem,) = problems_of(loss, {option: value}, LossSetting())
    assert problem.startswith(f"{option} = {value}: expected {expected}")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("grpo", {"correction": {"cap": 0.0}}, "cap = 0.0: expected above 0"),
        ("grpo", {"correction": {"floor": -1.0}}, "floor = -1.0: expected a finite number of at least 0"),
        ("grpo", {"correction": {"floor": 3.0}}, "floor = 3.0 is above cap = 2.0"),
        ("grpo", {"correction": {"name": "off", "cap": 3.0}}, "unknown configuration key 'loss.options.corr"),
        ("grpo", {"correction": "token_maks"}, "geometric_mask. Did you mean 'token_mask'?"),
        ("grpo", {"correction": 3}, "is 3; expected a table or off or token_truncate or token_mask"),
        ("grpo", {"mask": {"top_entropy": 0.0}}, "above 0 and at most 1"),
        ("grpo", {"mask": {"top_entropy": 1.5}}, "a share of tokens"),
        ("grpo", {"mask": {"off_policy_limit": 0.0}}, "above 0"),
        ("grpo", {"kl": {"estimator": "k1"}}, "estimator does nothing without coefficient"),
        ("grpo", {"kl": {"coefficient": -0.1}}, "'loss.options.kl': coefficient = -0.1: expected a finite"),
        ("grpo", {"kl": {"coefficient": "much"}}, "'loss.options.kl.coefficient': expected a number"),
        ("grpo", {"kl": {"coeficient": 0.1}}, "Did you mean 'coefficient'?"),
        ("grpo", {"kl": {"coefficient": 1.0, "acts_on": "reward", "weight": "none"}}, "has none"),
        ("grpo", {"kl": {"coefficient": 0.1, "input_clamp": 0.0}}, "input_clamp = 0.0: expected a finite"),
        ("grpo", {"kl": {"coefficient": 0.1, "output_clamp": -1}}, "output_clamp = -1.0: expected a fin"),
        ("grpo", {"entropy": {"delta": 0.1}}, "delta does nothing without target"),
        ("grpo", {"entropy": {"target": 0.0}}, "above 0"),
        ("grpo", {"entropy": {"target": 1.0, "min": 0.1}}, "is not between min = 0.1 and max = 1.0"),
        ("grpo", {"teacher": {"clip": 1.0}}, "clip does nothing without coefficient"),
        ("grpo", {"teacher": {"reward_coefficient": 0.0}}, "nothing to learn from"),
        ("distillation", {"teacher": {"coefficient": 0.0}}, "nothing to learn from"),
        ("distillation", {"teacher": {"clip": -1.0}}, "above 0"),
        ("distillation", {"teacher": {"coefficient": -1.0}}, "at least 0"),
        ("distillation", {"teacher": {"reward_coefficient": -1.0}}, "at least 0"),
        ("grpo", {"kl_coefficient": 0.1}, "write\n[loss.options.kl]\ncoefficient = 0.1"),
        ("grpo", {"kl_coefficient": 0.1, "correction": "off", "importance_cap": 3, "top_entropy": 0.5},
         "cap = 3\nname = \"off\"\n\n[loss.options.mask]\ntop_entropy = 0.5"),
    ],
)  # fmt: skip
def test_a_table_of_options_that_does_not_fit_is_refused(
    name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        PluginHost.discover(["algorithms"]).function("loss", name, **options)
    assert message in str(caught.value)


@pytest.mark.parametrize("kind", [Kl, Teacher, Entropy, Mask, TokenMask])
def test_a_number_of_a_table_is_finite(kind: Any) -> None:
    """An infinite upper bound bounds nothing, which one field may say."""
    for each in attrs.fields(kind):
        for value in (nan, inf, -inf) if "float" in str(each.type) else ():
            if (value, each.name) != (inf, "cap"):
                with pytest.raises(ValueError, match=f"{each.name} = {value}"):
                    kind(**{each.name: value})
    for loss in (*NAMED, further.distillation):
        for value in (nan, inf, -inf):
            assert problems_of(loss, {"nll_coefficient": value}, LossSetting())


def test_tables_and_names_of_a_configuration_become_the_values_of_a_loss() -> None:
    config = build([
        {"loss": {"options": {"correction": "token_mask", "teacher": {"clip": 1}}}},
        *map(parse_setting, ["loss.options.correction.cap=3", "loss.options.kl.coefficient=0.01"]),
    ])  # fmt: skip
    assert config.loss.options["correction"] == {"name": "token_mask", "cap": 3}
    made = PluginHost.discover(["algorithms"]).function("loss", "distillation", **config.loss.options)
    assert made.options == {
        "correction": TokenMask(cap=3.0),
        "kl": Kl(coefficient=0.01),
        "teacher": Teacher(coefficient=1.0, reward_coefficient=0.0, clip=1.0),
    }
    assert type(made.options["correction"]) is TokenMask


@pytest.mark.parametrize(
    ("loss", "options", "setting"),
    [
        (grpo, {"on_policy": True, "correction": TokenMask()}, {"proximal": "generation"}),
        (grpo, {"on_policy": True, "correction": TokenTruncate(cap=5.0)}, {"proximal": "generation"}),
        (grpo, {"clip_low": 0.0, "clip_high": 0, "kl": Kl()}, {}),
        (further.cispo, {"clip_low": 1, "clip_high": inf}, {}),
        (further.reinforce, {"kl": Kl(coefficient=0.1, weight="generation")}, {}),
    ],
)
def test_what_has_an_effect_is_not_refused(
    loss: Any, options: dict[str, Any], setting: dict[str, Any]
) -> None:
    assert problems_of(loss, options, LossSetting(**setting)) == []


def test_with_on_policy_a_correction_has_an_effect_whatever_the_proximal_logprobs_are() -> None:
    given = inputs(grpo, {})
    given = evolve(given, proximal_logprobs=given.generation_logprobs)
    one, other = (grpo(given, on_policy=True, correction=kind)[0] for kind in (Off(), TokenMask()))
    assert not torch.equal(one, other)


@pytest.mark.parametrize("loss", NAMED)
@pytest.mark.parametrize("proximal", ["recompute", "generation"])
def test_a_loss_with_its_defaults_is_never_refused(loss: Any, proximal: str) -> None:
    updates = 1 if loss is further.reinforce else 3
    assert problems_of(loss, {}, LossSetting(proximal=proximal, updates_per_step=updates)) == []


@pytest.mark.parametrize("loss", [*NAMED, further.distillation])
@pytest.mark.parametrize("proximal", ["recompute", "generation"])
def test_a_loss_that_does_not_correct_for_older_weights_says_what_that_costs(
    loss: Any, proximal: str
) -> None:
    """It is one whose result does not depend on who sampled, as the tokens of two generators show."""
    given = inputs(loss, {})
    start = given.policy_logprobs.detach()
    every: list[dict[str, Any]] = [{}, {"on_policy": True}]
    for options in (*every, *(each | {"correction": Off()} for each in every)):
        if problems_of(loss, options, LossSetting(proximal=proximal)):
            continue
        gradients = []
        for generation in (start - 0.3, start + 0.2):
            policy = start.clone().requires_grad_()
            old = generation if proximal == "generation" else start
            here = evolve(
                given, policy_logprobs=policy, proximal_logprobs=old, generation_logprobs=generation
            )
            gradients.append(torch.autograd.grad(loss(here, **options)[0].sum(), policy)[0])
        remarks = remarks_of(loss, options, LossSetting(proximal=proximal, max_staleness=2))
        said = [each.message for each in remarks if each.costs]
        assert bool(said) is torch.equal(*gradients), options
        assert all("with pipeline.max_staleness = 2: tokens that older weights" in each for each in said)
        assert not any(each.costs for each in remarks_of(loss, options, LossSetting(proximal=proximal)))


def test_a_given_clip_that_cannot_act_is_said_once() -> None:
    for loss in (grpo, further.gspo, further.cispo, losses.grpo):
        for name in ("clip_low", "clip_high"):
            (remark,) = remarks_of(loss, {name: 0.3}, LossSetting(max_staleness=1))
            assert name in remark.message
            for setting in (LossSetting(updates_per_step=2), LossSetting(proximal="generation")):
                assert not remarks_of(loss, {name: 0.3}, setting)
        assert not remarks_of(loss, {}, LossSetting(max_staleness=1))


def test_a_constant_goes_with_its_aggregation_and_with_no_other() -> None:
    assert build([{"loss": {"aggregation": "constant", "aggregation_constant": 512}}]).loss.aggregation
    for loss in ({"aggregation": "constant"}, {"aggregation_constant": 512.0}):
        with pytest.raises(ConfigError, match="needs a constant above 0"):
            build([{"loss": loss}])


def test_needs_follow_from_the_options() -> None:
    assert needs_of(grpo, {}) == frozenset()
    assert needs_of(further.gspo, {}) == {"sequences"}
    assert needs_of(grpo, {"ratio": Sequence()}) == {"sequences"}
    assert needs_of(grpo, {"correction": GeometricMask()}) == {"sequences"}
    assert needs_of(grpo, {"mask": Mask(off_policy_limit=0.1)}) == {"sequences"}
    assert needs_of(grpo, {"kl": Kl(coefficient=0.1)}) == {"scores.reference", "all_rows"}
    assert needs_of(grpo, {"entropy": Entropy(coefficient=0.1)}) == {"entropy", "all_rows"}
    assert needs_of(grpo, {"entropy": Entropy(target=0.1)}) == {"entropy", "all_rows", "entropy_control"}
    assert needs_of(grpo, {"teacher": Teacher(coefficient=0.1)}) == {"scores.teacher", "all_rows"}
    assert needs_of(grpo, {"nll_coefficient": 0.1}) == {"all_rows"}
    assert needs_of(further.distillation, {}) == {"scores.teacher", "all_rows"}
    assert needs_of(further.distillation, {"teacher": Teacher()}) == frozenset()
    assert needs_of(further.cispo, {"mask": Mask(top_entropy=0.2)}) == {"update_entropies"}


# ---------------------------------------------------------------------------------- the entropy's target


def control(**options: Any) -> losses.EntropyControl:
    return losses.EntropyControl.of(grpo, {"entropy": Entropy(target=1.0, **options)})


def test_the_coefficient_rises_below_the_target_falls_above_it_and_applies_only_below() -> None:
    """The rule of TRL 1.16: ``GRPOTrainer`` with ``use_adaptive_entropy``."""
    held = control(coefficient=0.01, delta=0.02, max=0.06)
    applied, coefficients = [], []
    for entropy in (1.5, 1.0, 0.9, 0.8, 0.7, 1.1, 0.9):
        applied.append(held.applied)
        held.observe(entropy)
        coefficients.append(held.coefficient)
    assert coefficients == pytest.approx([0.0, 0.02, 0.04, 0.06, 0.06, 0.04, 0.06])
    assert applied == pytest.approx([0.0, 0.0, 0.02, 0.04, 0.06, 0.06, 0.0])


@of_all(st.lists(st.floats(0, 10, allow_nan=False), max_size=40), st.floats(0, 0.2), st.floats(0.001, 0.3))
def test_the_coefficient_stays_between_its_bounds_and_moves_by_one_delta(
    entropies: list[float], begin: float, delta: float
) -> None:
    held = control(coefficient=begin, delta=delta, max=0.2)
    for entropy in entropies:
        before = held.coefficient
        held.observe(entropy)
        assert 0 <= held.coefficient <= 0.2
        assert abs(held.coefficient - before) <= delta + 1e-12
        assert held.applied in (0.0, held.coefficient)


@pytest.mark.parametrize(
    "options", [{}, {"mask": Mask(top_entropy=0.4)}], ids=["all tokens", "the most uncertain"]
)
def test_the_bonus_is_that_of_the_coefficient_that_the_trainer_gives(options: dict[str, Any]) -> None:
    held = {"entropy": Entropy(target=1.0), **options}
    given = evolve(inputs(grpo, held), entropy_coefficient=0.3)
    found, metrics = grpo(given, **held)
    plain, _ = grpo(given, entropy=Entropy(coefficient=0.3), **options)
    torch.testing.assert_close(found, plain)
    assert given.entropy is not None
    entropies = given.entropy.detach()
    if options:
        entropies = entropies[entropies >= entropies.quantile(0.6)]
    assert float(metrics["bonus_entropy"].mean()) == pytest.approx(float(entropies.mean()))


# ---------------------------------------------------------------------------------- the teacher


def test_distillation_is_grpo_whose_advantages_are_those_of_the_formula() -> None:
    given = inputs(further.distillation, {})
    by_formula = given.scores["teacher"] - given.proximal_logprobs
    expected, _ = grpo(evolve(given, advantages=by_formula))
    found, metrics = further.distillation(given)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(metrics["teacher_kl"], -by_formula)


def test_rewards_and_teacher_are_mixed_by_their_weights() -> None:
    given = inputs(further.distillation, {})
    difference = given.scores["teacher"] - given.proximal_logprobs
    mixed = evolve(given, advantages=0.3 * given.advantages + 0.5 * difference.clamp(-0.1, 0.1))
    teacher = Teacher(coefficient=0.5, reward_coefficient=0.3, clip=0.1)
    torch.testing.assert_close(further.sapo(given, teacher=teacher)[0], further.sapo(mixed)[0])


def test_what_hints_teach_has_the_gradient_of_the_reverse_kl_on_average() -> None:
    logits = torch.tensor([0.3, -1.0, 0.7], dtype=torch.float64, requires_grad=True)
    policy = logits.log_softmax(0)
    hinted = torch.tensor([1.0, 0.5, -2.0], dtype=torch.float64).log_softmax(0)
    (exact,) = torch.autograd.grad((policy.exp() * (policy - hinted)).sum(), logits, retain_graph=True)
    given = losses.padded(
        policy_logprobs=policy[:, None],
        mask=torch.ones(3, 1),
        advantages=torch.full((3,), 9.0, dtype=torch.float64),
        scores={"hinted": hinted[:, None]},
    )
    found_losses, metrics = further.self_distillation(given, clip=10.0)
    (found,) = torch.autograd.grad((policy.exp().detach() * found_losses).sum(), logits, retain_graph=True)
    torch.testing.assert_close(found, exact)
    torch.testing.assert_close(metrics["hinted_difference"], (hinted - policy).detach())
    bounded, metrics = further.self_distillation(given, clip=0.1)
    assert metrics["hinted_clipped"].tolist() == [float(each) for each in (hinted - policy).abs() > 0.1]
    assert found_losses.abs().max() > bounded.abs().max()


def test_rewards_teach_where_no_hint_does_and_add_to_it_in_a_mixture() -> None:
    policy = torch.tensor([[-1.0], [-1.0]], dtype=torch.float64)
    given = losses.padded(
        policy_logprobs=policy,
        mask=torch.ones(2, 1),
        advantages=torch.tensor([3.0, 3.0], dtype=torch.float64),
        scores={"hinted": torch.tensor([[torch.nan], [-0.5]], dtype=torch.float64)},
    )
    assert further.self_distillation(given)[0].tolist() == [-3.0, -0.5]
    assert further.self_distillation(given, teach="mix", coefficient=0.5)[0].tolist() == [-3.0, -3.25]


def test_dppo_drops_a_token_that_moved_where_its_advantage_pushes_it() -> None:
    policy = torch.tensor([0.9, 0.9, 0.1, 0.1, 0.1], dtype=torch.float64).log()
    given = losses.padded(
        policy_logprobs=policy[:, None].requires_grad_(),
        mask=torch.ones(5, 1),
        advantages=torch.tensor([1.0, -1.0, 1.0, -1.0, 0.0], dtype=torch.float64),
        generation_logprobs=torch.full((5, 1), 0.5, dtype=torch.float64).log(),
    )
    for low, kept in ((0.3, [False, True, True, False, False]), (0.5, [False, True, True, True, False])):
        found, _ = further.dppo(given, mask_low=low, mask_high=0.3, drift_coefficient=0.0)
        assert [each != 0.0 for each in found.tolist()] == kept


def test_as_a_term_of_the_loss_the_teacher_has_the_gradient_of_the_reverse_kl() -> None:
    """Summed over all tokens with their probabilities, the estimate has the exact gradient."""
    logits = torch.tensor([0.3, -0.2, 1.0], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([1.0, 0.5, -2.0], dtype=torch.float64).log_softmax(0)
    policy = logits.log_softmax(0)
    (exact,) = torch.autograd.grad((policy.exp() * (policy - teacher)).sum(), logits, retain_graph=True)
    given = losses.padded(
        policy_logprobs=policy[:, None],
        mask=torch.ones(3, 1),
        advantages=torch.zeros(3),
        scores={"teacher": teacher[:, None]},
    )
    per_token, _ = further.distillation(
        given, teacher=Teacher(coefficient=1.0, acts_on="loss", reward_coefficient=0.0)
    )
    (estimated,) = torch.autograd.grad((policy.exp().detach() * per_token).sum(), logits)
    torch.testing.assert_close(estimated, exact)


# ---------------------------------------------------------------------------------- parts


def test_a_sequence_with_a_negative_advantage_is_left_out_if_the_policy_has_left_it() -> None:
    generation = torch.tensor([-1.0, -1.0, -1.0, -1.0, -1.0])
    policy = torch.tensor([-1.5, -1.1, -1.5, -1.1, -0.2])
    advantages = torch.tensor([-1.0, -1.0, 1.0, 0.0, -1.0])
    sequences = torch.tensor([0, 0, 1, 1, 2])
    kept = off_policy_kept(policy, generation, advantages, sequences, limit=0.25)
    assert kept.tolist() == [False, False, True, True, True]
    kept = off_policy_kept(policy, generation, advantages, sequences, limit=0.35)
    assert kept.tolist() == [True] * 5


def test_tokens_left_out_as_off_policy_have_no_objective_and_are_counted() -> None:
    policy = torch.tensor([[-1.5, -1.1], [-0.2, -0.2]], dtype=torch.float64)
    given = losses.padded(
        policy_logprobs=policy,
        generation_logprobs=torch.full_like(policy, -1.0),
        mask=torch.ones(2, 2),
        advantages=torch.tensor([-1.0, -1.0], dtype=torch.float64),
    )
    per_token, metrics = further.reinforce(given, mask=Mask(off_policy_limit=0.25))
    assert (per_token == 0).tolist() == [True, True, False, False]
    assert metrics["off_policy_masked"].tolist() == [1, 1, 0, 0]


def test_the_docstrings_of_a_loss_and_its_values_explain_all_options() -> None:
    for loss in (*NAMED, further.distillation):
        for name in signature(loss).parameters:
            assert f"\n    {name}: " in str(getdoc(loss)), f"{loss.__name__}: {name}"
    for kind in (Kl, Teacher, Entropy, Mask, TokenMask):
        assert {each.name for each in attrs.fields(kind)} <= {
            name for name, text in meanings(kind).items() if text
        }
