"""Ranges of the numbers among a loss's options."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

import attrs
from attrs import frozen


@frozen
class Range:
    """The valid numbers of an option, as a validator of attrs; None is always valid."""

    fits: Callable[[float], bool]
    """Whether a number is valid; NaN compares false."""
    expected: str

    def problem(self, name: str, value: float | None) -> str:
        """Return the error in an option's value, or an empty string."""
        return "" if value is None or self.fits(value) else f"{name} = {value}: expected {self.expected}"

    def __call__(self, instance: object, attribute: attrs.Attribute[Any], value: float | None) -> None:
        if problem := self.problem(attribute.name, value):
            raise ValueError(problem)


FINITE = Range(lambda x: -inf < x < inf, "a finite number")
SHARE = Range(lambda x: 0 <= x <= 1, "0 to 1")
POSITIVE = Range(lambda x: 0 < x < inf, "a finite number above 0")
FACTOR = Range(lambda x: 0 <= x < inf, "a finite number of at least 0")
CLIP = Range(lambda x: x >= 0, "at least 0")
CAP = Range(lambda x: x > 0, "above 0")
RATIO_CAP = Range(lambda x: 1 < x < inf, "above 1, or it would remove the gradient at ratio 1")


def check_idle(value: Any, *names: str, without: str) -> None:
    """Raise ValueError for a field of an attrs value that is set, and has no effect ``without`` another."""
    for name in names:
        if (
            not getattr(value, without)
            and getattr(value, name) != getattr(attrs.fields(type(value)), name).default
        ):
            raise ValueError(f"{name} does nothing without {without}")
