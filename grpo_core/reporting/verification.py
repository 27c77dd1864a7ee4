"""Checks the files of a run: its events against the laws, its files against its events.

The events are read once, line by line.  Each other file of the run is then compared with its events: rollouts
and checkpoints by their digests, the lines of metrics.jsonl one after the other.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from attrs import define, field, frozen

from grpo_core.contracts.errors import ConfigError
from grpo_core.contracts.typed import Count, checked
from grpo_core.loop import checkpoint
from grpo_core.loop.laws import Laws, summary
from grpo_core.loop.metrics import validation_metrics
from grpo_core.loop.retention import SCORES, SavedScores
from grpo_core.models.files import taken_elsewhere
from grpo_core.reporting.files import digest, metrics_line
from grpo_core.storage.disk import REPLACED, fingerprint
from grpo_core.storage.run_directory import (
    CONFIG,
    PARTIAL,
    ROLLOUTS,
    VALIDATION,
    numbered_events,
    rollouts_step,
)

EVENTS, METRICS = "events.jsonl", "metrics.jsonl"
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
    measured: NotRequired[int]
    manifest: NotRequired[str]
    config_file: NotRequired[str]


@define
class _Expected:
    """A file or a line that the events mention."""

    step: int
    digest: str
    optional: bool = False
    """Whether it may be missing: a resume discarded it, or its process was killed before writing it."""
    validation: bool = False
    """Whether it is the line of a validation."""


@define
class Files:
    """Compares the other files of a run with its events."""

    path: Path
    _rollouts: dict[str, _Expected] = field(factory=dict)
    _metrics: list[_Expected] = field(factory=list)
    _checkpoints: dict[int, list[_Expected]] = field(factory=dict)
    """By step; a step that was reached again is saved again."""
    _measured: dict[int, list[Mapping[str, float]]] = field(factory=dict)
    """Measured values by version; a version that was reached again is measured again."""
    _saving: int | None = None
    """Step of a checkpoint that may be complete without an event, because its process was killed."""
    _config: str | None = None
    _starting: bool = False
    """Whether the newest process has not begun to train: it may still complete the configuration."""
    _written: bool = True
    """Whether the newest line of metrics.jsonl is written: another event followed."""

    def observe(self, event: Mapping[str, Any]) -> None:
        """Account for an event."""
        name = checked(event, _Known)["event"]
        if not self._written:
            self._written = name != "Opened"
            self._metrics[-1].optional |= not self._written
        match name:
            case "Opened":
                self._config, self._starting = event["config"], True
                self._forget(event["step"], event["measured"])
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
            case "StepEnded":
                self._expect(event["step"], event, event["metrics"])
            case "Validated":
                values = validation_metrics(event["results"])
                version = checked(event["version"], Count, "version")
                self._expect(version, event, values, validation=True)
                self._measured.setdefault(version, []).append(values)
            case "Saving":
                self._saving = event["step"]
            case "Saved":
                self._saved(event["step"], event["manifest"])
                self._saving = None

    def compare(self) -> list[str]:
        """Return the differences."""
        return [
            *self._compare_config(),
            *self._compare_metrics(),
            *self._compare_rollouts(),
            *self._compare_checkpoints(),
            *self._compare_scores(),
        ]

    def summary(self) -> str:
        """Return what was compared, in one line."""
        checkpoints = len(checkpoint.complete_names(self.path / "checkpoints"))
        counts = [
            (len(self._metrics), f"lines of {METRICS}"),
            (len(self._rollouts), "files of rollouts"),
            (checkpoints, "checkpoints"),
        ]
        return "as the run wrote them: " + ", ".join(f"{count:,} {what}" for count, what in counts)

    def _forget(self, step: int, measured: int) -> None:
        """Drop expectations after the step from which the run continues.

        A validation of a version after ``measured`` is made again.
        """
        saved = [each for found in self._checkpoints.values() for each in found]
        for expected in (*self._rollouts.values(), *self._metrics, *saved):
            expected.optional |= expected.step > (min(step, measured) if expected.validation else step)

    def _saved(self, step: int, manifest: str) -> None:
        self._checkpoints.setdefault(step, []).append(_Expected(step, manifest))

    def _expect(
        self, step: int, event: Mapping[str, Any], values: Mapping[str, float], *, validation: bool = False
    ) -> None:
        line = metrics_line(step, event["time"], values)
        self._metrics.append(_Expected(step, digest(line.encode()), validation=validation))
        self._written = False

    def _compare_config(self) -> Iterator[str]:
        path = self.path / CONFIG
        if self._config is None:
            yield f"{EVENTS} does not record the configuration of the run"
        elif not path.is_file():
            yield f"{CONFIG} is missing"
        elif digest(path.read_bytes()) != self._config and not self._starting:
            yield f"{CONFIG} is not the one that the run was started with"

    def _compare_metrics(self) -> Iterator[str]:
        if self._metrics and not self._written:
            self._metrics[-1].optional = True
        path = self.path / METRICS
        if not path.is_file():
            if any(not each.optional for each in self._metrics):
                yield f"{METRICS} is missing"
            return
        expected = iter(self._metrics)
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                found = digest(line)
                match = next((e for e in expected if e.digest == found or not e.optional), None)
                if match is None or match.digest != found:
                    wanted = "no line" if match is None else f"the line of step {match.step}"
                    yield f"{METRICS}, line {number} differs from what the run wrote; the events say {wanted}"
                    return
        missing = [each for each in expected if not each.optional]
        if missing:
            yield f"{METRICS}: the line of step {missing[0].step} is missing"

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

    def _compare_scores(self) -> Iterator[str]:
        """Compare the values by which the best checkpoint is chosen."""
        name, path = f"checkpoints/{SCORES}", self.path / "checkpoints" / SCORES
        if not path.is_file():
            return
        try:
            found = checked(json.loads(path.read_bytes()), SavedScores)
            metric, scores = found["metric"], {int(step): value for step, value in found["scores"].items()}
        except (ValueError, RecursionError) as error:
            yield f"{name}: cannot be read: {error}"
            return
        newest = max(self._measured, default=-1)  # a process that is killed may have saved one more score
        for step, value in scores.items():
            if step <= newest and value not in [each.get(metric) for each in self._measured.get(step, [])]:
                yield f"{name}: {metric} of step {step} is {value!r}, which no validation measured"

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
            if strays := checkpoint.strays(directory):
                yield f"{name}: {strays[0]} was not written by the run"
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
