"""Checks from the events that a run keeps the laws, whatever its schedule and its faults.

It reads the events of ``events.jsonl`` and keeps its own account of every slot; it reads neither the buffer
nor the pipeline.  The simulation feeds it while the pipeline runs, ``grpo-core verify`` from the file of a
past run.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from statistics import fmean
from typing import Any

from attrs import define, evolve, field, frozen

from grpo_core.loop.buffer import COUNTED, BufferStatistics
from grpo_core.loop.dynamic import EQUAL_REWARDS, short_name
from grpo_core.loop.versions import Interval

LAWS = {
    "staleness": "no trained token is older than max_staleness steps, older than its slot, or newer than the "
    "weights that train on it",
    "batch": "a step trains exactly prompts_per_step groups of group_size rollouts, each with a reward; with "
    'rollout.truncated = "unscored" those that a token limit cut off have none',
    "once": "only finished groups are trained, and none twice",
    "deadline": "a group is trained at its target_version at the latest; in_order: exactly then",
    "steps": "steps are consecutive, and each ends once before the next one begins",
    "metrics": "the metrics of a step agree with the groups that it trained",
    "stamps": "a slot is stamped with the version that the engine holds and its farthest deadline",
    "stream": "the places of the stream are filled one after the other, and each keeps its prompt; a resumed "
    "run draws the same prompts of a task in the same order",
    "epoch": "each prompt is offered once an epoch, and is dispatched, or passed over with a reason",
    "retries": "a prompt is skipped after max_retries further attempts, not sooner and not later",
    "conservation": "dispatched = trained + skipped + filtered + in flight + retrying + ready",
    "filter": "a group is filtered by a filter of the configuration, which says why",
    "memory": "at most (max_staleness + 1) * prompts_per_step slots are outstanding",
    "sync": "the engine gets each version once, in order, after the step that made it",
    "validation": "validation measures the version that its engine holds, one after the other, by the sets "
    "that are due, and leaves out no version that is due",
    "checkpoint": "a cut is taken when it is due, and is saved before the next one",
    "resume": "a run continues from a cut that was saved, and only what was unfinished comes again",
    "end": "a run that is finished has trained every step and has nothing left over; nothing follows its end",
    "record": "the events have at least one step, and each has the fields of its kind",
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
    """The configuration that the laws depend on."""

    prompts_per_step: int
    max_staleness: int
    num_steps: int
    policy: str
    max_retries: int
    group_size: int
    unscored: bool
    """Whether a rollout that a token limit cut off has no reward."""
    validates_apart: bool
    """Whether validation has its own engine."""
    validations: Mapping[str, Interval]
    """When each validation set is measured; the tasks are the set ``""``."""
    save_every: int
    filters: frozenset[str] = frozenset()
    """Names of the filters, without their plugins or files."""

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
            unscored=config["rollout"].get("truncated") == "unscored",
            validates_apart="engine" in config.get("validation", {}),
            validations=_validations(config.get("validation", {})),
            save_every=config.get("checkpoint", {}).get("every", 0),
            filters=frozenset(
                [
                    *map(short_name, config.get("filters", {})),
                    *([EQUAL_REWARDS] if config.get("dynamic_sampling", {}).get("enabled") else []),
                ]
            ),
        )

    def due(self, version: int) -> set[str]:
        """Return the validation sets that are due for a version."""
        return {name for name, when in self.validations.items() if when.due(version, last=self.num_steps)}


def _validations(section: Mapping[str, Any]) -> dict[str, Interval]:
    """Return when each validation set is measured; keys that a set lacks come from the section."""
    every, start = section.get("every", 0), section.get("at_start", True)
    sets = section.get("sets", {}).items()
    own = {name: Interval(one.get("every", every), one.get("at_start", start)) for name, one in sets}
    return {"": Interval(every, start), **own}


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
    """Whether the slot was unfinished at the cut; it is offered again unchanged."""


@define
class _Account:
    """The state of the run at one moment, from which a resumed run starts."""

    step: int = 0
    """Number of steps that were taken."""
    ended: int = 0
    """Number of steps that ended."""
    cut: int = 0
    """Step of the newest cut."""
    saving: int | None = None
    """Step of the cut that is being written."""
    version: int = 0
    """Version that the engine holds."""
    validated: int = -1
    """Version that the newest validation measured."""
    due: tuple[int, ...] = ()
    """Versions whose validation is due and not yet seen."""
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
    statistics of the same moment.  Broken laws are collected in ``violations``.
    """

    def __init__(self) -> None:
        self.violations: list[Violation] = []
        self.steps = 0
        """Number of steps that were checked, including steps of lives that were cut off."""
        self.terms: Terms
        """The terms of the current life; set by the first event RunStarted."""
        self._over = False
        """Whether the current life has ended."""
        self._groups: Sequence[Mapping[str, Any]] = ()
        """The groups of the newest step."""
        self._slots: dict[int, _Open] = {}
        """Their slots."""
        self._manifests: dict[int, str] = {}
        """Digest of each saved checkpoint's manifest, by step, where the events have it."""
        self._now = _Account()
        self._cuts: dict[int, list[_Account]] = defaultdict(list)
        """Cuts by step; a step may be saved again, and a resumed run may find either cut."""
        self._stream: dict[str, array[int]] = defaultdict(lambda: array("Q"))
        """Hashes of the prompts of each task, in the order in which they were drawn."""
        self._offered: dict[str, array[int]] = defaultdict(lambda: array("Q"))
        """Places of the prompts of each task, in the order in which they were offered."""
        self._epoch: dict[str, bytearray] = {}
        """Whether the newest epoch of each task has offered each of its prompts."""
        self._expected: dict[str, Counter[str]] = defaultdict(Counter)
        """Prompts that were chosen and are to be dispatched next."""

    def observe(self, event: Mapping[str, Any]) -> None:
        """Account for an event.  An event without a required field breaks the law ``record``."""
        try:
            self._observe(event)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            name = event.get("event") if isinstance(event, Mapping) else None
            self._broken("record", f"{name or 'a line'}: {type(error).__name__}: {error}")

    def _observe(self, event: Mapping[str, Any]) -> None:
        name = event["event"]
        watch = getattr(self, f"_on_{name}", None)
        if watch is None:
            return
        begun = hasattr(self, "terms")
        if name == "RunStarted":
            self._over = False
        elif name == "RunEnded" and not begun:
            return  # a start that failed
        elif not begun or self._over:
            self._broken("end", f"{name} comes {'after RunEnded' if self._over else 'before RunStarted'}")
            if not begun:
                return
        watch(event)

    def close(self) -> None:
        """Record a violation after the last event if nothing was checked."""
        if not self.steps:
            self._broken("record", "there is no step, so nothing was checked")

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
        step = event["step"]
        found = event["buffer"] | {name: its for name, its in event.items() if name == "validated"}
        cuts = self._cuts[step] if event["resumed"] else [_Account()]
        known = [name for name in _RESTORED if name in found]
        fits = [cut for cut in cuts if all(getattr(cut, n) == found[n] for n in known)]
        cut = fits[-1] if fits else None  # one that was saved again was replaced
        if cut is None:
            saved = [{n: getattr(cut, n) for n in known} for cut in cuts]
            self._broken("resume", f"continues at step {step} with {found}; saved were {saved}")
            cut = _Account(step=step, ended=step, cut=step, version=step)
        self._cuts = defaultdict(list, {at: cuts for at, cuts in self._cuts.items() if at < step})
        self._cuts[step] = [cut]
        known_manifest, manifest = self._manifests.get(step), event.get("manifest")
        same = not known_manifest or not manifest or known_manifest == manifest
        self._law("resume", same, f"continues from a checkpoint of step {step} that the run did not save")
        self._now = cut.copy()
        self._now.saving = None
        self._now.version = step  # a run that stops saves a version that its engine may not hold yet
        self._expected.clear()
        fresh = not event["resumed"] and self.terms.due(0)
        unsynced = cut.version < step and self.terms.due(step)  # then it was not validated before the cut
        due = {*cut.due, *([step] if unsynced else [])}
        self._now.due = (0,) if fresh else tuple(version for version in due if version == step)
        self._now.open = {
            id: slot if slot.ready else evolve(slot, resumed=True) for id, slot in cut.open.items()
        }

    def _on_Saving(self, event: Mapping[str, Any]) -> None:  # noqa: N802
        now, leaves = self._now, bool(event.get("reason"))
        # the engine of a run that stops gets no more weights; an earlier cut may be why it failed
        synced = now.step - now.version <= (2 if leaves else 0)
        self._law(
            "resume",
            event["step"] == now.step and synced,
            f"a cut of step {event['step']} after {now.step} steps, with the engine at {now.version}",
        )
        self._law(
            "checkpoint",
            (now.saving is None or leaves) and now.ended == now.step,
            f"a cut of step {event['step']} after {now.ended} ends of steps; being written: {now.saving}",
        )
        now.cut = now.saving = event["step"]
        self._manifests.pop(event["step"], None)
        self._cuts[event["step"]].append(now.copy())

    def _on_Saved(self, event: Mapping[str, Any]) -> None:  # noqa: N802
        now, step = self._now, event["step"]
        self._law(
            "checkpoint", step == now.saving, f"step {step} is saved, and {now.saving} was being written"
        )
        now.saving = None
        if event.get("manifest"):
            self._manifests[step] = event["manifest"]

    def _on_RunEnded(self, event: Mapping[str, Any]) -> None:  # noqa: N802
        self._over = True
        if event["reason"] != "finished":  # a second ctrl-C interrupts without a checkpoint
            return
        now = self._now
        saved = now.cut == now.step and now.saving is None
        self._law("checkpoint", saved, f"ended after {now.step} steps; the newest cut is {now.cut}")
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
        terms, now = self.terms, self._now
        held = len(now.open) + (now.step - now.version) * terms.prompts_per_step
        bound = (terms.max_staleness + 1) * terms.prompts_per_step
        self._law("memory", held <= bound, f"{held} slots are held")

    def _dispatch(self, given: Mapping[str, Any]) -> None:
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
            # a slot that failed before the cut comes as a further attempt, one in flight as the same
            attempts = {before.attempt, before.attempt + 1} if before.resumed else {before.attempt + 1}
            self._law("retries", slot.attempt in attempts, f"{who} came after attempt {before.attempt}")
        self._law("retries", slot.attempt <= self.terms.max_retries, f"{who} exceeds max_retries")
        self._check_stamps(slot, given["kept"], before, who)
        now.open[id] = slot
        now.attempts += 1

    def _draw(self, slot: _Open, who: str) -> None:
        """Check that the n-th prompt of a task is the same in each life, whatever the sampler."""
        if self._expected[slot.task][slot.prompt] > 0:  # it was counted when it was offered
            self._expected[slot.task][slot.prompt] -= 1
            return
        left = +self._expected[slot.task]
        self._law("epoch", not left, f"{who} was not drawn; {dict(left)} were, and were not dispatched")
        place, drawn = self._now.drawn[slot.task], self._stream[slot.task]
        drawn.extend([_UNKNOWN] * (place - len(drawn)))
        prompt = int.from_bytes(blake2b(slot.prompt.encode(errors="replace"), digest_size=8).digest())
        self._now.drawn[slot.task] += 1
        if place == len(drawn):
            drawn.append(prompt)
        else:
            same = drawn[place] in (prompt, _UNKNOWN)
            self._law("stream", same, f"{who}: the previous process drew another prompt here")

    def _check_stamps(self, slot: _Open, kept: int, before: _Open | None, who: str) -> None:
        v, target = slot.generation_version, slot.target_version
        if kept:
            same = before is not None and (before.generation_version, before.target_version) == (v, target)
            self._law("stamps", same, f"{who} keeps finished rollouts, but not their stamps")
            return
        self._law("stamps", v == self._now.version, f"{who} has {v}, the engine {self._now.version}")
        farthest = v + self.terms.max_staleness
        late = target > farthest or (self.terms.policy == "deadline" and target != farthest)
        self._law("stamps", not late, f"{who} of version {v} has the deadline {target}")

    def _on_PromptsPassedOver(self, event: Mapping[str, Any]) -> None:  # noqa: N802
        now, task, size = self._now, event["task"], event["size"]
        offered, passed = event["offered"], event["passed_over"]
        known, seen = self._offered[task], self._epoch.setdefault(task, bytearray(size))
        for index in offered:
            place = now.drawn[task]
            now.drawn[task] += 1
            known.extend([_UNKNOWN] * (place - len(known)))
            if place < len(known):
                same = known[place] in (index, _UNKNOWN)
                self._law("stream", same, f"task {task!r}: the previous process got {known[place]} here")
                continue
            known.append(index)
            if place % size == 0:
                self._epoch[task] = seen = bytearray(size)
            self._law("epoch", not seen[index], f"task {task!r}: prompt {index} is offered twice in an epoch")
            seen[index] = 1
        whole = len(offered) == len(event["drawn"]) + len(passed) and all(reason for _, reason in passed)
        self._law("epoch", whole, f"task {task!r}: {offered} were offered, {event['drawn']} drawn")
        self._expected[task] += Counter(event["drawn"])

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
        if name := event.get("filter"):
            known = name in self.terms.filters and bool(event.get("reason"))
            self._law("filter", known, f"slot {event['slot']} is filtered by {name}: {event.get('reason')!r}")

    def _on_PromptSkipped(self, event: Mapping[str, Any]) -> None:  # noqa: N802
        slot = self._now.open.pop(event["slot"], None)
        self._now.skipped += 1
        last = slot is not None and not slot.ready and slot.attempt == self.terms.max_retries
        self._law("retries", last, f"slot {event['slot']} is skipped as {slot}")

    # ------------------------------------------------------------------------------ steps

    def _on_GroupsReady(self, event: Mapping[str, Any]) -> None:  # noqa: N802
        now, terms = self._now, self.terms
        self._law("steps", event["step"] == now.step, f"step {event['step']} comes after {now.step} steps")
        self._law("steps", now.ended == now.step, f"step {now.step} begins, and {now.ended} steps have ended")
        self._check_due(event["step"])
        self._groups, self._slots = event["groups"], {}
        count = len(event["groups"])
        self._law("batch", count == terms.prompts_per_step, f"it trains {count} groups")
        for group in event["groups"]:
            self._train(group)
        now.step += 1
        now.trained += count
        now.ready -= count
        self.steps += 1

    def _on_GroupsReturned(self, event: Mapping[str, Any]) -> None:  # noqa: N802
        now, slots = self._now, set(event["slots"])
        if slots & self._slots.keys():
            unfinished = self._slots.keys() <= slots and now.ended < now.step
            self._law("steps", unfinished, f"step {now.step} is undone, of which {now.ended} had ended")
            now.open |= self._slots
            now.ready += len(self._slots)
            now.step -= 1
            now.trained -= len(self._slots)
            self.steps -= 1
        for id in event["slots"]:
            slot = now.open.get(id)
            if slot is None or not slot.ready:
                self._broken("once", f"slot {id} comes back as {slot or 'trained, skipped or filtered'}")
                continue
            now.open[id] = evolve(slot, ready=False, resumed=True)
            now.ready -= 1

    def _train(self, group: Mapping[str, Any]) -> None:
        now, terms, who = self._now, self.terms, f"slot {group['slot']} (prompt {group['prompt']!r})"
        slot = now.open.pop(group["slot"], None)
        if slot is None or not slot.ready:
            self._broken("once", f"{who} is trained as {slot or 'trained, skipped or never dispatched'}")
        else:
            self._slots[group["slot"]] = slot
            same = all(getattr(slot, name) == group[name] for name in _STAMPS if name != "attempt")
            self._law("stamps", same, f"{who} was dispatched as {slot}, and is trained as {dict(group)}")
        rewards: Sequence[float | None] = group["rewards"]
        numbers = (terms.unscored if reward is None else math.isfinite(reward) for reward in rewards)
        whole = len(rewards) == terms.group_size and all(numbers)
        self._law("batch", whole, f"{who} has the rewards {rewards}, expected {terms.group_size} numbers")
        tokens: Sequence[int] = group["token_versions"]
        oldest = min([group["generation_version"], *tokens])
        stale = now.step - oldest
        fresh = stale <= terms.max_staleness and oldest >= group["generation_version"]
        fresh = fresh and bool(tokens) and max(tokens) <= now.step
        self._law("staleness", fresh, f"{who} has staleness {stale}, stamps and tokens: {dict(group)}")
        target = group["target_version"]
        in_time = target == now.step if terms.policy == "in_order" else target >= now.step
        self._law("deadline", in_time, f"{who} has target_version {target}")

    def _check_due(self, step: int) -> None:
        """Check at the start of a step that nothing was skipped before it.

        A version is measured before the step after the next begins, on its own engine one validation later.
        """
        now, every = self._now, self.terms.save_every
        saved = not every or step % every or now.cut == step
        self._law("checkpoint", bool(saved), f"step {step} was to be saved; the newest cut is {now.cut}")
        late = [version for version in now.due if version < step or not version]
        late = late[:-1] if self.terms.validates_apart else late
        self._law("validation", not late, f"step {step} begins, and version {late} was not measured")

    def _on_StepEnded(self, event: Mapping[str, Any]) -> None:  # noqa: N802
        now, step, metrics = self._now, event["step"], event["metrics"]
        self._law("steps", step == now.step, f"step {step} ended after {now.step} steps were taken")
        self._law("steps", step == now.ended + 1, f"step {step} ended after {now.ended} steps had ended")
        now.ended = step
        counted = {name: metrics.get(f"buffer/{name}") for name in COUNTED}
        if None in counted.values():
            self._broken("conservation", f"step {step} lacks counts of the buffer: {counted}")
        else:
            self.check(BufferStatistics(reserved=0, trained=now.trained, **counted))
        expected = _metrics(self._groups, step - 1)
        reported = {
            name: value for name, value in metrics.items() if name.startswith("groups/") or name in expected
        }
        same = reported.keys() == expected.keys() and all(
            value is not None and math.isclose(value, expected[name], rel_tol=1e-9, abs_tol=1e-12)
            for name, value in reported.items()
        )
        self._law("metrics", same, f"the groups give {expected}, the metrics say {reported}")

    def _on_Synced(self, event: Mapping[str, Any]) -> None:  # noqa: N802
        now = self._now
        now.version += 1
        self._law(
            "sync",
            event["step"] == now.version <= now.step,
            f"the engine got version {event['step']} after {now.version - 1}; {now.step} steps were taken",
        )
        if self.terms.due(now.version):
            now.due = (*now.due, now.version)

    def _on_Validated(self, event: Mapping[str, Any]) -> None:  # noqa: N802
        now, measured = self._now, event["version"]
        fits = measured <= now.version if self.terms.validates_apart else measured == now.version
        holds = fits and now.validated < measured
        self._law("validation", holds, f"measured {measured} after {now.validated}, held was {now.version}")
        due, found = self.terms.due(measured), set(event["results"])
        tasks = found - set(self.terms.validations)
        complete = due - {""} == found - tasks and ("" in due or not tasks)
        self._law("validation", complete, f"version {measured}: measured by {found}, due by {due}")
        now.validated = measured
        now.due = tuple(version for version in now.due if version > measured)


def _metrics(groups: Sequence[Mapping[str, Any]], step: int) -> dict[str, float]:
    """Return the metrics of a step that follow from the groups of GroupsReady."""
    rewards: dict[str, list[float]] = defaultdict(list)
    counts: dict[str, float] = defaultdict(float)
    for group in groups:
        rewards[group["task"]] += [reward for reward in group["rewards"] if reward is not None]
        counts[group["task"]] += 1
    versions = [version for group in groups for version in group["token_versions"]]
    return {
        **{f"groups/{task}": count for task, count in counts.items()},
        **{f"reward/{task}": fmean(values) for task, values in rewards.items() if values},
        "staleness_max": float(step - min(versions)) if versions else 0.0,
    }


_UNKNOWN = 2**64 - 1
"""Stands for a draw that no event mentions, because another sampler made it."""
_STAMPS = ("task", "prompt", "generation_version", "target_version", "attempt")
_RESTORED = ("dispatched", "trained", "skipped", "filtered", "ready", "attempts", "validated")


def summary(laws: Laws) -> str:
    """Return one line if all laws hold, and otherwise one line for each violation."""
    if laws.violations:
        return "\n".join(map(str, laws.violations))
    now = laws._now
    again = laws.steps - now.step
    twice = f" and {again} that a resume has repeated" if again else ""
    return (
        f"{len(LAWS)} laws hold over {now.step} steps{twice}: {now.dispatched} prompts dispatched, "
        f"{now.trained} trained, {now.skipped} skipped, {now.filtered} filtered, {len(now.open)} unfinished"
    )
