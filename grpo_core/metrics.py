"""What is measured of a step: the groups it trains, and how busy generation and training were."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import fmean

import numpy as np

from grpo_core.buffer import Statistics
from grpo_core.records import Group, Rollout
from grpo_core.tokens import sampled_versions

FULL_REWARD = 1.0
"""A rollout with this reward or more counts as accurate."""


def task_metrics(groups: Sequence[Group], *, step: int) -> dict[str, float]:
    """Rewards, lengths and staleness of the groups, by task.  Staleness is in steps, by token."""
    by_task: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        by_task[group.prompt.environment].append(group)
    metrics: dict[str, float] = {}
    for task, members in sorted(by_task.items()):
        rollouts = [rollout for group in members for rollout in group.rollouts]
        rewards = [r.reward for r in rollouts if r.reward is not None]
        metrics[f"reward/{task}"] = fmean(rewards)
        metrics[f"accuracy/{task}"] = fmean(float(reward >= FULL_REWARD) for reward in rewards)
        metrics[f"frac_reward_zero_std/{task}"] = fmean(float(len(set(g.rewards)) == 1) for g in members)
        metrics[f"groups/{task}"] = float(len(members))
        metrics[f"staleness/{task}"], _ = _staleness(members, step)
        metrics[f"completion_tokens/{task}"] = fmean(r.tokens.n_sampled for r in rollouts)
        metrics[f"truncated/{task}"] = fmean(float(r.finish_reason == "length") for r in rollouts)
        parts: dict[str, list[float]] = defaultdict(list)
        for rollout in rollouts:
            for name, value in rollout.metrics.items():
                parts[name].append(float(value))
        metrics |= {f"reward/{task}/{name}": fmean(values) for name, values in sorted(parts.items())}
    metrics["staleness_mean"], metrics["staleness_max"] = _staleness(groups, step)
    return metrics


def _staleness(groups: Sequence[Group], step: int) -> tuple[float, float]:
    """Mean and maximum over the sampled tokens; 0 if there are none."""
    versions = sampled_versions([rollout.tokens for group in groups for rollout in group.rollouts])
    if not versions.size:
        return 0.0, 0.0
    # whole numbers until the division, so that the mean is rounded once
    total = step * versions.size - int(versions.sum(dtype=np.int64))
    return total / versions.size, float(step - versions.min())


class Meter:
    """Busy time and token counts between two steps, on the event loop's clock."""

    def __init__(self) -> None:
        self._running = 0
        self._busy = 0.0
        self._since: float | None = None
        self._tokens = 0
        self._errors: dict[str, int] = defaultdict(int)
        self._last: float | None = None

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Around whatever keeps the engine busy."""
        self._running += 1
        if self._since is None:
            self._since = self.now()
        try:
            yield
        finally:
            self._running -= 1
            if self._running == 0 and self._since is not None:
                self._busy += self.now() - self._since
                self._since = None

    def count(self, task: str, rollout: Rollout) -> None:
        self._tokens += rollout.tokens.n_sampled
        if rollout.error is not None:
            self._errors[task] += 1

    def read(self, buffer: Statistics, *, trained: Mapping[str, float], waited: float) -> dict[str, float]:
        """Metrics since the last call: ``overlap`` is the busier side's share of the step's time."""
        now = self.now()
        elapsed = max(now - (self._last if self._last is not None else now - waited), 1e-9)
        if self._since is not None:
            self._busy += now - self._since
            self._since = now
        training = trained.get("time/train", 0.0)
        metrics = {
            "time/step": elapsed,
            "time/wait_for_groups": waited,
            "time/generate": self._busy,
            "tokens_per_second/generation": self._tokens / elapsed,
            "overlap": min(max(self._busy, training) / elapsed, 1.0),
            "buffer/in_flight": float(buffer.in_flight),
            "buffer/retrying": float(buffer.again),
            "buffer/ready": float(buffer.ready),
            "buffer/dispatched": float(buffer.dispatched),
            "buffer/skipped": float(buffer.skipped),
            "buffer/filtered": float(buffer.filtered),
            **{f"errors/{task}": float(count) for task, count in sorted(self._errors.items())},
        }
        self._last, self._busy, self._tokens = now, 0.0, 0
        self._errors.clear()
        return metrics

    @staticmethod
    def now() -> float:
        """Seconds on the event loop's clock."""
        return asyncio.get_running_loop().time()
