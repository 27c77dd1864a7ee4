"""The tracker ``diagnosis``: finds in recent replies why a run learns nothing, or the wrong thing.

Each task is examined alone, by joint fractions: the mean success and the mean truncation do not show whether
the successes are the truncated replies.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from math import sqrt
from operator import add
from statistics import fmean

from attrs import astuple, define, field, fields, frozen

from grpo_core.contracts.advantages import equal
from grpo_core.contracts.errors import shortened
from grpo_core.contracts.protocols import Tracker
from grpo_core.contracts.records import Group, Rollout, RunInfo
from grpo_core.loop.health import WINDOW, Finding

MANY, ALL_BUT_FEW, NEARLY_ALL = 0.5, 0.9, 0.95
"""Fractions of truncated replies that explain why little is learnt: usually, if replies that end are paid
better, and if no reply is paid."""
PAID_CUT, USUAL = 0.25, 0.1
"""Fractions of the successes that are truncated: the first is a fault, because a model learns not to end long
before all of them are; the second is usual in a healthy run."""
FEWEST, SIGMAS = 16, 5.0
"""Minimum of successes, and of standard deviations above the usual fraction, to rule out chance: a run checks
hundreds of windows."""
ENOUGH = 128
"""Minimum of replies without a part to rule out chance."""
SHOWN, LENGTH = 3, 90
"""Number of replies that a message shows, and the characters of each."""
GAINED, LEFT, SIZE = 0.2, 0.25, 0.05
"""A part of the reward rises by the first.  Another one, which was at least the third, keeps less than the
second fraction of its value, and chance does not explain it."""


@frozen
class RewardPart:
    """A part of the reward, or another metric of the feedback, in the replies of a task."""

    replies: int = 0
    """Replies that have the metric."""
    total: float = 0.0
    some: int = 0
    """Replies in which it is not 0."""
    pays: float = 0.0
    """Above 0 if replies with more of it have larger rewards."""

    @property
    def mean(self) -> float:
        return self.total / max(1, self.replies)

    @classmethod
    def of(cls, name: str, rollouts: Iterable[Rollout]) -> RewardPart:
        pairs = [(r.metrics[name], r.reward) for r in rollouts if name in r.metrics and r.reward is not None]
        total, reward = (sum(column) for column in zip(*pairs, strict=True)) if pairs else (0.0, 0.0)
        together = sum(value * paid for value, paid in pairs) - total * reward / max(1, len(pairs))
        return cls(len(pairs), total, sum(value != 0.0 for value, _ in pairs), together)

    def __add__(self, other: RewardPart) -> RewardPart:
        return RewardPart(*(one + two for one, two in zip(astuple(self), astuple(other), strict=True)))


@frozen(kw_only=True)
class Seen:
    """The replies of a task in a step, or in several."""

    rewards: Sequence[float]
    replies: int
    truncated: int
    """Replies that a token limit cut off."""
    truncated_rewards: float
    """Sum of their rewards."""
    judged: int
    """Replies with a declared success or failure."""
    right: int
    """Successes; where none are declared, replies with a reward above 0."""
    truncated_right: int
    """Truncated successes that are not masked for it."""
    taught: int
    """Replies with an advantage."""
    groups: int
    equal: int
    """Groups whose rewards are equal."""
    parts: Mapping[str, RewardPart]
    unpaid: Sequence[str]
    """The last unpaid replies that were not truncated."""

    @classmethod
    def of(cls, groups: Sequence[Group]) -> Seen:
        """Summarize the groups of a task in one step."""
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        judged = sum(rollout.success is not None for rollout in rollouts)
        right = [each for each in rollouts if each.right]
        unpaid = (each for each in rollouts if each.reward == 0.0 and not each.truncated)
        return cls(
            rewards=[rollout.reward for rollout in rollouts if rollout.reward is not None],
            replies=len(rollouts),
            truncated=sum(rollout.truncated for rollout in rollouts),
            truncated_rewards=sum(rollout.reward or 0.0 for rollout in rollouts if rollout.truncated),
            judged=judged,
            right=len(right),
            truncated_right=sum(rollout.truncated and rollout.advantage is not None for rollout in right),
            taught=sum(map(_taught, rollouts)),
            groups=len(groups),
            equal=sum(equal([r for r in group.rewards if r is not None]) for group in groups),
            parts={n: RewardPart.of(n, rollouts) for n in sorted({n for r in rollouts for n in r.metrics})},
            unpaid=[_text(rollout) for rollout in unpaid][-SHOWN:],
        )

    def __add__(self, other: Seen) -> Seen:
        names = [each.name for each in fields(Seen) if each.name != "parts"]
        parts = {
            name: self.parts.get(name, RewardPart()) + other.parts.get(name, RewardPart())
            for name in sorted({*self.parts, *other.parts})
        }
        return Seen(**{name: getattr(self, name) + getattr(other, name) for name in names}, parts=parts)

    @property
    def declared(self) -> bool:
        """Whether successes are known: they are declared, or rewards are all or nothing."""
        return self.judged > 0 or (len(set(self.rewards)) <= 2 and min(self.rewards, default=0.0) <= 0.0)


def _taught(rollout: Rollout) -> bool:
    tokens = rollout.token_advantages
    return bool(rollout.advantage) or (tokens is not None and bool(tokens.any()))


def _text(rollout: Rollout) -> str:
    return " ".join(str(rollout.messages[-1].get("content") or "").split()) if rollout.messages else ""


def by_task(groups: Sequence[Group]) -> dict[str, Seen]:
    """Summarize the groups of a step, by task."""
    found: dict[str, list[Group]] = {}
    for group in groups:
        found.setdefault(group.prompt.environment, []).append(group)
    return {task: Seen.of(part) for task, part in sorted(found.items())}


@frozen
class _Peak:
    """The moment at which a part was largest."""

    mean: float
    some: int
    paid: bool
    parts: Mapping[str, float]
    right: float


@define
class Replies:
    """Watches the replies of a run's last steps.

    Args:
        taught_by_rewards: whether the loss learns from advantages alone; distillation learns without rewards.
    """

    taught_by_rewards: bool = True
    _steps: deque[Mapping[str, Seen]] = field(init=False, factory=lambda: deque(maxlen=WINDOW))
    _idle: deque[bool] = field(init=False, factory=lambda: deque(maxlen=WINDOW))
    """Whether each of the steps trained no token."""
    _peaks: dict[tuple[str, str], _Peak] = field(init=False, factory=dict)
    _without: dict[tuple[str, str], int] = field(init=False, factory=dict)
    """Number of replies in a row that lack a part."""

    def observe(self, groups: Sequence[Group], metrics: Mapping[str, float]) -> list[Finding]:
        """Take the newest step; return warnings about the last steps."""
        self._steps.append(newest := by_task(groups))
        for task, each in newest.items():
            for name, part in each.parts.items():
                before = self._without.get((task, name), 0)
                self._without[task, name] = 0 if part.some else before + part.replies
        self._idle.append(0 in (metrics.get("rows"), metrics.get("tokens/trained")))
        if len(self._steps) < WINDOW:
            return []
        tasks = sorted({task for step in self._steps for task in step})
        seen = {task: reduce(add, [step[task] for step in self._steps if task in step]) for task in tasks}
        found = self._nothing(seen)
        for task, last in newest.items():
            gamed = self._gamed(task, seen[task])
            if not found:
                found += _of_truncated(task, seen[task], last)
                found += [] if gamed else self._never(task, seen[task])
            found += gamed
        return found

    def _nothing(self, seen: Mapping[str, Seen]) -> list[Finding]:
        """Return a warning about a run or a task without a learning signal."""
        last = f"the last {WINDOW} steps trained nothing"
        idle = {task: each for task, each in seen.items() if self.taught_by_rewards and not each.taught}
        if all(self._idle) or len(idle) == len(seen):
            why = "; ".join(self._why(task, each) for task, each in seen.items())
            return [_warning("rows", f"{last}: {why}")]
        return [
            _warning(f"rows/{task}", f"{last} of a task: {self._why(task, each)}")
            for task, each in idle.items()
            if each.replies >= ENOUGH and not any(each.rewards)
        ]

    def _missing(self, task: str, seen: Seen) -> str:
        """Return a warning about the parts that no recent reply has; "" if there are none."""
        lacking = [name for name, part in seen.parts.items() if not part.some]
        missing = [name for name in lacking if self._without[task, name] >= ENOUGH]
        if not missing:
            return ""
        replies = min(self._without[task, name] for name in missing)
        return (
            f"no reply in {replies} had {' or '.join(missing)}: nothing can be learned about it. Ask for it "
            "in the prompts, show it in an example, or reward a step towards it"
        )

    def _never(self, task: str, seen: Seen) -> list[Finding]:
        """Return a warning about a part that no reply has, if no reply is right either."""
        none_right = not seen.right if seen.judged else max(seen.rewards, default=0.0) <= MANY
        if none_right and (missing := self._missing(task, seen)):
            return [_warning(f"never/{task}", f"task {task!r}: {missing}{_shown(seen)}")]
        return []

    def _gamed(self, task: str, seen: Seen) -> list[Finding]:
        """Return a warning for each paid part that has vanished while another one rose, without successes."""
        found, right = [], seen.right / seen.replies if seen.declared else 0.0
        means = {name: part.mean for name, part in seen.parts.items()}
        for name, part in seen.parts.items():
            peak = self._peaks.get((task, name))
            if peak is None or part.mean > peak.mean:
                self._peaks[task, name] = _Peak(part.mean, part.some, part.pays > 0, means, right)
                continue
            surely = peak.some - part.some > 3 * sqrt(peak.some)
            if surely and peak.paid and peak.mean >= SIZE and part.mean <= LEFT * peak.mean:
                gains = {each: means[each] - then for each, then in peak.parts.items() if each in means}
                rose = max(gains, key=lambda each: gains[each])
                if gains[rose] >= GAINED and right <= peak.right + SIZE and self._peaks[task, rose].paid:
                    reward = fmean(seen.rewards)
                    message = (
                        f"task {task!r}: {name} fell from {peak.mean:.3g} to {part.mean:.3g} while {rose} "
                        f"rose from {peak.parts[rose]:.3g} to {means[rose]:.3g} (mean reward {reward:.3g}): "
                        "the model may learn one part of the reward at the cost of the other; lower the "
                        f"weight of {rose}, or give it only to correct replies, and read rollouts/ of the run"
                    )
                    found.append(_warning(f"gamed/{task}/{name}", message))
        return found

    def _why(self, task: str, seen: Seen) -> str:
        """Explain why the groups of a task had nothing to train."""
        cut_off, reward = seen.truncated / seen.replies, fmean(seen.rewards) if seen.rewards else None
        rewards = "no rewards" if reward is None else f"equal rewards (mean reward {reward:.3g})"
        reasons = [f"{seen.equal / seen.groups:.0%} of the groups of task {task!r} have {rewards}"]
        if cut_off >= NEARLY_ALL or (cut_off >= MANY and reward != 0):
            paid = seen.declared and seen.truncated_right >= MANY * seen.replies
            reasons.append(
                f"{cut_off:.0%} of its rollouts are cut off by a token limit: "
                + ("do not reward cut-off text (episode.truncated)" if paid else "raise rollout.max_tokens")
            )
        elif reward == 0:
            ended = (
                f", also none of the {1 - cut_off:.0%} that ended by themselves" if cut_off >= MANY else ""
            )
            never = f"; {missing}" if (missing := self._missing(task, seen)) else ""
            reasons.append(
                f"no reply was rewarded{ended}: their format may not be the one that evaluate expects, or "
                f"the task is too hard; read rollouts/ of the run{never}{_shown(seen)}"
            )
        elif seen.equal == seen.groups:
            reasons.append(
                "its prompts are all too hard or all too easy for the model, or evaluate gives everything "
                "the same reward; read rollouts/ of the run"
            )
        else:
            reasons.append("the advantage function gives 0 or None to all of its rollouts")
        return ", and ".join(reasons)


class Diagnosis(Tracker):
    """Warns of what ``Replies`` finds after each step."""

    def __init__(self, run: RunInfo) -> None:
        self._run = run
        self._replies = Replies(not run.config.get("scores"))
        self._groups: Sequence[Group] = ()

    def rollouts(self, step: int, groups: Sequence[Group]) -> None:
        self._groups = groups

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        if "rows" in values:  # those of a step, and of no validation
            for found in self._replies.observe(self._groups, values):
                self._run.warn(found.message, cause=found.metric, step=step)
            self._groups = ()  # their tokens may be in a data plane, which holds them as long


def _warning(cause: str, message: str) -> Finding:
    return Finding(metric=cause, value=0.0, fatal=False, message=message)


def _of_truncated(task: str, seen: Seen, last: Seen) -> list[Finding]:
    """Return a warning about truncated replies."""
    who = f"task {task!r}: of the last {WINDOW} steps"
    chance = USUAL * seen.right + SIGMAS * sqrt(USUAL * (1 - USUAL) * seen.right)
    many = seen.truncated_right >= max(chance, PAID_CUT * seen.right)
    if seen.declared and seen.right >= FEWEST and many and last.truncated_right >= PAID_CUT * last.right:
        message = (
            f"{who} {seen.truncated_right} of {seen.right} successes were cut off by a token limit "
            f"({last.truncated_right} of {last.right} in the newest): unfinished text is rewarded, and the "
            "model may learn not to end. Do not reward cut text (episode.truncated in evaluate), or leave it "
            'out (rollout.truncated = "mask"); a higher rollout.max_tokens alone feeds it'
        )
        return [_warning(f"accuracy_finished/{task}", message)]
    cut, paid, ended = seen.truncated, seen.truncated_rewards, seen.replies - seen.truncated
    pays = ended and (sum(seen.rewards) - paid) / ended > paid / max(1, cut)
    # a model learns to end where that pays
    if min(cut / seen.replies, last.truncated / last.replies) >= (ALL_BUT_FEW if pays else MANY):
        message = (
            f"{who} {cut / seen.replies:.0%} of the replies are cut off by a token limit, and their "
            "rewards are for unfinished text: raise rollout.max_tokens, or ask for shorter replies"
        )
        return [_warning(f"truncated/{task}", message)]
    return []


def _shown(seen: Seen) -> str:
    replies = ", ".join(repr(shortened(reply, LENGTH)) for reply in seen.unpaid[-SHOWN:])
    return f"; unrewarded replies that ended: {replies}" if replies else ""
