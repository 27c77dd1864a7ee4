"""The files of a run, written as it goes.

runs/NAME/
    config.toml                    the resolved configuration
    metrics.jsonl                  one line for each step and each validation
    rollouts/step-000120.jsonl     what that step was trained on
    events.jsonl                   everything that happened, append-only
    report.html                    all of it on one page, made when the run ends
    logs/                          what the child processes print
    checkpoints/                   see grpo_core.checkpoint
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from attrs import asdict

from grpo_core.buffer import Slot
from grpo_core.config import Config, as_toml, build, read_toml
from grpo_core.errors import ConfigError
from grpo_core.events import Dispatched, Event, GroupsReady, StepEnded, Validated
from grpo_core.records import Group, Prompt
from grpo_core.reporting import report

if TYPE_CHECKING:
    from grpo_core.tokens import Ids

CONFIG = "config.toml"


class RunDirectory:
    """A directory that holds one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.logs = path / "logs"
        self.model = path / "model"
        """Where a tiny model is made."""

    @classmethod
    def create(cls, path: Path, config: Config) -> RunDirectory:
        """A new one.  Raises ConfigError if the path holds anything already."""
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            what = "holds another run" if (path / CONFIG).exists() else "is not empty"
            raise ConfigError(
                f"--output {path}: {what}; give another directory, or continue that run with --resume {path}"
            )
        try:
            path.mkdir(parents=True, exist_ok=True)
            (path / CONFIG).write_text(as_toml(config), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--output {path}: cannot be written: {error.strerror}") from error
        run = cls(path)
        run.logs.mkdir(exist_ok=True)
        return run

    @classmethod
    def open(cls, path: Path) -> tuple[RunDirectory, Config]:
        """One that exists.  Raises ConfigError if the path is none."""
        if not (path / CONFIG).is_file():
            raise ConfigError(f"{path}: holds no run (there is no {CONFIG} in it)")
        return cls(path), build([read_toml(path / CONFIG)])

    @classmethod
    def latest(cls, parent: Path) -> Path:
        """The run in ``parent`` with a checkpoint that was changed last; ConfigError if there is none."""
        runs = {path.parent.parent for path in parent.glob("*/checkpoints/step-*")}
        if not runs:
            raise ConfigError(
                f"--resume: there is no run with a checkpoint in {parent}/; give the run's directory"
            )
        return max(runs, key=lambda run: max(p.stat().st_mtime for p in run.iterdir()))

    def events(self) -> Iterator[dict[str, Any]]:
        """What ``events.jsonl`` holds.  Raises ConfigError if there is none, or a line that is no event.

        Half a line is what a process was writing when it was killed: it stands before the start of the
        next, or at the end.
        """
        path = self.path / "events.jsonl"
        if not path.is_file():
            raise ConfigError(f"{self.path}: has no {path.name} yet")
        half = 0
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            try:
                event = json.loads(line)
            except ValueError:
                half = half or number
                continue
            if half and event["event"] != "RunStarted":
                break
            half = 0
            yield event
        else:
            return
        raise ConfigError(f"{path}, line {half}: is no event; somebody has changed this file")

    def forget_after(self, step: int) -> None:
        """Remove what was recorded after the step that a run continues from; events are kept."""
        metrics = self.path / "metrics.jsonl"
        if metrics.exists():
            lines = metrics.read_text(encoding="utf-8").splitlines(keepends=True)
            kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
            metrics.write_text("".join(kept), encoding="utf-8")
        for rollouts in (self.path / "rollouts").glob("step-*.jsonl"):
            if int(rollouts.stem.removeprefix("step-")) > step:
                rollouts.unlink()


class Recorder:
    """Writes a run's files; a listener of events."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        (run.path / "rollouts").mkdir(exist_ok=True)
        self._metrics = _appending(run.path / "metrics.jsonl")
        self._events = _appending(run.path / "events.jsonl")

    def __call__(self, event: Event) -> None:
        match event:
            case GroupsReady():
                self._write_rollouts(event)
            case StepEnded():
                self._line(self._metrics, {"step": event.step, "time": time.time(), **event.metrics})
            case Validated():
                flat = {
                    f"validation/{task}/{metric}": value
                    for task, metrics in event.results.items()
                    for metric, value in metrics.items()
                }
                self._line(self._metrics, {"step": event.step, "time": time.time(), **flat})
        self._line(self._events, {"time": time.time(), **plain(event)})

    def close(self) -> None:
        """End the files, and make the report; a run does not fail because its report cannot be made."""
        self._metrics.close()
        self._events.close()
        try:
            report.write(self._run.path)
        except Exception:
            logging.getLogger(__name__).warning("%s: no report could be made", self._run.path, exc_info=True)

    def _write_rollouts(self, event: GroupsReady) -> None:
        with open(
            self._run.path / "rollouts" / f"step-{event.step + 1:06d}.jsonl", "w", encoding="utf-8"
        ) as file:
            for group in event.groups:
                for rollout in group.rollouts:
                    self._line(
                        file,
                        {
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
                        },
                    )

    @staticmethod
    def _line(file: Any, value: Mapping[str, Any]) -> None:
        try:
            line = json.dumps(value, default=str, allow_nan=False)
        except ValueError:
            line = json.dumps(_finite(value), default=str)
        file.write(line + "\n")  # one write for a line, so that a reader never sees half of it


def _appending(path: Path) -> TextIO:
    """Open for whole lines; what a process that died left of its last one stays a line of its own."""
    file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 - closed with the recorder
    if file.tell() and not path.read_bytes().endswith(b"\n"):
        file.write("\n")
    return file


def plain(event: Event) -> dict[str, Any]:
    """An event as it stands in events.jsonl: slots and groups by what identifies them."""
    name = type(event).__name__
    match event:
        case Dispatched():
            return {"event": name, "step": event.step, "slots": [_slot(slot) for slot in event.slots]}
        case GroupsReady():
            return {"event": name, "step": event.step, "groups": [_group(group) for group in event.groups]}
    return {"event": name, **asdict(event)}


def _slot(slot: Slot[Prompt]) -> dict[str, Any]:
    prompt = slot.prompt
    return {
        "slot": slot.id,
        "task": prompt and prompt.environment,
        "prompt": prompt and prompt.id,
        "attempt": slot.attempts,
        "kept": len(slot.kept),
        "generation_version": slot.generation_version,
        "target_version": slot.target_version,
    }


def _group(group: Group) -> dict[str, Any]:
    versions = [v for r in group.rollouts for v in _range(r.tokens.sampled_versions)]
    return {
        "slot": group.slot,
        "task": group.prompt.environment,
        "prompt": group.prompt.id,
        "generation_version": group.generation_version,
        "target_version": group.target_version,
        "token_versions": [min(versions), max(versions)] if versions else [],
        "rewards": group.rewards,
    }


def _range(versions: Ids) -> list[int]:
    """The least and the greatest; nothing of none."""
    return [int(versions.min()), int(versions.max())] if versions.size else []


def _jsonable(value: Any) -> Any:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return str(value)
    return value


def _finite(value: Any) -> Any:
    """JSON has no NaN: it is written as null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
