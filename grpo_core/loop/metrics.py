"""The metrics of a run: their names and meanings, and those of the groups that a step trains.  Pure.

A metric's name is ``name``, ``group/name``, ``name/TASK`` or ``validation/TASK/name``; ``name`` contains no
slash.  In the last form TASK may also be the name of a validation set.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from math import ceil
from statistics import fmean, pstdev

import numpy as np
from attrs import field, frozen

from grpo_core.events import LOOP, Span
from grpo_core.loop.advantages import equal
from grpo_core.records import Group, Rollout
from grpo_core.tokens import sampled_versions


@frozen
class Metric:
    """The unit and the meaning of a metric."""

    unit: str
    meaning: str


_SHARE, _TOKENS, _GROUPS, _STEPS, _SECONDS, _NATS = "share", "tokens", "groups", "steps", "seconds", "nats"

METRICS: Mapping[str, Mapping[str, Metric]] = {
    "Tasks": {
        "reward/TASK": Metric(
            "reward", "Mean reward of the rollouts that the step trained; absent if none has one."
        ),
        "reward_std/TASK": Metric("reward", "Standard deviation of these rewards."),
        "accuracy/TASK": Metric(
            _SHARE,
            "Rollouts with a reward of at least what the environment (or `tasks.TASK.success`) declares as "
            "`success`; absent if neither does.",
        ),
        "feedback_PART/TASK": Metric(
            "as the environment says", "Mean of what the environment returns as `Feedback.metrics[PART]`."
        ),
        "std_feedback_PART/TASK": Metric(
            "as the environment says", "Standard deviation of the same numbers."
        ),
        "groups/TASK": Metric(_GROUPS, "Groups that the step trained."),
        "frac_reward_zero_std/TASK": Metric(
            _SHARE, "Trained groups whose rewards are all equal: they have no policy gradient."
        ),
        "filtered/TASK": Metric(
            _GROUPS,
            "Groups that dynamic sampling left out since the last step, because their rewards are equal or a "
            "filter rejected them. Only with `dynamic_sampling.enabled` or `[filters]`, like the next three.",
        ),
        "filtered_fraction/TASK": Metric(_SHARE, "Finished groups that were filtered since the last step."),
        "filtered_reward/TASK": Metric(
            "reward", "Mean reward of the filtered groups: near 0 the prompts are too hard, near 1 too easy."
        ),
        "filtered_by_NAME/TASK": Metric(
            _GROUPS, "Groups that the filter NAME left out since the last step. Only with `[filters]`."
        ),
        "shaped_reward/TASK": Metric(
            "reward",
            "Mean of the rewards that the advantages compare. Only with `[shaping]`.",
        ),
        "completion_tokens/TASK": Metric(
            _TOKENS, "Sampled tokens of a rollout, over all of its turns; mean."
        ),
        "completion_tokens_min/TASK": Metric(_TOKENS, "The fewest sampled tokens of a rollout."),
        "completion_tokens_p50/TASK": Metric(_TOKENS, "Half of the rollouts have at most as many."),
        "completion_tokens_p95/TASK": Metric(_TOKENS, "Of 20 rollouts 19 have at most as many."),
        "completion_tokens_max/TASK": Metric(_TOKENS, "The most sampled tokens of a rollout."),
        "turns/TASK": Metric("turns", "Completions of a rollout; mean."),
        "tool_calls/TASK": Metric("calls", "Tool calls of a rollout; mean.  Absent if there were none."),
        "tool_failures/TASK": Metric(
            "calls",
            'Answers of tools that begin with "error:", as those to calls that fail do, in a rollout; mean. '
            "Absent if the model called no tool.",
        ),
        "segments/TASK": Metric(
            "segments",
            "Segments of a rollout; mean. More than 1: the chat template rewrites earlier turns, and the "
            "tokens before a rewritten turn are computed again for each segment.",
        ),
        "truncated/TASK": Metric(
            _SHARE,
            "Rollouts that a token limit cut off: `rollout.max_tokens`, `rollout.max_total_tokens` or the "
            "model's positions. A limit of turns or tool calls does not count.",
        ),
        "masked/TASK": Metric(
            "rollouts",
            "Rollouts of the step that are not trained, because the advantage function returned None, the "
            'environment said `train=False`, or `rollout.truncated = "mask"`; absent if there were none.',
        ),
        "unscored/TASK": Metric(
            "rollouts",
            "Rollouts of the step that have no reward because a token limit cut them off. Only with "
            '`rollout.truncated = "unscored"`; absent if there were none.',
        ),
        "staleness/TASK": Metric(
            _STEPS,
            "Steps between the weights that sampled a token and those that train on it; mean over tokens.",
        ),
        "environment_seconds/TASK": Metric(
            _SECONDS, "Time since the last step in which at least one call of the environment was running."
        ),
        "environment_latency/TASK": Metric(
            _SECONDS,
            "Seconds that a call of the environment takes; mean over those since the last step. Of an "
            "environment that asks judges, most of it is theirs.",
        ),
        "errors/TASK": Metric(
            "rollouts",
            "Unscored rollouts since the last step. They are played again, unless their prompt is skipped; "
            "absent if there were none.",
        ),
    },
    "Asynchrony": {
        "staleness_mean": Metric(_STEPS, "Staleness of the trained tokens of all tasks; mean."),
        "staleness_max": Metric(_STEPS, "The largest staleness of a trained token; at most `max_staleness`."),
        "staleness_share_K": Metric(_SHARE, "Trained tokens of staleness K; absent if there are none."),
        "time/step": Metric(_SECONDS, "Time since the step before ended."),
        "time/wait_for_groups": Metric(_SECONDS, "Time in which the trainer waited for groups to train."),
        "time/generate": Metric(_SECONDS, "Time in which at least one group was being generated."),
        "time/train": Metric(_SECONDS, "Time in the trainer, without the publication of the weights."),
        "time/publish": Metric(_SECONDS, "Time in which the trainer published weights."),
        "time/sync": Metric(_SECONDS, "Time in which engines took weights, beside the next step."),
        "time/canary": Metric(_SECONDS, "Time in which canaries were asked."),
        "time/validation": Metric(_SECONDS, "Time in which a version was validated; absent if none was."),
        "time/checkpoint": Metric(
            _SECONDS,
            "Time in which training waited for checkpoints: for the cut, and for the one before it to be "
            "written; absent if there was none.",
        ),
        "time/wait_for_sync": Metric(
            _SECONDS, "Time in which training waited for the engine to take the weights before."
        ),
        "time/wait_for_validation": Metric(
            _SECONDS, "Time in which training waited for a validation. Only with `validation.pause`."
        ),
        "overlap": Metric(
            _SHARE, "Share of `time/step` in which the busier of generation and training works; 1 is ideal."
        ),
        "tokens_per_second/generation": Metric(
            "tokens/s", "Tokens sampled for training, per second of the step."
        ),
        "tokens_per_second/training": Metric(
            "tokens/s", "Tokens of the trained rows, prompts included, per second in the trainer."
        ),
        "tokens/trained": Metric(_TOKENS, "Tokens of the trained rows, prompts included."),
        "tokens/padding": Metric(_SHARE, "Positions of the trainer's micro-batches that hold padding."),
        "buffer/in_flight": Metric(_GROUPS, "Groups that are being generated now."),
        "buffer/retrying": Metric(_GROUPS, "Groups that failed and wait to be generated again."),
        "buffer/ready": Metric(_GROUPS, "Finished groups that wait to be trained."),
        "buffer/dispatched": Metric(_GROUPS, "Prompts that were sent to the engine since the run began."),
        "buffer/skipped": Metric(_GROUPS, "Prompts that were given up since the run began."),
        "buffer/filtered": Metric(_GROUPS, "Groups that were filtered since the run began."),
        "buffer/attempts": Metric(
            _GROUPS, "Prompts that were sent to the engine since the run began, each with its retries."
        ),
    },
    "Training": {
        "rows": Metric(
            "rows",
            "Segments of the step's trained rollouts, with those that max_sequence_error leaves out.",
        ),
        "loss": Metric("-", "The loss that was minimised; mean over tokens."),
        "entropy": Metric(_NATS, "Entropy of the policy at the sampled tokens; mean."),
        "bonus_entropy": Metric(
            _NATS,
            "Entropy at the tokens that the entropy bonus acts on; mean. This and the next only with "
            "`entropy_target`.",
        ),
        "entropy_coefficient": Metric("-", "Factor of the entropy bonus; mean over the updates."),
        "kl": Metric(_NATS, "KL of the policy to the reference model. Only with `kl_coefficient`."),
        "teacher_kl": Metric(
            _NATS,
            "KL of the policy to the teacher at the sampled tokens; mean. Only with `teacher_coefficient`.",
        ),
        "clip_fraction_low": Metric(_SHARE, "Tokens whose gradient the lower clip removed."),
        "clip_fraction_high": Metric(_SHARE, "Tokens whose gradient the upper clip removed."),
        "importance_weight_mean": Metric(
            "ratio", "Weight that corrects for sampling by older weights, after its cap; mean."
        ),
        "importance_weight_max": Metric("ratio", "The largest of these weights."),
        "sequence_error_mean": Metric(
            "ratio",
            "Mean of exp(|difference of logprobs between engine and trainer|) over a rollout, 1 if they "
            "agree; mean over rollouts. This and the next three only with `loss.max_sequence_error`.",
        ),
        "sequence_error_max": Metric("ratio", "The largest of these."),
        "sequence_error_masked": Metric("rollouts", "Rollouts left out for it; absent if none."),
        "sequence_error_masked_correct": Metric(_SHARE, "Right ones among these; absent if there are none."),
        "off_policy_masked": Metric(
            _SHARE, "Tokens that the objective left out as too far off-policy. Only with `off_policy_limit`."
        ),
        "sequence_weight": Metric("ratio", "Weight of a token's rollout; mean. Only with the loss `vespo`."),
        "grad_norm": Metric("-", "Norm of the gradient before it was clipped."),
        "lr": Metric("-", "Learning rate, as a mean over the updates."),
    },
    "Engine against trainer": {
        "logprob_diff_mean": Metric(
            _NATS, "Absolute difference of a token's logprob, by the engine and by the trainer; mean."
        ),
        "mismatch_kl": Metric(_NATS, "KL of the policy that generated to the one that the step starts from."),
        "importance_ratio_mean": Metric("ratio", "Probability by the trainer over that by the engine; mean."),
        "importance_ratio_max": Metric("ratio", "The largest of these ratios."),
        "canary/difference_mean": Metric(
            _NATS,
            "Difference of logprobs between engine and trainer in the canary of the sync before; mean.",
        ),
        "canary/difference_max": Metric(_NATS, "The largest of these differences."),
        "canary/moved": Metric(
            _NATS,
            "Difference between the trainer's logprobs now and when its sync was last proved; mean.",
        ),
        "canary/unproved": Metric(
            "syncs",
            "Weight syncs since the canary last proved that the engine uses new weights and not older ones: "
            "their logprobs moved less than rounding explains.",
        ),
        "effective_sample_size": Metric(
            _SHARE, "Share of the tokens that carry the gradient, by their importance ratios; 1 is on-policy."
        ),
    },
    "Engines and machine": {
        "engine_tokens_per_second/NAME": Metric(
            "tokens/s", "Tokens that an engine finished, per second of the step. Only with several engines."
        ),
        "engine_cache_use/NAME": Metric(
            _SHARE,
            "Part of an engine's cache of keys and values that is used. Only with vLLM, as the next two.",
        ),
        "engine_preemptions/NAME": Metric(
            "requests", "Requests that lost their place in an engine for want of cache, since the last step."
        ),
        "engine_cached_prompt_tokens/NAME": Metric(
            _SHARE, "Prompt tokens since the last step whose keys and values the cache had."
        ),
        "memory/NAME": Metric(
            "MiB",
            "Resident memory of a process of this machine, with those that it started: main, trainer, "
            "environment_of_task_TASK and others. What processes share counts for each. Only on Linux.",
        ),
        "memory_gpu/NAME": Metric(
            "MiB",
            "Most memory that the trainer, or its first rank, allocated on its GPU since the last step.",
        ),
    },
    "Faults": {
        "incidents/KIND": Metric(
            "incidents",
            "Faults of a kind that the run has survived since the last step; absent if there were none. "
            "docs/reliability.md explains the kinds.",
        ),
        "non_finite_rows": Metric("rows", "Rows left out because their loss is not finite; absent if none."),
        "non_finite_updates": Metric(
            "updates", "Updates left out because their gradient is not finite; absent if none."
        ),
    },
    "Validation": {
        "validation/TASK/accuracy": Metric(
            _SHARE,
            "Rollouts with a reward of at least `success`; mean over prompts. Absent if the task declares no "
            "`success`: then the reward stands for the task. Where the strategy `paired` leaves prompts "
            "out, this and the reward are estimates for all prompts.",
        ),
        "validation/TASK/reward": Metric("reward", "Mean reward; mean over prompts."),
        "validation/TASK/pass@K": Metric(
            _SHARE, "Chance that at least one of K rollouts is a success. Strategy `pass_at_k`."
        ),
        "validation/TASK/maj@N": Metric(
            _SHARE, "Chance that the answer of most of N rollouts is right. Strategy `majority`."
        ),
        "validation/TASK/NAME_low": Metric("as NAME", "Lower end of the bootstrap interval of NAME."),
        "validation/TASK/NAME_high": Metric("as NAME", "Upper end of the bootstrap interval of NAME."),
        "validation/TASK/difference": Metric(
            "as accuracy or reward",
            "Difference to the best version before, on the same prompts; mean.  Only of the strategy "
            "`paired`, like the next four.",
        ),
        "validation/TASK/difference_low": Metric(
            "as difference", "Lower end of its interval, which may be looked at as often as one likes."
        ),
        "validation/TASK/difference_high": Metric("as difference", "Upper end of that interval."),
        "validation/TASK/outcome": Metric(
            "-", "1: certainly better than the best version before; 0: equal; -1: worse; absent: undecided."
        ),
        "validation/TASK/standard": Metric("version", "The version that it was compared with."),
        "validation/TASK/feedback_PART": Metric(
            "as the environment says", "Mean of what the environment returns as `Feedback.metrics[PART]`."
        ),
        "validation/TASK/completion_tokens": Metric(_TOKENS, "Sampled tokens of a rollout; mean."),
        "validation/TASK/truncated": Metric(_SHARE, "Rollouts that a token limit cut off."),
        "validation/TASK/prompts": Metric(
            "prompts", "Prompts that count: enough of their rollouts have a reward."
        ),
        "validation/TASK/errors": Metric("rollouts", "Unscored rollouts."),
        "validation/TASK/unscored": Metric(
            _SHARE,
            "Unscored rollouts. The intervals of shares hold whatever their scores would have been; if these "
            "could move a metric by more than 5%, it has an interval alone. Absent if all have a reward.",
        ),
    },
}
"""All metrics that the core writes, in sections.  A part of a name in capitals stands for any text."""


ENVIRONMENT = "environment "
"""The beginning of the lanes of environments."""
CALLS = ("evaluate", "agent")
"""The names of what an environment does in its lane that takes its time."""

COMPARED = ("difference", "difference_low", "difference_high", "outcome", "standard")
"""Metrics of a validation that compare a version with another one; absent until there is one to compare."""


def documented(name: str) -> str | None:
    """Return the entry of ``METRICS`` that describes a metric, or None if no entry does."""
    entries = (entry for section in METRICS.values() for entry in section)
    return next((entry for entry in sorted(entries, key=_wildcards) if _pattern(entry).fullmatch(name)), None)


_WILDCARD = re.compile("TASK|PART|NAME|KIND|[KN]$")


def _wildcards(entry: str) -> int:
    """Return the number of wildcards: entries that name a metric exactly come first."""
    return len(_WILDCARD.findall(entry))


def _pattern(entry: str) -> re.Pattern[str]:
    """Return the pattern of an entry; only the name of a task may contain a slash."""
    texts, holes = _WILDCARD.split(entry), _WILDCARD.findall(entry)
    parts = [".+" if hole == "TASK" else r"\d+" if hole in "KN" else "[^/]+" for hole in holes]
    return re.compile("".join(re.escape(t) + p for t, p in zip(texts, [*parts, ""], strict=True)))


DESCRIPTIONS = ("completion_tokens", "truncated", "prompts", "errors", "unscored")
"""Metrics of a validation that measure how it went, and not how good the model is."""


def measured(metrics: Iterable[str]) -> list[str]:
    """Return the names of what was measured, one for a metric and its interval; some have nothing else."""
    names = dict.fromkeys(metrics)
    with_ends = {name.removesuffix("_low") for name in names if name.endswith("_low")}
    with_ends = {name for name in with_ends if f"{name}_high" in names}
    ends = {f"{name}_{end}": name for name in with_ends for end in ("low", "high")}
    return list(dict.fromkeys(ends.get(name, name) for name in names))


def headline(metrics: Iterable[str]) -> str | None:
    """Return the metric that represents a task: accuracy, or else the first; None without one.

    It may have no value in these metrics, but an interval.
    """
    names = [name for name in measured(metrics) if name not in DESCRIPTIONS]
    names = [name for name in names if not name.startswith("feedback_")]
    return "accuracy" if "accuracy" in names else next(iter(names), None)


def lacks_scores(metric: str, values: Mapping[str, float]) -> bool:
    """Return whether a validation, which these values are of, has no value of a metric for want of scores."""
    return metric not in values and f"{metric.rpartition('/')[0]}/unscored" in values


def accuracy(rollouts: Iterable[Rollout]) -> dict[str, float]:
    """Return the share of successes among scored rollouts, as ``accuracy``; empty if none is declared."""
    successes = [rollout.success for rollout in rollouts if rollout.success is not None]
    return {"accuracy": fmean(successes)} if successes else {}


def feedback_means(
    rollouts: Sequence[Rollout], of: Callable[[list[float]], float] = fmean, before: str = ""
) -> dict[str, float]:
    """Return the means of what the environment reports as ``Feedback.metrics``, by ``feedback_PART``.

    Args:
        rollouts: whose environment reports it.
        of: another statistic than the mean.
        before: what the names begin with, for that statistic.
    """
    parts: dict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        for part, value in rollout.metrics.items():
            parts[f"feedback_{part.replace('/', '_')}"].append(float(value))
    return {f"{before}{name}": of(values) for name, values in sorted(parts.items())}


MOST_LEFT_OUT = 10
"""Largest number of metrics of a step, or of a validation, that are named because they are no numbers."""


def left_out(groups: Iterable[Group]) -> dict[str, str]:
    """Return a message for each metric of the environments that is not a finite number, by a cause."""
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
            f"task {task!r}: the metric {name!r} is {told[0]}, expected a finite number; it is left out of "
            f"{len(told)} of {rollouts[task]} rollouts, whose rewards stay"
        )
        for (task, name), told in islice(found.items(), MOST_LEFT_OUT)
    }


def completion_tokens(rollouts: Sequence[Rollout]) -> float:
    """Return the mean number of sampled tokens."""
    return fmean([rollout.n_sampled for rollout in rollouts])


def truncated(rollouts: Sequence[Rollout]) -> float:
    """Return the share of the rollouts that a token limit cut off."""
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
"""Metric of what a lane of the timeline does."""


def times(spans: Iterable[Span]) -> dict[str, float]:
    """Return the seconds of what went on, and of environments; times of spans that overlap add up."""
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
    staleness = []
    for task, members in sorted(by_task.items()):
        rollouts = [rollout for group in members for rollout in group.rollouts]
        rewards = [r.reward for r in rollouts if r.reward is not None]
        staleness.append(Staleness.of(rollouts, step))
        metrics |= {
            **({f"reward/{task}": fmean(rewards)} if rewards else {}),
            **({f"reward_std/{task}": pstdev(rewards)} if rewards else {}),
            **({f"unscored/{task}": unscored} if (unscored := float(len(rollouts) - len(rewards))) else {}),
            f"frac_reward_zero_std/{task}": fmean([_equal(group) for group in members]),
            f"groups/{task}": float(len(members)),
            f"staleness/{task}": staleness[-1].mean,
            f"completion_tokens/{task}": completion_tokens(rollouts),
            **{f"completion_tokens_{name}/{task}": value for name, value in _lengths(rollouts).items()},
            f"turns/{task}": fmean([rollout.turns for rollout in rollouts]),
            f"segments/{task}": fmean([len(rollout.segments) for rollout in rollouts]),
            f"truncated/{task}": truncated(rollouts),
            **{
                f"{name}/{task}": value
                for name, value in (
                    accuracy(rollouts) | feedback_means(rollouts) | feedback_means(rollouts, pstdev, "std_")
                ).items()
            },
        }
        if calls := sum(rollout.tool_calls for rollout in rollouts):
            metrics[f"tool_calls/{task}"] = calls / len(rollouts)
            metrics[f"tool_failures/{task}"] = sum(map(_tool_failures, rollouts)) / len(rollouts)
    whole = Staleness.together(staleness)
    metrics["staleness_mean"], metrics["staleness_max"] = whole.mean, float(whole.largest)
    return metrics | {
        f"staleness_share_{steps}": count / whole.tokens for steps, count in sorted(whole.counts.items())
    }


def _lengths(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return the smallest, median, 95% and largest number of sampled tokens of a rollout."""
    lengths = sorted(rollout.n_sampled for rollout in rollouts)
    places = {"min": 0.0, "p50": 0.5, "p95": 0.95, "max": 1.0}
    return {name: float(lengths[max(0, ceil(part * len(lengths)) - 1)]) for name, part in places.items()}


def _tool_failures(rollout: Rollout) -> int:
    """Count the answers of tools that report an error."""
    answers = (message.get("content") for message in rollout.messages if message.get("role") == "tool")
    return sum(isinstance(text, str) and text.startswith("error:") for text in answers)


def _equal(group: Group) -> bool:
    return equal([reward for reward in group.rewards if reward is not None])


@frozen
class Staleness:
    """The staleness of sampled tokens, in steps.  Whole numbers, so that its mean is rounded once."""

    tokens: int = 0
    total: int = 0
    largest: int = 0
    counts: Mapping[int, int] = field(factory=dict)
    """Number of tokens by their staleness."""

    @classmethod
    def of(cls, rollouts: Sequence[Rollout], step: int) -> Staleness:
        """Count the tokens that ``step`` trains."""
        versions = sampled_versions(rollouts)
        if not versions.size:
            return cls()
        total = step * versions.size - int(versions.sum(dtype=np.int64))
        oldest = int(versions.min())
        found = np.bincount(versions - oldest)  # few versions: as many as staleness allows
        counts = {step - oldest - above: int(count) for above, count in enumerate(found) if count}
        return cls(versions.size, total, step - oldest, counts)

    @classmethod
    def together(cls, parts: Iterable[Staleness]) -> Staleness:
        """Return that of all parts."""
        parts = list(parts)
        return cls(
            sum(part.tokens for part in parts),
            sum(part.total for part in parts),
            max((part.largest for part in parts), default=0),
            sum((Counter(part.counts) for part in parts), Counter()),
        )

    @property
    def mean(self) -> float:
        """Mean over the tokens; 0 if there are none."""
        return self.total / self.tokens if self.tokens else 0.0
