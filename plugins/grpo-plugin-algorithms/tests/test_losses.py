"""The losses of the core keep their contract with every option, and the aggregation divides as it says."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import signature
from math import inf, nan
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given as of_all
from hypothesis import strategies as st

from grpo_core import losses
from grpo_core.config import build
from grpo_core.contracts.errors import ConfigError
from grpo_core.contracts.loss import LossInputs, LossSetting, needs_of, problems_of, remarks_of
from grpo_plugin_algorithms import losses as further
from grpo_plugin_algorithms.clipped import grpo
from grpo_plugin_algorithms.corrections import off_policy_kept
from grpo_plugin_algorithms.ranges import Range
from grpo_plugin_algorithms.terms import Objective, composed
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
    {"correction": "off"},
    {"kl_coefficient": 0.1},
    {"kl_coefficient": 0.1, "kl_estimator": "k1", "kl_weight": "none"},
    {"kl_coefficient": 0.1, "kl_estimator": "k2", "kl_weight": "ratio", "kl_output_clamp": 1.0},
    {"kl_coefficient": 0.1, "kl_weight": "generation", "kl_input_clamp": 0.1, "kl_output_clamp": 10.0},
    {"kl_coefficient": 0.1, "kl_in": "reward"},
    {"teacher_coefficient": 0.5},
    {"teacher_coefficient": 0.5, "teacher_clip": 0.1, "reward_coefficient": 0.3},
    {"teacher_coefficient": 0.5, "teacher_in": "loss"},
    {"entropy_coefficient": 0.01},
    {"entropy_coefficient": 0.01, "top_entropy": 0.4},
    {"entropy_target": 2.0},
    {"entropy_target": 2.0, "top_entropy": 0.4},
    {"nll_coefficient": 0.1},
    {"top_entropy": 0.5},
    {"off_policy_limit": 0.05},
]
ALL_TERMS = {
    "kl_coefficient": 0.1,
    "kl_weight": "ratio",
    "entropy_coefficient": 0.01,
    "nll_coefficient": 0.1,
    "top_entropy": 0.5,
    "off_policy_limit": 0.05,
}
CORRECTED: list[dict[str, Any]] = [
    {"correction": kind, "importance_floor": 0.9, "importance_cap": 1.1}
    for kind in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "geometric_mask")
]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for tensors of this size several are slower
    yield
    torch.set_num_threads(threads)


def cases() -> list[Any]:
    made = [(grpo, options) for options in SHARED]
    made += [(loss, {}) for loss in NAMED if loss is not grpo]
    made += [(further.distillation, {})]
    made += [(loss, ALL_TERMS) for loss in NAMED]
    made += [(grpo, options) for options in (*CORRECTED, {"on_policy": True}, {"ratio_cap": 1.1})]
    made += [(grpo, {"ratio": "sequence_token", "dual_clip": 1.1})]
    made += [(loss, {"ratio": "sequence"}) for loss in CLIPPED]
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
        bonus = losses.total(further.reinforce(made, entropy_coefficient=1.0)[0], made)
        right = losses.total(further.reinforce(made, nll_coefficient=1.0)[0], made)
        high = losses.total(further.reinforce(made, entropy_coefficient=1.0, top_entropy=0.5)[0], made)
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
        (grpo, {"kl_estimator": "k1"}, {}, "kl_estimator does nothing without kl_coefficient"),
        (grpo, {"kl_coefficient": 1.0, "kl_in": "reward", "kl_weight": "none"}, {}, "has none"),
        (grpo, {"entropy_delta": 0.1}, {}, "does nothing without entropy_target"),
        (grpo, {"entropy_target": 0.0}, {}, "above 0"),
        (grpo, {"entropy_target": 1.0, "entropy_min": 0.1}, {}, "is not between entropy_min"),
        (grpo, {"teacher_clip": 1.0}, {}, "does nothing without teacher_coefficient"),
        (grpo, {"reward_coefficient": 0.0}, {}, "nothing to learn from"),
        (further.distillation, {"teacher_clip": -1.0}, {}, "above 0"),
        (further.distillation, {"teacher_coefficient": -1.0}, {}, "push the policy away"),
        (further.distillation, {"reward_coefficient": -1.0}, {}, "reward failures"),
        (grpo, {"correction": "off", "importance_cap": 3.0}, {}, "does not compute"),
        (grpo, {"correction": "token_mask"}, {"proximal": "generation"}, "does nothing"),
        (grpo, {"importance_floor": 3.0}, {}, "is above importance_cap"),
        (grpo, {"on_policy": True}, {"updates_per_step": 2}, "nothing would bound 2 updates"),
        (grpo, {"dual_clip": 1.0}, {}, "expected above 1"),
        (grpo, {"ratio_cap": 0.9}, {}, "expected above 1"),
        (grpo, {"top_entropy": 1.5}, {}, "a share of tokens"),
        (grpo, {"off_policy_limit": 0.0}, {}, "above 0"),
        (further.sapo, {"nll_coefficient": -1.0}, {}, "would push the policy away"),
        (further.reinforce, {"kl_coefficient": 0.1, "kl_weight": "ratio"}, {}, "has no ratio to weight"),
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
        (grpo, "importance_cap", 0.0, "above 0"),
        (grpo, "importance_floor", -1.0, "at least 0"),
        (further.sapo, "temperature_positive", 0.0, "above 0"),
        (further.sapo, "temperature_negative", -1.0, "above 0"),
        (grpo, "top_entropy", 0.0, "above 0 and at most 1"),
        (grpo, "kl_coefficient", -0.1, "at least 0"),
    ],
)
def test_an_option_out_of_its_range_is_refused(loss: Any, option: str, value: float, expected: str) -> None:
    (problem,) = problems_of(loss, {option: value}, LossSetting())
    assert problem.startswith(f"{option} = {value}: expected {expected}")


@pytest.mark.parametrize("value", [0.0, -1.0])
@pytest.mark.parametrize("option", ["kl_input_clamp", "kl_output_clamp"])
def test_a_divergence_is_clamped_to_more_than_0(option: str, value: float) -> None:
    (problem,) = problems_of(grpo, {"kl_coefficient": 0.1, option: value}, LossSetting())
    assert problem == f"{option} = {value}: expected above 0"


@pytest.mark.parametrize("loss", [*NAMED, further.distillation])
def test_an_option_of_a_loss_is_a_finite_number(loss: Any) -> None:
    """An infinite upper bound bounds nothing, which two options may say."""
    options = signature(loss).parameters.values()
    numbers = [each.name for each in options if str(each.annotation) in ("float", "float | None")]
    assert {"kl_coefficient", "nll_coefficient", "entropy_coefficient", "teacher_clip"} <= {*numbers}
    for option in numbers:
        for value in (nan, inf, -inf):
            found = problems_of(loss, {option: value}, LossSetting())
            refused = any(each.startswith(f"{option} = {value}: expected") for each in found)
            assert refused is not (value == inf and option in ("clip_high", "importance_cap")), option


@pytest.mark.parametrize(
    ("loss", "options", "setting"),
    [
        (grpo, {"on_policy": True, "correction": "token_mask"}, {"proximal": "generation"}),
        (grpo, {"on_policy": True, "importance_cap": 5.0}, {"proximal": "generation"}),
        (grpo, {"clip_low": 0.0, "clip_high": 0, "kl_coefficient": 0}, {}),
        (further.cispo, {"clip_low": 1, "clip_high": inf}, {}),
        (further.reinforce, {"kl_coefficient": 0.1, "kl_weight": "generation"}, {}),
    ],
)
def test_what_has_an_effect_is_not_refused(
    loss: Any, options: dict[str, Any], setting: dict[str, Any]
) -> None:
    assert problems_of(loss, options, LossSetting(**setting)) == []


def test_with_on_policy_a_correction_has_an_effect_whatever_the_proximal_logprobs_are() -> None:
    given = inputs(grpo, {})
    given = evolve(given, proximal_logprobs=given.generation_logprobs)
    one, other = (grpo(given, on_policy=True, correction=kind)[0] for kind in ("off", "token_mask"))
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
    for options in ({}, {"correction": "off"}, {"on_policy": True}, {"correction": "off", "on_policy": True}):
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


def test_an_objective_of_a_plugin_says_what_its_options_may_be() -> None:
    @composed(lacks=["ratio"], within={"power": Range(above=0, why="since it is a power")})
    def mine(given: LossInputs, weights: Any, *, power: float = 1.0, rest: float = 0.0) -> Objective:
        """Compute no loss."""
        raise NotImplementedError

    assert problems_of(mine, {"power": 2, "rest": -1.0}, LossSetting()) == []
    found = problems_of(mine, {"power": 0, "rest": nan}, LossSetting(updates_per_step=2))
    assert found[:2] == [
        "power = 0: expected above 0, since it is a power",
        "rest = nan: expected a finite number",
    ]
    assert "nothing would bound 2 updates" in found[2]


def test_a_constant_goes_with_its_aggregation_and_with_no_other() -> None:
    assert build([{"loss": {"aggregation": "constant", "aggregation_constant": 512}}]).loss.aggregation
    for loss in ({"aggregation": "constant"}, {"aggregation_constant": 512.0}):
        with pytest.raises(ConfigError, match="needs a constant above 0"):
            build([{"loss": loss}])


def test_needs_follow_from_the_options() -> None:
    assert needs_of(grpo, {}) == frozenset()
    assert needs_of(further.gspo, {}) == {"sequences"}
    assert needs_of(grpo, {"ratio": "sequence"}) == {"sequences"}
    assert needs_of(grpo, {"correction": "geometric_mask"}) == {"sequences"}
    assert needs_of(grpo, {"entropy_coefficient": 0.1}) == {"entropy", "all_rows"}
    assert needs_of(grpo, {"teacher_coefficient": 0.1}) == {"teacher", "all_rows"}
    assert needs_of(further.distillation, {}) == {"teacher", "all_rows"}
    assert needs_of(further.distillation, {"teacher_coefficient": 0.0}) == frozenset()
    assert needs_of(further.cispo, {"top_entropy": 0.2}) == {"update_entropies"}


# ---------------------------------------------------------------------------------- the entropy's target


def control(**options: Any) -> losses.EntropyControl:
    return losses.EntropyControl.of(grpo, {"entropy_target": 1.0, **options})


def test_the_coefficient_rises_below_the_target_falls_above_it_and_applies_only_below() -> None:
    """The rule of TRL 1.16: ``GRPOTrainer`` with ``use_adaptive_entropy``."""
    held = control(entropy_coefficient=0.01, entropy_delta=0.02, entropy_max=0.06)
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
    held = control(entropy_coefficient=begin, entropy_delta=delta, entropy_max=0.2)
    for entropy in entropies:
        before = held.coefficient
        held.observe(entropy)
        assert 0 <= held.coefficient <= 0.2
        assert abs(held.coefficient - before) <= delta + 1e-12
        assert held.applied in (0.0, held.coefficient)


@pytest.mark.parametrize("options", [{}, {"top_entropy": 0.4}], ids=["all tokens", "the most uncertain"])
def test_the_bonus_is_that_of_the_coefficient_that_the_trainer_gives(options: dict[str, Any]) -> None:
    given = evolve(inputs(grpo, {"entropy_target": 1.0, **options}), entropy_coefficient=0.3)
    found, metrics = grpo(given, entropy_target=1.0, **options)
    plain, _ = grpo(given, entropy_coefficient=0.3, **options)
    torch.testing.assert_close(found, plain)
    assert given.entropy is not None
    entropies = given.entropy.detach()
    if options:
        entropies = entropies[entropies >= entropies.quantile(0.6)]
    assert float(metrics["bonus_entropy"].mean()) == pytest.approx(float(entropies.mean()))


# ---------------------------------------------------------------------------------- the teacher


def test_distillation_is_grpo_whose_advantages_are_those_of_the_formula() -> None:
    given = inputs(further.distillation, {})
    assert given.teacher_logprobs is not None
    by_formula = given.teacher_logprobs - given.proximal_logprobs
    expected, _ = grpo(evolve(given, advantages=by_formula))
    found, metrics = further.distillation(given)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(metrics["teacher_kl"], -by_formula)


def test_rewards_and_teacher_are_mixed_by_their_weights() -> None:
    given = inputs(further.distillation, {})
    assert given.teacher_logprobs is not None
    difference = given.teacher_logprobs - given.proximal_logprobs
    mixed = evolve(given, advantages=0.3 * given.advantages + 0.5 * difference.clamp(-0.1, 0.1))
    options = {"teacher_coefficient": 0.5, "reward_coefficient": 0.3, "teacher_clip": 0.1}
    torch.testing.assert_close(further.sapo(given, **options)[0], further.sapo(mixed)[0])


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
        teacher_logprobs=teacher[:, None],
    )
    per_token, _ = further.distillation(given, teacher_in="loss")
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
    per_token, metrics = further.reinforce(given, off_policy_limit=0.25)
    assert (per_token == 0).tolist() == [True, True, False, False]
    assert metrics["off_policy_masked"].tolist() == [1, 1, 0, 0]


def test_the_docstring_of_a_loss_explains_all_of_its_options() -> None:
    for loss in (*NAMED, further.distillation):
        for name in signature(loss).parameters:
            assert f"\n    {name}: " in str(loss.__doc__), f"{loss.__name__}: {name}"
