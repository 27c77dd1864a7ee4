"""A call that is repeated after an error."""

import asyncio

import pytest

from grpo_core.processes.aio import repeated


class Flaky:
    """Fails a given number of times, then succeeds."""

    def __init__(self, failures, error=ValueError):
        self.failures, self.error, self.calls = failures, error, 0

    async def __call__(self):
        self.calls += 1
        if self.calls <= self.failures:
            raise self.error(f"failure {self.calls}")
        return "result"


def test_a_call_is_repeated_until_it_succeeds():
    call = Flaky(2)
    assert asyncio.run(repeated(call, 3, ValueError)) == "result"
    assert call.calls == 3


def test_the_last_error_is_raised():
    with pytest.raises(ValueError, match="failure 3"):
        asyncio.run(repeated(Flaky(9), 3, ValueError))


def test_another_error_is_raised_at_once():
    call = Flaky(9, KeyError)
    with pytest.raises(KeyError, match="failure 1"):
        asyncio.run(repeated(call, 3, ValueError))
