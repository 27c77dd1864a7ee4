"""The losses compute what NeMo RL computes: its numbers, and ours for each of its configurations."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_core import losses
from grpo_plugin_algorithms import losses as further
from grpo_plugin_algorithms.corrections import GeometricMask, Off, SequenceTruncate, TokenMask, TokenTruncate
from grpo_plugin_algorithms.kl import Kl, kl_estimate
from grpo_plugin_algorithms.losses import grpo
from grpo_plugin_algorithms.ratios import Sequence

VECTORS = json.loads(
    gzip.decompress((Path(__file__).parents[3] / "tests" / "vectors" / "nemo_rl.json.gz").read_bytes())
)
CASES = VECTORS["loss_cases"]
TOLERANCE = 1e-6

CORRECTIONS = {
    None: TokenTruncate,
    "tis": TokenTruncate,
    "icepop": TokenMask,
    "seq-mask-tis": GeometricMask,
}


def ours(config: Mapping[str, Any]) -> tuple[Callable[..., Any], dict[str, Any], str]:
    """The loss, its options and the aggregation that express a configuration of NeMo RL."""
    options: dict[str, Any] = {}
    loss: Callable[..., Any] = grpo
    if config.get("use_cispo"):
        loss = further.cispo
    if config.get("disable_ppo_ratio"):
        loss = further.reinforce
    else:
        options |= {
            "clip_low": config.get("ratio_clip_min", 0.2),
            "clip_high": config.get("ratio_clip_max", 0.2),
        }
    if (cap := config.get("ratio_clip_c")) is not None:
        options["dual_clip"] = cap
    if config.get("force_on_policy_ratio"):
        options["on_policy"] = True
    if config.get("sequence_level_importance_ratios"):
        options["ratio"] = Sequence()
    options["correction"] = Off()
    if config.get("use_importance_sampling_correction"):
        kind = CORRECTIONS[config.get("truncated_importance_sampling_type")]
        options["correction"] = (SequenceTruncate if "ratio" in options else kind)(
            cap=config.get("truncated_importance_sampling_ratio", math.inf),
            floor=config.get("truncated_importance_sampling_ratio_min", 0.0),
        )
    coefficient = config.get("reference_policy_kl_penalty", 0.01)
    if coefficient and not config.get("use_kl_in_reward"):
        options["kl"] = Kl(
            coefficient=coefficient,
            estimator=config.get("reference_policy_kl_type", "k3"),
            weight="generation" if config.get("use_on_policy_kl_approximation") else "score",
            input_clamp=config.get("kl_input_clamp_value", 20.0),
            output_clamp=config.get("kl_output_clamp_value", 10.0),
        )
    if config.get("positive_example_nll_weight"):
        options["nll_coefficient"] = config["positive_example_nll_weight"]
    return loss, options, "token" if config.get("token_level_loss", True) else "sequence"


def tensor(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def inputs_of(case: Mapping[str, Any], policy: Tensor, aggregation: Any, rows: slice = slice(None)) -> Any:
    given = {name: tensor(values) for name, values in VECTORS["inputs"][case["input"]].items()}
    mask = given["token_mask"][:, 1:] * given["sample_mask"][:, None]
    rewards = case.get("rewards")
    return losses.padded(
        policy_logprobs=policy[rows],
        mask=mask[rows],
        advantages=given["advantages"][rows, 1:],
        proximal_logprobs=given["prev_logprobs"][rows, 1:],
        generation_logprobs=given["generation_logprobs"][rows, 1:],
        scores={"reference": given["reference_policy_logprobs"][rows, 1:]},
        correct=None if rewards is None else tensor(rewards)[rows] > 0,
        aggregation=aggregation,
    )


def policy_of(case: Mapping[str, Any]) -> Tensor:
    return tensor(VECTORS["inputs"][case["input"]]["next_token_logprobs"]).requires_grad_()


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_a_loss_and_its_gradient_are_those_of_nemo_rl(case: Mapping[str, Any]) -> None:
    loss, options, aggregation = ours(case["config"])
    policy = policy_of(case)
    inputs = inputs_of(case, policy, aggregation)
    total = losses.total(loss(inputs, **options)[0], inputs)
    (gradient,) = torch.autograd.grad(total, policy)
    assert total.item() == pytest.approx(case["loss"], abs=TOLERANCE)
    torch.testing.assert_close(gradient, tensor(case["grad"]), rtol=0, atol=TOLERANCE)


def test_all_cases_are_here() -> None:
    assert len(CASES) == 66
    assert len({case["name"].split("|")[0] for case in CASES}) == 33


@pytest.mark.parametrize("case", VECTORS["kl_cases"], ids=lambda case: case["kl_type"])
def test_estimates_of_the_divergence_are_those_of_nemo_rl(case: Mapping[str, Any]) -> None:
    kl = kl_estimate(
        tensor(case["logprobs"]),
        tensor(case["logprobs_reference"]),
        case["kl_type"],
        input_clamp=case["input_clamp"],
        output_clamp=case["output_clamp"],
    )
    torch.testing.assert_close(kl, tensor(case["kl"]), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("case", VECTORS["misc_cases"], ids=["kl", "corrected"])
def test_halves_of_an_update_add_up(case: Mapping[str, Any]) -> None:
    loss, options, aggregation = ours(case["config"])
    policy = policy_of(case)
    whole = inputs_of(case, policy, aggregation)
    per_token = loss(whole, **options)[0] * whole.weights
    halves = [per_token[whole.rows // 2 == half].sum().item() for half in (0, 1)]
    assert halves == pytest.approx(case["halves"], abs=TOLERANCE)
    assert sum(halves) == pytest.approx(case["full"], abs=TOLERANCE)
