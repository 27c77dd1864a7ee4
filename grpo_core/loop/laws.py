"""A checker of the laws that every run keeps, whatever its schedule and its faults; it watches the events.

It knows the events as they stand in ``events.jsonl`` and keeps its own account of every slot; it looks
neither into the buffer nor into the pipeline.  The simulation feeds it while the pipeline runs,
``grpo-core verify`` from the file of a run that was.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import define, evolve, field, frozen

from grpo_core import versions
from grpo_core.loop.buffer import BufferStatistics

LAWS = {
    "staleness": "no trained token is older than max_staleness steps, or than its slot",
    "batch": "a step trains exactly prompts_per_step groups of group_size rollouts, each with a reward",
    "once": "only finished groups are trained, and none twice",
    "deadline": "a group is trained at its target_version at the latest; in_order: exactly then",
    "steps": "steps are consecutive",
    "stamps": "a slot is stamped with the version that the engine holds and its farthest deadline",
    "stream": "the places of the stream are filled one after the other, and each keeps its prompt; a resumed "
    "run draws the same prompts of a task in the same order",
    "retries": "a prompt is skipped after max_retries further attempts, not sooner and not later",
    "conservation": "dispatched = trained + skipped + filtered + in flight + retrying + ready",
    "memory": "at most (max_staleness + 1) * prompts_per_step slots are outstanding",
    "sync": "the engine gets each version once, in order, after the step that made it",
    "validation": "validation measures the version that its engine holds, one after the other",
    "resume": "a run continues from a cut that was saved, and only what was unfinished comes again",
    "end": "a run that is finished has trained every step and has nothing left over",
}
"""The laws by name."""


@frozen
class Violation:
    """A broken law, with the step at which it broke."""

    law: str
    step: int
    what: str

    def __str__(self) -> str:
        return f"step {self.step}: {self.law}: {self.what} (law: {LAWS.get(self.law, 'of the simulation')})"


@frozen(kw_only=True)
class Terms:
    """The part of a run's configuration that the laws depend on."""

    prompts_per_step: int
    max_staleness: int
    num_steps: int
    policy: str
    max_retries: int
    group_size: int
    validates_apart: bool = False
    """Whether validation has its own engine."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Terms:
        """Read the terms from the configuration in ``RunStarted``."""
        return cls(
            prompts_per_step=config["trainer"]["prompts_per_step"],
            max_staleness=config["pipeline"]["max_staleness"],
            num_steps=config["trainer"]["steps"],
            policy=config["pipeline"]["policy"],
            max_retries=config["rollout"]["max_retries"],
            group_size=config["rollout"]["group_size"],
            validates_apart="engine" in config.get("validation", {}),
        )


@frozen(kw_only=True)
class _Open:
    """A slot that is neither trained nor skipped nor filtered."""

    task: str
    prompt: str
    generation_version: int
    target_version: int
    attempt: int
    ready: bool = False
    resumed: bool = False
    """Whether the slot was unfinished at the cut; it comes again as it was."""


@define
class _Account:
    """The state of the run at one moment, from which a resumed run starts."""

    step: int = 0
    """Number of steps that were taken."""
    version: int = 0
    """Version that the engine holds."""
    measured: int = -1
    """Version that the newest validation measured."""
    dispatched: int = 0
    trained: int = 0
    skipped: int = 0
    filtered: int = 0
    ready: int = 0
    attempts: int = 0
    open: dict[int, _Open] = field(factory=dict)
    drawn: dict[str, int] = field(factory=lambda: defaultdict(int))
    """Number of prompts of each task."""

    def copy(self) -> _Account:
        return evolve(self, open=dict(self.open), drawn=defaultdict(int, self.drawn))


class Laws:
    """Watches one run through all its lives.

    ``observe`` takes an event as ``grpo_core.reporting.files.plain`` gives it, ``check`` the buffer's
    statistics of the same moment.  What does not hold is collected in ``violations``.
    """

    def __init__(self) -> None:
        self.violations: list[Violation] = []
        self.steps = 0
        """Number of steps that were checked, including steps of lives that were cut off."""
        self.terms: Terms | None = None
        self._now = _Account()
        self._cuts: dict[int, list[_Account]] = defaultdict(list)
        """Cuts by step; a step may be saved again, and a resumed run may find either cut."""
        self._stream: dict[str, list[str]] = defaultdict(list)

    def observe(self, event: Mapping[str, Any]) -> None:
        """Account for an event.  Events before the first RunStarted are not checked."""
        watch = getattr(self, f"_on_{event['event']}", None)
        if watch is not None and (self.terms is not None or event["event"] == "RunStarted"):
            watch(event)

    def check(self, now: BufferStatistics) -> None:
        """Compare the buffer's own account with this one."""
        mine = self._now
        done = (mine.dispatched, mine.trained, mine.skipped, mine.filtered, mine.attempts)
        expected = (*done, mine.ready, len(mine.open) - mine.ready)
        done = (now.dispatched, now.trained, now.skipped, now.filtered, now.attempts)
        counted = (*done, now.ready, now.in_flight + now.retrying)
        if now.reserved or expected != counted:
            self._broken("conservation", f"the events give {expected}, the buffer says {now}")

    def _broken(self, law: str, what: str) -> None:
        self.violations.append(Violation(law, self._now.step, what))

    def _law(self, law: str, holds: bool, what: str) -> None:
        if not holds:
            self._broken(law, what)

    # ------------------------------------------------------------------------------ lives

    def _on_RunStarted(self, event: Mapping[str, Any]) -> None:  # noqa: N802 - named as the event
        self.terms = Terms.of(event["config"])
        step, found = event["step"], event["buffer"]
        cuts = self._cuts[step] if event["resumed"] else [_Account()]
        known = [name for name in _RESTORED if name in found]
        cut = next((cut for cut in cuts if all(getattr(cut, n) == found[n] for n in known)), None)
        if cut is None:
            saved = [{n: getattr(cut, n) for n in known} for cut in cuts]
            self._broken("resume", f"continues at step {step} with {found}; saved were {saved}")
            cut = _Account(step=step, version=step)
        self._cuts = defaultdict(list, {at: cuts for at, cuts in self._cuts.items() if at < step})
        self._cuts[step] = [cut]
        self._now = cut.copy()
        self._now.open = {
            id: slot if slot.ready else evolve(slot, resumed=True) for id, slot in cut.open.items()
        }

    def _on_Saving(self, event: Mapping[str, Any]) -> None:  # noqa: N802
        now = self._now
        self._law(
            "resume",
            event["step"] == now.step == now.version,
            f"a cut of step {event['step']} after {now.step} steps, with the engine at {now.version}",
        )
        self._cuts[event["step"]].append(now.copy())

    def _on_RunEnded(self, event: Mapping[str, Any]) -> None:  # noqa: N802
        if event["reason"] != "finished":
            return
        assert self.terms is not None
        self._law(
            "end",
            self._now.step == self._now.version == self.terms.num_steps and not self._now.open,
            f"{self._now.step} of {self.terms.num_steps} steps, engine at version {self._now.version}, slots "
            f"left: {sorted(self._now.open)}",
        )

    # ------------------------------------------------------------------------------ slots

    def _on_Dispatched(self, event: Mapping[str, Any]) -> None:  # noqa: N802
        for slot in event["slots"]:
            self._dispatch(slot)
        assert self.terms is not None
        terms, now = self.terms, self._now
        held = len(now.open) + (now.step - now.version) * terms.prompts_per_step
        bound = versions.capacity(prompts_per_step=terms.prompts_per_step, max_staleness=terms.max_staleness)
        self._law("memory", held <= bound, f"{held} slots are held")

    def _dispatch(self, given: Mapping[str, Any]) -> None:
        assert self.terms is not None
        now, id = self._now, given["slot"]
        slot = _Open(**{name: given[name] for name in _STAMPS})
        who = f"slot {id} (prompt {slot.prompt!r} of {slot.task!r}, attempt {slot.attempt})"
        before = now.open.get(id)
        if before is None:
            self._law("stream", id == now.dispatched, f"{who} was dispatched, expected slot {now.dispatched}")
            self._law("retries", slot.attempt == 0, f"{who} was never dispatched before")
            self._draw(slot, who)
            now.dispatched += 1
        else:
            law = "resume" if before.resumed else "once"
            self._law(law, not before.ready, f"{who} is finished and is generated again")
            same = (before.task, before.prompt) == (slot.task, slot.prompt)
            self._law("stream", same, f"{who} had prompt {before.prompt!r} of {before.task!r} before")
            # what failed just before the cut comes as a further attempt, what was in flight as the same
            attempts = {before.attempt, before.attempt + 1} if before.resumed else {before.attempt + 1}
            self._law("retries", slot.attempt in attempts, f"{who} came after attempt {before.attempt}")
        self._law("retries", slot.attempt <= self.terms.max_retries, f"{who} has attempts without end")
        self._check_stamps(slot, given["kept"], before, who)
        now.open[id] = slot
        now.attempts += 1

    def _draw(self, slot: _Open, who: str) -> None:
        """Check that the n-th prompt of a task is the same in each life, whatever the sampler."""
        place, drawn = self._now.drawn[slot.task], self._stream[slot.task]
        self._now.drawn[slot.task] += 1
        if place == len(drawn):
            drawn.append(slot.prompt)
        else:
            same = drawn[place] == slot.prompt
            self._law("stream", same, f"{who}: the life before drew {drawn[place]!r} here")

    def _check_stamps(self, slot: _Open, kept: int, before: _Open | None, who: str) -> None:
        assert self.terms is not None
        v, target = slot.generation_version, slot.target_version
        if kept:
            same = before is not None and (before.generation_version, before.target_version) == (v, target)
            self._law("stamps", same, f"{who} keeps finished rollouts, but not their stamps")
            return
        self._law("stamps", v == self._now.version, f"{who} has {v}, the engine {self._now.version}")
        farthest = versions.deadline(generated_by=v, max_staleness=self.terms.max_staleness)
        late = target > farthest or (self.terms.policy == "deadline" and target != farthest)
        self._law("stamps", not late, f"{who} of version {v} has the deadline {target}")

    def _on_GroupFinished(self, event: Mapping[str, Any]) -> None:  # noqa: N802
        slot = self._now.open.get(event["slot"])
        if slot is None or slot.ready or slot.resumed:
            self._broken("once", f"slot {event['slot']} is finished and was not in flight")
        else:
            self._now.open[event["slot"]] = evolve(slot, ready=True)
            self._now.ready += 1

    def _on_GroupFiltered(self, event: Mapping[str, Any]) -> None:  # noqa: N802
        slot = self._now.open.pop(event["slot"], None)
        self._now.filtered += 1
        flying = slot is not None and not slot.ready and not slot.resumed
        self._law("once", flying, f"slot {event['slot']} is filtered as {slot}")

    def _on_PromptSkipped(self, event: Mapping[str, Any]) -> None:  # noqa: N802
        assert self.terms is not None
        slot = self._now.open.pop(event["slot"], None)
        self._now.skipped += 1
        last = slot is not None and not slot.ready and slot.attempt == self.terms.max_retries
        self._law("retries", last, f"slot {event['slot']} is skipped as {slot}")

    # ------------------------------------------------------------------------------ steps

    def _on_GroupsReady(self, event: Mapping[str, Any]) -> None:  # noqa: N802
        assert self.terms is not None
        now, terms = self._now, self.terms
        self._law("steps", event["step"] == now.step, f"step {event['step']} comes after {now.step} steps")
        count = len(event["groups"])
        self._law("batch", count == terms.prompts_per_step, f"it trains {count} groups")
        for group in event["groups"]:
            self._train(group)
        now.step += 1
        now.trained += count
        now.ready -= count
        self.steps += 1

    def _train(self, group: Mapping[str, Any]) -> None:
        assert self.terms is not None
        now, terms, who = self._now, self.terms, f"slot {group['slot']} (prompt {group['prompt']!r})"
        slot = now.open.pop(group["slot"], None)
        if slot is None or not slot.ready:
            self._broken("once", f"{who} is trained as {slot or 'trained, skipped or never dispatched'}")
        else:
            same = all(getattr(slot, name) == group[name] for name in _STAMPS if name != "attempt")
            self._law("stamps", same, f"{who} was dispatched as {slot}, and is trained as {dict(group)}")
        rewards: Sequence[float | None] = group["rewards"]
        whole = len(rewards) == terms.group_size and all(r is not None and math.isfinite(r) for r in rewards)
        self._law("batch", whole, f"{who} has the rewards {rewards}, expected {terms.group_size} numbers")
        oldest = min([group["generation_version"], *group["token_versions"]])
        stale = versions.staleness(trained_at=now.step, generated_by=oldest)
        fresh = stale <= terms.max_staleness and oldest >= group["generation_version"]
        self._law("staleness", fresh, f"{who} has staleness {stale}, stamps and tokens: {dict(group)}")
        target = group["target_version"]
        in_time = target == now.step if terms.policy == "in_order" else target >= now.step
        self._law("deadline", in_time, f"{who} has target_version {target}")

    def _on_StepEnded(self, event: Mapping[str, Any]) -> None:  # noqa: N802
        now, step = self._now, event["step"]
        self._law("steps", step == now.step, f"step {step} ended after {now.step} steps were taken")
        counted = {name: event["metrics"].get(f"buffer/{name}") for name in _COUNTED}
        if None not in counted.values():
            self.check(BufferStatistics(reserved=0, trained=now.trained, **counted))

    def _on_Synced(self, event: Mapping[str, Any]) -> None:  # noqa: N802
        now = self._now
        now.version += 1
        self._law(
            "sync",
            event["step"] == now.version <= now.step,
            f"the engine got version {event['step']} after {now.version - 1}; {now.step} steps were taken",
        )

    def _on_Validated(self, event: Mapping[str, Any]) -> None:  # noqa: N802
        now, measured = self._now, event["version"]
        later = now.measured < measured <= now.version
        holds = later if self.terms and self.terms.validates_apart else measured == now.version
        self._law("validation", holds, f"measured {measured} after {now.measured}, held was {now.version}")
        now.measured = measured


_STAMPS = ("task", "prompt", "generation_version", "target_version", "attempt")
_RESTORED = ("dispatched", "trained", "skipped", "filtered", "ready", "attempts")
_COUNTED = ("in_flight", "retrying", "ready", "dispatched", "skipped", "filtered", "attempts")


def summary(laws: Laws) -> str:
    """Return one line if all laws hold, and otherwise one line for each violation."""
    if laws.violations:
        return "\n".join(map(str, laws.violations))
    now = laws._now
    return (
        f"{len(LAWS)} laws hold over {laws.steps} steps: {now.dispatched} prompts dispatched, {now.trained} "
        f"trained, {now.skipped} skipped, {now.filtered} filtered, {len(now.open)} unfinished"
    )
