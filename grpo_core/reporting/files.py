"""The tracker ``files``: writes the files of a run, which every tool reads, while it runs.

Another tracker warns when their disk will soon be full.

In addition to the run's events, events.jsonl has two kinds of lines about the files themselves: ``Opened``,
when a process begins to write (steps after its ``step``, and validations after the version ``measured``, are
discarded), and ``Recorded``, with the digest of a file of rollouts.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from attrs import asdict

from grpo_core._version import __version__
from grpo_core.contracts import events
from grpo_core.contracts.errors import ConfigError, DataPlaneError
from grpo_core.contracts.protocols import Tracker
from grpo_core.contracts.records import Group, RunInfo
from grpo_core.loop.checkpoint import manifest_digest
from grpo_core.loop.rows import sampled_versions
from grpo_core.reporting import stored
from grpo_core.reporting.stored import TEXTS, TOKENS, as_json
from grpo_core.storage.disk import Disk
from grpo_core.storage.run_directory import (
    PARTIAL,
    ROLLOUTS,
    VALIDATION,
    RunDirectory,
    rollouts_step,
    whole_lines,
)


class FilesTracker(Tracker):
    """Writes the files that ``grpo-core verify``, ``report`` and every other tool reads.

    The run ends if they cannot be written: they are the only record of the training.

    Args:
        every: write the rollouts of every this many steps to ``rollouts/``; 0 writes none.  Rollouts of
            validations are always written, to ``validation/``.
        keep: number of newest steps, and of newest validations, whose rollouts stay on disk; 0 keeps all.
        compress: write the texts of rollouts with gzip.
        tokens: write the tokens of rollouts as well, with logprobs, versions and advantages: about 12 bytes
            for each token.  ``grpo_core.stored_rollouts`` reads them.
    """

    required = True

    def __init__(
        self, run: RunInfo, *, every: int = 1, keep: int = 0, compress: bool = True, tokens: bool = True
    ) -> None:
        for name, value in (("every", every), ("keep", keep)):
            if value < 0:
                raise ConfigError(f"tracking.files.{name} is {value}, expected at least 0")
        self._every, self._keep, self._compress, self._tokens = every, keep, compress, tokens
        self._directory = run.directory
        for folder in (ROLLOUTS, VALIDATION):
            (run.directory / folder).mkdir(exist_ok=True)
        self._events = _appending(run.directory / "events.jsonl")
        cut = -1 if run.resumed_from is None else run.resumed_from
        self._record("Opened", step=cut, version=__version__)
        RunDirectory(run.directory).forget_after(cut, cut if run.validated is None else run.validated)
        self._metrics = _appending(run.directory / "metrics.jsonl")
        self._timeline = _appending(run.directory / "timeline.jsonl")
        self._time = 0.0
        """Time of the newest event."""
        self._unsynced: list[Path] = []
        """Files of rollouts that a power cut could still undo."""

    def event(self, event: events.Event) -> None:
        """A line of events.jsonl."""
        self._time = event.time
        match event:
            case events.TimelineExtended():
                with _named(Path(self._timeline.name)):
                    self._timeline.writelines(timeline_lines(event))
                return
            case events.StageBegan() | events.LineShown():
                return
            case events.ValidationPlayed():
                self._write_rollouts(VALIDATION, event.version, event.groups)
                return
            case events.Saved():
                more = {"manifest": manifest_digest(Path(event.directory))}
            case _:
                more = {}
        self._write_event({"time": event.time, **plain(event), **more})
        if isinstance(event, events.Saving):
            self._sync()

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """A line of metrics.jsonl."""
        with _named(Path(self._metrics.name)):
            self._metrics.write(metrics_line(step, self._time, values))

    def rollouts(self, step: int, groups: Sequence[Group]) -> None:
        """The files of a step in rollouts/."""
        if self._every and step % self._every == 0:
            self._write_rollouts(ROLLOUTS, step, groups)

    def close(self) -> None:
        """Close the files."""
        self._sync()
        self._metrics.close()
        self._timeline.close()
        self._events.close()

    def _write_rollouts(self, folder: str, step: int, groups: Sequence[Group]) -> None:
        """Write the texts and the tokens of groups; remove files that are too old."""
        name = f"{folder}/step-{step:06d}"
        texts = stored.texts(groups)
        removed = self._superfluous(folder, step) if self._keep else []
        if self._compress:
            self._write(step, f"{name}.jsonl.gz", stored.packed(texts))
        else:
            self._write(step, f"{name}.jsonl", texts)
        if self._tokens:
            with contextlib.suppress(DataPlaneError):  # this ends the run, and the events of the end follow
                self._write(step, f"{name}{stored.TOKENS}", stored.tokens(groups))
        for old in removed:
            (self._directory / old).unlink(missing_ok=True)

    def _write(self, step: int, name: str, data: bytes) -> None:
        """Write a file under a temporary name, record its digest, and rename it.

        A process that is killed in between leaves the temporary file and its digest.
        """
        path = self._directory / name
        partial = path.with_name(path.name + PARTIAL)
        with _named(partial):
            partial.write_bytes(data)
        self._record("Recorded", step=step, file=name, digest=hashlib.sha256(data).hexdigest())
        partial.replace(path)
        self._unsynced.append(path)

    def _superfluous(self, folder: str, new: int) -> list[str]:
        """Return the files of a folder that are too old once step ``new`` is written, oldest first."""
        found = [path.name for path in (self._directory / folder).iterdir()]
        steps = {name: rollouts_step(name) for name in found if not name.endswith(PARTIAL)}
        kept = sorted({step for step in steps.values() if step is not None} | {new})[-self._keep :]
        old = [(step, name) for name, step in steps.items() if step is not None and step < kept[0]]
        return [f"{folder}/{name}" for _, name in sorted(old)]

    def _record(self, name: str, **values: Any) -> None:
        """Write a line of events.jsonl about the files themselves."""
        self._write_event({"time": time.time(), "event": name, **values})

    def _write_event(self, event: Mapping[str, Any]) -> None:
        with _named(Path(self._events.name)):
            self._events.write(as_json(event) + "\n")

    def _sync(self) -> None:
        """Make everything durable: records must not be lost while a later checkpoint survives."""
        for path in (*self._unsynced, self._directory / "metrics.jsonl", self._directory / "events.jsonl"):
            if path.exists():  # ``keep`` may have removed it
                Disk().sync(path)
        self._unsynced.clear()


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Add the file's name to write errors, as in errors of opening."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def timeline_lines(event: events.TimelineExtended) -> Iterator[str]:
    """Yield the lines of timeline.jsonl: a span each, with its times in seconds since 1970."""
    zero = event.time - event.now
    for span in event.spans:
        begin, end = (round(zero + time, 4) for time in (span.begin, span.end))
        more = {"begin": begin, "end": end, "busy": round(span.busy, 4), "calls": span.calls}
        more["seconds"] = round(span.seconds, 4)
        yield as_json({"step": event.step, "lane": span.lane, "what": span.what, **more}) + "\n"


def metrics_line(step: int, time: float | None, values: Mapping[str, float]) -> str:
    """Return a line of metrics.jsonl."""
    return as_json({"step": step, "time": time, **values}) + "\n"


def plain(event: events.Event) -> dict[str, Any]:
    """Convert an event to a line of events.jsonl, with slots and groups by their ids."""
    name = type(event).__name__
    match event:
        case events.Dispatched():
            slots = [
                {
                    "slot": slot.id,
                    "task": slot.prompt and slot.prompt.environment,
                    "prompt": slot.prompt and slot.prompt.id,
                    "attempt": slot.attempts,
                    "kept": len(slot.partial_rollouts),
                    "generation_version": slot.generation_version,
                    "target_version": slot.target_version,
                }
                for slot in event.slots
            ]
            return {"event": name, "step": event.step, "slots": slots}
        case events.GroupsReady():
            return {"event": name, "step": event.step, "groups": [_group(group) for group in event.groups]}
    return {"event": name, **asdict(event, filter=lambda attribute, _: attribute.name != "time")}


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
    """Open for appending lines; an incomplete last line of a killed process is cut off."""
    if path.exists():
        os.truncate(path, whole_lines(path))
    return open(path, "a", encoding="utf-8", buffering=1)


# ---------------------------------------------------------------------------------- the room on the disk

FEWEST_STEPS = 100
"""Number of further steps for which the disk should have room."""
FIRST = 5
"""Number of steps after which the growth of the run can be estimated."""


class DiskRoom(Tracker):
    """Compares the growth of a run's files with the free bytes of its disk, at each step.

    Checkpoints do not count: newer ones replace older ones.

    Args:
        directory: of the run.
        num_steps: number of steps of the run.
        emit: receives the warning.
        free: returns the free bytes of a directory's disk.
    """

    def __init__(
        self,
        directory: Path,
        num_steps: int,
        emit: Callable[[events.Event], None],
        free: Callable[[Path], int] = lambda directory: shutil.disk_usage(directory).free,
    ) -> None:
        self._directory, self._num_steps, self._emit, self._free = directory, num_steps, emit, free
        self._begin: tuple[int, int] | None = None
        """Step and size of the growing files when the first step ended."""
        self._rollouts: list[int] = []
        """Sizes of the files of the newest rollouts."""

    def event(self, event: events.Event) -> None:
        """Look at the disk when a step ends."""
        if not isinstance(event, events.StepEnded):
            return
        grown = sum(_size(self._directory / name) for name in ("events.jsonl", "metrics.jsonl"))
        written = self._directory / ROLLOUTS / f"step-{event.step - 1:06d}"  # of the step before
        newest = sum(_size(Path(f"{written}{suffix}")) for suffix in (*TEXTS, TOKENS))
        self._rollouts = [*self._rollouts[-FIRST:], newest]
        first, size = self._begin = self._begin or (event.step, grown)
        steps = event.step - first
        left = min(FEWEST_STEPS, self._num_steps - event.step)
        if steps < FIRST or not left:
            return
        per_step = (grown - size) / steps + sum(self._rollouts) / len(self._rollouts)
        free = self._free(self._directory)
        if per_step * left > free:
            message = (
                f"the disk has room for about {int(free / per_step):,} more steps: {free / 1e6:,.3f} MB are "
                f"free, and a step takes {per_step / 1e6:,.3f} MB. Make room, or end the run and continue it "
                "with --resume and --set tracking.files.keep=N, tracking.files.every=N or "
                "tracking.files.tokens=false"
            )
            self._emit(events.WarningRaised(step=event.step, cause="disk", message=message))


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0
