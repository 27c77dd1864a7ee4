"""The loss: known values, and what it may not depend on.

The values are those of the clipped policy gradient with hand-computable ratios 0.5, 1 and 1.5; losses and
gradients are divided by the three tokens, as the core does.
"""

import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_core.contracts.errors import ConfigError, PluginError
from grpo_core.contracts.loss import LossInputs, LossSetting, check_options, needs, needs_of
from grpo_core.losses import IDLE_CLIP, Kl, TokenTruncate, grpo
from grpo_core.plugins.host import PluginHost
from grpo_plugin_algorithms import losses as further
from grpo_plugin_algorithms.kl import kl_estimate, score_weights

HALF, SAME, MORE = -1.69315, -1.0, -0.59453  # 0.5, 1 and 1.5 times the proximal probability exp(-1)
GENERATION = [-0.5, -1.5, -0.8]


def loss_and_gradient(
    policy: list[float],
    proximal: list[float] | None = None,
    advantages: tuple[float, ...] = (1.0, -1.0, 2.0),
    generation: list[float] | None = None,
    reference: list[float] | None = None,
    loss_function: Callable[..., tuple[Tensor, dict[str, Tensor]]] = grpo,
    **options: Any,
) -> tuple[float, list[float], dict[str, Tensor]]:
    logprobs = torch.tensor(policy, dtype=torch.float64, requires_grad=True)
    before = logprobs.detach() if proximal is None else torch.tensor(proximal, dtype=torch.float64)
    inputs = LossInputs(
        policy_logprobs=logprobs,
        proximal_logprobs=before,
        generation_logprobs=before if generation is None else torch.tensor(generation, dtype=torch.float64),
        scores={} if reference is None else {"reference": torch.tensor(reference, dtype=torch.float64)},
        advantages=torch.tensor(advantages, dtype=torch.float64),
        rows=torch.zeros(len(policy), dtype=torch.int64),
        step=0,
        update=0,
        update_tokens=len(policy),
        update_rows=1,
    )
    losses, metrics = loss_function(inputs, **options)
    loss = losses.sum() / len(policy)
    loss.backward()
    assert logprobs.grad is not None
    return loss.item(), logprobs.grad.tolist(), metrics


def test_the_clip_bounds_what_a_step_can_gain() -> None:
    loss, gradient, metrics = loss_and_gradient([HALF, SAME, MORE], [-1.0] * 3, clip_high=0.2)
    assert loss == pytest.approx(-0.63333, abs=1e-5)
    assert gradient == pytest.approx([-0.16667, 0.33333, 0.0], abs=1e-5)
    assert metrics["clip_fraction_high"].tolist() == [0, 0, 1]
    assert metrics["clip_fraction_low"].tolist() == [0, 0, 0]


def test_a_higher_upper_bound_leaves_more_room_for_rare_tokens() -> None:
    assert loss_and_gradient([HALF, SAME, MORE], [-1.0] * 3)[0] == pytest.approx(-0.68667, abs=1e-5)


def test_a_bad_token_that_became_rare_is_clipped_low() -> None:
    _, gradient, metrics = loss_and_gradient([HALF], [-1.0], advantages=(-1.0,))
    assert gradient == [0.0]
    assert metrics["clip_fraction_low"].tolist() == [1]


def test_the_dual_clip_bounds_the_loss_of_a_bad_token_that_became_likely() -> None:
    policy, proximal, advantages = [HALF, -1.0, -0.69741], [-1.0, -1.0, -3.0], (1.0, -1.0, -4.0)
    loss, gradient, _ = loss_and_gradient(
        policy, proximal, advantages, loss_function=further.grpo, clip_high=0.2, dual_clip=3.0
    )
    assert loss == pytest.approx(4.16667, abs=1e-4)
    assert gradient[2] == 0.0
    unbounded, _, _ = loss_and_gradient(policy, proximal, advantages, clip_high=0.2)
    assert unbounded - loss == pytest.approx((40 - 12) / 3, abs=1e-3)


def test_in_a_first_update_the_gradient_is_the_plain_policy_gradient() -> None:
    loss, gradient, _ = loss_and_gradient([HALF, SAME, MORE])
    assert loss == pytest.approx(-0.66667, abs=1e-5)
    assert gradient == pytest.approx([-1 / 3, 1 / 3, -2 / 3])


def test_tokens_of_older_weights_count_by_how_likely_they_still_are() -> None:
    loss, gradient, metrics = loss_and_gradient(
        [HALF, SAME, MORE],
        [-1.0] * 3,
        generation=GENERATION,
        clip_high=0.2,
        correction=TokenTruncate(cap=math.inf),
    )
    assert loss == pytest.approx(-0.2065, abs=1e-4)
    assert gradient == pytest.approx([-0.10109, 0.54957, 0.0], abs=1e-5)
    assert metrics["importance_weight_mean"].tolist() == pytest.approx([0.6065, 1.6487, 0.8187], abs=1e-4)


def test_their_weight_is_truncated() -> None:
    loss, _, metrics = loss_and_gradient(
        [HALF, SAME, MORE],
        [-1.0] * 3,
        generation=GENERATION,
        clip_high=0.2,
        correction=TokenTruncate(cap=0.8),
    )
    assert loss == pytest.approx(-0.47442, abs=1e-5)
    assert metrics["importance_weight_max"].max() == pytest.approx(0.8)


def test_a_token_that_the_engine_thought_impossible_stays_finite() -> None:
    loss, gradient, _ = loss_and_gradient(
        [-1.0, -1.0], [-1.0, -1.0], (1.0, -1.0), generation=[-math.inf, -1.0]
    )
    assert math.isfinite(loss)
    assert all(map(math.isfinite, gradient))


def test_the_divergence_from_the_reference_has_its_true_gradient() -> None:
    loss, gradient, _ = loss_and_gradient(
        [0.0, -1.0, -2.0], advantages=(0.0, 0.0, 0.0), reference=[-1.0] * 3, kl=Kl(coefficient=0.1)
    )
    assert loss == pytest.approx(0.03621, abs=1e-5)
    assert gradient == pytest.approx([0.03333, 0.0, -0.03333], abs=1e-5)


def test_the_expected_gradient_of_the_estimate_is_the_gradient_of_the_divergence() -> None:
    logits = torch.tensor([0.3, -0.5, 1.0], dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64), -1)
    policy = torch.log_softmax(logits, -1)
    exact = (policy.exp() * (policy - reference)).sum()
    (wanted,) = torch.autograd.grad(exact, logits, retain_graph=True)
    (estimate,) = torch.autograd.grad(
        (policy.exp().detach() * kl_estimate(policy, reference, weights=score_weights(policy))).sum(), logits
    )
    estimated = (policy.exp() * kl_estimate(policy, reference, weights=score_weights(policy))).sum()
    assert estimated.item() == pytest.approx(exact.item())
    torch.testing.assert_close(estimate, wanted)


def test_without_a_coefficient_the_reference_is_ignored() -> None:
    plain, _, _ = loss_and_gradient([HALF, SAME, MORE], [-1.0] * 3)
    other, _, metrics = loss_and_gradient([HALF, SAME, MORE], [-1.0] * 3, reference=[-9.0] * 3)
    assert plain == other
    assert "kl" not in metrics


def test_a_loss_can_be_imported_and_inspected_without_torch() -> None:
    modules = "grpo_core.contracts.loss, grpo_core.loop.rows, grpo_core.training.batching"
    code = f"import sys, {modules}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# ---------------------------------------------------------------------------------- needs


def test_the_built_in_loss_needs_the_reference_and_all_rows_only_for_its_kl_term() -> None:
    assert needs_of(grpo, {}) == frozenset()
    assert needs_of(grpo, {"kl": Kl()}) == frozenset()
    assert needs_of(grpo, {"kl": Kl(coefficient=0.01), "clip_low": 0.1}) == {"scores.reference", "all_rows"}


def test_declarations_of_needs_add_up() -> None:
    @needs("entropy")
    @needs("scores.reference", when="beta")
    @needs("all_rows", when="bonus")
    def mine(inputs: LossInputs, *, beta: float = 0.5, bonus: float | None = None) -> None: ...

    assert needs_of(mine, {}) == {"entropy", "scores.reference"}
    assert needs_of(mine, {"beta": 0.0}) == {"entropy"}
    assert needs_of(mine, {"bonus": 1.0}) == {"entropy", "scores.reference", "all_rows"}
    assert needs_of(lambda inputs: None, {}) == frozenset()


def test_an_unknown_need_and_an_unknown_option_are_refused_where_they_are_written() -> None:
    with pytest.raises(ValueError, match=r"unknown \['refrence'\]; expected some of \('entropy'"):
        needs("refrence")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="mine has no option 'beta'"):

        @needs("scores.reference", when="beta")
        def mine(inputs: LossInputs) -> None: ...


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"clip_low": 0.1, "clip_high": 0.5},
        {"correction": {"cap": 1.1}},
        {"correction": {"name": "token_truncate", "cap": 1.1}},
        {"correction": "token_truncate"},
        {"kl": {"coefficient": 0.3}},
    ],
)
def test_the_loss_of_the_core_and_its_extension_compute_the_same(options: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    policy, proximal, generation, reference = (-torch.rand(4, 40, generator=generator) * 3).tolist()
    advantages = tuple(torch.randn(40, generator=generator).tolist())
    given = (policy, proximal, advantages, generation, reference)
    core, plugin = (PluginHost.discover().function("loss", name, **options) for name in ("core:grpo", "grpo"))
    mine = loss_and_gradient(*given, loss_function=core.function, **core.options)
    other = loss_and_gradient(*given, loss_function=plugin.function, **plugin.options)
    assert mine[:2] == other[:2]
    assert mine[2].keys() == other[2].keys()
    assert all(torch.equal(value, other[2][name]) for name, value in mine[2].items())


def test_the_extension_replaces_the_loss_of_the_core_and_without_it_its_options_name_it() -> None:
    both, alone = PluginHost.discover(), PluginHost.discover(block=["algorithms"])
    assert both.find("loss", "grpo").plugin.distribution == "grpo-plugin-algorithms"
    assert both.find("loss", "core:grpo").plugin.distribution == "grpo-core"
    assert alone.find("loss", "grpo").plugin.distribution == "grpo-core"
    with pytest.raises(PluginError, match=r"no option 'dual_clip'.*pip install grpo-plugin-algorithms"):
        alone.check_options("loss", "grpo", {"dual_clip": 3.0})


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"clip_low": 1.5}, "clip_low = 1.5"),
        ({"clip_high": math.nan}, "clip_high = nan"),
        ({"correction": TokenTruncate(cap=3.0)}, "correction does nothing"),
    ],
)
def test_options_of_the_core_loss_that_make_no_sense_are_named(options: dict[str, Any], problem: str) -> None:
    (found,) = check_options(grpo, options, LossSetting(proximal="generation"))
    assert str(found).startswith(problem)
    without = {"clip_high": math.inf, "correction": TokenTruncate(cap=math.inf)}
    assert list(check_options(grpo, without, LossSetting())) == [IDLE_CLIP]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"correction": {"cap": 0.0}}, "'loss.options.correction': 'cap' must be > 0: 0.0"),
        ({"kl": {"coefficient": -0.1}}, "'coefficient' must be >= 0: -0.1"),
        ({"kl": {"coefficient": math.inf}}, "'coefficient' must be < inf"),
        ({"kl_coefficient": 0.1}, "write\n[loss.options.kl]\ncoefficient = 0.1"),
        ({"importance_cap": 3.0}, "write\n[loss.options.correction]\ncap = 3.0"),
    ],
)
def test_tables_of_the_core_loss_that_do_not_fit_are_named(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PluginHost.discover(block=["algorithms"]).check_options("loss", "grpo", options)
    assert problem in str(caught.value)
