"""Checks the files of a run: its events against the laws, its files against its events.

The events are read once, line by line.  The digests of the configuration, of rollouts and of checkpoints are
then compared with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from attrs import define, field, frozen

from grpo_core.contracts.errors import ConfigError
from grpo_core.contracts.typed import checked
from grpo_core.loop import checkpoint
from grpo_core.loop.laws import Laws, summary
from grpo_core.models.files import taken_elsewhere
from grpo_core.reporting.files import digest
from grpo_core.storage.disk import REPLACED, fingerprint
from grpo_core.storage.run_directory import (
    CONFIG,
    PARTIAL,
    ROLLOUTS,
    VALIDATION,
    numbered_events,
    rollouts_step,
)

EVENTS = "events.jsonl"
MOST = 50
"""Largest number of findings that are listed."""


@frozen
class Verification:
    """Findings in the files of a run, and a summary of what was compared."""

    findings: tuple[str, ...]
    summary: str

    def __str__(self) -> str:
        if not self.findings:
            return self.summary
        more = len(self.findings) - MOST
        return "\n".join([*self.findings[:MOST], *([f"... and {more:,} more"] if more > 0 else [])])


def verified(path: Path) -> Verification:
    """Check all files of the run in a directory.  Raises ConfigError if it has no events."""
    events = path / EVENTS
    if not events.is_file():
        hint = taken_elsewhere(str(path))
        raise ConfigError(f"{path} is not a run (there is no {EVENTS} in it).{hint}")
    size = events.stat().st_size
    laws, files, broken = Laws(), Files(path), []
    for number, event in numbered_events(events):
        where = f"{EVENTS}, line {number}"
        if event is None:
            broken.append(f"{where}: is not an event")
            continue
        laws.observe(event)
        try:
            files.observe(event)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            broken.append(f"{where}: lacks a field of its kind: {type(error).__name__}: {error}")
    laws.close()
    found = [*broken, *map(str, laws.violations)]
    if events.stat().st_size != size:
        comparison = "the run is still running, so its files were not compared with its events"
    else:
        found += files.compare()
        comparison = files.summary()
    return Verification(tuple(found), f"{summary(laws)}\n{comparison}")


class _Known(TypedDict):
    """The parts of events that files are compared with."""

    event: str
    step: NotRequired[int]
    manifest: NotRequired[str]
    config_file: NotRequired[str]


@define
class _Expected:
    """A file that the events mention."""

    step: int
    digest: str
    optional: bool = False
    """Whether it may be missing: a resume discarded it, or its process was killed before writing it."""


@define
class Files:
    """Compares the other files of a run with its events."""

    path: Path
    _rollouts: dict[str, _Expected] = field(factory=dict)
    _checkpoints: dict[int, list[_Expected]] = field(factory=dict)
    """By step; a step that was reached again is saved again."""
    _saving: int | None = None
    """Step of a checkpoint that may be complete without an event, because its process was killed."""
    _config: str | None = None
    _starting: bool = False
    """Whether the newest process has not begun to train: it may still complete the configuration."""

    def observe(self, event: Mapping[str, Any]) -> None:
        """Account for an event."""
        name = checked(event, _Known)["event"]
        match name:
            case "Opened":
                self._config, self._starting = event["config"], True
                self._forget(event["step"])
            case "RunStarted":
                self._config, self._starting = event["config_file"], False
                if event["manifest"]:  # saved by a process that was killed before the event
                    self._saved(event["step"], event["manifest"])
            case "Recorded":
                folder, _, name = event["file"].partition("/")
                if folder not in (ROLLOUTS, VALIDATION) or rollouts_step(name) is None:
                    raise ValueError(f"{event['file']!r} is not a file of rollouts")
                self._rollouts[event["file"]] = _Expected(event["step"], event["digest"])
                for removed in event["removed"]:
                    self._rollouts[removed].optional = True
            case "Saving":
                self._saving = event["step"]
            case "Saved":
                self._saved(event["step"], event["manifest"])
                self._saving = None

    def compare(self) -> list[str]:
        """Return the differences."""
        return [
            *self._compare_config(),
            *self._compare_rollouts(),
            *self._compare_checkpoints(),
        ]

    def summary(self) -> str:
        """Return what was compared, in one line."""
        checkpoints = len(checkpoint.complete_names(self.path / "checkpoints"))
        return f"as the run wrote them: {len(self._rollouts):,} files of rollouts, {checkpoints} checkpoints"

    def _forget(self, step: int) -> None:
        """Drop expectations after the step from which the run continues."""
        saved = [each for found in self._checkpoints.values() for each in found]
        for expected in (*self._rollouts.values(), *saved):
            expected.optional |= expected.step > step

    def _saved(self, step: int, manifest: str) -> None:
        self._checkpoints.setdefault(step, []).append(_Expected(step, manifest))

    def _compare_config(self) -> Iterator[str]:
        path = self.path / CONFIG
        if self._config is None:
            yield f"{EVENTS} does not record the configuration of the run"
        elif not path.is_file():
            yield f"{CONFIG} is missing"
        elif digest(path.read_bytes()) != self._config and not self._starting:
            yield f"{CONFIG} is not the one that the run was started with"

    def _compare_rollouts(self) -> Iterator[str]:
        found = {
            f"{folder}/{p.name}" for folder in (ROLLOUTS, VALIDATION) for p in (self.path / folder).glob("*")
        }
        for name, expected in self._rollouts.items():
            path = self.path / (name if name in found else name + PARTIAL)  # killed between record and rename
            if not path.is_file():
                if not expected.optional:
                    yield f"{name} is missing"
            elif fingerprint(path)["sha256"] != expected.digest:
                yield f"{name} has changed since the run wrote it (its sha256 differs)"
        for name in sorted(found - set(self._rollouts)):
            if rollouts_step(name.partition("/")[2]) is not None and not name.endswith(PARTIAL):
                yield f"{name} was not written by the run"

    def _compare_checkpoints(self) -> Iterator[str]:
        folder = self.path / "checkpoints"
        found = checkpoint.complete_names(folder)
        for step, directory in found:
            name = f"checkpoints/{directory.name}"
            expected = self._checkpoints.get(step, [])
            if expected and all(each.optional for each in expected):
                continue  # the run was continued from an earlier one, because this one was damaged
            if (fault := checkpoint.fault(directory)) is not None:
                yield f"{name}: {fault}"
                continue
            known = expected if directory.name.endswith(REPLACED) else expected[-1:]
            fits = checkpoint.manifest_digest(directory) in {each.digest for each in known}
            if not fits and (step != self._saving or checkpoint.read_step(directory) != step):
                yield (
                    f"{name} is not the one that the run saved"
                    if expected
                    else f"{name} was not saved by the run"
                )
        needed = [step for step, saved in self._checkpoints.items() if not saved[-1].optional]
        if needed and not any(step >= max(needed) for step, _ in found):
            yield f"checkpoints/step-{max(needed):06d}, the newest one, is missing"
