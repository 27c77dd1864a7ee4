"""The chance of one game.

TextArena's games draw from the global generators of ``random`` and numpy.  Many games are played in one
process, one move of each in turn: without a state of its own, what one game draws would depend on the others.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

from attrs import define

States = tuple[Any, Any]
"""The states of the generators of ``random`` and of numpy; None without numpy."""


@define(eq=False)
class Chance:
    """The random numbers of one game, which continue from turn to turn."""

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
    """Let the global generators draw from this chance, and give them back as they were."""
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
