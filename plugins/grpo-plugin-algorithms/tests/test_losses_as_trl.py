"""The losses compute what TRL 1.16 computes: its numbers, and ours for each of its configurations."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_core import losses
from grpo_core.config import parse_settings
from grpo_core.kit import PluginHost
from grpo_plugin_algorithms import losses as further
from grpo_plugin_algorithms.losses import grpo

VECTORS = json.loads(
    gzip.decompress((Path(__file__).parents[3] / "tests" / "vectors" / "trl.json.gz").read_bytes())
)
CASES = VECTORS["cases"]
TOLERANCE = 1e-6

HOST = PluginHost.discover(["algorithms"])
LOSSES: dict[str, tuple[Callable[..., Any], str]] = {
    "grpo": (grpo, "sequence"),
    "bnpo": (grpo, "token"),
    "dapo": (grpo, "token"),
    "dr_grpo": (grpo, "constant"),
    "luspo": (grpo, "constant"),
    "cispo": (further.cispo, "token"),
    "sapo": (further.sapo, "sequence"),
    "vespo": (further.vespo, "token"),
}
RENAMED = {
    "sapo_temperature_pos": "temperature_positive",
    "sapo_temperature_neg": "temperature_negative",
    "vespo_k_pos": "k_positive",
    "vespo_lambda_neg": "lambda_negative",
    "delta": "ratio_cap",
    "importance_sampling_level": "ratio",
    "top_entropy_quantile": "mask.top_entropy",
    "entropy_coef": "entropy.coefficient",
    "off_policy_mask_threshold": "mask.off_policy_limit",
    "vllm_importance_sampling_mode": "correction.name",
    "vllm_importance_sampling_clip_min": "correction.floor",
    "vllm_importance_sampling_clip_max": "correction.cap",
}


def ours(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The options that express a configuration of TRL."""
    options: dict[str, Any] = {"correction.name": "off"}
    options |= {RENAMED[name]: value for name, value in config.items() if name in RENAMED}
    if config.get("beta"):
        biased = config.get("use_bias_correction_kl", True)
        options |= {"kl.coefficient": config["beta"], "kl.weight": "ratio" if biased else "none"}
    low = config.get("epsilon", 0.2)
    if config["loss_type"] == "cispo":
        options["clip_high"] = config["epsilon_high"] - 1  # TRL's is the cap itself
    elif config["loss_type"] not in ("sapo", "vespo"):
        options |= {"clip_low": low, "clip_high": config.get("epsilon_high", low)}
    given = parse_settings(f"{key}={value}" for key, value in options.items())
    return HOST.function("loss", LOSSES[config["loss_type"]][0].__name__, **given).options


def tensors() -> dict[str, Tensor]:
    return {
        name: torch.tensor(values, dtype=torch.float64)
        for name, values in VECTORS["inputs"].items()
        if isinstance(values, list)
    }


def named(case: Mapping[str, Any]) -> str:
    return ",".join(f"{name}={value}" for name, value in case["config"].items()).removeprefix("loss_type=")


@pytest.mark.parametrize("case", CASES, ids=map(named, CASES))
def test_a_loss_and_its_gradient_are_those_of_trl(case: Mapping[str, Any]) -> None:
    config, given = case["config"], tensors()
    loss, aggregation = LOSSES[config["loss_type"]]
    policy, entropy = given["policy"].requires_grad_(), given["entropy"].requires_grad_()
    mask = given["mask"]
    mask[config.get("masked_rows", [])] = 0
    inputs = losses.padded(
        policy_logprobs=policy,
        mask=mask,
        advantages=given["advantages"],
        proximal_logprobs=None if config.get("on_policy") else given["old"],
        generation_logprobs=given["sampling"] if "vllm_importance_sampling_mode" in config else None,
        scores={"reference": given["reference"]},
        entropy=entropy,
        aggregation=aggregation,
        constant=VECTORS["inputs"]["max_length"] if config["loss_type"] == "dr_grpo" else 1,
        empty_rows=True,
    )
    total = losses.total(loss(inputs, **ours(config))[0], inputs)
    gradients = torch.autograd.grad(total, [policy, entropy], materialize_grads=True)
    wanted = torch.tensor(case["grad"], dtype=torch.float64)
    of_entropy = torch.tensor(case.get("entropy_grad", [[0.0] * 5] * 6), dtype=torch.float64)
    assert total.item() == pytest.approx(case["loss"], abs=TOLERANCE)
    torch.testing.assert_close(gradients[0], wanted, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(gradients[1], of_entropy, rtol=0, atol=TOLERANCE)


def test_a_token_without_a_logprob_of_the_engine_has_weight_1() -> None:
    given = tensors()
    known, missing = given["sampling"].clone(), given["sampling"].clone()
    known[0, 1], missing[0, 1] = given["old"][0, 1], float("nan")
    weights = [
        further.reinforce(
            losses.padded(
                policy_logprobs=given["policy"],
                mask=given["mask"],
                advantages=given["advantages"],
                proximal_logprobs=given["old"],
                generation_logprobs=sampled,
            )
        )[1]["importance_weight_mean"]
        for sampled in (known, missing)
    ]
    assert weights[1][1] == 1
    torch.testing.assert_close(*weights)


def test_each_type_of_loss_is_here() -> None:
    assert {case["config"]["loss_type"] for case in CASES} == set(LOSSES)
    assert len(CASES) == 114
