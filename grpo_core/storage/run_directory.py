"""The directory of a run, and what it holds.

runs/NAME/
    config.toml                    the resolved configuration
    config-1.toml, config-2.toml   earlier ones, if a resume changed it
    metrics.jsonl                  one line for each step and each validation
    rollouts/step-000120.jsonl.gz  the texts that made version 120, with their rewards
    rollouts/step-000120.safetensors   their tokens; see grpo_core.reporting.stored
    validation/                    the same of what version 120 was validated by
    events.jsonl                   everything that happened, append-only
    provenance.jsonl               versions and hashes of the programs of each start
    timeline.jsonl                 who did what when; see grpo_core.loop.timeline
    report.html                    all of it on one page, made when the run ends
    logs/                          what the child processes print
    profile/                       traces of some steps, and where their time went
    checkpoints/                   see grpo_core.loop.checkpoint
    .lock                          held by the process that runs here; names it
    .ended                         how the run ended, and the files that it left; written last
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import re
import shutil
import socket
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import NoneType
from typing import Any

from grpo_core.config import Config, as_table, as_toml, read_toml
from grpo_core.contracts.errors import ConfigError
from grpo_core.contracts.records import RunInfo
from grpo_core.contracts.typed import Count, checked
from grpo_core.models.files import command_hint
from grpo_core.plugins.configured import configured
from grpo_core.storage.disk import Disk, replace_file

CONFIG = "config.toml"
PARTIAL = ".partial"
"""Suffix of a file of rollouts while it is written."""
LOCK, ENDED = ".lock", ".ended"
PROVENANCE = "provenance.jsonl"
"""File of the programs of each start, see grpo_core.app.provenance."""
ROLLOUTS, VALIDATION = "rollouts", "validation"
"""Directories of files of rollouts: of the steps, and of the validations."""
WRITTEN = (
    CONFIG,
    "metrics.jsonl",
    "events.jsonl",
    PROVENANCE,
    "timeline.jsonl",
    "report.html",
    ROLLOUTS,
    VALIDATION,
    "logs",
    "profile",
    "checkpoints",
    "model",
)
"""Names that a start writes."""
_BLOCK = 65536
"""Number of bytes per read in the search for a file's last line."""


class RunDirectory:
    """A directory that holds one run.  One process at a time may change it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.logs = path / "logs"
        self.page = path / "report.html"
        self.profile = path / "profile"
        """Directory of the traces and the table of ``trainer.profile``."""
        self.model = path / "model"
        """Directory in which a tiny model is made."""
        self.unlock: Callable[[], object] = lambda: None
        """Releases the lock, if this object has it."""
        self._earlier: Path | None = None
        """The configuration before ``replace_config``."""

    @classmethod
    def create(cls, path: Path, config: Config) -> RunDirectory:
        """Make a run's directory, and lock it for this process.

        Files of an earlier start that never trained a step are removed.  Raises ConfigError if the path holds
        anything else.
        """
        run = cls(path)
        if path.exists() and not path.is_dir():
            raise ConfigError(f"--output {path} is a file; give a directory for the run")
        text = as_toml(config)
        try:
            run._check_free()
            path.mkdir(parents=True, exist_ok=True)
            run.lock()
            run._check_free()  # another process may have been quicker
            for left in path.iterdir():  # from a failed start
                if left.name in WRITTEN or re.fullmatch(r"config-\d+\.toml", left.name):
                    left.unlink() if left.is_file() else shutil.rmtree(left)
            (path / CONFIG).write_text(text, encoding="utf-8")
            run.logs.mkdir(exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--output {path}: cannot be written: {error.strerror}") from error
        return run

    def lock(self) -> None:
        """Reserve the directory for this process, until ``unlock``, or until the process or this object ends.

        The kernel releases the lock of a process that was killed.  Raises ConfigError, which names the
        holder, if another process has it.
        """
        file = self.path / LOCK
        try:
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise ConfigError(f"{self.path}: cannot be written: {error.strerror}") from error
        self.unlock = closing = weakref.finalize(self, os.close, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            closing()
            if not isinstance(error, BlockingIOError):
                raise ConfigError(f"{self.path}: cannot be locked: {error.strerror}") from error
            holder = file.read_text(encoding="utf-8", errors="replace").strip() or "another process"
            raise ConfigError(
                f"{self.path}: {holder} is running in it; wait until it ends, or give another directory"
            ) from None
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())

    @property
    def is_running(self) -> bool:
        """Whether a process of this machine has reserved the directory; nothing is written to find out."""
        try:
            descriptor = os.open(self.path / LOCK, os.O_RDONLY)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    def mark_ended(self, reason: str, step: int) -> None:
        """Record that the run has ended, and that its trackers have finished."""
        files = sorted(path.name for path in self.path.iterdir())
        ended = {"reason": reason, "step": step, "files": files}
        with suppress(OSError):  # the disk is full: a resume completes the end once more
            replace_file(Disk(), self.path / ENDED, json.dumps(ended).encode())

    def has_ended(self, reason: str, step: int) -> bool:
        """Whether the run has ended for this reason at this step, and its files are still there."""
        try:
            ended = json.loads((self.path / ENDED).read_text(encoding="utf-8"))
            there = {path.name for path in self.path.iterdir()}
            return (ended["reason"], ended["step"]) == (reason, step) and there.issuperset(ended["files"])
        except (OSError, ValueError, KeyError, TypeError):  # it was never written, or by another program
            return False

    def forget_end(self) -> None:
        """Record that the run continues."""
        (self.path / ENDED).unlink(missing_ok=True)

    def _check_free(self) -> None:
        """Raise ConfigError if the directory holds anything but the rest of a failed start."""
        found = {path.name for path in self.path.iterdir()} if self.path.exists() else set()
        if not found - {LOCK}:
            return
        if LOCK in found and CONFIG in found and not self.has_trained():
            return
        what = "holds another run" if CONFIG in found else "is not empty"
        raise ConfigError(
            f"--output {self.path} {what}; give another directory, or continue that run with "
            f"--resume {self.path}"
        )

    def has_trained(self) -> bool:
        """Whether there is a checkpoint or a trained rollout."""
        return any(self.checkpoints.glob("step-*")) or any((self.path / ROLLOUTS).glob("step-*"))

    @classmethod
    def existing(cls, path: Path) -> RunDirectory:
        """Find an existing run.  Raises ConfigError if the path is not a run's directory."""
        if not (path / CONFIG).is_file():
            hint = command_hint(str(path))
            raise ConfigError(f"{path} is not a run (there is no {CONFIG} in it).{hint}")
        return cls(path)

    @classmethod
    def open(cls, path: Path, block: Sequence[str] = ()) -> tuple[RunDirectory, Config]:
        """Find an existing run, and read its configuration; plugins in ``block`` are not loaded.

        Raises ConfigError.
        """
        run, table = cls.existing(path), read_toml(path / CONFIG)
        try:
            return run, configured([table], block, stored=True)[0]
        except ConfigError as error:
            raise ConfigError(f"{path / CONFIG}: {error}") from error

    @classmethod
    def latest(cls, parent: Path) -> Path:
        """Open the newest run in ``parent`` with a checkpoint.  Raises ConfigError without such a run."""
        runs = {path.parent.parent for path in parent.glob("*/checkpoints/step-*")}
        if not runs:
            raise ConfigError(
                f"--resume: there is no run with a checkpoint in {parent}/; give the run's directory"
            )
        return max(runs, key=lambda run: max(p.stat().st_mtime for p in run.iterdir()))

    def info(self, config: Config, resumed_from: int | None, validated: int | None = None) -> RunInfo:
        """Return the run's description for trackers."""
        return RunInfo(
            name=self.path.resolve().name,
            directory=self.path,
            config=as_table(config),
            resumed_from=resumed_from,
            validated=validated,
        )

    def forget_after(self, step: int, validated: int, disk: Disk | None = None) -> None:
        """Remove the records after the step from which a run continues; events are kept.

        Args:
            step: the step.
            validated: newest version whose validation stays; a later one is made again.
            disk: holds the files.
        """
        metrics = self.path / "metrics.jsonl"
        if metrics.exists():
            lines = metrics.read_bytes().splitlines(keepends=True)
            whole = [line for line in lines if line.endswith(b"\n")]
            kept = [
                line
                for line, row in zip(whole, metrics_rows(metrics), strict=True)
                if row["step"] <= (min(step, validated) if b'"validation/' in line else step)
            ]
            if len(kept) < len(lines):
                replace_file(disk or Disk(), metrics, b"".join(kept))
        for folder in (ROLLOUTS, VALIDATION):
            for rollouts in (self.path / folder).glob("*"):
                at = rollouts_step(rollouts.name)
                unwanted = at is not None and (at > step or rollouts.name.endswith(PARTIAL))
                if unwanted and rollouts.is_file():
                    rollouts.unlink()

    def work_after(self, step: int) -> tuple[int, float]:
        """Return how many steps ``metrics.jsonl`` has after a step, and how many seconds they took."""
        rows = metrics_rows(self.path / "metrics.jsonl", containing=b'"time/step"')
        seconds = [row["time/step"] or 0.0 for row in rows if row["step"] > step]
        return len(seconds), sum(seconds)

    def scores(self) -> dict[str, tuple[dict[str, float], dict[str, float]]]:
        """Return the metrics of the first and the last validation of each task, from ``metrics.jsonl``.

        Raises ConfigError if a line is something else.
        """
        found: dict[str, tuple[dict[str, float], dict[str, float]]] = {}
        for row in validations(metrics_rows(self.path / "metrics.jsonl", containing=b'"validation/')):
            task = row.pop("task")
            known = {name: value for name, value in row.items() if name != "step" and value is not None}
            found[task] = found.get(task, (known,))[0], known
        return found

    def remove_model(self) -> None:
        """Remove the model that an earlier start made; the next start makes it again."""
        shutil.rmtree(self.model, ignore_errors=True)

    def replace_config(self, config: Config, disk: Disk | None = None) -> None:
        """Write another configuration, and keep the current one under the next free number."""
        disk = disk or Disk()
        numbers = itertools.count(1)
        earlier = next(path for n in numbers if not (path := self.path / f"config-{n}.toml").exists())
        replace_file(disk, earlier, (self.path / CONFIG).read_bytes())
        replace_file(disk, self.path / CONFIG, as_toml(config).encode())
        self._earlier = earlier

    def complete_config(self, config: Config) -> None:
        """Write the configuration with a value that was not known before."""
        replace_file(Disk(), self.path / CONFIG, as_toml(config).encode())

    def take_back_config(self) -> None:
        """Restore the configuration that ``replace_config`` replaced, if any."""
        if self._earlier is not None:
            self._earlier.replace(self.path / CONFIG)
            self._earlier = None


def numbered_events(file: Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Yield the number of each complete line of ``events.jsonl``, and its event, or None without one.

    A killed process may have left an incomplete last line.
    """
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                return
            try:
                event = json.loads(line)
            except (ValueError, RecursionError):
                event = None
            yield number, event if isinstance(event, dict) else None


def whole_lines(file: Path) -> int:
    """Return the number of bytes up to the last newline; a large file is read from its end."""
    with open(file, "rb") as lines:
        begin = lines.seek(0, os.SEEK_END)
        while begin:
            end, begin = begin, max(0, begin - _BLOCK)
            lines.seek(begin)
            if (found := lines.read(end - begin).rfind(b"\n")) >= 0:
                return begin + found + 1
    return 0


def lost(steps: int, seconds: float) -> str:
    """Describe how much work is lost with some steps: "15 steps (14 minutes) are lost"."""
    time = f"{seconds / 60:.0f} minutes" if seconds >= 120.0 else f"{seconds:.0f} s"
    return f"{steps} steps ({time}) are lost" if steps > 1 else f"1 step ({time}) is lost"


def metrics_rows(file: Path, containing: bytes = b"") -> Iterator[dict[str, Any]]:
    """Yield the rows of ``metrics.jsonl``; the last line may be incomplete during a run.

    Args:
        containing: bytes that a line must contain to be read.

    Raises ConfigError if a line is something else.
    """
    for number, line in enumerate(file.read_bytes().splitlines(keepends=True) if file.exists() else (), 1):
        if not line.endswith(b"\n"):
            return
        if containing not in line:
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict) or {*map(type, row.values())} - {int, float, NoneType}:
                checked(row, dict[str, float | None])  # slower, but names the key
            checked(row.get("step"), Count, "step")
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"{file}, line {number}: {error}; this is not a line of metrics. Somebody has changed the "
                "file: remove the line"
            ) from error
        yield row


def validations(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each validation of a task or set in rows of metrics: its step, task and metrics."""
    found: dict[tuple[int, str], dict[str, Any]] = {}
    for row in rows:
        for key, value in row.items():
            first, _, rest = key.partition("/")
            task, _, metric = rest.partition("/")
            if first == "validation" and metric:
                at = row["step"], task
                found.setdefault(at, {"step": at[0], "task": task})[metric] = value
    return list(found.values())


def planned_steps(config: object, started: object = None) -> int:
    """Return the number of steps of a whole run; 0 if unknown.

    Args:
        config: the table of ``config.toml``, which lacks the number if ``trainer.epochs`` is set.
        started: the configuration in the last event ``RunStarted``, which has the number; or any other value.
    """

    def trainer(table: object) -> Mapping[str, Any]:
        section = table.get("trainer") if isinstance(table, Mapping) else None
        return section if isinstance(section, Mapping) else {}

    written = {} if trainer(config).get("epochs") else trainer(config)
    numbers = (trainer(started).get("steps"), written.get("steps"))
    return next((steps for steps in numbers if isinstance(steps, int) and steps > 0), 0)


def rollouts_step(name: str) -> int | None:
    """Return the step of a file of rollouts, in the folder of steps or of validations; None: another file."""
    found = re.fullmatch(rf"step-(\d{{1,12}})\.(?:jsonl(?:\.gz)?|safetensors)(?:{re.escape(PARTIAL)})?", name)
    return int(found[1]) if found else None
