"""Calls are merged: few calls, results in order, everybody gets their own and nothing else.  Virtual time."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_core.config import EnvironmentConfig
from grpo_core.contracts.errors import GrpoError, PluginError
from grpo_core.contracts.records import Episode, Prompt
from grpo_core.environments.batcher import MicroBatcher
from grpo_core.environments.pool import EnvironmentPool
from grpo_core.testing import FakeEnvironment, clock


class Calls:
    """Squares numbers, takes a while, refuses negative ones, and remembers who came together."""

    def __init__(self, seconds=1.0):
        self.seconds = seconds
        self.batches = []
        self.times = []
        self.running = 0

    async def __call__(self, items):
        self.running += 1
        assert self.running == 1, "one call at a time"
        self.batches.append(list(items))
        self.times.append(asyncio.get_running_loop().time())
        try:
            await asyncio.sleep(self.seconds)
            if min(items) < 0:
                raise ValueError(f"negative: {min(items)}")
            return [item * item for item in items]
        finally:
            self.running -= 1


def tell(story, calls=None, **settings):
    """Run ``story(batcher, calls)`` on virtual time."""
    calls = calls or Calls()

    async def main():
        batcher = MicroBatcher(calls, **({"max_batch": 4, "max_wait": 0.5} | settings))
        try:
            return await story(batcher, calls)
        finally:
            await batcher.aclose()

    return clock.run(main())


async def after(seconds, awaitable):
    await asyncio.sleep(seconds)
    return await awaitable


def test_episodes_that_arrive_within_the_wait_share_a_call():
    async def story(batcher, calls):
        results = await asyncio.gather(batcher.submit([1, 2]), after(0.4, batcher.submit([3])))
        assert results == [[1, 4], [9]]
        assert calls.batches == [[1, 2, 3]]
        assert calls.times == [0.5], "the wait counts from the first arrival"

    tell(story)


def test_a_broken_contract_without_waiting_callers_is_raised_to_the_next_caller():
    """All who waited have passed their deadlines; yet no later call can be trusted."""

    class TooMany(Calls):
        async def __call__(self, items):
            return [*await super().__call__(items), 0]

    async def story(batcher, calls):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await batcher.submit([1])
        await asyncio.sleep(1.0)
        with pytest.raises(PluginError, match="a call with 1 items returned 2 results"):
            await batcher.submit([2])
        assert calls.batches == [[1]]

    tell(story, TooMany())


def test_a_full_batch_does_not_wait():
    async def story(batcher, calls):
        await asyncio.gather(*(batcher.submit([n]) for n in range(4)))
        assert calls.times == [0.0]

    tell(story)


def test_without_a_wait_those_of_the_same_moment_still_share_a_call():
    async def story(batcher, calls):
        await asyncio.gather(*(batcher.submit([n]) for n in range(3)))
        assert calls.batches == [[0, 1, 2]]

    tell(story, max_wait=0.0)


def test_the_next_batch_gathers_while_a_call_is_running():
    async def story(batcher, calls):
        await asyncio.gather(
            batcher.submit([0, 0, 0, 0]),
            after(0.1, batcher.submit([1])),
            after(0.6, batcher.submit([2])),
            after(0.9, batcher.submit([3])),
        )
        assert calls.batches == [[0, 0, 0, 0], [1, 2, 3]]
        assert calls.times == [0.0, 1.0], "it had waited long enough when the first call ended"

    tell(story)


def test_a_long_submission_is_split_and_its_results_are_joined():
    async def story(batcher, calls):
        results = await asyncio.gather(batcher.submit([1]), batcher.submit(list(range(9))))
        assert results == [[1], [n * n for n in range(9)]]
        assert calls.batches == [[1, 0, 1, 2], [3, 4, 5, 6], [7, 8]]

    tell(story)


def test_a_group_that_belongs_together_is_never_split():
    async def story(batcher, calls):
        await asyncio.gather(
            batcher.submit([1, 1, 1]), batcher.submit([2, 2, 2]), batcher.submit([3]), batcher.submit([4] * 6)
        )
        assert calls.batches == [[1, 1, 1], [2, 2, 2, 3], [4] * 6]

    tell(story, together=True)


def test_an_exception_reaches_only_the_callers_in_that_call():
    async def story(batcher, calls):
        results = await asyncio.gather(
            batcher.submit([1, -2]),
            batcher.submit([3]),
            batcher.submit([-4, 5]),
            batcher.submit([6]),
            return_exceptions=True,
        )
        first, second, third, fourth = results
        assert first is second is third
        assert str(first) == "negative: -4"
        assert fourth == [36]
        assert calls.batches == [[1, -2, 3, -4], [6]], "what is left of a failed submission is not called"

    tell(story)


def test_the_rest_of_a_failed_submission_is_never_sent():
    async def story(batcher, calls):
        await asyncio.gather(batcher.submit([-1] * 6), batcher.submit([7] * 4), return_exceptions=True)
        assert calls.batches == [[-1] * 4, [7] * 4]

    tell(story)


def test_a_wrong_number_of_results_is_an_error():
    async def one(items):
        return [1]

    async def story(batcher, calls):
        with pytest.raises(PluginError, match="a call with 2 items returned 1 results"):
            await batcher.submit([1, 2])

    tell(story, one)


def test_a_cancelled_caller_does_not_disturb_others():
    async def story(batcher, calls):
        running = asyncio.create_task(batcher.submit([1, 2, 3, 4]))
        await asyncio.sleep(0.1)
        waiting = asyncio.create_task(batcher.submit([5]))
        neighbour = asyncio.create_task(batcher.submit([6]))
        await asyncio.sleep(0.1)
        running.cancel()
        waiting.cancel()
        assert await neighbour == [36]
        assert calls.batches == [[1, 2, 3, 4], [6]]
        assert calls.times == [0.0, 1.0], "the call that was running was not disturbed"
        assert await batcher.submit([7]) == [49]

    tell(story)


def test_a_caller_cancelled_at_the_last_moment_is_not_in_the_call():
    async def story(batcher, calls):
        caller = asyncio.create_task(batcher.submit([1, 2, 3]))
        await asyncio.sleep(0.1)
        caller.cancel()
        await batcher.submit([4, 5, 6, 7])
        assert calls.batches == [[4, 5, 6, 7]]

    tell(story)


def test_cancelled_callers_do_not_fill_a_batch():
    async def story(batcher, calls):
        caller = asyncio.create_task(batcher.submit([1, 2, 3]))
        await asyncio.sleep(0.1)
        caller.cancel()
        await asyncio.sleep(0)
        await batcher.submit([4])
        assert calls.times == [0.5]

    tell(story)


def test_there_is_no_call_if_all_callers_are_cancelled():
    async def story(batcher, calls):
        caller = asyncio.create_task(batcher.submit([1]))
        await asyncio.sleep(0.1)
        caller.cancel()
        await asyncio.sleep(10)
        assert calls.batches == []

    tell(story)


def test_an_empty_submission_makes_no_call():
    async def story(batcher, calls):
        assert await batcher.submit([]) == []
        assert calls.batches == []

    tell(story)


def test_closing_fails_all_callers_and_leaves_no_task():
    async def story(batcher, calls):
        callers = [asyncio.create_task(batcher.submit([n] * 4)) for n in range(3)]
        await asyncio.sleep(0.1)
        await batcher.aclose()
        told = [str(error) for error in await asyncio.gather(*callers, return_exceptions=True)]
        assert told == [
            "the batcher was closed during its call",
            "the batcher was closed before its call began",
            "the batcher was closed before its call began",
        ]
        assert asyncio.all_tasks() == {asyncio.current_task()}
        with pytest.raises(GrpoError, match="the batcher is closed"):
            await batcher.submit([1])

    tell(story)


def test_closing_waits_until_the_running_call_has_cleaned_up():
    ended = []

    class Careful(Calls):
        async def __call__(self, items):
            try:
                return await super().__call__(items)
            finally:
                await asyncio.sleep(3.0)
                ended.append(asyncio.get_running_loop().time())

    async def story(batcher, calls):
        caller = asyncio.create_task(batcher.submit([1] * 4))
        await asyncio.sleep(0.5)
        await batcher.aclose()
        assert ended == [3.5]
        assert asyncio.all_tasks() <= {asyncio.current_task(), caller}
        await asyncio.gather(caller, return_exceptions=True)

    tell(story, Careful())


Arrival = st.tuples(
    st.floats(0, 3), st.lists(st.integers(-1, 9), min_size=1, max_size=9), st.none() | st.floats(0, 3)
)


@pytest.mark.long
@given(
    arrivals=st.lists(Arrival, max_size=12),
    max_batch=st.integers(1, 6),
    max_wait=st.sampled_from([0.0, 0.3]),
    together=st.booleans(),
    seed=st.integers(0, 99),
)
def test_whatever_happens_each_gets_the_own_results_or_an_own_error(
    arrivals, max_batch, max_wait, together, seed
):
    calls = Calls(seconds=0.4)

    async def caller(batcher, begin, items, patience):
        await asyncio.sleep(begin)
        try:
            async with asyncio.timeout(patience):
                results = await batcher.submit(items)
        except TimeoutError:
            return
        except ValueError:
            assert any(set(items) & set(batch) and min(batch) < 0 for batch in calls.batches)
            return
        assert results == [item * item for item in items]

    async def main():
        batcher = MicroBatcher(calls, max_batch=max_batch, max_wait=max_wait, together=together)
        async with asyncio.TaskGroup() as group:
            for arrival in arrivals:
                group.create_task(caller(batcher, *arrival))
        await batcher.aclose()
        assert batcher._waiting == 0
        assert not batcher._queue

    clock.run(main(), seed=seed)
    if not together:
        assert all(len(batch) <= max_batch for batch in calls.batches)


def test_a_judge_of_groups_sees_them_whole():
    async def story():
        environment = FakeEnvironment(max_turns=2, needs_group=True)
        batched = EnvironmentPool([environment], EnvironmentConfig(max_batch=3, max_wait=0.1))
        episodes = [Episode(prompt=Prompt(messages="?"), messages="!")] * 2
        await asyncio.gather(batched.evaluate(episodes), batched.evaluate(episodes))
        await batched.aclose()
        assert environment.calls == [2, 2]
        assert (batched.max_turns, batched.needs_group) == (2, True)

    clock.run(story())
