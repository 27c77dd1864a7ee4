"""The newest record of each step of a run, from events.jsonl."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from attrs import frozen

from grpo_core import ConfigError, Group, Run, StateDigest
from grpo_core.kit import Config
from grpo_core.plugins.configured import configured

WIDTH = 4
"""Bytes of a tensor's fingerprint in a ``StateDigest``."""
NOT_COMPARED = ("time/", "tokens_per_second/")
"""Prefixes of the names of metrics that differ between equal steps."""


@frozen(kw_only=True)
class StepRecord:
    """The record of a step; ``step`` is the version that it produced."""

    step: int
    table: Mapping[str, Any]
    """The configuration as tables."""
    config: Config
    metrics: Mapping[str, float | None]
    digest: StateDigest | None

    @property
    def threads(self) -> int:
        """Number of torch threads that computed the step; 0 if unknown."""
        return self.digest.threads if self.digest else 0


@frozen(kw_only=True)
class History:
    """The steps of a run; steps that a resumed run repeated are present once, with the newest record."""

    run: Run
    steps: Mapping[int, StepRecord]
    files: Mapping[str, str]
    """Digest of each file of rollouts, by name."""

    def step(self, number: int) -> StepRecord:
        """Return a step.  Raises ConfigError if the run has not completed it."""
        if number not in self.steps:
            known = f"it made 1 to {max(self.steps)}" if self.steps else "it has made none yet"
            raise ConfigError(f"{self.run.path}: has made no step {number}; {known}")
        return self.steps[number]

    def groups(self, number: int) -> list[Group]:
        """Return the trained groups of a step.  Raises ConfigError if they are damaged or not stored."""
        self.check(number)
        return self.run.rollouts(number)

    def check(self, number: int) -> None:
        """Raise ConfigError if the rollouts of a step are damaged, or not stored."""
        texts, tokens = self.run.texts().get(number), f"rollouts/step-{number:06d}.safetensors"
        if texts is None:
            raise ConfigError(
                f"{self.run.path}: has not stored the rollouts of step {number}; a run stores all of them "
                'with the tracker "files", tracking.files.every = 1 and tracking.files.keep = 0, the defaults'
            )
        if not (self.run.path / tokens).is_file():
            raise ConfigError(
                f"{self.run.path}: has not stored the tokens of step {number}; a run stores them with "
                "tracking.files.tokens = true, the default"
            )
        for name in (texts, tokens):
            path = self.run.path / name
            if name in self.files and sha256(path.read_bytes()).hexdigest() != self.files[name]:
                raise ConfigError(
                    f"{path} has changed since the run wrote it (its sha256 differs); the step cannot be "
                    "computed again from it"
                )


def read(path: Path) -> History:
    """Read the records of a run.  Raises ConfigError if it is not a run, or its events are unreadable."""
    run = Run(path)
    if not (run.path / "events.jsonl").is_file():
        raise ConfigError(f"{path}: has no events.jsonl yet")
    steps: dict[int, StepRecord] = {}
    files: dict[str, str] = {}
    table: Mapping[str, Any] = {}
    config: Config | None = None
    names: tuple[str, ...] = ()
    for event in run.events("RunStarted", "Recorded", "StepEnded"):
        match event["event"]:
            case "RunStarted":
                table, config = event["config"], None
                steps = {number: step for number, step in steps.items() if number <= event["step"]}
            case "Recorded":
                files[event["file"]] = event["digest"]
            case "StepEnded":
                config = config or configured([table], stored=True)[0]
                found = None
                if (digest := event.get("digest")) is not None:  # names are in the first digest only
                    names = tuple(digest["names"]) or names
                    found = StateDigest(**{**digest, "names": names})
                steps[event["step"]] = StepRecord(
                    step=event["step"], table=table, config=config, metrics=event["metrics"], digest=found
                )
    return History(run=run, steps=steps, files=files)


# ---------------------------------------------------------------------------------- comparisons


def first_tensor(one: StateDigest, other: StateDigest) -> str | None:
    """Return the name of the first tensor that differs between two states, or None."""
    if (one.weights, one.optimizer) == (other.weights, other.optimizer):
        return None
    names = one.names or other.names
    a, b = (base64.b64decode(each.tensors) for each in (one, other))
    if len(a) == len(b) == WIDTH * len(names):
        for index, name in enumerate(names):
            here = slice(WIDTH * index, WIDTH * (index + 1))
            if a[here] != b[here]:
                return name
        return "a number of the optimizer's state, such as its count of updates"
    return "the number of tensors"


def compared(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics that are reproducible."""
    return {name: value for name, value in metrics.items() if not name.startswith(NOT_COMPARED)}


def first_metric(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Describe the first metric that differs, with both values; "" if all are equal."""
    a, b = compared(one), compared(other)
    for name in (name for name in a if name in b):
        if a[name] != b[name] and not (a[name] is None or a[name] != a[name]):
            return f"{name} is {a[name]!r} and {b[name]!r}"
    return ""
