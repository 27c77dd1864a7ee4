"""Reads what a run has recorded about its times: metrics, the timeline, the lengths of its rollouts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from attrs import define, field, frozen

from grpo_core.config import Config
from grpo_core.errors import ConfigError
from grpo_core.planning.outcomes import Outcome, RecordedOutcomes
from grpo_core.records import Group, Rollout
from grpo_core.reporting.stored import files_of_texts, groups_in
from grpo_core.run_directory import RunDirectory

STEPS = 200
"""Largest number of steps that are read: the last ones."""
FEWEST = 5
"""Number of steps without which nothing can be said about a run."""


@frozen(kw_only=True)
class RecordedGroup:
    """A group that was trained."""

    step: int
    begin: float
    """Time at which its prompt went to the engine, in seconds since 1970."""
    end: float
    """Time at which its last rollout had ended."""
    outcomes: tuple[Outcome, ...]

    @property
    def longest(self) -> Outcome:
        """The rollout with the most tokens, for which the group waits."""
        return max(self.outcomes, key=lambda each: sum(each.turn_tokens))


@define(kw_only=True)
class Recorded:
    """The records of a run."""

    config: Config
    steps: Sequence[Mapping[str, float]]
    """Metrics of each step."""
    spans: Sequence[Mapping[str, Any]]
    """Lines of the timeline."""
    groups: list[RecordedGroup]
    """Groups whose first attempt succeeded, in the order of their steps."""
    trained_tokens: dict[int, int]
    """Number of tokens of the rows of each step, prompts included."""
    prompt_tokens: int
    """Mean number of tokens of a prompt."""
    validated: list[Outcome] = field(factory=list)
    """Rollouts of the last validation."""

    @property
    def outcomes(self) -> RecordedOutcomes:
        """The recorded rollouts, as a simulated run plays them."""
        return RecordedOutcomes(
            [(group.step, group.outcomes) for group in self.groups], self.prompt_tokens, self.validated
        )


def read(path: Path) -> Recorded:
    """Read the records of a run.

    Raises ConfigError if they are not there, or do not say enough.
    """
    run, config = RunDirectory.open(path)
    if config.dynamic_sampling.enabled or config.filters:
        raise ConfigError(
            f"{path}: this run filters groups (dynamic_sampling, filters), and the rollouts of filtered "
            "groups are not stored, so nobody knows how long they are"
        )
    files = dict(list(files_of_texts(run.path / "rollouts").items())[-STEPS:])
    steps = [row for row in _lines(run.path / "metrics.jsonl") if "time/step" in row]
    spans = list(_lines(run.path / "timeline.jsonl"))
    if min(len(files), len(steps)) < FEWEST or not spans:
        raise ConfigError(
            f"{path}: has {len(steps)} steps with metrics, {len(files)} with rollouts and {len(spans)} lines "
            f"of timeline.jsonl; a forecast needs the records of {FEWEST} steps or more"
        )
    stored = {step: groups_in(file) for step, file in files.items()}
    prompts = [_prompt_tokens(group.rollouts[0]) for groups in stored.values() for group in groups]
    recorded = Recorded(
        config=config,
        steps=[row for row in steps if row["step"] >= min(files)],
        spans=spans,
        groups=list(_groups(run, stored)),
        trained_tokens={step: _trained_tokens(groups) for step, groups in stored.items()},
        prompt_tokens=max(1, round(float(np.mean(prompts)))),
        validated=_validated(run.path),
    )
    if not recorded.groups:
        raise ConfigError(f"{path}: no group of this run succeeded at its first attempt")
    return recorded


def _groups(run: RunDirectory, stored: Mapping[int, list[Group]]) -> Iterator[RecordedGroup]:
    begins: dict[int, float] = {}
    ends: dict[int, float] = {}
    for event in run.events():
        if event.get("event") == "Dispatched":
            for slot in event["slots"]:
                begins[slot["slot"]] = event["time"] if slot["attempt"] == 0 else float("nan")
        elif event.get("event") == "GroupFinished":
            ends[event["slot"]] = event["time"]
    for step, groups in stored.items():
        for group in groups:
            begin, end = begins.get(group.slot, float("nan")), ends.get(group.slot, float("nan"))
            if end > begin:
                outcomes = tuple(_outcome(rollout) for rollout in group.rollouts)
                yield RecordedGroup(step=step, begin=begin, end=end, outcomes=outcomes)


def _outcome(rollout: Rollout) -> Outcome:
    if not rollout.segments:
        raise ConfigError(
            "the tokens of this run's rollouts are not stored (tracking.files.tokens), so nobody knows how "
            "long its completions are"
        )
    lengths = [length for segment in rollout.segments for length in _runs(segment.tokens.sampled)]
    if len(lengths) != rollout.turns:  # nothing is between two completions
        lengths = [max(1, sum(lengths) // rollout.turns)] * rollout.turns
    return Outcome(tuple(lengths), rollout.reward or 0.0)


def _runs(sampled: Any) -> list[int]:
    """Return the lengths of the runs of true values."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], sampled.astype(np.int8), [0]])))
    return [int(end - begin) for begin, end in zip(edges[::2], edges[1::2], strict=True)]


def _prompt_tokens(rollout: Rollout) -> int:
    return len(rollout.segments[0].prompt_ids) if rollout.segments else 1


def _trained_tokens(groups: list[Group]) -> int:
    return sum(
        len(segment.prompt_ids) + len(segment.tokens)
        for group in groups
        for rollout in group.rollouts
        if rollout.trained
        for segment in rollout.segments
    )


def _validated(path: Path) -> list[Outcome]:
    files = list(files_of_texts(path / "validation").values())
    if not files:
        return []
    rollouts = [rollout for group in groups_in(files[-1]) for rollout in group.rollouts]
    return [_outcome(rollout) for rollout in rollouts if rollout.turns]


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a file, but for a last line that is not complete."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8") as file:
        for line in file:
            try:
                record = json.loads(line)
            except ValueError:
                return
            if isinstance(record, dict):
                yield record
