"""Cases that an asynchronous GRPO trainer has got wrong somewhere before, as they have to come out here.

The ids are those of a list of cases for this kind of program.  What is not here:

| id | holds elsewhere, or does not apply |
|---|---|
| A4, A5, A7, A9, A10 | worker threads: groups are tasks of one event loop here, and end with it |
| A13, A14 | no pause flag is polled: ``test_pipeline`` has the weight sync under the virtual clock |
| B1, B6, B7, B10, B13, B14, B15 | watermarks, eviction and capacity of a replay buffer: nothing is replayed |
| C2, C3, C5, C7, C9, C11, C13 | freshest first, eviction, promotion: finished work is never dropped |
| C10 | the buffer has no capacity of its own: it is a function of the staleness |
| G8-G12 | ``test_dynamic_sampling`` |
| H1, H4 | ``test_loaders``, and the contract in ``test_samplers`` |
| H7 | ``test_checkpoint``: tasks that come and go; a changed source is an error, ``test_loaders`` |
| H9 | ``test_plugins`` |

| id | test |
|---|---|
| A1, A2, A3 | test_the_steps_that_may_train_follow_from_the_version_and_the_staleness |
| A6 | test_no_prompt_is_drawn_without_a_free_slot |
| A8 | test_a_failure_is_counted_by_prompt_and_success_ends_its_account |
| A11, A12 | test_a_target_that_was_delayed_or_failed_is_generated_before_the_next |
| B2, B3 | test_half_a_step_is_not_taken_and_stays |
| B4, C1, C4 | test_the_oldest_deadline_is_trained_first_and_nothing_is_evicted |
| B5 | test_the_groups_that_are_missing_of_a_step_are_reserved_and_no_more |
| B8, B9, B11, B12, B16, C12 | test_a_restored_step_is_completed_with_new_prompts |
| C6 | test_in_order_a_group_waits_for_its_step |
| C8 | test_admission_continues_with_the_version_and_not_before |
| H2 | test_chosen_tasks_fill_each_draw |
| H3 | test_a_sampler_that_returns_too_few_gets_an_error_with_both_numbers |
| H5 | test_the_sampler_is_asked_once_a_reservation_with_all_three_versions |
| H6 | test_dynamic_sampling, test_pipeline: cut anywhere and resumed |
| H8 | test_an_empty_task_is_an_error_and_no_endless_loop |
"""

from __future__ import annotations

import pytest
from test_buffer import fill

from grpo_core.contracts.errors import PluginError
from grpo_core.contracts.records import SampleRequest
from grpo_core.data.loaders import IndexedLoader
from grpo_core.data.samplers import RoundRobin, checked_sample
from grpo_core.loop.buffer import Buffer
from grpo_core.testing import MemoryLoader, prompts
from grpo_plugin_curriculum.curriculum import TaskOrder


def a_buffer(**changes):
    return Buffer(
        **{"prompts_per_step": 1, "max_staleness": 1, "num_steps": 100, "policy": "in_order", **changes}
    )


def at(version, **changes):
    """A buffer whose engine holds that version, with nothing in it."""
    buffer = a_buffer(**changes)
    state = {**buffer.state_dict(), "step": version}
    buffer.load_state_dict(state)
    return buffer


def targets(slots):
    return [slot.target_version for slot in slots]


# ---------------------------------------------------------------------------------- A: targets


@pytest.mark.parametrize(
    ("version", "staleness", "expected"),
    [(0, 4, [0, 1, 2, 3, 4]), (10, 4, [10, 11, 12, 13, 14]), (20, 2, [20, 21, 22]), (0, 1, [0, 1])],
)
def test_the_steps_that_may_train_follow_from_the_version_and_the_staleness(version, staleness, expected):
    buffer = at(version, max_staleness=staleness)
    slots = fill(buffer)
    assert targets(slots) == expected
    buffer.complete(slots[0], "group")
    buffer.take()
    buffer.advance()
    assert targets(fill(buffer)) == [expected[-1] + 1]


def test_no_prompt_is_drawn_without_a_free_slot():
    buffer = a_buffer(prompts_per_step=2, policy="deadline")
    slots = fill(buffer)
    buffer.complete(slots[0], "group")
    assert buffer.reserve() is None, "the second prompt of the batch is not drawn for nothing"
    buffer.complete(slots[1], "group")
    buffer.take()
    buffer.advance()
    assert [slot.id for slot in buffer.reserve()] == [4, 5]


def test_a_failure_is_counted_by_prompt_and_success_ends_its_account():
    buffer = a_buffer(max_staleness=0, max_retries=2)
    (slot,) = fill(buffer)
    assert buffer.fail(slot)
    (slot,) = fill(buffer)
    buffer.complete(slot, "group")
    buffer.take()
    buffer.advance()
    outcomes = []
    for _ in range(3):
        (slot,) = fill(buffer)
        outcomes.append(buffer.fail(slot))
    assert outcomes == [True, True, False]


def test_a_target_that_was_delayed_or_failed_is_generated_before_the_next():
    buffer = a_buffer(max_staleness=3, prompts_per_step=1)
    first, second, *_ = fill(buffer)
    buffer.complete(first, "group")
    buffer.take()
    buffer.advance()
    buffer.fail(second)
    (again, *fresh) = fill(buffer)
    assert (again.target_version, again.generation_version, targets(fresh)) == (1, 1, [4])


# ---------------------------------------------------------------------------------- B, C: what is trained


def test_half_a_step_is_not_taken_and_stays():
    buffer = at(4, prompts_per_step=2)
    first, second, *_ = fill(buffer)
    buffer.complete(first, "a")
    assert buffer.take() is None
    assert (buffer.step, buffer.statistics().ready) == (4, 1)
    buffer.complete(second, "b")
    assert buffer.take() == ["a", "b"]
    assert buffer.step == 5


def test_the_oldest_deadline_is_trained_first_and_nothing_is_evicted():
    buffer = a_buffer(policy="deadline", max_staleness=2)
    old, middle, young = fill(buffer)
    for slot in (young, middle):
        buffer.complete(slot, slot.id)
    assert buffer.take() == [middle.id]
    buffer.advance()
    (new,) = fill(buffer)
    buffer.complete(new, new.id)
    buffer.complete(old, old.id)
    taken = []
    for _ in range(3):
        taken += buffer.take()
        buffer.advance()
    assert taken == [old.id, young.id, new.id]


def test_the_groups_that_are_missing_of_a_step_are_reserved_and_no_more():
    buffer = at(5, prompts_per_step=3, max_staleness=0)
    slots = fill(buffer)
    buffer.complete(slots[0], "group")
    buffer.filter(slots[1])
    assert targets(fill(buffer)) == [5], "one of three is missing"


@pytest.mark.parametrize(("finished", "missing"), [(0, 2), (1, 1), (2, 0)])
def test_a_restored_step_is_completed_with_new_prompts(finished, missing):
    buffer = a_buffer(prompts_per_step=2, max_staleness=1)
    slots = fill(buffer)
    for slot in slots[:finished]:
        buffer.complete(slot, slot.id)
    restored = a_buffer(prompts_per_step=2, max_staleness=1)
    restored.load_state_dict(buffer.state_dict())
    again = fill(restored)
    assert targets(again).count(0) == missing
    assert targets(again).count(1) == 2
    for slot in again:
        restored.complete(slot, slot.id)
    assert [restored.take(), restored.take()] == [[0, 1], [2, 3]], "no step is unreachable"


def test_in_order_a_group_waits_for_its_step():
    buffer = at(5)
    now, later = fill(buffer)
    buffer.complete(later, "later")
    assert buffer.take() is None
    buffer.complete(now, "now")
    assert (buffer.take(), buffer.take()) == (["now"], ["later"])


def test_admission_continues_with_the_version_and_not_before():
    buffer = a_buffer(policy="deadline")
    slots = fill(buffer)
    assert len(slots) == 2
    for slot in slots:
        buffer.complete(slot, slot.id)
    buffer.take()
    assert buffer.reserve() is None
    buffer.advance()
    assert len(fill(buffer)) == 1


# ---------------------------------------------------------------------------------- H: data


def request(n, step=0):
    return SampleRequest(
        generation_version=step, target_version=step, current_version=step, expected_prompts=n
    )


def test_chosen_tasks_fill_each_draw():
    loaders = {"one": MemoryLoader("one", 2), "two": MemoryLoader("two", 4)}
    sampler = TaskOrder([["one", "two"], "one", "two"])
    drawn = [
        sorted((p.environment, p.id) for p in sampler.sample(loaders, request(4, step))) for step in range(3)
    ]
    assert [task for task, _ in drawn[0]] == ["one", "one", "two", "two"]
    assert drawn[1] == [("one", "0"), ("one", "0"), ("one", "1"), ("one", "1")], "two epochs of two prompts"
    assert [task for task, _ in drawn[2]] == ["two"] * 4


def test_a_sampler_that_returns_too_few_gets_an_error_with_both_numbers():
    class Short(RoundRobin):
        def sample(self, loaders, request):
            return super().sample(loaders, request)[:3]

    with pytest.raises(PluginError, match="returned 3 prompts, expected exactly 4"):
        checked_sample(Short(), "short", {"one": MemoryLoader("one", 9)}, request(4))


def test_the_sampler_is_asked_once_a_reservation_with_all_three_versions():
    buffer, seen = a_buffer(prompts_per_step=4), []
    for _ in range(3):
        while (slots := buffer.reserve()) is not None:
            seen.append((slots[0].generation_version, slots[0].target_version, buffer.step, len(slots)))
            for slot in buffer.assign(slots, [slot.id for slot in slots]):
                buffer.complete(slot, slot.id)
        buffer.take()
        buffer.advance()
    assert seen == [(0, 0, 0, 4), (0, 1, 0, 4), (1, 2, 1, 4), (2, 3, 2, 4)]


def test_an_empty_task_is_an_error_and_no_endless_loop():
    with pytest.raises(PluginError, match="has no training prompts"):
        IndexedLoader("empty", prompts(0), seed=0).take(1)
