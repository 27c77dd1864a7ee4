"""Totals over the rows of an optimizer update."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen
from torch import Tensor

from grpo_core.training.plan import Share


@frozen(kw_only=True, eq=False)
class Update:
    """One optimizer update of a step: its number, and totals over all of its rows."""

    share: Share
    number: int
    tokens: int
    """Sampled tokens."""
    rows: int
    sequences: int
    """Rollouts."""
    prompts: int
    """Groups."""
    correct_tokens: int
    """Sampled tokens of rollouts that are right."""
    entropies: Tensor | None = None
    """Entropies of all of its tokens; None unless the loss needs them."""
    entropy_coefficient: float = 0.0
    """Coefficient of an adaptive entropy bonus; 0 unless the loss needs it."""

    @classmethod
    def of(cls, share: Share, number: int, indices: Sequence[int]) -> Update:
        rows = [share.facts[index] for index in indices]
        return cls(
            share=share,
            number=number,
            tokens=sum(row.sampled for row in rows),
            rows=len(rows),
            sequences=len({row.rollout for row in rows}),
            prompts=len({row.group for row in rows}),
            correct_tokens=sum(row.sampled for row in rows if row.correct),
        )
