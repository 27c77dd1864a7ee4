"""The tracker ``report`` and its ``report.html``: a run on one page that opens offline, and on a phone.

It is made from the files of the run (see ``grpo_core.Run``) and needs nothing else, so that it
can be made of a run that goes on, was killed, or was copied from another machine.  Whatever the files hold is
text to it: the template escapes everything, and what cannot be read is left out and counted.
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
from grpo_plugin_report.curves import charts, tasks_of
from grpo_plugin_report.explain.causes import Finding
from grpo_plugin_report.explain.decisions import explained
from grpo_plugin_report.explain.facts import Facts
from grpo_plugin_report.pages import is_page, number, plain, rendered, save

REPORT = "report.html"
TOLD = ("RunStarted", "WarningRaised", "ErrorRaised", "PromptSkipped")
"""Events that the report shows."""
MOST_TOLD = 50
"""Number of errors and skipped prompts that are shown."""
MOST_STAGES = 5
"""Number of stages of the loop whose shares of its time are told."""
TIMED = 20
"""Number of steps whose time says how long the others take."""
MOST_CAUSES = 3
"""Number of causes of ``grpo-core explain`` that are shown, as many as the command shows."""

Row = Mapping[str, Any]


@frozen
class Files:
    """The records of a run that its page shows."""

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
        """Number of lines that cannot be read."""
        return sum(map(len, self.run.damaged.values()))

    @classmethod
    def read(cls, path: Path) -> Files:
        run = Run(path, strict=False)
        files = cls(run, Facts.read(run), events=[*run.events(*TOLD)])
        for row in run.metrics():
            validated = any(name.startswith("validation/") for name in row)
            (files.validations if validated else files.steps).append(row)
        return files

    def told(self, event: str) -> list[Row]:
        return [row for row in self.events if row["event"] == event]

    def causes(self) -> list[Finding]:
        """Return the causes that ``grpo-core explain`` names, the likeliest first."""
        return [] if self.facts.is_empty else explained(self.facts)[:MOST_CAUSES]

    def progress(self) -> str:
        """Return how far a run is that goes on, or how a killed one is continued; empty for others."""
        if self.run.state == "killed":
            return f"grpo-core train --resume {self.run.path} continues it"
        if self.run.state != "running" or not self.steps:
            return ""
        step = plain(self.steps[-1].get("step"))
        times = [plain(row.get("time")) for row in self.steps[-TIMED:]]
        ago = max(0.0, time.time() - times[-1])
        told = f"step {step:.0f}, last step {ago:.0f} s ago"
        planned = plain(self.table.get("trainer", {}).get("steps"))
        if planned and len(times) > 1:
            left = (times[-1] - times[0]) / (len(times) - 1) * (planned - step) - ago
            told += f", about {left / 60:.0f} minutes left" if left > 90 else ", about a minute left"
        return told


class ReportTracker(Tracker):
    """Makes the report from the files of the run when the run ends."""

    def __init__(self, run: RunInfo) -> None:
        self._directory = run.directory
        page = run.directory / REPORT
        if run.resumed_from is not None and page.exists() and is_page(page):
            page.unlink()  # it is of the steps before, and would be taken for that of the whole run

    def close(self) -> None:
        """Write the report; a run does not fail because its report cannot be made."""
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

    Raises ConfigError if the file cannot be written, or is something else than a report.
    """
    Run(path, strict=False)  # raises if it is none
    return save(output or path / REPORT, lambda: render(Files.read(path)))


def render(files: Files) -> str:
    """The page."""
    from markupsafe import Markup

    facts, tasks = files.facts, tasks_of(files.steps, files.validations, files.table)
    starts = [*files.run.rows("provenance.jsonl")]
    selection = browse(files)  # before ``unreadable``: it may find more that cannot be read
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
        warnings=warnings(files.told("WarningRaised")),
        errors=files.told("ErrorRaised")[-MOST_TOLD:],
        skipped=files.told("PromptSkipped"),
        incidents=sorted(facts.incidents.items()),
        most_told=MOST_TOLD,
        resumed=[row.get("step") for row in files.told("RunStarted") if row.get("resumed")],
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
    """Return label, value and meaning of each number at the top of the page."""
    facts, steps = files.facts, files.steps
    seconds = facts.of("time/step").total
    generated = sum(
        plain(row.get("tokens_per_second/generation")) * plain(row.get("time/step")) for row in steps
    )
    done = steps[-1].get("step", len(steps)) if steps else 0
    told = [
        ("steps", f"{done} of {facts.planned}" if facts.planned else f"{done}", ""),
        ("training time", lanes.duration(seconds), "without the start" if steps else ""),
    ]
    if steps and seconds:
        stale, most = facts.of("staleness_mean").mean, facts.of("staleness_max").most
        plays, trains = (min(1.0, facts.of(f"time/{side}").total / seconds) for side in ("generate", "train"))
        told += [
            ("tokens generated", number(generated), f"{number(generated / seconds)} per second"),
            ("busy", f"{plays:.0%}, {trains:.0%}", "engines and trainer, of the time"),
            ("staleness", f"{plain(stale):.2f}", f"steps; at most {plain(most):.0f}"),
        ]
    return told


def warnings(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return one entry for each cause: its count, its first and last step, and its last message."""
    causes: dict[str, dict[str, Any]] = {}
    for row in rows:
        cause = causes.setdefault(str(row.get("cause")), {"first": row.get("step"), "times": 0})
        cause |= {"times": cause["times"] + 1, "last": row.get("step"), "message": row.get("message")}
    return [{"cause": name, **told} for name, told in sorted(causes.items())]


def browse(files: Files, pieces: browsing.Pieces | None = None, runs: int = 1) -> browsing.Selection:
    """Return the rollouts of a run that the page holds, which it may share with other runs."""
    model = files.table.get("model")
    text_of = browsing.token_texts(files.run.path, model.get("path") if isinstance(model, Mapping) else None)
    return browsing.select(files.run, text_of, pieces=pieces, runs=runs)
