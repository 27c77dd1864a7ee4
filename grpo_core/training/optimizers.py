"""The default optimizer, and the state that an optimizer keeps for a parameter.

Offers declare that state: the memory estimate adds it up, and a resumed trainer compares it with its
checkpoint.  torch is imported when an optimizer is made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING, Any

from grpo_core.contracts.protocols import ParameterGroup
from grpo_core.plugins.offers import Selected

if TYPE_CHECKING:
    from torch.optim import Optimizer

State = Mapping[str, tuple[tuple[int, ...], str]]
"""Shape and dtype of each slot of a parameter's state; the dtype "int" is a plain number."""


def state_of(selected: Selected, options: Mapping[str, Any], name: str, shape: Sequence[int]) -> State | None:
    """Return an optimizer's state for a parameter; None if its offer does not declare it."""
    if selected.offer.state is None:
        return None
    state: State = selected.loaded(selected.offer.state)(name, tuple(shape), **options)
    return state


def adamw_state(name: str, shape: tuple[int, ...], **options: Any) -> State:
    return {"step": ((), "float32"), "exp_avg": (shape, "float32"), "exp_avg_sq": (shape, "float32")}


def adamw(groups: Sequence[ParameterGroup], *, eps: float = 1e-8) -> list[Optimizer]:
    """AdamW with two moments for each parameter (arXiv 1711.05101), fused, by torch.

    Args:
        groups: parameters with their learning rates.
        eps: added to the root of the second moment.
    """
    import torch

    return [torch.optim.AdamW([group.for_torch() for group in groups], eps=eps, fused=True)]


def check_eps(*, eps: float = 1e-8, **options: Any) -> None:
    if not 0 <= eps < inf:
        raise ValueError(f"eps is {eps}; expected a finite number >= 0")
