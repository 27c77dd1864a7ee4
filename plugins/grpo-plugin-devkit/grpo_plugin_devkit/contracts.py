"""The base of contracts: clauses that are tried in their order, and a time limit for what they wait for."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Self, TypeVar

T = TypeVar("T")


class Contract:
    """A contract iterates over its clauses, which are its public methods, in the order of their definition.

    A clause raises AssertionError if it is broken, and may return a text for what is only noted.  A contract
    is a context manager that ends what its clauses started.
    """

    begun = True
    """Whether further clauses have something to ask: a contract whose first clause starts it begins with
    False."""

    def __iter__(self) -> Iterator[Callable[[], str | None]]:
        for name, clause in vars(type(self)).items():
            if inspect.isfunction(clause) and not name.startswith("_"):
                yield getattr(self, name)
                if not self.begun:
                    return

    def check(self) -> None:
        """Try all clauses.  Raises AssertionError."""
        with self:
            for clause in self:
                clause()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: Any) -> None:
        """End nothing."""


async def within(seconds: float, awaitable: Awaitable[T], what: str) -> T:
    """Return what an awaitable returns.  Raises AssertionError if it takes more than ``seconds``."""
    try:
        async with asyncio.timeout(seconds):
            return await awaitable
    except TimeoutError:
        raise AssertionError(f"{what} has not returned for {seconds:g} s") from None
