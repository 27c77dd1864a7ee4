"""Writes trl.json.gz: losses and gradients of TRL's own ``GRPOTrainer._compute_loss``, in float64.

python -m venv trl && trl/bin/pip install trl==1.16.0 torch==2.13.0
    trl/bin/python tests/vectors/make_trl.py
"""

import gzip
import itertools
import json
import math
from pathlib import Path
from types import SimpleNamespace

import torch
from trl import GRPOTrainer

B, T, MAX_LENGTH = 6, 5, 8
LENGTHS = (5, 3, 4, 1, 5, 2)
TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def rounded(tensor):
    return tensor.float().double()


def inputs():
    chance = torch.Generator().manual_seed(16)

    def noise(scale):
        return scale * (torch.rand(B, T, generator=chance, dtype=torch.float64) - 0.5)

    policy = rounded(-2 * torch.rand(B, T, generator=chance, dtype=torch.float64) - 0.05)
    old = rounded(policy + noise(1.2))
    return {
        "policy": policy,
        "old": old,
        "sampling": rounded(old + noise(0.9)),
        "reference": rounded(policy + noise(1.0)),
        "entropy": rounded(torch.rand(B, T, generator=chance, dtype=torch.float64) * 2),
        "advantages": rounded(torch.tensor([1.2, -0.7, 0.0, -1.4, 0.5, 0.9], dtype=torch.float64)),
        "mask": torch.tensor([[t < n for t in range(T)] for n in LENGTHS]).long(),
    }


def importance_ratio(given, mask, mode, low, high):
    """Compute the weights as ``_generate_and_score_completions`` does inline."""
    difference = (given["old"] - given["sampling"]) * mask
    if mode.startswith("sequence"):
        difference = difference.sum(-1, keepdim=True)
    ratio = difference.exp()
    if mode.endswith("truncate"):
        return ratio.clamp(min=low, max=high)
    return ratio.masked_fill((ratio < (low or -math.inf)) | (ratio > (high or math.inf)), 0.0)


def stub(config):
    options = {
        "delta": None, "use_bias_correction_kl": True,
        "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05,
        "vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0,
        "steps_per_generation": 1,
    }  # fmt: skip
    self = SimpleNamespace(
        args=SimpleNamespace(**options | {k: v for k, v in config.items() if k in options}),
        accelerator=SimpleNamespace(
            num_processes=1, sync_gradients=True, gather=lambda t: t, reduce=lambda t, reduction: t,
            pad_across_processes=lambda t, dim, pad_index: t, gather_for_metrics=lambda t: t,
        ),
        model=SimpleNamespace(training=True),
        aux_loss_enabled=False,
        current_gradient_accumulation_steps=1,
        max_completion_length=MAX_LENGTH,
        loss_type=config["loss_type"],
        importance_sampling_level=config.get("importance_sampling_level", "token"),
        epsilon_low=config.get("epsilon", 0.2),
        epsilon_high=config.get("epsilon_high", config.get("epsilon", 0.2)),
        beta=config.get("beta", 0.0),
        top_entropy_quantile=config.get("top_entropy_quantile", 1.0),
        off_policy_mask_threshold=config.get("off_policy_mask_threshold"),
        use_vllm="vllm_importance_sampling_mode" in config,
        vllm_importance_sampling_correction="vllm_importance_sampling_mode" in config,
        _entropy_bonus_enabled="entropy_coef" in config,
        use_adaptive_entropy=False,
        entropy_coef=config.get("entropy_coef", 0.0),
        _metrics={"train": __import__("collections").defaultdict(list)},
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
    )  # fmt: skip
    self.get_high_entropy_mask = lambda *given: GRPOTrainer.get_high_entropy_mask(self, *given)
    return self


def computed(given, config):
    policy, entropy = (given[name].clone().requires_grad_() for name in ("policy", "entropy"))
    mask = given["mask"].clone()
    for row in config.get("masked_rows", []):
        mask[row] = 0
    batch = {
        "prompt_ids": torch.zeros(B, 1).long(), "prompt_mask": torch.ones(B, 1).long(),
        "completion_ids": torch.zeros(B, T).long(), "completion_mask": mask,
        "advantages": given["advantages"], "num_items_in_batch": mask.sum(),
        "ref_per_token_logps": given["reference"],
    }  # fmt: skip
    if not config.get("on_policy"):
        batch["old_per_token_logps"] = given["old"]
    if mode := config.get("vllm_importance_sampling_mode"):
        low, high = (
            config.get("vllm_importance_sampling_clip_min"),
            config["vllm_importance_sampling_clip_max"],
        )
        batch["sampling_per_token_logps"] = given["sampling"]
        batch["importance_sampling_ratio"] = importance_ratio(given, mask, mode, low, high)
    self = stub(config)
    self._get_per_token_logps_and_entropies = lambda *_, **__: (policy, entropy, None)
    loss = GRPOTrainer._compute_loss(self, None, batch)
    gradients = torch.autograd.grad(loss, [policy, entropy], materialize_grads=True)
    return loss.item(), *(gradient.tolist() for gradient in gradients)


def configurations():
    for kind in TYPES:
        base = {"loss_type": kind} | ({"epsilon_high": 1.3} if kind == "cispo" else {})
        yield base
        yield base | {"on_policy": True}
        yield base | {"beta": 0.1}
        yield base | {"beta": 0.1, "use_bias_correction_kl": False}
        yield base | {"masked_rows": [1]}
        yield base | {"top_entropy_quantile": 0.4}
        yield base | {"entropy_coef": 0.05}
        yield base | {"off_policy_mask_threshold": 0.1}
        if kind != "vespo":
            yield base | {"importance_sampling_level": "sequence"}
            yield base | {"importance_sampling_level": "sequence", "beta": 0.1}
        for mode in MODES if kind != "vespo" else MODES[:2]:
            bounds = {"vllm_importance_sampling_clip_min": 0.8, "vllm_importance_sampling_clip_max": 1.15}
            yield base | {"vllm_importance_sampling_mode": mode} | bounds
    yield {
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        "epsilon": 3e-4,
        "epsilon_high": 4e-4,
    }
    yield {"loss_type": "dapo", "epsilon_high": 0.28, "delta": 1.4}
    yield {"loss_type": "dapo", "epsilon_high": 0.28, "delta": 1.1}
    yield {"loss_type": "dapo", "top_entropy_quantile": 0.3, "entropy_coef": 0.02, "beta": 0.04}
    yield {"loss_type": "sapo", "sapo_temperature_pos": 2.0, "sapo_temperature_neg": 0.5}
    yield {"loss_type": "vespo", "vespo_k_pos": 1.0, "vespo_lambda_neg": 1.0}


def short(values):
    return [short(v) for v in values] if isinstance(values, list) else float(f"{values:.10g}")


if __name__ == "__main__":
    given = inputs()
    cases = []
    for config in configurations():
        loss, gradient, of_entropy = computed(given, config)
        case = {"config": config, "loss": short(loss), "grad": short(gradient)}
        if any(itertools.chain(*of_entropy)):
            case["entropy_grad"] = short(of_entropy)
        cases.append(case)
    kept = {name: short(t.tolist()) for name, t in given.items()} | {"max_length": MAX_LENGTH}
    text = json.dumps({"inputs": kept, "cases": cases}, separators=(",", ":"))
    path = Path(__file__).parent / "trl.json.gz"
    path.write_bytes(gzip.compress(text.encode(), mtime=0))
    print(len(cases), "cases,", path.stat().st_size, "bytes")
