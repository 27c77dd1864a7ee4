"""Losses: from the logprobs of the sampled tokens to what the optimizer descends.

The default loss is a composition of small functions of plain tensors [N], which are here too: ratios, an
objective, importance weights, KL estimates and weights of an aggregation.  ``padded`` makes the inputs of a
loss from tensors [B, T]::

    inputs = padded(policy_logprobs=..., mask=..., advantages=..., aggregation="sequence")
    losses, metrics = grpo(inputs, clip_high=0.2)
    loss = total(losses, inputs)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from grpo_core._lazy import attach

if TYPE_CHECKING:
    from grpo_core.losses.aggregation import Aggregation as Aggregation
    from grpo_core.losses.aggregation import row_weights as row_weights
    from grpo_core.losses.aggregation import total as total
    from grpo_core.losses.corrections import importance_weights as importance_weights
    from grpo_core.losses.corrections import off_policy_kept as off_policy_kept
    from grpo_core.losses.entropy import EntropyControl as EntropyControl
    from grpo_core.losses.inputs import padded as padded
    from grpo_core.losses.kl import kl_estimate as kl_estimate
    from grpo_core.losses.kl import score_weights as score_weights
    from grpo_core.losses.named import clipped_loss as clipped_loss
    from grpo_core.losses.named import clipped_objective as clipped_objective
    from grpo_core.losses.named import grpo as grpo
    from grpo_core.losses.ranges import Range as Range
    from grpo_core.losses.ratios import policy_ratio as policy_ratio
    from grpo_core.losses.terms import Objective as Objective
    from grpo_core.losses.terms import Terms as Terms
    from grpo_core.losses.terms import composed as composed

__getattr__, __dir__, __all__ = attach(__name__)
