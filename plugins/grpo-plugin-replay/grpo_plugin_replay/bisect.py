"""``grpo-core bisect``: finds the first step and value in which two runs differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from grpo_core import ConfigError, Group, Rollout
from grpo_core.app import launch
from grpo_core.commands.complaints import say
from grpo_plugin_replay.history import History, first_metric, first_tensor, read

NAMES = {
    "ids": "the id",
    "sampled": "whether it was sampled",
    "logprobs": "the logprob",
    "versions": "the version",
}
"""Names of the token arrays, in the order of comparison."""
TRAINED = ("loss", "entropy", "grad_norm", "lr", "mismatch_kl", "importance_ratio", "reward/")
"""Prefixes of the names of compared metrics."""
ELSEWHERE = ("engine", "environment", "placement", "checkpoint", "tracking", "validation", "data_plane")
"""Sections whose differences are not shown, because they do not affect results."""


def bisect(run_a: Path, run_b: Path, /) -> int:
    """Find the first step, and there the first value, at which two runs differ.

    It reads what both runs have stored and computes nothing.  The exit status is 1 if they differ.

    Parameters
    ----------
    run_a
        Directory of one run.
    run_b
        Directory of the other run.
    """
    one, other = read(run_a), read(run_b)
    last = min(max(one.steps, default=0), max(other.steps, default=0))
    if not last:
        raise ConfigError(f"{run_a} and {run_b}: one of them has made no step yet")
    mine, its = (each.step(last).table for each in (one, other))
    for key, a, b in launch.differences(mine, its):
        if key.partition(".")[0] not in ELSEWHERE:
            say(f"configuration: {key} is {launch.shown(a)} and {launch.shown(b)}")
    notes: dict[Path, list[str]] = {}
    for step in range(1, last + 1):
        if found := difference(one, other, step, notes):
            break
    for reasons in notes.values():
        more = f" ({len(reasons) - 1} more of its steps cannot be compared either)"
        say(f"note: {reasons[0]}{more if len(reasons) > 1 else ''}")
    if found:
        say(f"step {step} is the first that differs: {found}")
        return 1
    both = f"{len(one.steps)} and {len(other.steps)} steps"
    say(f"steps 1 to {last} are the same, as far as both runs recorded them ({both})")
    return 0


def difference(one: History, other: History, step: int, notes: dict[Path, list[str]] | None = None) -> str:
    """Describe the first difference in a step of two runs; "" if all common records are equal.

    Args:
        notes: receives, by run, the reasons why rollouts cannot be compared.
    """
    records = one.step(step), other.step(step)
    notes = {} if notes is None else notes
    mine, its = _stored(one, step, notes), _stored(other, step, notes)
    if mine is not None and its is not None and (found := _of_groups(mine, its)):
        return found
    a, b = (record.digest for record in records)
    metric = first_metric(*(_of_training(record.metrics) for record in records))
    if a is not None and b is not None:
        tensor = first_tensor(a, b)
        also = f"; {metric}" if metric else ""
        return f"after the same rollouts, {tensor} differs{also}" if tensor else ""
    return metric


def _of_training(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of a step's training, without times."""
    return {name: value for name, value in metrics.items() if name.startswith(TRAINED)}


def _stored(history: History, step: int, notes: dict[Path, list[str]]) -> Sequence[Group] | None:
    """Return the groups of a step; None and a note if they are not stored."""
    try:
        return history.groups(step)
    except ConfigError as error:
        notes.setdefault(history.run.path, []).append(str(error))
        return None


def _of_groups(one: Sequence[Group], other: Sequence[Group]) -> str:
    """Describe the first value that differs in the groups of a step, in the order of training."""
    for a, b in zip(one, other, strict=False):
        prompts = [(group.prompt.environment, group.prompt.id) for group in (a, b)]
        if prompts[0] != prompts[1]:
            return f"slot {a.slot}: the prompt is {prompts[0]} and {prompts[1]} (slot {b.slot})"
        for index, (mine, its) in enumerate(zip(a.rollouts, b.rollouts, strict=False)):
            where = f"slot {a.slot} ({a.prompt.environment}, prompt {a.prompt.id}), rollout {index}"
            if found := _of_rollouts(mine, its):
                return f"{where}: {found}"
        if len(a.rollouts) != len(b.rollouts):
            return f"slot {a.slot}: it has {len(a.rollouts)} and {len(b.rollouts)} rollouts"
    if len(one) != len(other):
        return f"it trained {len(one)} and {len(other)} groups"
    return ""


def _of_rollouts(a: Rollout, b: Rollout) -> str:
    if len(a.segments) != len(b.segments):
        return f"it has {len(a.segments)} and {len(b.segments)} segments"
    for index, (mine, its) in enumerate(zip(a.segments, b.segments, strict=True)):
        segment = f"segment {index}, " if len(a.segments) > 1 else ""
        if (at := _first(mine.prompt_ids, its.prompt_ids)) is not None:
            return f"{segment}token {at} of the prompt is {_values(mine.prompt_ids, its.prompt_ids, at)}"
        found = [
            (at, rank, name)
            for rank, name in enumerate(NAMES)
            if (at := _first(mine.tokens.arrays()[name], its.tokens.arrays()[name])) is not None
        ]
        if found:
            at, _, name = min(found)
            values = _values(mine.tokens.arrays()[name], its.tokens.arrays()[name], at)
            return f"{segment}{NAMES[name]} of token {at} is {values}"
    for name in ("reward", "turn_rewards", "advantage", "token_advantages", "trained"):
        if not np.array_equal(getattr(a, name), getattr(b, name)):
            return f"the {name} is {getattr(a, name)!r} and {getattr(b, name)!r}"
    return ""


def _first(a: Any, b: Any) -> int | None:
    """Return the first index at which two arrays differ bitwise, or None."""
    n = min(len(a), len(b))
    different = np.flatnonzero(_bits(a[:n]) != _bits(b[:n]))
    if different.size:
        return int(different[0])
    return None if len(a) == len(b) else n


def _bits(array: Any) -> Any:
    return array.view(np.uint32) if array.dtype == np.float32 else array


def _values(a: Any, b: Any, at: int) -> str:
    """Format the values of two arrays at an index with all digits."""
    return " and ".join(f"{each[at].item()!r}" if at < len(each) else "missing" for each in (a, b))
