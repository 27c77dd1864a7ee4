"""A loss in a file: GSPO's sequence-level ratio with an entropy bonus.

grpo-core train --env math:sort --set loss.name=./examples/custom_loss.py:gspo --set loss.options.bonus=0.001
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpo_core as grpo

if TYPE_CHECKING:
    from torch import Tensor


@grpo.needs("entropy", "all_rows", when="bonus")
def gspo(
    inputs: grpo.LossInputs, *, clip_low: float = 3e-4, clip_high: float = 4e-4, bonus: float = 0.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clips whole rows by the geometric mean of their tokens' ratios (arXiv 2507.18071).

    Args:
        inputs: the sampled tokens of one micro-batch; a row is never split.
        clip_low: how far below 1 a row's ratio may move.
        clip_high: how far above 1 a row's ratio may move.
        bonus: weight of the entropy; above 0 the loss needs it, and rows with advantage 0 as well.
    """
    rows, advantages = inputs.rows, inputs.advantages
    log_ratio = inputs.policy_logprobs - inputs.proximal_logprobs
    sums = log_ratio.new_zeros(int(rows.max()) + 1).index_add(0, rows, log_ratio)
    lengths = rows.bincount()
    ratio = (sums / lengths)[rows].clamp(-20, 20).exp()  # of its row, for each token
    losses = -(ratio * advantages).minimum(ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    losses = losses * inputs.update_tokens / (inputs.update_rows * lengths[rows])  # the mean over rows
    if inputs.entropy is not None:
        losses = losses - bonus * inputs.entropy
    return losses, {"sequence_ratio_max": ratio}


@grpo.hookimpl
def grpo_losses() -> dict[str, object]:
    return {"gspo": gspo}
