"""The finding of a cause of ``grpo-core explain``, and words that causes share. Pure.

A cause is a function of the facts of a run that returns nothing, or a finding with three lines of evidence
and a fix.  The first causes of the list explain the later ones: a run whose rewards are all equal has also an
entropy that does not change.  So the place in the list is the rank.
"""

from __future__ import annotations

from attrs import frozen


@frozen
class Finding:
    """A cause that the facts of a run show."""

    title: str
    """A sentence that says what is wrong."""
    evidence: tuple[str, str, str]
    """Three facts, with their values."""
    fix: str
    """A change of the configuration, or a command, that helps."""
    cause: str = ""
    """Name of the cause."""


def percent(share: float) -> str:
    """Return a share as text."""
    return f"{share:.0%}" if share >= 0.1 else f"{share:.1%}"


def moved(first: float, last: float) -> str:
    """Return how a number changed, as text."""
    return f"{first:.3g} at first, {last:.3g} at the end"
