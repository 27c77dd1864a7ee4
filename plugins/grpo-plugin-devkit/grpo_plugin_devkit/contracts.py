"""The base class of contracts, which are sequences of clauses, and their findings."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import traceback
from collections.abc import Awaitable, Callable, Collection, Iterator
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from attrs import frozen

from grpo_core import GrpoError, errors

T = TypeVar("T")
E = TypeVar("E", bound=Exception)
Clause = Callable[[], str | None]
"""Raises AssertionError if it is violated; may return what it found as a text."""


class Noted(Exception):  # noqa: N818 - not an error
    """Raised by a clause that does not apply, or that finds something allowed but notable."""


@frozen
class Finding:
    """The result of a clause."""

    check: str
    outcome: Literal["passed", "failed", "noted"]
    result: str
    """The result as a sentence, with advice if the check failed."""


def finding_of(check: str, clause: Clause) -> Finding:
    """Run a clause."""
    try:
        return Finding(check, "passed", clause() or "")
    except Noted as noted:
        return Finding(check, "noted", str(noted))
    except Exception as error:  # the contract or the checked code may raise any error
        return Finding(check, "failed", message_of(error))


def message_of(error: Exception) -> str:
    """Return the message of an error, with the line if the checked code raised it."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    if isinstance(error, AssertionError | GrpoError):
        return str(error) or f"this does not hold: {where.line}"
    return f"{errors.describe(error)} ({Path(where.filename).name}, line {where.lineno}: {where.line})"


class Contract:
    """A sequence of clauses: the public methods of a subclass, in the order of their definition.

    A contract is a context manager that closes everything that its clauses started.
    """

    essential: Collection[str] = ()
    """Clauses whose failure ends the series."""

    def _clauses(self) -> Iterator[tuple[str, Clause]]:
        """Yield the clauses with their names."""
        for name, clause in vars(type(self)).items():
            if inspect.isfunction(clause) and not name.startswith("_"):
                yield name.replace("_", " "), getattr(self, name)

    def findings(
        self, around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    ) -> Iterator[Finding]:
        """Run the clauses, each in a context of its own, and yield what they find."""
        for name, clause in self._clauses():
            with around():
                finding = finding_of(name, clause)
            yield finding
            if finding.outcome == "failed" and name in self.essential:
                return

    def check(self) -> None:
        """Run all clauses.  Raises AssertionError."""
        with self:
            for _, clause in self._clauses():
                with contextlib.suppress(Noted):
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


async def error_of(call: Awaitable[object], kind: type[E]) -> E | None:
    """Return the error of this kind that a call raises, or None if it succeeds."""
    try:
        await call
    except kind as error:
        return error
    return None
