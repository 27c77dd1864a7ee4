"""Checks the result of a loss function."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from grpo_core.contracts.errors import PluginError

if TYPE_CHECKING:
    from grpo_core.contracts.loss import LossOutput


def checked(returned: Any, who: str, n: int) -> LossOutput:
    """Check a loss's result.  Raises PluginError unless each of n tokens has a loss and metrics."""
    if not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping)):
        raise PluginError(
            f"{who} returned {_kind(returned)}; expected (losses, metrics), a tensor and a dict"
        )
    per_token, metrics = returned
    for name, values in {"": per_token, **metrics}.items():
        if not isinstance(values, Tensor) or values.shape != (n,):
            what, part = (
                (f"{_kind(values)} as metric {name!r}", "number") if name else (_kind(values), "loss")
            )
            raise PluginError(
                f"{who} returned {what}; expected a tensor with one {part} for each of the {n} sampled tokens"
            )
    return per_token, dict(metrics)


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"shape {tuple(value.shape)}"
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return f"a value of type {type(value).__name__}"
