"""Losses: from the logprobs of the sampled tokens to what the optimizer descends.

The losses of the core are compositions of small functions of plain tensors [N], which are here too: ratios,
objectives, importance weights, KL estimates and weights of an aggregation.  ``padded`` makes the inputs of a
loss from tensors [B, T]::

    inputs = padded(policy_logprobs=..., mask=..., advantages=..., aggregation="sequence")
    losses, metrics = grpo(inputs, clip_high=0.2)
    loss = total(losses, inputs)
"""

from __future__ import annotations

from grpo_core.losses.aggregation import Aggregation, row_weights, total
from grpo_core.losses.corrections import importance_weights, off_policy_kept, sequence_errors
from grpo_core.losses.inputs import padded
from grpo_core.losses.kl import kl_estimate, reference_kl, score_weights
from grpo_core.losses.named import cispo, dppo, grpo, gspo, reinforce, sapo, vespo
from grpo_core.losses.objectives import (
    cispo_loss,
    clipped_loss,
    dppo_kept,
    reinforce_loss,
    sapo_loss,
    vespo_loss,
    vespo_weights,
)
from grpo_core.losses.ratios import policy_ratio
from grpo_core.losses.terms import Objective, Terms, composed

__all__ = [
    "Aggregation",
    "Objective",
    "Terms",
    "cispo",
    "cispo_loss",
    "clipped_loss",
    "composed",
    "dppo",
    "dppo_kept",
    "grpo",
    "gspo",
    "importance_weights",
    "kl_estimate",
    "off_policy_kept",
    "padded",
    "policy_ratio",
    "reference_kl",
    "reinforce",
    "reinforce_loss",
    "row_weights",
    "sapo",
    "sapo_loss",
    "score_weights",
    "sequence_errors",
    "total",
    "vespo",
    "vespo_loss",
    "vespo_weights",
]
