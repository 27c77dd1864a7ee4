"""Values of a run's files, which may be anything.  Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

LARGEST = 1e300
"""Largest number; larger and non-finite ones are none."""


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


def plain(value: Any) -> float:
    """Return a value as a number; 0 for anything else."""
    return float(value) if is_number(value) else 0.0


def table(value: Any) -> Mapping[str, Any]:
    """Return a value as a table; an empty one for anything else."""
    return value if isinstance(value, Mapping) else {}


def tables(value: Any) -> list[Mapping[str, Any]]:
    """Return the tables of a list; none for anything else."""
    return [each for each in value if isinstance(each, Mapping)] if isinstance(value, list) else []
