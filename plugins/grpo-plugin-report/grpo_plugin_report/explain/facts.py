"""The facts about a run that the causes of ``grpo_plugin_report.explain`` use, from its files.

Files are read line by line, and only one number for each metric and step is stored: 10,000 steps take about
10 MB.  Unreadable lines are counted and skipped.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean, median
from typing import Any

from attrs import define, field

from grpo_core import Run
from grpo_core.loop.health import Fall, Trend
from grpo_core.storage.run_directory import planned_steps
from grpo_plugin_report.values import is_number, table, tables

STARTING = ("start", "first weight sync", "first validation")
"""Stages of the loop before its first step, excluded from shares of the time."""
MOST_PROMPTS = 200_000
"""Largest number of different prompts of a task to count."""
REASON = 120
"""Length of the prefix that distinguishes messages."""
LONGEST = 400
"""Largest number of stored characters of a message."""
RECORDS = ("metrics.jsonl", "events.jsonl", "timeline.jsonl")
"""Source files of the facts."""
WANTED = (
    "Dispatched",
    "RunStarted",
    "RunEnded",
    "Saved",
    "WarningRaised",
    "ErrorRaised",
    "IncidentReported",
    "PromptSkipped",
)
"""Events to read."""


@define
class Series:
    """The values of a metric by step; steps without a number are left out."""

    steps: array[int] = field(factory=lambda: array("q"))
    values: array[float] = field(factory=lambda: array("d"))

    def __len__(self) -> int:
        return len(self.values)

    def add(self, step: int, value: float) -> None:
        """Add the value of a step."""
        self.steps.append(step)
        self.values.append(value)

    @property
    def first(self) -> float:
        """Mean of the first fifth; NaN without a value."""
        return self._mean(self.values[: max(1, len(self.values) // 5)])

    @property
    def last(self) -> float:
        """Mean of the last fifth; NaN without a value."""
        return self._mean(self.values[-max(1, len(self.values) // 5) :])

    @property
    def rise(self) -> float:
        """Difference between the last fifth and the first one."""
        return self.last - self.first

    @property
    def moved(self) -> str:
        """Description of its change."""
        return f"{self.first:.3g} at first, {self.last:.3g} at the end"

    @property
    def mean(self) -> float:
        """Mean; NaN without a value."""
        return self._mean(self.values)

    @property
    def median(self) -> float:
        """Median; NaN without a value."""
        return median(self.values) if self.values else math.nan

    @property
    def most(self) -> float:
        """The largest value; NaN without a value."""
        return max(self.values, default=math.nan)

    @property
    def least(self) -> float:
        """The smallest value; NaN without a value."""
        return min(self.values, default=math.nan)

    @property
    def usual_most(self) -> float:
        """95th percentile, or the largest of up to 20 values; NaN without a value."""
        return sorted(self.values)[-1 - len(self.values) // 21] if self.values else math.nan

    @property
    def usual_least(self) -> float:
        """5th percentile, or the smallest of up to 20 values; NaN without a value."""
        return sorted(self.values)[len(self.values) // 21] if self.values else math.nan

    @property
    def total(self) -> float:
        """Sum of the values."""
        return math.fsum(self.values)

    @staticmethod
    def _mean(values: array[float]) -> float:
        return fmean(values) if values else math.nan


@define
class Messages:
    """Count, steps and texts of messages of one kind."""

    count: float = 0.0
    first: int = 0
    """Step of the first message."""
    last: int = 0
    message: str = ""
    """The last message."""
    reasons: Counter[str] = field(factory=Counter)
    """Number of messages by their prefix, for the first hundred different ones."""


@define
class Prompts:
    """The prompts of a task that were sent to the engine."""

    sent: int = 0
    """Number of prompts, without retries."""
    ids: set[int] = field(factory=set)
    """Hashes of their ids."""


@define(kw_only=True)
class Facts:
    """The contents of a run's files as numbers and messages."""

    path: Path
    config: Mapping[str, Any] = field(factory=dict)
    series: dict[str, Series] = field(factory=dict)
    warnings: dict[str, Messages] = field(factory=dict)
    """Warnings by cause."""
    incidents: dict[tuple[str, str], Messages] = field(factory=dict)
    """Incidents by kind and component."""
    falls: dict[str, Fall | None] = field(factory=dict)
    """Tasks whose newest validation is worse, while their training is not."""
    skipped: dict[str, Messages] = field(factory=dict)
    """Skipped prompts by task."""
    prompts: dict[str, Prompts] = field(factory=dict)
    error: Messages | None = None
    """The error that ended the run."""
    error_type: str = ""
    """Class of the error, or of the exception of an author's code behind it."""
    started: int = 0
    """Number of starts, including the first one."""
    resolved: Any = None
    """The configuration of the last start, with the number of steps."""
    resumed_at: int = 0
    """Step at which the last start continued the run; 0 if it was started once."""
    saved: int = 0
    """Step of the newest checkpoint; 0 if there is none."""
    ended: str = ""
    """Reason of the last end; empty if the last start has no end."""
    running: bool = False
    """Whether a process on this machine has locked the run."""
    stages: Counter[str] = field(factory=Counter)
    """Seconds of each stage of the loop."""
    lanes: Counter[tuple[str, str]] = field(factory=Counter)
    """Busy seconds of all other lanes, by lane and activity."""
    damaged: dict[str, int] = field(factory=dict)
    """Number of unreadable lines by file."""
    missing: list[str] = field(factory=list)
    """Missing files."""

    # ------------------------------------------------------------------------------ reading

    @classmethod
    def read(cls, run: Run) -> Facts:
        """Read the files of a run."""
        facts = cls(path=run.path, running=run.is_running, config=run.config)
        trend = Trend()
        for row in run.rows(RECORDS[0]):
            step = _whole(row.get("step"))
            numbers = {name: float(value) for name, value in row.items() if is_number(value)}
            for name, number in numbers.items():
                facts.series.setdefault(name, Series()).add(step, number)
            facts.falls |= trend.observe(step, numbers)
        for row in run.events(*WANTED):
            facts._take_event(row)
        for row in run.timeline():
            facts._take_span(row)
        facts.missing = [name for name in RECORDS if not (run.path / name).is_file()]
        facts.damaged = {
            name: len(run.damaged[name]) for name in ("config.toml", *RECORDS) if name in run.damaged
        }
        return facts

    def _take_event(self, row: Mapping[str, Any]) -> None:
        step, text = _whole(row.get("step")), str(row.get("message", ""))[:LONGEST]
        match row.get("event"):
            case "Dispatched":
                self._take_slots(row.get("slots"))
            case "RunStarted":
                self.started, self.ended, self.error, self.error_type = self.started + 1, "", None, ""
                self.warnings.clear()  # each start repeats warnings that still apply
                if self.started > 1:
                    self.resumed_at = step
                self.resolved, self.saved = row.get("config"), step
            case "Saved":
                self.saved = step
            case "RunEnded":
                self.ended = str(row.get("reason"))
            case "ErrorRaised":
                self.error = Messages(1, step, step, text)
                fault = row.get("fault")
                self.error_type = str(fault.get("kind", "")) if isinstance(fault, dict) else ""
            case "WarningRaised":
                add_message(self.warnings, str(row.get("cause")), step, text)
            case "IncidentReported":
                key = str(row.get("kind")), str(row.get("component"))[:LONGEST]
                add_message(self.incidents, key, step, text, max(1, _whole(row.get("count", 1))))
            case "PromptSkipped":
                add_message(self.skipped, str(row.get("task")), step, str(row.get("error"))[:LONGEST])

    def _take_slots(self, slots: Any) -> None:
        for slot in tables(slots):
            if not slot.get("attempt"):
                prompts = self.prompts.setdefault(str(slot.get("task")), Prompts())
                prompts.sent += 1
                if len(prompts.ids) < MOST_PROMPTS:
                    prompts.ids.add(hash(str(slot.get("prompt"))))

    def _take_span(self, row: Mapping[str, Any]) -> None:
        lane, what, busy = row.get("lane"), row.get("what"), row.get("busy")
        if not (isinstance(lane, str) and isinstance(what, str) and isinstance(busy, int | float)):
            return
        if not 0.0 <= busy < 1e12:
            return
        if lane != "loop":
            self.lanes[lane, what] += busy  # type: ignore[assignment]
        elif what not in STARTING:
            self.stages[what] += busy  # type: ignore[assignment]

    # ------------------------------------------------------------------------------ asking

    def of(self, metric: str) -> Series:
        """Return the values of a metric, empty if there are none."""
        return self.series.get(metric, Series())

    @property
    def is_empty(self) -> bool:
        """Whether the run has only its configuration."""
        return not self.series and not self.started and self.error is None

    @property
    def steps(self) -> int:
        """Number of steps with metrics."""
        return len(self.of("time/step"))

    @property
    def lost(self) -> tuple[int, float]:
        """Number of steps after the newest checkpoint, and their seconds."""
        made = self.of("time/step")
        after = [took for step, took in zip(made.steps, made.values, strict=True) if step > self.saved]
        return len(after), math.fsum(after)

    @property
    def planned(self) -> int:
        """Planned number of steps; 0 if unknown."""
        return planned_steps(self.config, self.resolved)

    @property
    def tasks(self) -> list[str]:
        """Names of the trained tasks."""
        return sorted(name.removeprefix("groups/") for name in self.series if name.startswith("groups/"))

    def setting(self, key: str, default: Any = None) -> Any:
        """Return a value of the configuration, such as "trainer.lr"."""
        found: Any = self.config
        for part in key.split("."):
            if not isinstance(found, Mapping) or part not in found:
                return default
            found = found[part]
        return found

    def settings(self, *keys: str) -> str:
        """Describe values of the configuration, as in "trainer.lr = 1e-06, model.dtype = 'auto'"."""
        values = {key: self.setting(key) for key in keys}
        return ", ".join(
            f"{key} = {repr(value) if isinstance(value, str) else value}" for key, value in values.items()
        )

    def number(self, key: str, default: float = math.nan) -> float:
        """Return a number of the configuration; the default if it is not a number."""
        found = self.setting(key)
        return float(found) if is_number(found) else default

    def table(self, key: str) -> Mapping[str, Any]:
        """Return a table of the configuration; empty if it is not a table."""
        return table(self.setting(key))

    @property
    def seconds(self) -> float:
        """Seconds of the loop, from its first step on."""
        return math.fsum(self.stages.values())

    def stage(self, *whats: str) -> float:
        """Return the share of the loop's time in these stages; 0 without a timeline."""
        return sum(self.stages[what] for what in whats) / self.seconds if self.seconds > 0 else 0.0

    def lane(self, lane: str, *whats: str) -> float:
        """Return the share of the loop's time that a lane spent on these activities."""
        busy = sum(self.lanes[lane, what] for what in whats)
        return busy / self.seconds if self.seconds > 0 else 0.0

    def share_of_time(self, metric: str) -> float:
        """Return the sum of a metric in seconds as a share of all steps' time."""
        whole = self.of("time/step").total
        return self.of(metric).total / whole if whole > 0 else 0.0

    def incident(self, kind: str, component: str = "") -> Messages:
        """Return the incidents of a kind, over all components with this prefix."""
        found = Messages()
        for (its, who), messages in self.incidents.items():
            if its == kind and who.startswith(component):
                found = Messages(
                    found.count + messages.count,
                    min(found.first, messages.first) if found.count else messages.first,
                    max(found.last, messages.last),
                    f"{who}: {messages.message}",
                    found.reasons + messages.reasons,
                )
        return found

    @property
    def attempts(self) -> float:
        """Number of groups sent to the engine, including retries."""
        return max(self.of("buffer/attempts").most, 1.0) if len(self.of("buffer/attempts")) else 1.0


def add_message(found: dict[Any, Messages], key: Any, step: int, message: str, count: int = 1) -> None:
    """Add a message about ``count`` incidents to its kind."""
    messages = found.setdefault(key, Messages(0.0, step, step))
    messages.count, messages.last, messages.message = messages.count + count, step, message
    reason = message[:REASON]
    if reason in messages.reasons or len(messages.reasons) < 100:
        messages.reasons[reason] += count


def _whole(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53 else 0
