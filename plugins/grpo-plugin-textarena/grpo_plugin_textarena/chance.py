"""The random state of one game.

TextArena's games draw from the global generators of ``random`` and numpy.  Many games run interleaved in one
process, so each needs a separate state to be independent of the others.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

from attrs import define

States = tuple[Any, Any]
"""States of the generators of ``random`` and numpy; None without numpy."""


@define(eq=False)
class Chance:
    """The random state of one game, which continues from turn to turn."""

    states: States

    @classmethod
    def of(cls, seed: int) -> Chance:
        with _restored():
            random.seed(seed)
            if numpy := sys.modules.get("numpy"):
                numpy.random.seed(seed % 2**32)
            return cls(_states())


@contextlib.contextmanager
def drawing_from(chance: Chance) -> Iterator[None]:
    """Swap this state into the global generators during the block."""
    with _restored():
        _set(chance.states)
        try:
            yield
        finally:
            chance.states = _states()


@contextlib.contextmanager
def _restored() -> Iterator[None]:
    before = _states()
    try:
        yield
    finally:
        _set(before)


def _states() -> States:
    numpy = sys.modules.get("numpy")
    return random.getstate(), numpy.random.get_state() if numpy else None


def _set(states: States) -> None:
    ours, of_numpy = states
    random.setstate(ours)
    if of_numpy is not None:
        sys.modules["numpy"].random.set_state(of_numpy)
