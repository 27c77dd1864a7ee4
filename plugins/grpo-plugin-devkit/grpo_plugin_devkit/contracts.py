"""The base class of contracts, which are sequences of clauses, and a time limit for awaited calls."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Self, TypeVar

T = TypeVar("T")


class Contract:
    """A sequence of clauses: the public methods of a subclass, in the order of their definition.

    A clause raises AssertionError if it is violated, and may return a text that is only noted.  A contract is
    a context manager that closes everything that its clauses started.
    """

    begun = True
    """Whether later clauses can run; False initially in a contract whose first clause starts the part."""

    def __iter__(self) -> Iterator[Callable[[], str | None]]:
        for name, clause in vars(type(self)).items():
            if inspect.isfunction(clause) and not name.startswith("_"):
                yield getattr(self, name)
                if not self.begun:
                    return

    def check(self) -> None:
        """Run all clauses.  Raises AssertionError."""
        with self:
            for clause in self:
                clause()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: Any) -> None:
        """Close nothing; subclasses override this."""


async def within(seconds: float, awaitable: Awaitable[T], what: str) -> T:
    """Return the result of an awaitable.  Raises AssertionError if it takes more than ``seconds``."""
    try:
        async with asyncio.timeout(seconds):
            return await awaitable
    except TimeoutError:
        raise AssertionError(f"{what} has not returned for {seconds:g} s") from None
