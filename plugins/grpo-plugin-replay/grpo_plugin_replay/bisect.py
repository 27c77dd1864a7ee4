"""``grpo-core bisect``: finds the first step, and there the first value, at which two runs differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from grpo_core import ConfigError, Group, Rollout
from grpo_core.kit import resume, say
from grpo_plugin_replay.history import History, first_metric, first_tensor, read

NAMES = {
    "ids": "the id",
    "sampled": "whether it was sampled",
    "logprobs": "the logprob",
    "versions": "the version",
}
"""Names of the arrays of tokens, in the order in which they are compared."""
TRAINED = ("loss", "entropy", "grad_norm", "lr", "mismatch_kl", "importance_ratio", "reward/")
"""Beginnings of the names of metrics that are compared."""
ELSEWHERE = ("engine", "environment", "placement", "checkpoint", "tracking", "validation", "data_plane")
"""Sections whose differences are not shown: they say where and how a run was computed and written."""


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
    for key, a, b in resume.differences(mine, its):
        if key.partition(".")[0] not in ELSEWHERE:
            say(f"configuration: {key} is {resume.shown(a)} and {resume.shown(b)}")
    notes: dict[Path, list[str]] = {}
    for step in range(1, last + 1):
        if told := difference(one, other, step, notes):
            break
    for reasons in notes.values():
        more = f" ({len(reasons) - 1} more of its steps cannot be compared either)"
        say(f"note: {reasons[0]}{more if len(reasons) > 1 else ''}")
    if told:
        say(f"step {step} is the first that differs: {told}")
        return 1
    both = f"{len(one.steps)} and {len(other.steps)} steps"
    say(f"steps 1 to {last} are the same, as far as both runs recorded them ({both})")
    return 0


def difference(one: History, other: History, step: int, notes: dict[Path, list[str]] | None = None) -> str:
    """Say what differs first in a step of two runs; "" if nothing does, as far as both have recorded it.

    Args:
        notes: receives, by run, why the rollouts of the step cannot be compared.
    """
    records = one.step(step), other.step(step)
    notes = {} if notes is None else notes
    mine, its = _stored(one, step, notes), _stored(other, step, notes)
    if mine is not None and its is not None and (told := _of_groups(mine, its)):
        return told
    a, b = (record.digest for record in records)
    metric = first_metric(*(_of_training(record.metrics) for record in records))
    if a is not None and b is not None:
        tensor = first_tensor(a, b)
        also = f"; {metric}" if metric else ""
        return f"after the same rollouts, {tensor} differs{also}" if tensor else ""
    return metric


def _of_training(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics that say how a step trained, and not how long what took."""
    return {name: value for name, value in metrics.items() if name.startswith(TRAINED)}


def _stored(history: History, step: int, notes: dict[Path, list[str]]) -> Sequence[Group] | None:
    """Return the groups of a step; None if they are not stored, and a note."""
    try:
        return history.groups(step)
    except ConfigError as error:
        notes.setdefault(history.run.path, []).append(str(error))
        return None


def _of_groups(one: Sequence[Group], other: Sequence[Group]) -> str:
    """Say which value of the groups of a step differs first, in the order in which they are trained."""
    for a, b in zip(one, other, strict=False):
        prompts = [(group.prompt.environment, group.prompt.id) for group in (a, b)]
        if prompts[0] != prompts[1]:
            return f"slot {a.slot}: the prompt is {prompts[0]} and {prompts[1]} (slot {b.slot})"
        for place, (mine, its) in enumerate(zip(a.rollouts, b.rollouts, strict=False)):
            where = f"slot {a.slot} ({a.prompt.environment}, prompt {a.prompt.id}), rollout {place}"
            if told := _of_rollouts(mine, its):
                return f"{where}: {told}"
        if len(a.rollouts) != len(b.rollouts):
            return f"slot {a.slot}: it has {len(a.rollouts)} and {len(b.rollouts)} rollouts"
    if len(one) != len(other):
        return f"it trained {len(one)} and {len(other)} groups"
    return ""


def _of_rollouts(a: Rollout, b: Rollout) -> str:
    if len(a.segments) != len(b.segments):
        return f"it has {len(a.segments)} and {len(b.segments)} segments"
    for place, (mine, its) in enumerate(zip(a.segments, b.segments, strict=True)):
        segment = f"segment {place}, " if len(a.segments) > 1 else ""
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
    """Return the first place at which two arrays differ, bit for bit; None if there is none."""
    n = min(len(a), len(b))
    different = np.flatnonzero(_bits(a[:n]) != _bits(b[:n]))
    if different.size:
        return int(different[0])
    return None if len(a) == len(b) else n


def _bits(array: Any) -> Any:
    return array.view(np.uint32) if array.dtype == np.float32 else array


def _values(a: Any, b: Any, at: int) -> str:
    """Return the values of two arrays at a place, with all their digits."""
    return " and ".join(f"{each[at].item()!r}" if at < len(each) else "missing" for each in (a, b))
