"""The finding of a cause of ``grpo-core explain``, and shared formatting.  Pure.

A cause is a function of the facts of a run that returns None, or a finding with three lines of evidence and a
fix.  Causes are ranked by their position in the list, because earlier ones explain later ones: a run whose
rewards are all equal also has a constant entropy.
"""

from __future__ import annotations

from attrs import frozen


@frozen
class Finding:
    """A cause that was found in a run."""

    title: str
    """The problem as a sentence."""
    evidence: tuple[str, str, str]
    """Three facts with their values."""
    fix: str
    """A change of the configuration, or a command, to fix it."""
    cause: str = ""
    """Name of the cause."""

    @classmethod
    def of(cls, title: str, one: str, two: str, three: str, fix: str) -> Finding:
        """Return a finding with its three facts."""
        return cls(title, (one, two, three), fix)


def percent(share: float) -> str:
    """Format a share."""
    return f"{share:.0%}" if share >= 0.1 else f"{share:.1%}"
