"""Reads what a run recorded about its steps: the newest life of each of them, as events.jsonl tells it."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

from grpo_core.config import Config
from grpo_core.errors import ConfigError
from grpo_core.plugins.configured import configured
from grpo_core.records import Group, StateDigest
from grpo_core.reporting.files import digest as digest_of
from grpo_core.reporting.stored import TEXTS, TOKENS, stored_rollouts
from grpo_core.run_directory import ROLLOUTS, RunDirectory

WIDTH = 4
"""Bytes of a tensor's fingerprint in a ``StateDigest``."""
NOT_COMPARED = ("time/", "tokens_per_second/")
"""Beginnings of the names of metrics that differ between equal steps."""


@frozen(kw_only=True)
class StepRecord:
    """A step as the run recorded it; ``step`` is the version that it made."""

    step: int
    config: Config
    metrics: Mapping[str, float | None]
    digest: StateDigest | None


@frozen(kw_only=True)
class History:
    """The steps of a run that count: those that a resumed run made again are there once."""

    run: RunDirectory
    steps: Mapping[int, StepRecord]
    files: Mapping[str, str]
    """Digest of each file of rollouts, by its name."""

    def step(self, number: int) -> StepRecord:
        """Return a step.  Raises ConfigError if the run has not made it."""
        if number not in self.steps:
            known = f"it made 1 to {max(self.steps)}" if self.steps else "it has made none yet"
            raise ConfigError(f"{self.run.path}: has made no step {number}; {known}")
        return self.steps[number]

    def groups(self, number: int) -> list[Group]:
        """Return the groups that a step trained.  Raises ConfigError if they are damaged or not stored."""
        self.check(number)
        return stored_rollouts(self.run.path, number)

    def check(self, number: int) -> None:
        """Raise ConfigError if the rollouts of a step are damaged, or not stored."""
        for name in self._files(number):
            path = self.run.path / name
            if name in self.files and digest_of(path.read_bytes()) != self.files[name]:
                raise ConfigError(
                    f"{path} is not what the run wrote (its sha256 differs); the step cannot be computed "
                    "again from it"
                )

    def _files(self, number: int) -> list[str]:
        name = f"{ROLLOUTS}/step-{number:06d}"
        texts = next((f"{name}{end}" for end in TEXTS if (self.run.path / f"{name}{end}").is_file()), None)
        if texts is None:
            raise ConfigError(
                f"{self.run.path}: has not stored the rollouts of step {number}; a run stores all of them "
                'with the tracker "files", tracking.files.every = 1 and tracking.files.keep = 0, the defaults'
            )
        if not (self.run.path / f"{name}{TOKENS}").is_file():
            raise ConfigError(
                f"{self.run.path}: has not stored the tokens of step {number}; a run stores them with "
                "tracking.files.tokens = true, the default"
            )
        return [texts, f"{name}{TOKENS}"]


def read(path: Path) -> History:
    """Read what a run recorded.  Raises ConfigError if it is no run, or its events are not readable."""
    run = RunDirectory.existing(path)
    steps: dict[int, StepRecord] = {}
    files: dict[str, str] = {}
    table: Mapping[str, Any] = {}
    config: Config | None = None
    names: tuple[str, ...] = ()
    for event in run.events():
        match event.get("event"):
            case "RunStarted":
                table, config = event["config"], None
                steps = {number: step for number, step in steps.items() if number <= event["step"]}
            case "Recorded":
                files[event["file"]] = event["digest"]
            case "StepEnded":
                config = config or configured([table], stored=True)[0]
                found = _digest(event.get("digest"), names)
                names = found.names if found else names
                steps[event["step"]] = StepRecord(
                    step=event["step"], config=config, metrics=event["metrics"], digest=found
                )
    return History(run=run, steps=steps, files=files)


def _digest(value: Mapping[str, Any] | None, names: tuple[str, ...]) -> StateDigest | None:
    """Return fingerprints with the names of their tensors, which a process tells at its first step."""
    if value is None:
        return None
    return StateDigest(**{**value, "names": tuple(value["names"]) or names})


# ---------------------------------------------------------------------------------- comparisons


def first_tensor(one: StateDigest, other: StateDigest) -> str | None:
    """Return the first tensor that differs between two states; None if both are the same."""
    if (one.weights, one.optimizer) == (other.weights, other.optimizer):
        return None
    names = one.names or other.names
    a, b = (base64.b64decode(each.tensors) for each in (one, other))
    if len(a) == len(b) == WIDTH * len(names):
        for place, name in enumerate(names):
            here = slice(WIDTH * place, WIDTH * (place + 1))
            if a[here] != b[here]:
                return name
        return "a number of the optimizer's state, such as its count of updates"
    return "the number of tensors"


def compared(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics that are equal in equal steps."""
    return {name: value for name, value in metrics.items() if not name.startswith(NOT_COMPARED)}


def first_metric(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Name the first metric that differs, with both values; "" if none does."""
    a, b = compared(one), compared(other)
    for name in (name for name in a if name in b):
        if a[name] != b[name] and not (a[name] is None or a[name] != a[name]):
            return f"{name} is {a[name]!r} and {b[name]!r}"
    return ""
