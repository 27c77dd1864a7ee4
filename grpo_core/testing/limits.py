"""A time limit for what a contract waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def within(seconds: float, awaitable: Awaitable[T], what: str) -> T:
    """Return what an awaitable returns.  Raises AssertionError if it takes more than ``seconds``."""
    try:
        async with asyncio.timeout(seconds):
            return await awaitable
    except TimeoutError:
        raise AssertionError(f"{what} has not returned for {seconds:g} s") from None
