"""The ranks of a trainer: processes that compute one step together.

``Alone`` is a trainer of one process; a plugin's trainer may join several.  All ranks call the same methods
in the same order, with arguments for their part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

from torch import Tensor

from grpo_core.weights.publishing import OnePublisher, Publishers

T = TypeVar("T")


class Ranks(Publishers, Protocol):
    """One rank's view of all ranks."""

    def joined(self, values: Tensor) -> Tensor:
        """Concatenate the values [N] of all ranks; N may differ."""
        ...

    def in_turn(self, make: Callable[[], T]) -> T:
        """Call ``make`` in one rank after the other, so that they need its memory one at a time."""
        ...

    def dealt(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the whole tensors that this rank saves: each is saved by one rank."""
        ...

    def part(self, value: Tensor, like: Tensor) -> Tensor:
        """Return this rank's part of a whole tensor, divided as ``like`` is."""
        ...


class Alone(OnePublisher):
    """A trainer of one process."""

    def joined(self, values: Tensor) -> Tensor:
        return values

    def in_turn(self, make: Callable[[], T]) -> T:
        return make()

    def dealt(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(tensors)

    def part(self, value: Tensor, like: Tensor) -> Tensor:
        return value
