"""The tracker ``files``: writes metrics.jsonl, events.jsonl and rollouts/ of a run as it goes.

Besides the events of the run, events.jsonl has two kinds of lines about the files themselves: ``Opened``,
when a process begins to write (what came after its ``step`` is forgotten), and ``Recorded``, with the digest
of a file of rollouts.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from attrs import asdict

from grpo_core import chain
from grpo_core._version import __version__
from grpo_core.disk import Disk
from grpo_core.errors import ConfigError, shortened
from grpo_core.events import Dispatched, Event, GroupsReady, Saved, Saving, ValidationPlayed
from grpo_core.loop.buffer import Slot
from grpo_core.loop.checkpoint import manifest_digest
from grpo_core.protocols import Tracker
from grpo_core.records import Group, Prompt, Rollout, RunInfo
from grpo_core.run_directory import CONFIG, PARTIAL, RunDirectory, rollouts_name
from grpo_core.tokens import sampled_versions

GZIP_LEVEL = 4
"""Level of the compression; level 6 takes four times as long for a ninth of the size."""


class FilesTracker(Tracker):
    """Writes the files that ``grpo-core verify``, ``report`` and every other tool reads.

    The run ends if they cannot be written: nothing else says what was trained.

    Args:
        every: write the rollouts of every this many steps to ``rollouts/``; 0 writes none.  Rollouts of
            validations are written in any case.
        keep: number of newest steps, and of newest validations, whose rollouts stay on disk; 0 keeps all.
        compress: write the rollouts with gzip.
    """

    required = True

    def __init__(self, run: RunInfo, *, every: int = 1, keep: int = 0, compress: bool = True) -> None:
        for name, value in (("every", every), ("keep", keep)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ConfigError(
                    f"tracking.files.{name}: expected a whole number of at least 0, got {value!r}"
                )
        self._every, self._keep, self._compress = every, keep, compress
        self._directory = run.directory
        self._rollouts = run.directory / "rollouts"
        self._rollouts.mkdir(exist_ok=True)
        self._events = _ChainedFile(run.directory / "events.jsonl")
        cut = -1 if run.resumed_from is None else run.resumed_from
        config = run.directory / CONFIG
        self._record(
            "Opened",
            step=cut,
            config=digest(config.read_bytes()) if config.is_file() else "",
            version=__version__,
        )
        RunDirectory(run.directory).forget_after(cut)
        self._metrics = _appending(run.directory / "metrics.jsonl")
        self._time = 0.0
        """Time of the newest event."""
        self._unsynced: list[Path] = []
        """Files of rollouts that a power cut could still undo."""

    def event(self, event: Event) -> None:
        """A line of events.jsonl."""
        self._time = event.time
        match event:
            case ValidationPlayed():
                self._write_rollouts("validation", event.version, event.groups)
                return
            case Saved():
                more = {"manifest": manifest_digest(Path(event.directory))}
            case _:
                more = {}
        self._events.write(_json({"time": event.time, **plain(event), **more}))
        if isinstance(event, Saving):
            self._sync()

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """A line of metrics.jsonl."""
        with _named(Path(self._metrics.name)):
            self._metrics.write(metrics_line(step, self._time, values))

    def rollouts(self, step: int, groups: Sequence[Group]) -> None:
        """The file of a step in rollouts/."""
        if self._every and step % self._every == 0:
            self._write_rollouts("step", step, groups)

    def close(self) -> None:
        """Close the files."""
        self._sync()
        self._metrics.close()
        self._events.close()

    def _write_rollouts(self, kind: str, step: int, groups: Sequence[Group]) -> None:
        """Write a file under another name, record its digest, and give it its name.

        A process that is killed between leaves the other name, and a digest that fits it.
        """
        path = self._rollouts / f"{kind}-{step:06d}.jsonl{'.gz' if self._compress else ''}"
        data = "".join(
            _json(_as_written(group, rollout)) + "\n" for group in groups for rollout in group.rollouts
        ).encode(errors="replace")
        if self._compress:
            data = gzip.compress(data, GZIP_LEVEL, mtime=0)
        partial = path.with_name(path.name + PARTIAL)
        with _named(partial):
            partial.write_bytes(data)
        removed = self._superfluous(kind, path.name) if self._keep else []
        self._record("Recorded", step=step, file=path.name, digest=digest(data), removed=removed)
        partial.replace(path)
        for name in removed:
            (self._rollouts / name).unlink(missing_ok=True)
        self._unsynced.append(path)

    def _superfluous(self, kind: str, new: str) -> list[str]:
        """Return the files of a kind that are too old once there is a new one, oldest first."""
        names = [path.name for path in self._rollouts.iterdir() if not path.name.endswith(PARTIAL)]
        names = [name for name in names if rollouts_name(name)[0] == kind and name != new]
        names.sort(key=lambda name: rollouts_name(name)[1])
        return names[: max(0, len(names) + 1 - self._keep)]

    def _record(self, name: str, **values: Any) -> None:
        """Write a line of events.jsonl about the files themselves."""
        self._events.write(_json({"time": time.time(), "event": name, **values}))

    def _sync(self) -> None:
        """Make everything durable: a checkpoint must not outlive what was written before it."""
        for path in (*self._unsynced, self._directory / "metrics.jsonl", self._directory / "events.jsonl"):
            if path.exists():  # ``keep`` may have removed it
                Disk().sync(path)
        self._unsynced.clear()


class _ChainedFile:
    """A file of chained lines that is open for more; half a line at its end is cut off."""

    def __init__(self, path: Path) -> None:
        self._path, self._link = path, chain.START
        if path.exists():
            size = chain.whole_lines(path)
            os.truncate(path, size)
            self._link = chain.last_link(path, size)
        self._file: TextIO = path.open("a", encoding="utf-8", buffering=1)

    def write(self, text: str) -> None:
        line, link = chain.chained(self._link, text)
        with _named(self._path):
            self._file.write(line)
        self._link = link

    def close(self) -> None:
        self._file.close()


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Name the file in an error of writing to it, as errors of opening do."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def digest(data: bytes) -> str:
    """Return the digest by which events.jsonl knows the contents of another file."""
    return hashlib.sha256(data).hexdigest()


def metrics_line(step: int, time: float | None, values: Mapping[str, float]) -> str:
    """Return a line of metrics.jsonl."""
    return _json({"step": step, "time": time, **values}) + "\n"


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
        "segments": len(rollout.segments),
        "tokens": rollout.n_sampled,
        "generation_version": group.generation_version,
        **({} if rollout.error is None else {"error": shortened(rollout.error)}),
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
    versions = sampled_versions(group.rollouts)
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
        os.truncate(path, chain.whole_lines(path))
    return open(path, "a", encoding="utf-8", buffering=1)


def _json(value: Mapping[str, Any]) -> str:
    try:
        return json.dumps(value, default=str, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), default=str)


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
