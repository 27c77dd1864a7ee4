"""Dynamic sampling: groups that should not train are filtered and replaced.  Pure.

A group whose rewards are all equal has no advantages.  It is filtered, whole, and its slot is free for
another prompt, so that each step trains ``prompts_per_step`` groups with a learning signal (DAPO, arXiv
2503.14476, section 3.2).  Other filters (``[filters]``) reject groups for other reasons: functions of a
finished group and options that return why the group is rejected, or None.  They see the environment's
rewards, unshaped.  Plugins add more with ``grpo_filters``.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping

from attrs import define, field, frozen

from grpo_core.contracts.advantages import equal
from grpo_core.contracts.errors import PluginError, SamplingError
from grpo_core.contracts.records import Group

EQUAL_REWARDS = "equal_rewards"
"""Name of the filter that ``dynamic_sampling.enabled`` stands for."""


def short_name(name: str) -> str:
    """Return the name of a filter without its plugin or file, as used in names of metrics."""
    return name.rpartition(":")[2].replace("/", "_")


def check_equal_rewards(*, group_size: int, tolerance: float = 0.0) -> None:
    if tolerance < 0:
        raise ValueError(f"tolerance is {tolerance}; expected 0 or more")


def equal_rewards(group: Group, *, tolerance: float = 0.0) -> str | None:
    """Filter a group whose rewards are all equal, unless the loss learns from hints of its rollouts.

    It has no advantages (DAPO, arXiv 2503.14476).

    Args:
        group: a finished group.
        tolerance: rewards that differ by no more than this are equal.
    """
    rewards = [reward for reward in group.rewards if reward is not None]
    hinted = any(rollout.hint_ids for rollout in group.rollouts)
    return "its rewards are equal" if equal(rewards, tolerance) and not hinted else None


@frozen
class Rejection:
    """Why a group does not train."""

    filter: str
    """Name of the filter."""
    reason: str


@define(kw_only=True)
class DynamicSampling:
    """Decides which groups train, and counts the others.

    Args:
        tolerance: rewards of a group that differ by no more than this are equal; None looks at no rewards.
        filters: further filters by name, in order; each returns why a group does not train, or None.
        max_extra_groups: groups filtered between two steps, at most.
    """

    tolerance: float | None = 0.0
    filters: Mapping[str, Callable[[Group], str | None]] = field(factory=dict)
    max_extra_groups: int
    _kept: Counter[str] = field(init=False, factory=Counter)
    _filtered: Counter[str] = field(init=False, factory=Counter)
    _by_filter: Counter[tuple[str, str]] = field(init=False, factory=Counter)
    """Number of filtered groups, by filter and task."""
    _rewards: dict[str, float] = field(init=False, factory=lambda: defaultdict(float))
    """Sums of the filtered groups' mean rewards."""

    def rejects(self, group: Group) -> Rejection | None:
        """Return why the group does not train, by the environment's rewards, or None; call it once per group.

        Raises SamplingError if too many were filtered since the last step, and PluginError if a filter
        returns neither a text nor None.
        """
        task = group.prompt.environment
        rejection = self._first(group)
        if rejection is None:
            self._kept[task] += 1
            return None
        rewards = [reward for reward in group.rewards if reward is not None]
        self._filtered[task] += 1
        self._by_filter[rejection.filter, task] += 1
        self._rewards[task] += sum(rewards) / max(1, len(rewards))
        if self._filtered.total() > self.max_extra_groups:
            raise SamplingError(self._complaint())
        return rejection

    def _first(self, group: Group) -> Rejection | None:
        if self.tolerance is not None and (reason := equal_rewards(group, tolerance=self.tolerance)):
            return Rejection(EQUAL_REWARDS, reason)
        for name, function in self.filters.items():
            reason = function(group)
            if reason is not None and not (isinstance(reason, str) and reason.strip()):
                raise PluginError(
                    f"{function} returned {type(reason).__name__} {reason!r:.60} for prompt "
                    f"{group.prompt.id!r}; expected a text that says why the group is not trained, or None"
                )
            if reason is not None:
                return Rejection(name, reason)
        return None

    def read(self) -> dict[str, float]:
        """Return the metrics since the last call; it is called once per step."""
        metrics: dict[str, float] = {}
        for task in sorted({*self._kept, *self._filtered}):
            filtered = self._filtered[task]
            metrics[f"filtered/{task}"] = float(filtered)
            metrics[f"filtered_fraction/{task}"] = filtered / (filtered + self._kept[task])
            if filtered:
                metrics[f"filtered_reward/{task}"] = self._rewards[task] / filtered
        for (name, task), count in sorted(self._by_filter.items()):
            if self.filters:
                metrics[f"filtered_by_{name}/{task}"] = float(count)
        for counts in (self._kept, self._filtered, self._rewards, self._by_filter):
            counts.clear()
        return metrics

    def _complaint(self) -> str:
        filtered, kept = self._filtered.total(), self._kept.total()
        tasks = ", ".join(
            f"{task}: {self._kept[task]} of {self._kept[task] + count} passed, mean reward of the others "
            f"{self._rewards[task] / count:.3g}"
            for task, count in sorted(self._filtered.items())
        )
        by_filter: Counter[str] = Counter()
        for (name, _), count in self._by_filter.items():
            by_filter[name] += count
        counted = ", ".join(f"{count} by {name}" for name, count in sorted(by_filter.items()))
        equal = set(by_filter) == {EQUAL_REWARDS}
        who, why = (
            ("dynamic sampling", "had equal rewards") if equal else ("filters", f"were filtered ({counted})")
        )
        advice = (
            "Choose prompts that the model solves sometimes, or a larger rollout.group_size or temperature"
            if EQUAL_REWARDS in by_filter
            else f"Widen {' and '.join(f'[filters.{name}]' for name in sorted(by_filter))}"
        )
        return (
            f"{who}: since the last step {kept} of {kept + filtered} groups passed "
            f"({kept / (kept + filtered):.1%}), the other {filtered} {why}; "
            f"dynamic_sampling.max_extra_groups is {self.max_extra_groups} ({tasks}). {advice}, or "
            "set a higher limit"
        )
