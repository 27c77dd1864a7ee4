"""The tracker ``report`` and its ``report.html``: a run on a single offline page.

The page is generated from the files of the run only (see ``grpo_core.Run``), so it also works for runs that
continue, were killed, or were copied from another machine.  The template escapes all contents; unreadable
lines are skipped and counted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import field, frozen

from grpo_core import ConfigError, Run, RunInfo, Tracker
from grpo_plugin_report import browsing, lanes
from grpo_plugin_report.cost import Account, sampled
from grpo_plugin_report.curves import charts, measured_in, tasks_of, trained_in
from grpo_plugin_report.explain.causes import Finding
from grpo_plugin_report.explain.decisions import explained
from grpo_plugin_report.explain.facts import Facts
from grpo_plugin_report.pages import is_page, number, rendered, save
from grpo_plugin_report.values import plain, table

REPORT = "report.html"
SHOWN = ("RunStarted", "WarningRaised", "ErrorRaised", "PromptSkipped")
"""Events in the report."""
MOST_MESSAGES = 50
"""Largest number of errors and skipped prompts in the report."""
MOST_STAGES = 5
"""Number of stages of the loop with a share of the time."""
TIMED = 20
"""Number of last steps for the estimate of the remaining time."""
MOST_CAUSES = 3
"""Number of causes of ``grpo-core explain``, the same as the command's."""

Row = Mapping[str, Any]


@frozen
class Files:
    """The records of a run for its page."""

    run: Run
    facts: Facts
    steps: list[Row] = field(factory=list)
    validations: list[Row] = field(factory=list)
    events: list[Row] = field(factory=list)

    @property
    def table(self) -> Mapping[str, Any]:
        """The configuration."""
        return self.facts.config

    @property
    def unreadable(self) -> int:
        """Number of unreadable lines."""
        return sum(map(len, self.run.damaged.values()))

    @classmethod
    def read(cls, path: Path) -> Files:
        run = Run(path, strict=False)
        files = cls(run, Facts.read(run), events=[*run.events(*SHOWN)])
        for row in run.metrics():
            validated = any(name.startswith("validation/") for name in row)
            (files.validations if validated else files.steps).append(row)
        return files

    def tasks(self) -> list[str]:
        """Return the tasks that were trained or validated."""
        return sorted(trained_in(self.steps) | {*measured_in(self.validations)} - {""})

    def records(self, event: str) -> list[Row]:
        return [row for row in self.events if row["event"] == event]

    def causes(self) -> list[Finding]:
        """Return the causes found by ``grpo-core explain``, the likeliest first."""
        return [] if self.facts.is_empty else explained(self.facts)[:MOST_CAUSES]

    def progress(self) -> str:
        """Describe the progress of a running run, or how to resume a killed one; empty for others."""
        if self.run.state == "killed":
            return f"grpo-core train --resume {self.run.path} continues it"
        if self.run.state != "running" or not self.steps:
            return ""
        step = plain(self.steps[-1].get("step"))
        times = [plain(row.get("time")) for row in self.steps[-TIMED:]]
        ago = max(0.0, time.time() - times[-1])
        status = f"step {step:.0f}, last step {ago:.0f} s ago"
        planned = plain(self.table.get("trainer", {}).get("steps"))
        if planned and len(times) > 1:
            left = (times[-1] - times[0]) / (len(times) - 1) * (planned - step) - ago
            status += f", about {left / 60:.0f} minutes left" if left > 90 else ", about a minute left"
        return status


class ReportTracker(Tracker):
    """Writes the report from the run's files at its end."""

    def __init__(self, run: RunInfo) -> None:
        self._directory = run.directory
        page = run.directory / REPORT
        if run.resumed_from is not None and page.exists() and is_page(page):
            page.unlink()  # it covers the earlier steps only, which would be misleading

    def close(self) -> None:
        """Write the report; failures do not affect the run."""
        log = logging.getLogger(__name__)
        if not (self._directory / "events.jsonl").exists():
            log.warning("%s: no report, because the tracker 'files' was not used", self._directory)
            return
        try:
            write(self._directory)
        except (ConfigError, OSError) as error:
            log.warning("%s: no report could be written: %s", self._directory, error)
        except Exception:
            log.warning("%s: no report could be made", self._directory, exc_info=True)


def write(path: Path, output: Path | None = None) -> Path:
    """Write the report of the run in the directory ``path``; return the file, by default ``REPORT`` in it.

    Raises ConfigError if the file cannot be written, or exists and is not a report.
    """
    Run(path, strict=False)  # raises if it is not a run
    return save(output or path / REPORT, lambda: render(Files.read(path)))


def render(files: Files) -> str:
    """Render the page."""
    from markupsafe import Markup

    facts, tasks = files.facts, tasks_of(files.steps, files.validations, files.table)
    starts = [*files.run.rows("provenance.jsonl")]
    selection = browse(files, {})  # before ``unreadable``, since it may find more unreadable lines
    return rendered(
        "report.html",
        name=files.run.path.resolve().name,
        state=files.run.state,
        progress=files.progress(),
        started=files.run.started,
        command=starts[-1].get("command") if starts else "",
        setting=facts.setting,
        tiles=tiles(files),
        causes=files.causes(),
        tasks=tasks,
        sections=charts(tasks, files.steps, files.table),
        warnings=warnings(files.records("WarningRaised")),
        errors=files.records("ErrorRaised")[-MOST_MESSAGES:],
        skipped=files.records("PromptSkipped"),
        incidents=sorted(facts.incidents.items()),
        most_messages=MOST_MESSAGES,
        resumed=[row.get("step") for row in files.records("RunStarted") if row.get("resumed")],
        unreadable=files.unreadable,
        views=lanes.views(lanes.spans(files.run.timeline())),
        kinds=lanes.KINDS,
        stages=[(what, facts.stage(what)) for what, _ in facts.stages.most_common(MOST_STAGES)],
        browser=Markup(browsing.as_script([selection])) if selection.groups else "",
        rule=selection.rule(),
        config=(files.run.path / "config.toml").read_text(encoding="utf-8", errors="replace"),
    )


# ---------------------------------------------------------------------------------- what is said


def tiles(files: Files) -> list[tuple[str, str, str]]:
    """Return label, value and explanation of each number at the top of the page."""
    facts, steps = files.facts, files.steps
    seconds = facts.of("time/step").total
    generated = sum(map(sampled, steps))
    done = steps[-1].get("step", len(steps)) if steps else 0
    tiles = [
        ("steps", f"{done} of {facts.planned}" if facts.planned else f"{done}", ""),
        ("training time", lanes.duration(seconds), "without the start" if steps else ""),
    ]
    if steps and seconds:
        stale, most = facts.of("staleness_mean").mean, facts.of("staleness_max").most
        plays, trains = (min(1.0, facts.of(f"time/{side}").total / seconds) for side in ("generate", "train"))
        tiles += [
            ("tokens generated", number(generated), f"{number(generated / seconds)} per second"),
            ("engines at work", f"{plays:.0%}", f"of the time; the trainer {trains:.0%}"),
            ("staleness", f"{plain(stale):.2f}", f"steps; at most {plain(most):.0f}"),
        ]
    if (cost := Account.of(files.run)) is not None:
        tiles.append(("cost", cost.total, cost.rates))
    return tiles


def warnings(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return count, first and last step, and last message for each cause."""
    causes: dict[str, dict[str, Any]] = {}
    for row in rows:
        cause = causes.setdefault(str(row.get("cause")), {"first": row.get("step"), "times": 0})
        cause |= {"times": cause["times"] + 1, "last": row.get("step"), "message": row.get("message")}
    return [{"cause": name, **entry} for name, entry in sorted(causes.items())]


def browse(files: Files, pieces: browsing.Pieces, runs: int = 1) -> browsing.Selection:
    """Return the selected rollouts for a page with one or several runs."""
    text_of = browsing.token_texts(files.run.path, table(files.table.get("model")).get("path"))
    return browsing.select(files.run, text_of, pieces=pieces, runs=runs)
