"""Statistics of the changes between two judgements of rollouts: means, successes, the largest changes."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attrs import define, field

from grpo_core.contracts.errors import one_line, shortened
from grpo_plugin_audit.rejudging import Judged

LARGEST = 10
"""Number of changes shown for a task."""
ERRORS = 100
"""Largest number of different errors that are counted."""
IDS = 5
"""Number of prompt ids shown."""


@define(eq=False)
class TaskDifference:
    """The difference between two judgements of a task's rollouts."""

    env: str
    """Name of the environment that judged the second time."""
    judged: int = 0
    """Number of rollouts that were judged again."""
    scored: int = 0
    """Number of rollouts with a reward in both judgements; means are taken over these."""
    higher: int = 0
    lower: int = 0
    success_only: int = 0
    """Number of rollouts whose success changed and whose reward did not."""
    now_unscored: int = 0
    now_scored: int = 0
    failed: int = 0
    """Number of rollouts with a reward before and an error now."""
    answers_differ: int = 0
    unfinished: int = 0
    rewards: list[float] = field(factory=lambda: [0.0, 0.0])
    """Sums of the rewards before and after."""
    with_success: int = 0
    successes: list[int] = field(factory=lambda: [0, 0])
    groups: int = 0
    teaching: list[int] = field(factory=lambda: [0, 0])
    """Number of groups with unequal rewards, before and after: only these have a training signal."""
    errors: Counter[str] = field(factory=Counter)
    """Number of rollouts that are unscored now, by error."""
    largest: list[tuple[int, Judged]] = field(factory=list)
    """Step and rollout of the largest change of each group, in descending order; the first of equal ones."""

    @property
    def changed(self) -> int:
        """Number of rollouts whose reward or success changed."""
        return self.higher + self.lower + self.success_only + self.now_unscored + self.now_scored

    def add(self, step: int, group: Sequence[Judged]) -> None:
        """Add the rollouts of a group."""
        for each in group:
            self._count(each)
        if changed := [(step, each) for each in group if each.changed]:
            worst = max(changed, key=lambda one: one[1].change)
            self.largest = heapq.nlargest(LARGEST, [*self.largest, worst], key=lambda one: one[1].change)
        self.groups += 1
        for when, rewards in enumerate(([e.stored.reward for e in group], [e.reward for e in group])):
            self.teaching[when] += len({reward for reward in rewards if reward is not None}) > 1

    def _count(self, each: Judged) -> None:
        before, after = each.stored.reward, each.reward
        self.judged += 1
        self.answers_differ += each.answers_differ
        self.unfinished += each.unfinished
        self.now_unscored += before is not None and after is None
        self.now_scored += before is None and after is not None
        self.failed += before is not None and each.error is not None
        if each.error and (len(self.errors) < ERRORS or each.error in self.errors):
            self.errors[each.error] += 1
        if before is None or after is None:
            return
        self.scored += 1
        self.rewards = [self.rewards[0] + before, self.rewards[1] + after]
        if each.changed:
            self.higher += each.moved and after > before
            self.lower += each.moved and after < before
            self.success_only += not each.moved
        if each.stored.success is not None and each.success is not None:
            self.with_success += 1
            self.successes = [self.successes[0] + each.stored.success, self.successes[1] + each.success]

    def mean(self, when: int) -> float | None:
        """Return the mean reward before (0) or after (1), or None without rollouts."""
        return self.rewards[when] / self.scored if self.scored else None

    def accuracy(self, when: int) -> float | None:
        """Return the share of successes before (0) or after (1); None if no success is declared."""
        return self.successes[when] / self.with_success if self.with_success else None

    def as_dict(self) -> dict[str, Any]:
        """Return all statistics as JSON values."""
        counts = ("judged", "scored", "changed", "higher", "lower", "success_only", "now_unscored")
        more = ("now_scored", "failed", "answers_differ", "unfinished", "groups")
        return {
            "env": self.env,
            **{name: getattr(self, name) for name in (*counts, *more)},
            "reward": {"before": self.mean(0), "after": self.mean(1)},
            "accuracy": {"before": self.accuracy(0), "after": self.accuracy(1)},
            "groups_with_different_rewards": {"before": self.teaching[0], "after": self.teaching[1]},
            "errors": dict(self.errors.most_common()),
            "largest_changes": [_as_dict(*each) for each in self.largest],
        }


def _as_dict(step: int, each: Judged) -> dict[str, Any]:
    return {
        "step": step,
        "prompt": each.prompt.id,
        "seed": each.stored.seed,
        "before": each.stored.reward,
        "after": each.reward,
        "reply": _reply(each),
        "error": each.error,
    }


def _reply(each: Judged) -> str:
    last = (each.stored.messages or ({},))[-1]
    return one_line(last.get("content") or "")


# ---------------------------------------------------------------------------------- text


def shown(
    differences: Mapping[str, TaskDifference],
    missing: Mapping[str, Sequence[str]],
    others: Mapping[str, Sequence[str]],
    width: int,
) -> str:
    """Format the differences of all tasks for a terminal of this width."""
    blocks = []
    for task, difference in differences.items():
        lines = [f"{task}, judged by {difference.env}"]
        if difference.judged:
            lines += _table(difference)
            lines += _changes(difference, width)
        lines += _notes(difference, missing.get(task, ()), others.get(task, ()))
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _table(difference: TaskDifference) -> Iterator[str]:
    def row(name: str, before: str, after: str, change: str = "") -> str:
        return f"  {name:<22}{before:>10}{after:>10}{change:>10}".rstrip()

    yield row("", "before", "after", "change")
    if (was := difference.mean(0)) is not None and (now := difference.mean(1)) is not None:
        yield row("mean reward", f"{was:.4g}", f"{now:.4g}", f"{now - was:+.4g}")
    if (was := difference.accuracy(0)) is not None and (now := difference.accuracy(1)) is not None:
        yield row("accuracy", f"{was:.1%}", f"{now:.1%}", f"{100 * (now - was):+.1f}")
    was, now = difference.teaching
    yield row("groups that teach", f"{was:,}", f"{now:,}", f"{now - was:+,}")
    changes = ", ".join(
        f"{number:,} {what}"
        for number, what in (
            (difference.higher, "higher"),
            (difference.lower, "lower"),
            (difference.success_only, "another success"),
            (difference.now_scored, "newly scored"),
            (difference.now_unscored, "no longer scored"),
        )
        if number
    )
    counts = f": {changes}" if changes else ""
    yield f"  {difference.changed:,} of {difference.judged:,} rollouts change{counts}"


def _changes(difference: TaskDifference, width: int) -> Iterator[str]:
    changes = difference.largest
    if not changes:
        return
    yield f"\n  the largest changes of {len(changes)} groups:" if len(changes) > 1 else ""
    for step, each in changes:
        line = f"  step {step}, prompt {shortened(each.prompt.id, 40)}: {_value(each.stored.reward)} -> "
        line += _value(each.reward)
        why = each.error or _reply(each)
        if len(line) + 30 <= width:
            yield shortened(f"{line}  {why}", width)
        else:
            yield from (line, shortened(f"      {why}", max(30, width)))


def _value(reward: float | None) -> str:
    return "unscored" if reward is None else f"{reward:.4g}"


def _notes(difference: TaskDifference, missing: Sequence[str], others: Sequence[str]) -> Iterator[str]:
    if missing:
        yield f"  not judged: {_prompts(missing)} no longer in the task"
    if others:
        yield f"  not judged: {_prompts(others)} with another text now"
    if difference.answers_differ:
        yield (
            f"  {difference.answers_differ:,} rollouts: the environment now says something else between two "
            "turns"
        )
    if difference.unfinished:
        yield f"  {difference.unfinished:,} rollouts: the environment would now continue after the last turn"
    if difference.failed:
        yield f"  {difference.failed:,} rollouts had a reward, and could not be judged:"
        for error, number in difference.errors.most_common(3):
            yield f"    {number:,} times: {one_line(error)}"


def _prompts(ids: Sequence[str]) -> str:
    named = ", ".join(shortened(id, 40) for id in ids[:IDS])
    more = f", and {len(ids) - IDS:,} more" if len(ids) > IDS else ""
    return f"{len(ids):,} {'prompt' if len(ids) == 1 else 'prompts'} ({named}{more})"
