"""Dynamic sampling: groups that teach nothing do not train, and others are drawn instead.  Pure.

A group whose rewards are all equal has no advantages.  It is filtered, whole, and its slot is free for
another prompt, so that each step trains ``prompts_per_step`` groups that say something (DAPO, arXiv
2503.14476, section 3.2).
"""

from __future__ import annotations

from collections import Counter, defaultdict

from attrs import define, field

from grpo_core.errors import SamplingError
from grpo_core.loop.advantages import equal
from grpo_core.records import Group


@define(kw_only=True)
class DynamicSampling:
    """Decides which groups train, and counts the others.

    Args:
        tolerance: rewards of a group that differ by no more than this are equal.
        max_extra_groups: groups filtered between two steps, at most.
    """

    tolerance: float = 0.0
    max_extra_groups: int
    _kept: Counter[str] = field(init=False, factory=Counter)
    _filtered: Counter[str] = field(init=False, factory=Counter)
    _rewards: dict[str, float] = field(init=False, factory=lambda: defaultdict(float))
    """Sums of the filtered groups' mean rewards."""

    def keeps(self, group: Group) -> bool:
        """Whether the group trains, by its rewards as the environment gave them; call it once a group.

        Raises SamplingError if too many were filtered since the last step.
        """
        task = group.prompt.environment
        rewards = [reward for reward in group.rewards if reward is not None]
        if not equal(rewards, self.tolerance):
            self._kept[task] += 1
            return True
        self._filtered[task] += 1
        self._rewards[task] += sum(rewards) / max(1, len(rewards))
        if self._filtered.total() > self.max_extra_groups:
            raise SamplingError(self._complaint())
        return False

    def read(self) -> dict[str, float]:
        """Return the metrics since the last call, which is made for each step."""
        metrics: dict[str, float] = {}
        for task in sorted({*self._kept, *self._filtered}):
            filtered = self._filtered[task]
            metrics[f"filtered/{task}"] = float(filtered)
            metrics[f"filtered_fraction/{task}"] = filtered / (filtered + self._kept[task])
            if filtered:
                metrics[f"filtered_reward/{task}"] = self._rewards[task] / filtered
        for counts in (self._kept, self._filtered, self._rewards):
            counts.clear()
        return metrics

    def _complaint(self) -> str:
        filtered, kept = self._filtered.total(), self._kept.total()
        tasks = ", ".join(
            f"{task}: {self._kept[task]} of {self._kept[task] + count} passed, mean reward of the others "
            f"{self._rewards[task] / count:.3g}"
            for task, count in sorted(self._filtered.items())
        )
        return (
            f"dynamic sampling: since the last step {kept} of {kept + filtered} groups passed "
            f"({kept / (kept + filtered):.1%}), the other {filtered} had equal rewards; "
            f"dynamic_sampling.max_extra_groups is {self.max_extra_groups} ({tasks}). Choose prompts that "
            "the model solves sometimes, a larger rollout.group_size or temperature, or a higher limit"
        )
