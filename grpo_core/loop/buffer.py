"""The buffer: slots of groups on their way to the trainer, and the rules for generating and training them.

Rule 1: everything that bounds staleness or decides what is trained is in this file.
Rule 2: nothing here waits, reads a clock, draws a random number or does I/O.  Every method returns at
        once, and the same calls give the same state.  The pipeline owns the waiting.

Theory of operation
-------------------
A slot carries one prompt to the trainer.  Its ``id`` is the place of the prompt in the stream.

    reserve ──> reserved ──assign──> in flight ──complete──> ready ──take──> trained
                                      │  ↑
                                     fail │ reserve
                                      ↓  │
                                   retrying ──(max_retries used up)──> skipped

A group in flight may also be *filtered*: it is finished and will not be trained.  Its slot becomes free at
once, and the next ``reserve`` offers a new slot instead.

A slot is stamped when it is reserved, before its prompt is drawn, with the version that the engine holds
(``generation_version``) and the last step that may train on it (``target_version``, at most
``max_staleness`` later).  ``advance`` records that the engine holds the weights of the next step.  Only then
do the permits of the step before it become free, so the number of slots, and with it the memory, is at most
``(max_staleness + 1) * prompts_per_step``.

Two policies decide when a group is trained:

``in_order``   Exactly at its ``target_version``.  Which prompts a step trains on does not depend on
               which rollouts finish first.  A straggler holds up its own step and no earlier one.

``deadline``   At ``target_version`` at the latest, the oldest first.  A step is taken as soon as
               ``prompts_per_step`` groups are ready, *provided that* everything left can still be trained
               before its deadline, whatever finishes when: for each j >= 1, at most ``j *
               prompts_per_step`` of the remaining slots have a deadline within the next j steps.
               This is the feasibility condition of earliest-deadline-first scheduling.  ``reserve`` keeps
               it (a new slot has the farthest deadline, and there are never more slots than permits), so
               it can fail only while a straggler is missing, and the straggler's own deadline ends that.

Finished work is never discarded, and no staleness bound has to be checked afterwards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from typing import Any, Generic, Literal, TypeVar

from attrs import evolve, frozen

from grpo_core.contracts.errors import SlotError
from grpo_core.contracts.records import Slot

PromptT = TypeVar("PromptT")
GroupT = TypeVar("GroupT")


@frozen(kw_only=True)
class BufferStatistics:
    """A snapshot of the buffer; every field is a number of groups."""

    reserved: int
    """Slots that have no prompt yet."""
    in_flight: int
    """Slots whose group is being generated."""
    retrying: int
    """Slots that failed and wait for another attempt."""
    ready: int
    dispatched: int
    """Prompts ever assigned to a slot: trained + skipped + filtered + in flight + retrying + ready."""
    trained: int
    skipped: int
    filtered: int
    attempts: int
    """Attempts started, including retries."""


COUNTED = ("in_flight", "retrying", "ready", "dispatched", "skipped", "filtered", "attempts")
"""Counts that are metrics of a step, as ``buffer/NAME``."""


class Buffer(Generic[PromptT, GroupT]):
    """A bounded set of slots; see the module's docstring for its rules.

    Args:
        prompts_per_step: number of groups that a step trains.
        max_staleness: largest number of steps between the weights that generate and the step that trains.
        num_steps: number of steps of the run; no slot is reserved beyond the last one.
        policy: ``"deadline"`` or ``"in_order"``.
        max_retries: number of attempts after the first, for each prompt.
    """

    def __init__(
        self,
        *,
        prompts_per_step: int,
        max_staleness: int,
        num_steps: int,
        policy: Literal["deadline", "in_order"] = "deadline",
        max_retries: int = 3,
    ) -> None:
        if prompts_per_step < 1 or max_staleness < 0 or num_steps < 0 or max_retries < 0:
            raise SlotError(
                f"expected prompts_per_step >= 1 and max_staleness, num_steps, max_retries >= 0, got "
                f"{prompts_per_step}, {max_staleness}, {num_steps}, {max_retries}"
            )
        if policy not in ("deadline", "in_order"):
            raise SlotError(f"expected policy 'deadline' or 'in_order', got {policy!r}")
        self.prompts_per_step = prompts_per_step
        self.max_staleness = max_staleness
        self.num_steps = num_steps
        self.policy = policy
        self.max_retries = max_retries
        self.step = 0
        """The next step to be taken."""
        self.version = 0
        """The weights that the engine holds."""
        self._dispatched = 0
        self._skipped = 0
        self._filtered = 0
        self._attempts = 0
        self._next_id = 0
        self._reserved: dict[int, Slot[PromptT]] = {}
        self._in_flight: dict[int, Slot[PromptT]] = {}
        self._retrying: dict[int, Slot[PromptT]] = {}
        self._ready: dict[int, tuple[Slot[PromptT], GroupT]] = {}
        # These indices keep every method from looking at all slots: there may be a hundred thousand.
        self._retrying_first: list[tuple[int, int]] = []
        """A heap of (target version, id) of ``_retrying``."""
        self._ready_first: list[tuple[int, int]] = []
        """A heap of (target version, id) of ``_ready``."""
        self._due: Counter[int] = Counter()
        """Number of stamped slots by target version; a retried slot without partial rollouts has no stamp."""
        self._ready_due: Counter[int] = Counter()
        self._last_slots: list[Slot[PromptT]] = []
        """The slots of the last step that was taken."""

    # ------------------------------------------------------------------------------ the life of a slot

    def reserve(self) -> list[Slot[PromptT]] | None:
        """Return slots to generate next, all with the same stamps, or None if there are none now.

        Slots that failed come first, with their prompt, and are in flight at once.  New slots have no
        prompt; give them one with ``assign``.
        """
        if self._retrying:
            _, id = heappop(self._retrying_first)
            slot = self._stamp_retry(self._retrying.pop(id))
            self._in_flight[slot.id] = slot
            self._attempts += 1
            return [slot]
        target, count = self._room()
        if count <= 0:
            return None
        slots: list[Slot[PromptT]] = [
            Slot(id=self._next_id + i, generation_version=self.version, target_version=target)
            for i in range(count)
        ]
        self._next_id += count
        self._due[target] += count
        self._reserved.update((slot.id, slot) for slot in slots)
        return slots

    def assign(self, slots: Sequence[Slot[PromptT]], prompts: Sequence[PromptT]) -> list[Slot[PromptT]]:
        """Assign prompts to reserved slots; they are then in flight."""
        if len(slots) != len(prompts):
            raise SlotError(f"{len(prompts)} prompts for {len(slots)} slots")
        filled = []
        for slot, prompt in zip(slots, prompts, strict=True):
            self._leave(self._reserved, slot, "reserved")
            self._in_flight[slot.id] = full = evolve(slot, prompt=prompt)
            filled.append(full)
        self._dispatched += len(filled)
        self._attempts += len(filled)
        return filled

    def complete(self, slot: Slot[PromptT], group: GroupT) -> None:
        """Record that the slot's group is ready to be trained."""
        self._make_ready(self._leave(self._in_flight, slot, "in flight"), group)

    def exchange(self, slot: Slot[PromptT], group: GroupT) -> None:
        """Replace a ready group: a resumed run moves its tokens to a data plane."""
        self._ready[slot.id] = (self._ready[slot.id][0], group)

    def fail(self, slot: Slot[PromptT], partial_rollouts: Iterable[Any] = ()) -> bool:
        """Record a failed attempt; return True if the slot is retried, False if its prompt is skipped.

        With ``partial_rollouts`` the slot keeps its stamps; without, it gets new ones.
        """
        slot = self._leave(self._in_flight, slot, "in flight")
        if slot.attempts >= self.max_retries:
            self._due[slot.target_version] -= 1
            self._skipped += 1
            return False
        self._offer_retry(evolve(slot, attempts=slot.attempts + 1, partial_rollouts=tuple(partial_rollouts)))
        if not self._retrying[slot.id].partial_rollouts:
            self._due[slot.target_version] -= 1
        return True

    def filter(self, slot: Slot[PromptT]) -> None:
        """Record that the slot's group is finished and will not be trained."""
        slot = self._leave(self._in_flight, slot, "in flight")
        self._due[slot.target_version] -= 1
        self._filtered += 1

    def take(self) -> list[GroupT] | None:
        """Return the groups of the next step, the oldest first, or None while they are not ready."""
        if self.step >= self.num_steps:
            return None
        ready = self._ready_due[self.step] if self.policy == "in_order" else len(self._ready)
        if ready < self.prompts_per_step or not self._feasible():
            return None
        oldest = [heappop(self._ready_first) for _ in range(self.prompts_per_step)]
        for target, _ in oldest:
            self._due[target] -= 1
            self._ready_due[target] -= 1
        self._due, self._ready_due = +self._due, +self._ready_due  # unary + drops the zero counts
        self.step += 1
        pairs = [self._ready.pop(id) for _, id in oldest]
        self._last_slots = [slot for slot, _ in pairs]
        return [group for _, group in pairs]

    def undo(self, trained: int, *, ready: bool = False) -> list[int]:
        """Retry the prompts of groups that cannot be trained; return their slots.

        Args:
            trained: number of trained steps; the groups of a step taken after them come back.
            ready: whether groups that are ready come back as well.
        """
        back = self._last_slots if self.step > trained else []
        self.step = trained
        if ready:
            back = [*back, *(slot for slot, _ in self._ready.values())]
            for slot, _ in self._ready.values():
                self._due[slot.target_version] -= 1
            self._ready.clear()
            self._ready_first.clear()
            self._ready_due.clear()
        for slot in back:
            self._offer_retry(evolve(slot, partial_rollouts=()))
        return [slot.id for slot in back]

    def advance(self) -> None:
        """Record that the engine holds the next version, which frees the permits of one step."""
        if self.version >= self.step:
            raise SlotError(f"the engine holds version {self.version}, and no step was taken after it")
        self.version += 1

    # ------------------------------------------------------------------------------ reading

    def statistics(self) -> BufferStatistics:
        """Return the counts of all states."""
        return BufferStatistics(
            reserved=len(self._reserved),
            in_flight=len(self._in_flight),
            retrying=len(self._retrying),
            ready=len(self._ready),
            dispatched=self._dispatched,
            trained=self.step * self.prompts_per_step,
            skipped=self._skipped,
            filtered=self._filtered,
            attempts=self._attempts,
        )

    @property
    def wanted(self) -> int:
        """Number of prompts that the next ``reserve`` needs; 0 if a slot that failed comes first."""
        return 0 if self._retrying else max(0, self._room()[1])

    @property
    def outstanding(self) -> int:
        """Number of slots that exist."""
        return len(self._reserved) + len(self._in_flight) + len(self._retrying) + len(self._ready)

    @property
    def in_flight(self) -> int:
        """Number of groups that are being generated."""
        return len(self._in_flight)

    # ------------------------------------------------------------------------------ saving

    def state_dict(self) -> dict[str, Any]:
        """Return a consistent cut.  Prompts in flight are saved as prompts to retry.

        The engine may hold older weights: a run resumed from the cut starts with those of ``step``.
        """
        if self._reserved:
            raise SlotError(f"no consistent cut here: {len(self._reserved)} slots have no prompt")
        unfinished = {**self._in_flight, **self._retrying}
        return {
            "step": self.step,
            "dispatched": self._dispatched,
            "skipped": self._skipped,
            "filtered": self._filtered,
            "attempts": self._attempts,
            "retrying": [evolve(unfinished[id], partial_rollouts=()) for id in sorted(unfinished)],
            "ready": [self._ready[id] for id in sorted(self._ready)],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state_dict()``; groups that were ready are not generated again."""
        self.step = self.version = state["step"]
        self._dispatched, self._skipped = state["dispatched"], state["skipped"]
        self._filtered = state["filtered"]
        self._attempts = state["attempts"]
        self._next_id = self._dispatched
        for slot in state["retrying"]:
            self._offer_retry(slot)
        for slot, group in state["ready"]:
            self._due[slot.target_version] += 1
            self._make_ready(slot, group)

    # ------------------------------------------------------------------------------ the policies

    def _room(self) -> tuple[int, int]:
        """Return the target version and the number of new slots that may be reserved now."""
        if self.policy == "in_order":
            for target in range(self.step, min(self._farthest() + 1, self.num_steps)):
                if missing := self.prompts_per_step - self._due[target]:
                    return target, missing
            return self._farthest(), 0
        held = (self.step - self.version) * self.prompts_per_step
        permits = (self.max_staleness + 1) * self.prompts_per_step
        wanted = (self.num_steps - self.step) * self.prompts_per_step
        return self._farthest(), min(permits - held, wanted) - self.outstanding

    def _stamp_retry(self, slot: Slot[PromptT]) -> Slot[PromptT]:
        if slot.partial_rollouts:
            return slot
        target = slot.target_version if self.policy == "in_order" else self._farthest()
        self._due[target] += 1
        return evolve(slot, generation_version=self.version, target_version=target)

    def _feasible(self) -> bool:
        """Return whether everything left after a step can still be trained in time."""
        if self.policy == "in_order":
            return True
        for j in range(self.max_staleness):  # beyond that, the number of permits implies it
            trained = min(_until(self._ready_due, self.step + j), self.prompts_per_step)
            if _until(self._due, self.step + j) - trained > j * self.prompts_per_step:
                return False
        return True

    def _farthest(self) -> int:
        return self.version + self.max_staleness

    def _offer_retry(self, slot: Slot[PromptT]) -> None:
        self._retrying[slot.id] = slot
        heappush(self._retrying_first, (slot.target_version, slot.id))

    def _make_ready(self, slot: Slot[PromptT], group: GroupT) -> None:
        self._ready[slot.id] = (slot, group)
        self._ready_due[slot.target_version] += 1
        heappush(self._ready_first, (slot.target_version, slot.id))

    def _leave(self, state: dict[int, Slot[PromptT]], slot: Slot[PromptT], name: str) -> Slot[PromptT]:
        if slot.id not in state or state[slot.id].attempts != slot.attempts:
            raise SlotError(f"slot {slot.id} (attempt {slot.attempts}) is not {name}")
        return state.pop(slot.id)


def _until(due: Counter[int], target: int) -> int:
    """Return the number of slots due at ``target`` or before."""
    return sum(count for at, count in due.items() if at <= target)
