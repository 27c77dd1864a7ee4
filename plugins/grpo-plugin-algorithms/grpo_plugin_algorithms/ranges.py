"""Ranges of the options of losses."""

from __future__ import annotations

import math

from attrs import frozen


@frozen(kw_only=True)
class Range:
    """The valid numbers of an option: finite, and between bounds."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    infinite: bool = False
    """Whether infinity is valid, for an upper bound that is off."""
    why: str = ""
    """Reason for the bounds, as the end of a sentence."""

    def problem(self, name: str, value: float) -> str | None:
        """Return the error in an option's value, or None."""
        if math.isnan(value) or not (self.infinite or math.isfinite(value)):
            return f"{name} = {value}: expected a finite number"
        if (
            (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
        ):
            return None
        return f"{name} = {value}: expected {self}" + (f", {self.why}" if self.why else "")

    def __str__(self) -> str:
        if self.at_least is not None and self.at_most is not None:
            return f"{self.at_least:g} to {self.at_most:g}"
        bounds = [
            f"{words} {bound:g}"
            for words, bound in (
                ("at least", self.at_least),
                ("above", self.above),
                ("at most", self.at_most),
            )
            if bound is not None
        ]
        return " and ".join(bounds) or "a finite number"


FINITE = Range()
SHARE = Range(at_least=0, at_most=1)
POSITIVE = Range(above=0)
NOT_NEGATIVE = Range(at_least=0)
