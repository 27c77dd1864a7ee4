"""The buffer's laws (DESIGN section 4) over every sequence of calls that hypothesis can think of."""

from __future__ import annotations

import copy

import pytest
from attrs import evolve
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from grpo_core.contracts.errors import SlotError
from grpo_core.contracts.records import Slot
from grpo_core.loop.buffer import Buffer

# ---------------------------------------------------------------------------------- stories


def a_buffer(**changes):
    return Buffer(**{"prompts_per_step": 2, "max_staleness": 1, "num_steps": 10, **changes})


def fill(buffer):
    """Reserve and fill until there is nothing left to reserve; prompts are the slots' ids."""
    slots = []
    while (offered := buffer.reserve()) is not None:
        fresh = [slot for slot in offered if slot.prompt is None]
        slots += [slot for slot in offered if slot.prompt is not None]
        slots += buffer.assign(fresh, [slot.id for slot in fresh])
    return slots


def test_slots_are_stamped_before_a_prompt_is_drawn():
    buffer = a_buffer()
    slots = buffer.reserve()
    assert [slot.id for slot in slots] == [0, 1, 2, 3]
    assert {(slot.generation_version, slot.target_version, slot.prompt) for slot in slots} == {(0, 1, None)}
    assert buffer.statistics().dispatched == 0
    buffer.assign(slots, ["a", "b", "c", "d"])
    assert buffer.statistics().dispatched == buffer.in_flight == 4
    assert buffer.reserve() is None


def test_in_order_reserves_one_target_after_the_other():
    buffer = a_buffer(policy="in_order")
    targets = []
    while (slots := buffer.reserve()) is not None:
        targets.append([slot.target_version for slot in slots])
        buffer.assign(slots, [slot.id for slot in slots])
    assert targets == [[0, 0], [1, 1]]


def test_in_order_waits_for_a_straggler_and_deadline_does_not():
    for policy, expected in [("in_order", None), ("deadline", ["group 1", "group 2"])]:
        buffer = a_buffer(policy=policy)
        straggler, *others = fill(buffer)
        for slot in others[:2]:
            buffer.complete(slot, f"group {slot.id}")
        assert buffer.take() == expected, straggler


def test_the_deadline_of_a_straggler_holds_the_last_step_that_may_train_it():
    buffer = a_buffer()
    straggler, *others = fill(buffer)
    for slot in others:
        buffer.complete(slot, slot.id)
    assert buffer.take() == [1, 2]
    buffer.advance()
    for slot in fill(buffer):
        buffer.complete(slot, slot.id)
    assert buffer.take() is None, "step 1 is the straggler's last: a batch without it would strand it"
    buffer.complete(straggler, 0)
    assert buffer.take() == [0, 3]


def test_permits_are_free_only_when_the_engine_holds_the_weights():
    buffer = a_buffer(max_staleness=0)
    for slot in fill(buffer):
        buffer.complete(slot, slot.id)
    buffer.take()
    assert buffer.reserve() is None
    buffer.advance()
    assert len(buffer.reserve()) == 2


def test_a_failed_prompt_is_retried_with_new_stamps_and_finally_skipped():
    buffer = a_buffer(max_retries=1)
    first, *others = fill(buffer)
    for slot in others:
        buffer.complete(slot, slot.id)
    assert buffer.fail(first)
    assert buffer.take() == [1, 2]
    buffer.advance()
    (again,) = buffer.reserve()
    assert (again.prompt, again.attempts, again.generation_version, again.target_version) == (0, 1, 1, 2)
    assert not buffer.fail(again)
    assert buffer.statistics().skipped == 1
    assert [slot.id for slot in buffer.reserve()] == [4, 5, 6], "the skipped prompt's place is offered too"


@pytest.mark.parametrize("policy", ["deadline", "in_order"])
def test_a_filtered_group_frees_its_slot_for_a_new_prompt_of_the_same_step(policy):
    buffer = a_buffer(policy=policy, max_staleness=0)
    first, second = fill(buffer)
    buffer.filter(first)
    buffer.complete(second, second.id)
    assert buffer.take() is None
    (refill,) = buffer.reserve()
    assert (refill.id, refill.prompt, refill.generation_version, refill.target_version) == (2, None, 0, 0)
    buffer.complete(*buffer.assign([refill], [2]), 2)
    assert buffer.take() == [1, 2]
    assert (buffer.statistics().filtered, buffer.statistics().dispatched) == (1, 3)


def test_a_filtered_group_is_refilled_with_the_newest_weights():
    buffer = a_buffer(max_staleness=2)
    first, *others = fill(buffer)
    for slot in others[:2]:
        buffer.complete(slot, slot.id)
    buffer.take()
    buffer.advance()
    fill(buffer)
    buffer.filter(first)
    (refill,) = buffer.reserve()
    assert (refill.generation_version, refill.target_version) == (1, 3)


def test_a_group_is_filtered_or_complete_and_not_both():
    buffer = a_buffer()
    slot = fill(buffer)[0]
    buffer.filter(slot)
    for method in (buffer.filter, buffer.fail, lambda slot: buffer.complete(slot, "group")):
        with pytest.raises(SlotError, match=r"slot 0 \(attempt 0\) is not in flight"):
            method(slot)


def test_rollouts_that_are_kept_keep_the_stamps_that_hold_for_them():
    buffer = a_buffer()
    first, *others = fill(buffer)
    for slot in others:
        buffer.complete(slot, slot.id)
    buffer.fail(first, partial_rollouts=["a finished rollout"])
    buffer.take()
    buffer.advance()
    (again,) = buffer.reserve()
    assert again == evolve(first, attempts=1, partial_rollouts=("a finished rollout",))


def test_kept_rollouts_hold_the_last_step_that_may_train_them():
    buffer = a_buffer()
    first, *others = fill(buffer)
    for slot in others:
        buffer.complete(slot, slot.id)
    buffer.take()
    buffer.advance()
    for slot in fill(buffer):
        buffer.complete(slot, slot.id)
    buffer.fail(first, partial_rollouts=["a finished rollout"])
    assert buffer.take() is None


def test_what_failed_is_offered_again_in_the_order_of_its_deadlines():
    """Slot 0 was stamped again, so slot 1, which kept a rollout, has the earlier deadline."""
    buffer = a_buffer(max_staleness=2)
    slots = fill(buffer)
    for slot in slots[2:4]:
        buffer.complete(slot, slot.id)
    buffer.take()
    buffer.advance()
    buffer.fail(slots[0])
    (anew,) = buffer.reserve()
    buffer.fail(anew)
    buffer.fail(slots[1], partial_rollouts=["a finished rollout"])
    again = [slot for _ in range(2) for slot in buffer.reserve()]
    assert [slot.id for slot in again] == [1, 0]
    assert [slot.target_version for slot in again] == [2, 3]


def test_a_late_answer_of_an_abandoned_attempt_is_refused():
    buffer = a_buffer()
    slot = fill(buffer)[0]
    buffer.fail(slot)
    with pytest.raises(SlotError, match=r"slot 0 \(attempt 0\) is not in flight"):
        buffer.complete(slot, "late")
    (again,) = buffer.reserve()
    with pytest.raises(SlotError, match=r"slot 0 \(attempt 0\) is not in flight"):
        buffer.complete(slot, "late")
    buffer.complete(again, "in time")
    with pytest.raises(SlotError):
        buffer.complete(again, "twice")


@pytest.mark.parametrize("policy", ["deadline", "in_order"])
@pytest.mark.parametrize("ready", [False, True])
def test_a_step_that_failed_is_undone_and_its_prompts_are_offered_again(policy, ready):
    buffer = a_buffer(policy=policy)
    for slot in fill(buffer):
        buffer.complete(slot, slot.id)
    before = buffer.statistics()
    assert buffer.take() == [0, 1]
    assert sorted(buffer.undo(0, ready=ready)) == ([0, 1, 2, 3] if ready else [0, 1])
    again = a_buffer(policy=policy)
    again.load_state_dict(buffer.state_dict())
    for each in (buffer, again):
        now = each.statistics()
        assert (now.dispatched, now.trained) == (before.dispatched, 0)
        assert (now.ready, now.retrying) == ((0, 4) if ready else (2, 2))
        trained = []
        while each.step < 10:
            for slot in fill(each):
                each.complete(slot, slot.id)
            trained += each.take()
            each.advance()
        assert sorted(trained) == list(range(20))


def test_a_step_that_was_trained_is_not_undone():
    buffer = a_buffer()
    for slot in fill(buffer):
        buffer.complete(slot, slot.id)
    buffer.take()
    assert buffer.undo(1) == []
    assert (buffer.step, buffer.statistics().ready) == (1, 2)


def test_no_prompt_is_drawn_that_no_step_would_train():
    buffer = a_buffer(max_staleness=4, num_steps=2)
    assert len(buffer.reserve()) == 4


def test_impossible_transitions_are_refused():
    with pytest.raises(SlotError, match="no step was taken after it"):
        a_buffer().advance()
    buffer = a_buffer()
    slots = buffer.reserve()
    with pytest.raises(SlotError, match="1 prompts for 4 slots"):
        buffer.assign(slots, ["one"])
    with pytest.raises(SlotError, match="expected policy"):
        a_buffer(policy="lifo")
    with pytest.raises(SlotError, match="no consistent cut"):
        buffer.state_dict()
    with pytest.raises(SlotError, match="expected prompts_per_step >= 1"):
        a_buffer(prompts_per_step=0)


# ---------------------------------------------------------------------------------- laws


class BufferMachine(RuleBasedStateMachine):
    """A model that knows only what it did itself; the buffer's insides are not looked at."""

    @initialize(
        prompts=st.integers(1, 4),
        staleness=st.integers(0, 4),
        steps=st.integers(1, 8),
        policy=st.sampled_from(["deadline", "in_order"]),
        retries=st.integers(0, 2),
    )
    def start(self, prompts, staleness, steps, policy, retries):
        self.buffer = Buffer(
            prompts_per_step=prompts,
            max_staleness=staleness,
            num_steps=steps,
            policy=policy,
            max_retries=retries,
        )
        self.flying: list[Slot] = []
        self.failed: list[int] = []  # prompts that must come again
        self.ready: set[int] = set()
        self.trained: list[int] = []
        self.skipped: set[int] = set()
        self.filtered: set[int] = set()
        self.drawn = 0
        self.steps = 0
        self.engine = 0

    @rule()
    def reserve_and_fill(self):
        slots = self.buffer.reserve()
        if slots is None:
            assert not self.failed, "a failed prompt is offered again at once"
            return
        assert len({(s.generation_version, s.target_version) for s in slots}) == 1
        for slot in slots:
            if not slot.partial_rollouts:
                assert slot.generation_version == self.engine
            assert slot.target_version >= self.steps, "no step would train it"
            assert 0 <= slot.target_version - slot.generation_version <= self.buffer.max_staleness
        if slots[0].prompt is None:
            prompts = list(range(self.drawn, self.drawn + len(slots)))
            self.drawn += len(slots)
            slots = self.buffer.assign(slots, prompts)
        else:
            for slot in slots:
                self.failed.remove(slot.prompt)
        assert all(slot.prompt is not None for slot in slots)
        self.flying += slots

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def complete(self, data):
        slot = self.flying.pop(data.draw(st.integers(0, len(self.flying) - 1)))
        self.ready.add(slot.prompt)
        self.buffer.complete(slot, slot)

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def filter(self, data):
        slot = self.flying.pop(data.draw(st.integers(0, len(self.flying) - 1)))
        self.filtered.add(slot.prompt)
        self.buffer.filter(slot)

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), keep=st.booleans())
    def fail(self, data, keep):
        slot = self.flying.pop(data.draw(st.integers(0, len(self.flying) - 1)))
        if self.buffer.fail(slot, ["rollout"] if keep else []):
            assert slot.attempts < self.buffer.max_retries
            self.failed.append(slot.prompt)
        else:
            assert slot.attempts == self.buffer.max_retries
            self.skipped.add(slot.prompt)

    @rule()
    def take(self):
        groups = self.buffer.take()
        if groups is None:
            return
        assert len(groups) == self.buffer.prompts_per_step
        for slot in groups:
            assert self.steps - slot.generation_version <= self.buffer.max_staleness, "law 1: staleness"
            assert self.steps <= slot.target_version
            if self.buffer.policy == "in_order":
                assert slot.target_version == self.steps
            self.ready.remove(slot.prompt)
            self.trained.append(slot.prompt)
        assert len(set(self.trained)) == len(self.trained), "law 2: none twice"
        self.steps += 1

    @precondition(lambda self: self.steps > self.engine)
    @rule()
    def advance(self):
        self.buffer.advance()
        self.engine += 1

    @precondition(lambda self: self.steps == self.engine)
    @rule()
    def save_crash_resume(self):
        state = copy.deepcopy(self.buffer.state_dict())
        old = self.buffer
        self.buffer = Buffer(
            prompts_per_step=old.prompts_per_step,
            max_staleness=old.max_staleness,
            num_steps=old.num_steps,
            policy=old.policy,
            max_retries=old.max_retries,
        )
        self.buffer.load_state_dict(state)
        self.failed += [slot.prompt for slot in self.flying]
        self.flying = []

    @invariant()
    def nothing_is_lost_or_doubled(self):
        """Law 3."""
        if not hasattr(self, "buffer"):
            return
        now = self.buffer.statistics()
        assert now.dispatched == self.drawn
        gone = now.trained + now.skipped + now.filtered
        assert now.dispatched == gone + now.in_flight + now.retrying + now.ready
        assert (now.in_flight, now.retrying, now.ready) == (
            len(self.flying),
            len(self.failed),
            len(self.ready),
        )
        assert (now.trained, now.skipped, now.filtered) == tuple(
            map(len, (self.trained, self.skipped, self.filtered))
        )
        assert not {*self.trained} & self.filtered, "what is filtered is not trained"

    @invariant()
    def memory_is_bounded(self):
        """Laws 4 and 9."""
        if hasattr(self, "buffer"):
            bound = (self.buffer.max_staleness + 1) * self.buffer.prompts_per_step
            held = (self.steps - self.engine) * self.buffer.prompts_per_step
            assert self.buffer.outstanding + held <= bound

    @invariant()
    def the_run_can_always_end(self):
        """Law 5: if calls now succeed, every step is trained and nothing is left over."""
        if not hasattr(self, "buffer"):
            return
        buffer, flying = copy.deepcopy(self.buffer), list(self.flying)
        engine = self.engine
        while True:
            for slot in [*flying, *fill(buffer)]:
                buffer.complete(slot, slot)
            flying = []
            while buffer.take() is not None:
                pass
            if engine == buffer.step:
                break
            buffer.advance()
            engine += 1
        assert buffer.step == buffer.num_steps, f"stuck at step {buffer.step}"
        assert buffer.outstanding == 0


TestBuffer = pytest.mark.long(BufferMachine.TestCase)
TestBuffer.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
