"""Waiting for shared state or slots, and errors of tasks that run together."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_core.processes.aio import Changes, FairSemaphore, gather
from grpo_core.testing import clock, run


def test_an_answer_can_be_what_another_task_waits_for():
    changes, state = Changes(), set()

    def turn():
        if "go" not in state:
            return None
        state.add("turned")
        return "turned"

    async def story():
        waiting = [
            asyncio.create_task(changes.until(lambda: "turned" in state and "seen")),
            asyncio.create_task(changes.until(turn)),
        ]
        await asyncio.sleep(1)
        state.add("go")
        changes.notify()
        return await asyncio.gather(*waiting)

    assert run(story()) == ["seen", "turned"]


def test_an_error_in_a_question_reaches_the_task_that_asked_it():
    changes, state = Changes(), []

    async def story():
        waiting = asyncio.create_task(changes.until(lambda: state[0] / 0 if state else None))
        await asyncio.sleep(1)
        state.append(1)
        changes.notify()
        with pytest.raises(ZeroDivisionError):
            await waiting

    run(story())


def test_the_question_of_a_cancelled_task_is_not_asked_again():
    changes, asked = Changes(), []

    async def story():
        waiting = asyncio.create_task(changes.until(lambda: asked.append(1)))
        await asyncio.sleep(1)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        changes.notify()

    run(story())
    assert asked == [1]


def test_changes_that_happen_together_are_seen_together():
    changes, state, seen = Changes(), [], []

    async def story():
        waiting = asyncio.create_task(changes.until(lambda: tuple(state) or None))
        await asyncio.sleep(1)
        state.append("late")
        changes.notify()
        state.append("early")
        seen.append(await waiting)

    run(story())
    assert seen == [("late", "early")]


def test_the_first_error_of_tasks_that_run_together_is_raised_as_it_is():
    ended = []

    async def fail():
        await asyncio.sleep(1)
        raise ZeroDivisionError

    async def wait():
        try:
            await asyncio.sleep(100)
        finally:
            ended.append("cancelled")

    async def story():
        with pytest.raises(ZeroDivisionError):
            await gather([wait(), fail()])

    run(story())
    assert ended == ["cancelled"]


def test_a_deadline_around_a_gather_that_failed_before_is_a_timeout_and_no_cancellation():
    """asyncio.TaskGroup leaves its caller with a cancellation that is counted and never taken back."""

    async def fail():
        await asyncio.sleep(1)
        raise ZeroDivisionError

    async def late():
        async with asyncio.timeout(10):
            with contextlib.suppress(ZeroDivisionError):
                await gather([fail(), asyncio.sleep(2)])
            await asyncio.sleep(100)

    async def story():
        with pytest.raises(TimeoutError):
            await late()
        assert not asyncio.current_task().cancelling()

    run(story())


@pytest.mark.long
@given(
    number=st.integers(1, 5),
    calls=st.lists(st.tuples(st.integers(1, 5), st.floats(0, 3), st.none() | st.floats(0, 3)), max_size=12),
    seed=st.integers(0, 99),
)
def test_slots_are_never_taken_twice_and_all_are_free_in_the_end(number, calls, seed):
    taken = 0

    async def call(slots, size, seconds, patience):
        nonlocal taken
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience), slots.take(min(size, number)):
                taken += min(size, number)
                assert taken <= slots.used <= number, "a call that has its slots may not have begun"
                try:
                    await asyncio.sleep(seconds)
                finally:
                    taken -= min(size, number)

    async def main():
        slots = FairSemaphore(number)
        async with asyncio.TaskGroup() as group:
            for each in calls:
                group.create_task(call(slots, *each))
        assert slots.used == 0
        async with slots.take(number):
            assert slots.used == number

    clock.run(main(), seed=seed)


def test_a_call_that_takes_all_slots_is_not_passed_by():
    order = []

    async def call(slots, size, name):
        async with slots.take(size):
            order.append(name)
            await asyncio.sleep(1)

    async def main():
        slots = FairSemaphore(2)
        await asyncio.gather(
            *(call(slots, size, name) for name, size in zip("abcd", (1, 2, 1, 1), strict=True))
        )

    clock.run(main())
    assert order == ["a", "b", "c", "d"]
