"""Losses: functions of the sampled tokens' logprobs that the optimizer minimizes.

``padded`` makes the inputs of a loss from tensors [B, T]::

    inputs = padded(policy_logprobs=..., mask=..., advantages=..., aggregation="sequence")
    losses, metrics = grpo(inputs, clip_high=0.2)
    loss = total(losses, inputs)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from grpo_core.plugins.lazy import attach

if TYPE_CHECKING:
    from grpo_core.contracts.loss import LossSetting as LossSetting
    from grpo_core.contracts.loss import Remark as Remark
    from grpo_core.contracts.loss import hints_chosen_by as hints_chosen_by
    from grpo_core.contracts.loss import options_checked_by as options_checked_by
    from grpo_core.losses.aggregation import Aggregation as Aggregation
    from grpo_core.losses.aggregation import row_weights as row_weights
    from grpo_core.losses.aggregation import total as total
    from grpo_core.losses.clipped import IDLE_CLIP as IDLE_CLIP
    from grpo_core.losses.clipped import LARGEST_LOG_RATIO as LARGEST_LOG_RATIO
    from grpo_core.losses.clipped import Kl as Kl
    from grpo_core.losses.clipped import TokenTruncate as TokenTruncate
    from grpo_core.losses.clipped import bounded_exp as bounded_exp
    from grpo_core.losses.clipped import grpo as grpo
    from grpo_core.losses.entropy import EntropyControl as EntropyControl
    from grpo_core.losses.inputs import padded as padded

__getattr__, __dir__, __all__ = attach(__name__)
