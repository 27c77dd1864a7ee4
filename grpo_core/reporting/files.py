"""The tracker ``files``: writes metrics.jsonl, events.jsonl and rollouts/ of a run as it goes."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from attrs import asdict

from grpo_core.events import Dispatched, Event, GroupsReady
from grpo_core.loop.buffer import Slot
from grpo_core.protocols import Tracker
from grpo_core.records import Group, Prompt, Rollout, RunInfo

BLOCK = 65536
"""Bytes that are read at once to find the last line of a file."""


class FilesTracker(Tracker):
    """Writes the files that ``grpo-core verify``, ``report`` and every other tool reads.

    The run ends if they cannot be written: nothing else says what was trained.
    """

    required = True

    def __init__(self, run: RunInfo) -> None:
        self._rollouts = run.directory / "rollouts"
        self._rollouts.mkdir(exist_ok=True)
        self._metrics = _appending(run.directory / "metrics.jsonl")
        self._events = _appending(run.directory / "events.jsonl")
        self._time = 0.0
        """Time of the newest event."""

    def event(self, event: Event) -> None:
        """A line of events.jsonl."""
        self._time = event.time
        self._events.write(_line({"time": event.time, **plain(event)}))

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """A line of metrics.jsonl."""
        self._metrics.write(_line({"step": step, "time": self._time, **values}))

    def rollouts(self, step: int, groups: Sequence[Group]) -> None:
        """The file of a step in rollouts/."""
        with open(self._rollouts / f"step-{step:06d}.jsonl", "w", encoding="utf-8") as file:
            for group in groups:
                for rollout in group.rollouts:
                    file.write(_line(_as_written(group, rollout)))

    def close(self) -> None:
        """Close the files."""
        self._metrics.close()
        self._events.close()


def plain(event: Event) -> dict[str, Any]:
    """An event as events.jsonl holds it: slots and groups by what identifies them."""
    name = type(event).__name__
    match event:
        case Dispatched():
            return {"event": name, "step": event.step, "slots": [_slot(slot) for slot in event.slots]}
        case GroupsReady():
            return {"event": name, "step": event.step, "groups": [_group(group) for group in event.groups]}
    return {"event": name, **asdict(event, filter=lambda attribute, _: attribute.name != "time")}


def _as_written(group: Group, rollout: Rollout) -> dict[str, Any]:
    return {
        "task": group.prompt.environment,
        "prompt": group.prompt.id,
        "answer": _jsonable(group.prompt.answer),
        "messages": list(rollout.messages),
        "reward": rollout.reward,
        "metrics": dict(rollout.metrics),
        "finish_reason": rollout.finish_reason,
        "turns": rollout.turns,
        "tokens": rollout.tokens.n_sampled,
        "generation_version": group.generation_version,
    }


def _slot(slot: Slot[Prompt]) -> dict[str, Any]:
    prompt = slot.prompt
    return {
        "slot": slot.id,
        "task": prompt and prompt.environment,
        "prompt": prompt and prompt.id,
        "attempt": slot.attempts,
        "kept": len(slot.partial_rollouts),
        "generation_version": slot.generation_version,
        "target_version": slot.target_version,
    }


def _group(group: Group) -> dict[str, Any]:
    versions = np.concatenate([rollout.tokens.sampled_versions for rollout in group.rollouts])
    return {
        "slot": group.slot,
        "task": group.prompt.environment,
        "prompt": group.prompt.id,
        "generation_version": group.generation_version,
        "target_version": group.target_version,
        "token_versions": [int(versions.min()), int(versions.max())] if len(versions) else [],
        "rewards": group.rewards,
    }


def _appending(path: Path) -> TextIO:
    """Open for whole lines; the half line that a killed process left at the end is cut off."""
    if path.exists():
        os.truncate(path, _whole_lines(path))
    return open(path, "a", encoding="utf-8", buffering=1)


def _whole_lines(path: Path) -> int:
    """Return the number of bytes up to the last newline; a large file is read from its end."""
    with open(path, "rb") as file:
        begin = file.seek(0, os.SEEK_END)
        while begin:
            end, begin = begin, max(0, begin - BLOCK)
            file.seek(begin)
            if (found := file.read(end - begin).rfind(b"\n")) >= 0:
                return begin + found + 1
    return 0


def _line(value: Mapping[str, Any]) -> str:
    """Return JSON with its newline, to be written at once, so that a reader never sees half a line."""
    try:
        return json.dumps(value, default=str, allow_nan=False) + "\n"
    except ValueError:
        return json.dumps(_finite(value), default=str) + "\n"


def _jsonable(value: Any) -> Any:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return str(value)
    return value


def _finite(value: Any) -> Any:
    """Replace NaN by None, since JSON has no NaN."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
