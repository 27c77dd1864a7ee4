"""The metrics of a step: of the groups that it trains, and of the generation since the step before.

A metric's name is ``name``, ``group/name``, ``name/TASK`` or ``validation/TASK/name``; ``name`` contains no
slash.  In the last form TASK may also be the name of a validation set.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from math import ceil
from statistics import fmean, pstdev

import numpy as np
from numpy.typing import NDArray

from grpo_core.contracts.advantages import equal
from grpo_core.contracts.events import LOOP, Span
from grpo_core.contracts.records import Group, Prompt, Rollout
from grpo_core.loop.buffer import COUNTED, BufferStatistics
from grpo_core.loop.rows import sampled_versions
from grpo_core.loop.timeline import Activity

AT_TIMES = (
    *("reward", "accuracy", "feedback_", "std_feedback_", "shaped_reward", "filtered", "masked", "unscored"),
    *("tool_calls", "tool_failures", "errors", "environment_", "staleness_share_", "off_policy_masked"),
    *("sequence_error_masked", "non_finite_", "incidents", "memory", "engine_"),
)
"""Prefixes of metrics that only some steps have.  docs/metrics.md has all metrics."""

ENVIRONMENT = "environment "
"""Prefix of the lanes of environments."""
CALLS = ("evaluate", "agent")
"""The activities that take an environment's time, as named in its lane."""

COMPARED = ("difference", "difference_low", "difference_high", "outcome", "standard")
"""Metrics of a validation that compare two versions; absent until there are two."""


def names_of_tasks() -> set[str]:
    """Return the names, before the slash, of a step's metrics per task."""
    prompt, rollout = Prompt(messages="", environment="task"), Rollout(reward=1.0, success=True)
    group = Group(prompt=prompt, rollouts=(rollout,), generation_version=0, target_version=0)
    return {name.removesuffix("/task") for name in task_metrics([group], step=0) if name.endswith("/task")}


OF = "prompts_of"
"""Metric of a validation: of how many prompts ``prompts`` are a choice; 0: they are the first of a stream."""
DESCRIPTIONS = ("accuracy_finished", "completion_tokens", "truncated", "prompts", OF, "errors", "unscored")
"""Metrics that describe a validation, not how good the model is."""


def metric_names(metrics: Iterable[str]) -> list[str]:
    """Return the names of the measured metrics; one with only an interval counts, too."""
    names = dict.fromkeys(metrics)
    with_ends = {name.removesuffix("_low") for name in names if name.endswith("_low")}
    with_ends = {name for name in with_ends if f"{name}_high" in names}
    ends = {f"{name}_{end}": name for name in with_ends for end in ("low", "high")}
    return list(dict.fromkeys(ends.get(name, name) for name in names))


def headline(metrics: Iterable[str]) -> str | None:
    """Return the metric that represents a task: accuracy, or else the first; None without one.

    It may have an interval and no value.
    """
    names = [name for name in metric_names(metrics) if name not in DESCRIPTIONS]
    names = [name for name in names if not name.startswith("feedback_")]
    return "accuracy" if "accuracy" in names else next(iter(names), None)


def lacks_scores(metric: str, values: Mapping[str, float]) -> bool:
    """Return whether a validation lacks a metric's value because scores are missing."""
    return metric not in values and f"{metric.rpartition('/')[0]}/unscored" in values


def accuracy(rollouts: Iterable[Rollout]) -> dict[str, float]:
    """Return the fraction of successes among scored rollouts, as ``accuracy``; empty if none is declared."""
    successes = [rollout.success for rollout in rollouts if rollout.success is not None]
    return {"accuracy": fmean(successes)} if successes else {}


def accuracy_finished(rollouts: Iterable[Rollout]) -> dict[str, float]:
    """Return the fraction of successes within the token limits; empty if none is declared."""
    finished = [
        rollout.success and not rollout.truncated for rollout in rollouts if rollout.success is not None
    ]
    return {"accuracy_finished": fmean(finished)} if finished else {}


_CODED = str.maketrans({"%": "%25", "/": "%2F"})


def feedback_values(rollouts: Sequence[Rollout]) -> dict[str, list[float]]:
    """Return the values of the environment's ``Feedback.metrics``, by ``feedback_PART``.

    A slash in a part is written as ``%2F``, and a percent sign as ``%25``, so that no two parts share a name.
    """
    parts: dict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        for part, value in rollout.metrics.items():
            parts[part].append(float(value))
    return {f"feedback_{part.translate(_CODED)}": values for part, values in sorted(parts.items())}


MOST_LEFT_OUT = 10
"""Largest number of non-numeric metrics that a step or a validation reports."""


def left_out(groups: Iterable[Group]) -> dict[str, str]:
    """Return a message for each environment metric that is not a finite number, by a cause."""
    found: dict[tuple[str, str], list[str]] = {}
    rollouts: Counter[str] = Counter()
    for group in groups:
        task = group.prompt.environment
        rollouts[task] += len(group.rollouts)
        for rollout in group.rollouts:
            for name, value in rollout.left_out.items():
                found.setdefault((task, name), []).append(f"{value} for prompt {group.prompt.id!r}")
    return {
        f"left_out/{task}/{name}": (
            f"task {task!r}: the metric {name!r} is {values[0]}, expected a finite number; it is left out of "
            f"{len(values)} of {rollouts[task]} rollouts, whose rewards stay"
        )
        for (task, name), values in islice(found.items(), MOST_LEFT_OUT)
    }


def completion_tokens(rollouts: Sequence[Rollout]) -> float:
    """Return the mean number of sampled tokens."""
    return fmean([rollout.n_sampled for rollout in rollouts])


def truncated(rollouts: Sequence[Rollout]) -> float:
    """Return the fraction of the rollouts that a token limit cut off."""
    return fmean([rollout.truncated for rollout in rollouts])


def validation_metrics(results: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return the measurements of a validation, by ``validation/TASK/name``."""
    return {
        f"validation/{task}/{name}": value for task, part in results.items() for name, value in part.items()
    }


TIMES = {
    (LOOP, "publish"): "time/publish",
    (LOOP, "wait for the weight sync"): "time/wait_for_sync",
    (LOOP, "wait for validation"): "time/wait_for_validation",
    (LOOP, "wait for the checkpoint"): "time/checkpoint",
    (LOOP, "cut of the checkpoint"): "time/checkpoint",
    ("sync", "update weights"): "time/sync",
    ("sync", "canary"): "time/canary",
    ("validation", "validate"): "time/validation",
}
"""Metric of each activity in the timeline."""


def times(spans: Iterable[Span]) -> dict[str, float]:
    """Return the seconds by activity, and of environments; times of spans that overlap add up."""
    found: dict[str, float] = defaultdict(float)
    calls: dict[str, tuple[int, float]] = {}
    for span in spans:
        if name := TIMES.get((span.lane, span.what)):
            found[name] += span.busy
        elif span.lane.startswith(ENVIRONMENT) and span.what in CALLS:
            task = span.lane.removeprefix(ENVIRONMENT)
            found[f"environment_seconds/{task}"] += span.busy
            number, seconds = calls.get(task, (0, 0.0))
            calls[task] = number + span.calls, seconds + span.seconds
    latencies = {
        f"environment_latency/{task}": seconds / number for task, (number, seconds) in calls.items() if number
    }
    return {**found, **latencies}


def task_metrics(groups: Sequence[Group], *, step: int) -> dict[str, float]:
    """Return rewards, lengths and staleness of the groups, by task; staleness counts steps, by token."""
    by_task: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        by_task[group.prompt.environment].append(group)
    metrics: dict[str, float] = {}
    staleness: list[NDArray[np.int32]] = []
    for task, members in sorted(by_task.items()):
        rollouts = [rollout for group in members for rollout in group.rollouts]
        rewards = [r.reward for r in rollouts if r.reward is not None]
        lengths = sorted(rollout.n_sampled for rollout in rollouts)
        feedback = feedback_values(rollouts)
        staleness.append(step - sampled_versions(rollouts))
        metrics |= {
            **({f"reward/{task}": fmean(rewards)} if rewards else {}),
            **({f"reward_std/{task}": pstdev(rewards)} if rewards else {}),
            **({f"unscored/{task}": unscored} if (unscored := float(len(rollouts) - len(rewards))) else {}),
            f"frac_reward_zero_std/{task}": fmean(
                [equal([reward for reward in group.rewards if reward is not None]) for group in members]
            ),
            f"groups/{task}": float(len(members)),
            f"staleness/{task}": _mean(staleness[-1]),
            f"completion_tokens/{task}": fmean(lengths),
            **{f"completion_tokens_{name}/{task}": value for name, value in _quantiles(lengths).items()},
            f"turns/{task}": fmean([rollout.turns for rollout in rollouts]),
            f"segments/{task}": fmean([len(rollout.segments) for rollout in rollouts]),
            f"truncated/{task}": truncated(rollouts),
            **{
                f"{name}/{task}": value
                for name, value in (
                    accuracy(rollouts)
                    | accuracy_finished(rollouts)
                    | {name: fmean(values) for name, values in feedback.items()}
                    | {f"std_{name}": pstdev(values) for name, values in feedback.items()}
                ).items()
            },
        }
        if calls := sum(rollout.tool_calls for rollout in rollouts):
            metrics[f"tool_calls/{task}"] = calls / len(rollouts)
            metrics[f"tool_failures/{task}"] = sum(map(_tool_failures, rollouts)) / len(rollouts)
    whole = np.concatenate([np.zeros(0, np.int32), *staleness])
    metrics |= {"staleness_mean": _mean(whole), "staleness_max": float(whole.max(initial=0))}
    counts = zip(*(found.tolist() for found in np.unique(whole, return_counts=True)), strict=True)
    return metrics | {f"staleness_share_{steps}": count / whole.size for steps, count in counts}


def _mean(staleness: NDArray[np.int32]) -> float:
    """Return the mean over tokens; 0 if there are none."""
    return float(staleness.mean()) if staleness.size else 0.0


def _quantiles(lengths: Sequence[int]) -> dict[str, float]:
    """Return the smallest, median, 95% and largest of sorted numbers of sampled tokens."""
    quantiles = {"min": 0.0, "p50": 0.5, "p95": 0.95, "max": 1.0}
    return {name: float(lengths[max(0, ceil(part * len(lengths)) - 1)]) for name, part in quantiles.items()}


def _tool_failures(rollout: Rollout) -> int:
    """Count the tool answers that report an error."""
    answers = (message.get("content") for message in rollout.messages if message.get("role") == "tool")
    return sum(isinstance(text, str) and text.startswith("error:") for text in answers)


# ---------------------------------------------------------------------------------- generation


class Meter:
    """Busy time and token counts between two steps, on the event loop's clock."""

    def __init__(self) -> None:
        self.generating = Activity("", "")
        """Counts the time inside this context as busy."""
        self._tokens = 0
        self._errors: dict[str, int] = defaultdict(int)
        self._last = 0.0

    def begin(self) -> None:
        """Start measuring with the first step."""
        self._last = self.now()

    def count(self, task: str, rollout: Rollout) -> None:
        self._tokens += rollout.n_sampled
        if rollout.error is not None:
            self._errors[task] += 1

    def read(
        self, buffer: BufferStatistics, *, trained: Mapping[str, float], waited: float
    ) -> dict[str, float]:
        """Return metrics since the last call.

        ``overlap`` is the share of the step's time in which both sides work, if one of them always does.
        Generated tokens are divided by the time in which rollouts are played, trained tokens by the time in
        which the trainer computes.
        """
        now = self.now()
        elapsed, busy = max(now - self._last, 1e-9), sum(span.busy for span in self.generating.take(now))
        training = trained.get("time/train", 0.0)
        metrics = {
            "time/step": elapsed,
            "time/wait_for_groups": waited,
            "time/generate": busy,
            "tokens_per_second/generation": self._tokens / busy if busy else 0.0,
            "tokens_per_second/training": trained.get("tokens/trained", 0.0) / training if training else 0.0,
            "overlap": min(max(busy + training - elapsed, 0.0) / elapsed, 1.0),
            **{f"buffer/{name}": float(getattr(buffer, name)) for name in COUNTED},
            **{f"errors/{task}": float(count) for task, count in sorted(self._errors.items())},
        }
        self._last, self._tokens = now, 0
        self._errors.clear()
        return metrics

    @staticmethod
    def now() -> float:
        """Return the time on the event loop's clock, in seconds."""
        return asyncio.get_running_loop().time()
