"""Deaths: how soon they are seen, and one count of failures in a row for children, engines and calls."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from attrs import define, field

T = TypeVar("T")

DEATH_IS_SEEN = 2.0
"""Seconds within which whoever watches a process knows that it has ended."""


@define
class RestartBudget:
    """Counts failures in a row; ``limit`` of them exhaust it, and a success makes it whole again."""

    limit: int
    failures: int = field(default=0, init=False)

    @property
    def exhausted(self) -> bool:
        """Whether to stop trying again."""
        return self.failures >= self.limit

    def failed(self) -> None:
        self.failures += 1

    def succeeded(self) -> None:
        self.failures = 0

    async def run(
        self, call: Callable[[], Awaitable[T]], *, on: type[Exception] | tuple[type[Exception], ...]
    ) -> T:
        """Await ``call()``, again after each failure, until it succeeds or the budget is exhausted.

        Raises the last of the errors ``on``, and any other error at once.
        """
        while True:
            try:
                result = await call()
            except on:
                self.failed()
                if self.exhausted:
                    raise
            else:
                self.succeeded()
                return result
