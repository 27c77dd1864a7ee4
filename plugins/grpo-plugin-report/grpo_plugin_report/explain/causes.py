"""The decision list of ``grpo-core explain``: an ordered list of causes, each with its condition. Pure.

A cause is a function of the facts of a run that returns nothing, or a finding with three lines of evidence
and a fix.  The first causes of the list explain the later ones: a run whose rewards are all equal has also an
entropy that does not change.  So the place in the list is the rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from attrs import frozen

from grpo_plugin_report.explain.facts import Facts


@frozen(kw_only=True)
class Finding:
    """A cause that the facts of a run show."""

    cause: str
    """Name of the cause."""
    title: str
    """A sentence that says what is wrong."""
    evidence: tuple[str, str, str]
    """Three facts, with their values."""
    fix: str
    """A change of the configuration, or a command, that helps."""


@frozen
class Evidence:
    """The result of a condition that holds."""

    title: str
    lines: tuple[str, str, str]
    fix: str


Condition = Callable[[Facts], Evidence | None]
_C = TypeVar("_C", bound=Condition)


@frozen
class Cause:
    """A cause that the list knows."""

    name: str
    condition: Condition

    def found(self, facts: Facts) -> Finding | None:
        """Return the finding, if the facts of a run show this cause."""
        evidence = self.condition(facts)
        if evidence is None:
            return None
        return Finding(cause=self.name, title=evidence.title, evidence=evidence.lines, fix=evidence.fix)


def named(name: str) -> Callable[[_C], _C]:
    """Give the condition of a cause its name."""

    def give(condition: _C) -> _C:
        condition.cause = name  # type: ignore[attr-defined]
        return condition

    return give


def cause(condition: Condition) -> Cause:
    """Return the cause whose condition this is."""
    return Cause(condition.cause, condition)  # type: ignore[attr-defined]


def percent(share: float) -> str:
    """Return a share as text."""
    return f"{share:.0%}" if share >= 0.1 else f"{share:.1%}"


def moved(first: float, last: float) -> str:
    """Return how a number changed, as text."""
    return f"{first:.3g} at first, {last:.3g} at the end"
