"""A budget of failures in a row: exhausted after so many, whole again after a success."""

import asyncio

import pytest

from grpo_core.processes.aio import RestartBudget


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
    budget, call = RestartBudget(3), Flaky(2)
    assert asyncio.run(budget.run(call, on=ValueError)) == "result"
    assert (call.calls, budget.failures) == (3, 0)


def test_the_last_error_is_raised_when_the_budget_is_exhausted():
    budget, call = RestartBudget(3), Flaky(9)
    with pytest.raises(ValueError, match="failure 3"):
        asyncio.run(budget.run(call, on=ValueError))
    assert budget.exhausted


def test_another_error_is_raised_at_once():
    call = Flaky(9, KeyError)
    with pytest.raises(KeyError, match="failure 1"):
        asyncio.run(RestartBudget(3).run(call, on=ValueError))


def test_only_failures_in_a_row_exhaust_the_budget():
    budget = RestartBudget(2)
    for _ in range(5):
        budget.failed()
        assert not budget.exhausted
        budget.succeeded()
