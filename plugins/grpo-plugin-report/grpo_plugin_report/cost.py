"""The tracker ``cost``: what a run costs, from its prices and its events.

``events.jsonl`` keeps the events of all processes of a run, those of steps that a resume has made again as
well, and of each start its prices.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from math import inf
from typing import Any

from attrs import asdict, define, field

from grpo_core import ConfigError, Run, RunInfo, Tracker, events
from grpo_core.loop.metrics import headline
from grpo_core.validation.results import SHARES
from grpo_plugin_report.config import Cost
from grpo_plugin_report.pages import number
from grpo_plugin_report.values import is_number, plain, table

EVENTS = ("Opened", "RunStarted", "GroupFinished", "StepEnded", "Validated", "Saved", "RunEnded")
"""Events from which a cost is added up: between two of them little time is spent."""


@define
class Account:
    """The cost of a run so far."""

    amount: float = 0.0
    steps: int = 0
    prices: Mapping[str, Any] = field(factory=dict)
    """The section ``cost`` of the newest start."""
    _shares: dict[str, dict[int, float]] = field(factory=dict)
    """Main metric of each task by version, if it is a share."""
    _validation: Mapping[str, Any] = field(factory=dict)
    """The section ``validation`` of the newest start."""
    _last: float = inf
    """Time of the last event."""

    @classmethod
    def of(cls, run: Run) -> Account | None:
        """Return the cost of a recorded run, or None without a price."""
        account = cls()
        if "cost" not in run.config:  # reading the events takes a while
            return None
        if run.state == "measured":  # by ``grpo-core validate``, which has no events
            account.add({"event": "RunStarted", "config": run.config})
            for row in run.validations():
                account.add({"event": "Validated", "version": row["step"], "results": {row["task"]: row}})
        for row in run.events(*EVENTS):
            account.add(row)
        return account if account.has_price else None

    @property
    def has_price(self) -> bool:
        return max(self.amount, self._per("hour"), self._per("million_tokens")) > 0

    def add(self, row: Mapping[str, Any]) -> None:
        """Add what the time since the last event, and the tokens of this one, cost."""
        now, step, tokens = plain(row.get("time")), int(plain(row.get("step"))), 0.0
        match row.get("event"):
            case "Opened":  # a process begins; it makes the steps and validations after ``step`` again
                self._last, self.steps = now, min(self.steps, max(0, step))
                for task, known in self._shares.items():
                    self._shares[task] = {
                        version: share for version, share in known.items() if version <= step
                    }
            case "RunStarted":
                config = table(row.get("config"))
                self.prices, self._validation = table(config.get("cost")), table(config.get("validation"))
            case "StepEnded":
                self.steps, tokens = step, sampled(table(row.get("metrics")))
            case "Validated":
                version = int(plain(row.get("version")))
                for task, results in table(row.get("results")).items():
                    metrics, own = table(results), table(table(self._validation.get("sets")).get(task))
                    options = table(own.get("options") or self._validation.get("options"))
                    rollouts = plain(metrics.get("prompts")) * plain(options.get("n", 1))
                    tokens += plain(metrics.get("completion_tokens")) * rollouts
                    name = headline(metrics) or ""
                    if name.startswith(SHARES) and is_number(metrics.get(name)):
                        self._shares.setdefault(task, {})[version] = metrics[name]
        hours = max(0.0, now - self._last) / 3600
        self._last = now
        self.amount += self._per("hour") * max(1.0, plain(self.prices.get("gpus"))) * hours
        self.amount += self._per("million_tokens") * tokens / 1e6

    @property
    def per_step(self) -> float | None:
        return self.amount / self.steps if self.steps else None

    @property
    def per_point(self) -> dict[str, float]:
        """The cost for each point of percent by which the validation of a task has risen."""
        risen = {
            task: 100 * (known[max(known)] - known[min(known)])
            for task, known in self._shares.items()
            if known
        }
        return {task: self.amount / points for task, points in risen.items() if points > 0}

    @property
    def total(self) -> str:
        return f"{number(self.amount)} {self.prices.get('currency', '')}".rstrip()

    @property
    def rates(self) -> str:
        """The cost of a step, and for each point of accuracy, as text."""
        each = [] if self.per_step is None else [f"{number(self.per_step)} a step"]
        return ", ".join(
            each + [f"{number(cost)} a point of {task}" for task, cost in self.per_point.items()]
        )

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.total, self.rates)))

    def as_json(self) -> dict[str, Any]:
        return {
            "amount": self.amount,
            "currency": self.prices.get("currency", ""),
            "per_step": self.per_step,
            "per_point": self.per_point,
        }

    def _per(self, unit: str) -> float:
        return plain(self.prices.get(f"per_{unit}"))


def sampled(metrics: Mapping[str, Any]) -> float:
    """Return the number of tokens that were sampled for training since the step before."""
    return plain(metrics.get("tokens_per_second/generation")) * plain(metrics.get("time/generate"))


class CostTracker(Tracker):
    """Adds the metric ``cost`` to each step, and shows it in the terminal.

    Args:
        run: the run.
        prices: the section ``[cost]``.
    """

    def __init__(self, run: RunInfo, **prices: Any) -> None:
        self._run, self._account = run, Account()
        with suppress(ConfigError):  # nothing was recorded before
            self._account = Account.of(Run(run.directory, strict=False)) or self._account
        step = -1 if run.resumed_from is None else run.resumed_from
        self._account.prices = asdict(Cost(**prices))
        self._account.add({"event": "Opened", "time": time.time(), "step": step})
        self._tell()

    def event(self, event: events.Event) -> None:
        """Add what the event costs."""
        names = ("step", "time", "config", "metrics", "version", "results")
        self._account.add(
            {"event": type(event).__name__} | {name: getattr(event, name, None) for name in names}
        )
        self._tell()
        if self._account.has_price and isinstance(event, events.StepEnded | events.Validated):
            self._run.show("cost", str(self._account))

    def _tell(self) -> None:
        if self._account.has_price:
            self._run.set_metrics({"cost": self._account.amount})
