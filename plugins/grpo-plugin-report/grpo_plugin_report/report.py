"""The tracker ``report`` and its ``report.html``: a run on one page that opens offline, and on a phone.

It is made from the files of the run (see ``grpo_core.run_directory``) and needs nothing else, so that it
can be made of a run that goes on, was killed, or was copied from another machine.  Whatever the files hold is
text to it: the template escapes everything, and what cannot be read is left out and counted.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from attrs import define, field, frozen

from grpo_core import ConfigError, Run, RunInfo, Tracker
from grpo_core.kit import planned_steps
from grpo_plugin_report import browsing, lanes
from grpo_plugin_report.curves import Task, charts, tasks_of
from grpo_plugin_report.explain.causes import Finding
from grpo_plugin_report.explain.decisions import explained
from grpo_plugin_report.explain.facts import Facts
from grpo_plugin_report.pages import (
    check_output,
    is_number,
    lacking,
    number,
    plain,
    rendered,
    replace,
    replace_output,
    result,
)

REPORT = "report.html"
TOLD = ("RunStarted", "RunEnded", "WarningRaised", "ErrorRaised", "PromptSkipped")
"""Events that the report shows; the others, which are by far the most, are not parsed."""
INCIDENT = "IncidentReported"
SAMPLED_STEPS = 5
"""Number of steps whose rollouts are shown."""
MOST_ROLLOUTS = 4096
"""Largest number of rollouts of a step that the report reads."""
LONGEST_TEXT = 2000
"""Number of characters of a prompt or a reply that are shown."""
MOST_TOLD = 50
"""Number of errors and skipped prompts that are shown."""
MOST_STAGES = 5
"""Number of stages of the loop whose shares of its time are told."""
MOST_CAUSES = 3
"""Number of causes of ``grpo-core explain`` that are shown, as many as the command shows."""

Row = Mapping[str, Any]


@define
class Incidents:
    """The incidents of one kind and component."""

    kind: str
    component: str
    first: Any
    """The first step in which there was one."""
    last: Any
    count: float = 0
    message: str = ""
    """Message of the last one."""


@define
class Files:
    """The records of a run that its page shows."""

    run: Run
    table: Mapping[str, Any] = field(factory=dict)
    """The configuration."""
    steps: list[Row] = field(factory=list)
    validations: list[Row] = field(factory=list)
    events: list[Row] = field(factory=list)
    incidents: dict[tuple[str, str], Incidents] = field(factory=dict)
    """By kind and component."""

    @property
    def unreadable(self) -> int:
        """Number of lines that cannot be read."""
        return sum(map(len, self.run.damaged.values()))

    @classmethod
    def read(cls, path: Path) -> Files:
        run = Run(path, strict=False)
        files = cls(run, run.config)
        for row in run.metrics():
            validated = any(name.startswith("validation/") for name in row)
            (files.validations if validated else files.steps).append(row)
        for row in run.events(*TOLD, INCIDENT):
            if row["event"] == INCIDENT:
                files._add_incident(row)
            else:
                files.events.append(row)
        return files

    def rollouts(self, most: int = SAMPLED_STEPS) -> Iterator[tuple[int, list[Row]]]:
        """Yield the rollouts of the first step, the last step, and some steps between."""
        found = [*self.run.texts().items()]
        places = {round(i * (len(found) - 1) / max(1, most - 1)) for i in range(most)} if found else set()
        for place in sorted(places):
            step, file = found[place]
            yield step, list(islice(self.run.rows(file), MOST_ROLLOUTS))

    def told(self, event: str) -> list[Row]:
        return [row for row in self.events if row["event"] == event]

    def _add_incident(self, row: Row) -> None:
        kind, component, step = str(row.get("kind")), str(row.get("component")), row.get("step")
        known = self.incidents.setdefault((kind, component), Incidents(kind, component, step, step))
        known.last, known.message = step, _short(str(row.get("message")))
        known.count += plain(row.get("count", 1))


@frozen(kw_only=True)
class Sample:
    """A rollout that is shown."""

    step: int
    task: str
    prompt: str
    reply: str
    answer: str
    reward: float | None
    share: float | None
    """Place of the reward between the lowest and the highest of the run's samples."""


class ReportTracker(Tracker):
    """Makes the report from the files of the run when the run ends."""

    def __init__(self, run: RunInfo) -> None:
        self._directory = run.directory

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
    if output is not None:
        check_output(output)
        return replace_output(output, render(Files.read(path)))
    page = render(Files.read(path))
    try:
        replace(path / REPORT, page)
    except OSError as error:
        raise ConfigError(
            f"{path}: the report cannot be written ({error.strerror}); give another file with --output"
        ) from error
    return path / REPORT


def render(files: Files) -> str:
    """The page."""
    from markupsafe import Markup

    shown = samples(files)  # first of all, since it may find more that cannot be read
    tasks = tasks_of(files.steps, files.validations, files.table)
    held_out = validation_samples(files, tasks)
    selection = browse(files)
    spans = lanes.spans(files.run.timeline())
    return rendered(
        "report.html",
        name=files.run.path.resolve().name,
        state=state(files),
        headline=headline(tasks),
        tiles=tiles(files),
        causes=causes(files.run),
        tasks=tasks,
        sections=charts(tasks, files.steps, files.table),
        warnings=warnings(files.told("WarningRaised")),
        errors=files.told("ErrorRaised")[-MOST_TOLD:],
        skipped=files.told("PromptSkipped"),
        incidents=sorted(files.incidents.values(), key=lambda each: (each.kind, each.component)),
        most_told=MOST_TOLD,
        resumed=[row.get("step") for row in files.told("RunStarted") if row.get("resumed")],
        unreadable=files.unreadable,
        samples=[
            (
                "Best and worst",
                "of the group whose rewards differ most, from some steps",
                shown,
            ),
            ("Best and worst of the newest validation", "of each task and set", held_out),
        ],
        views=lanes.views(spans),
        kinds=lanes.KINDS,
        stages=lanes.stages(spans)[:MOST_STAGES],
        browser=Markup(browsing.as_script([selection])) if selection.groups else "",
        rule=selection.rule(),
        config=(files.run.path / "config.toml").read_text(encoding="utf-8", errors="replace"),
    )


# ---------------------------------------------------------------------------------- what is said


def state(files: Files) -> str:
    """Return "finished", "interrupted", "failed"; or "unfinished" for a run that was killed or goes on."""
    last = [row for row in files.events if row.get("event") in ("RunStarted", "RunEnded")][-1:]
    return str(last[0].get("reason")) if last and last[0]["event"] == "RunEnded" else "unfinished"


def headline(tasks: Sequence[Task]) -> list[tuple[str, str, str, str, str]]:
    """Return for each task its name, the measured metric, its values before and after, and what it lacks."""
    told = []
    for task in tasks:
        if task.validation:
            told.append(
                (task.name, f"validation {task.metric}", result(task, 0), result(task, -1), lacking(task))
            )
        elif task.rewards:
            first, last = (number(task.rewards[place][1]) for place in (0, -1))
            told.append((task.name, "reward", first, last, ""))
    return told


def tiles(files: Files) -> list[tuple[str, str, str]]:
    """Return label, value and meaning of each number at the top of the page."""
    steps = files.steps

    def column(name: str) -> list[float]:
        return [row[name] for row in steps if is_number(row.get(name))]

    seconds = sum(column("time/step"))
    generated = sum(
        row["tokens_per_second/generation"] * row["time/step"]
        for row in steps
        if is_number(row.get("tokens_per_second/generation")) and is_number(row.get("time/step"))
    )
    started = files.told("RunStarted")
    planned = planned_steps(files.table, started[-1].get("config") if started else None)
    done = steps[-1].get("step", len(steps)) if steps else 0
    told = [
        ("steps", f"{done} of {planned}" if planned else f"{done}", ""),
        ("training time", _clock(seconds), "without the start" if steps else ""),
    ]
    if steps and seconds:
        told += [
            ("tokens generated", number(generated), f"{number(generated / seconds)} per second"),
            ("overlap", f"{_mean(column('overlap')):.0%}", "the busier side works"),
            ("staleness", f"{_mean(column('staleness_mean')):.2f}", f"steps; at most {_most(steps)}"),
        ]
        filtered = sum(v for row in steps for k, v in row.items() if k.startswith("filtered/") and v)
        trained = sum(v for row in steps for k, v in row.items() if k.startswith("groups/") and v)
        if filtered:
            share = filtered / (filtered + trained)
            told.append(("groups filtered", f"{share:.0%}", f"{number(filtered)} were left out"))
    return told


def causes(run: Run) -> list[Finding]:
    """Return the causes that ``grpo-core explain`` names for a run, the likeliest first."""
    try:
        return explained(Facts.read(run))[:MOST_CAUSES]
    except ConfigError:  # nothing has been recorded yet
        return []


def warnings(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return one entry for each cause: its count, its first and last step, and its last message."""
    causes: dict[str, dict[str, Any]] = {}
    for row in rows:
        cause = causes.setdefault(str(row.get("cause")), {"first": row.get("step"), "times": 0})
        cause |= {"times": cause["times"] + 1, "last": row.get("step"), "message": row.get("message")}
    return [{"cause": name, **told} for name, told in sorted(causes.items())]


# ---------------------------------------------------------------------------------- rollouts


def browse(files: Files, pieces: browsing.Pieces | None = None, runs: int = 1) -> browsing.Selection:
    """Return the rollouts of a run that the page holds, which it may share with other runs."""
    model = files.table.get("model")
    text_of = browsing.token_texts(files.run.path, model.get("path") if isinstance(model, Mapping) else None)
    return browsing.select(files.run, MOST_ROLLOUTS, text_of, pieces=pieces, runs=runs)


def samples(files: Files) -> list[Sample]:
    """Return the best and the worst rollout of the most instructive group, for some steps and each task."""
    found = []
    for step, rows in files.rollouts():
        for task in sorted({str(row.get("task")) for row in rows}):
            groups: dict[str, list[Row]] = {}
            for row in rows:
                if str(row.get("task")) == task:
                    groups.setdefault(str(row.get("prompt")), []).append(row)
            group = max(groups.values(), key=_spread)
            ranked = sorted(group, key=lambda row: plain(row.get("reward")), reverse=True)
            shown = ranked if len(ranked) < 2 else [ranked[0], ranked[-1]]
            if len(shown) == 2 and shown[0].get("reward") == shown[1].get("reward"):
                shown = shown[:1]
            found += [(step, task, row) for row in shown]
    return _samples(found)


def validation_samples(files: Files, tasks: Sequence[Task]) -> list[Sample]:
    """Return the best and the worst rollout of the newest validation of each task and set."""
    newest: dict[int, set[str]] = {}
    for task in tasks:
        if task.validation:
            newest.setdefault(int(task.validation[-1][0]), set()).add(task.name)
    found = []
    for version, names in sorted(newest.items()):
        ends: dict[str, tuple[Row, Row]] = {}
        held_out = files.run.texts(validation=True).get(version)
        for row in files.run.rows(held_out) if held_out else ():
            name, reward = str(row.get("task")), row.get("reward")
            if name in names and is_number(reward):
                worst, best = ends.get(name, (row, row))
                ends[name] = (
                    min(worst, row, key=lambda one: plain(one.get("reward"))),
                    max(best, row, key=lambda one: plain(one.get("reward"))),
                )
        for name, (worst, best) in sorted(ends.items()):
            found += [(version, name, row) for row in ((best, worst) if worst is not best else (best,))]
    return _samples(found)


def _samples(found: Sequence[tuple[int, str, Row]]) -> list[Sample]:
    """Return rollouts as they are shown, each with its step and task."""
    rewards = [plain(row.get("reward")) for _, _, row in found]
    low, high = min(rewards, default=0.0), max(rewards, default=0.0)
    return [_sample(step, task, row, low, high) for step, task, row in found]


def _spread(group: Sequence[Row]) -> float:
    """Return the spread of a group's rewards: a group with a large spread is instructive."""
    rewards = [plain(row.get("reward")) for row in group]
    return max(rewards) - min(rewards)


def _sample(step: int, task: str, row: Row, low: float, high: float) -> Sample:
    given = row.get("messages")
    messages = [m for m in given if isinstance(m, Mapping)] if isinstance(given, list) else []
    roles = [message.get("role") for message in messages]
    replied = roles.index("assistant") if "assistant" in roles else len(messages)
    reward = row.get("reward")
    known = is_number(reward)
    return Sample(
        step=step,
        task=task,
        prompt=_text(messages[:replied]),
        reply=_text(messages[replied:]),
        answer=_short("" if row.get("answer") is None else str(row["answer"])),
        reward=reward if known else None,
        share=(plain(reward) - low) / (high - low) if known and high > low else None,
    )


def _text(messages: Sequence[Row]) -> str:
    """The messages' text; of several, each with who speaks."""
    several = len(messages) > 1
    parts = [(f"{message.get('role')}: " if several else "") + _said(message) for message in messages]
    return _short("\n".join(parts))


def _said(message: Row) -> str:
    """The text of a message, and its calls of tools."""
    packed = browsing.message(message)
    calls = (f"calls {name} {arguments}" for name, arguments in packed.get("calls", ()))
    return "\n".join([*([packed["text"]] if "text" in packed else []), *calls])


def _short(text: str) -> str:
    return text if len(text) <= LONGEST_TEXT else text[:LONGEST_TEXT] + f" … ({len(text):,} characters)"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _most(steps: Sequence[Row]) -> str:
    return f"{max((plain(row.get('staleness_max')) for row in steps), default=0):.0f}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
