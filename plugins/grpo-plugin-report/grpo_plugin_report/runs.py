"""``grpo-core runs``: lists and compares runs, removes old checkpoints, and exports metrics.

Everything is read from the files of the runs, without effects on running ones.
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import Any, TextIO

from attrs import field, frozen
from cyclopts import App
from rich.filesize import decimal

from grpo_core import ConfigError, Run
from grpo_core.commands.complaints import complain, say
from grpo_core.loop.metrics import headline
from grpo_core.loop.retention import Retention
from grpo_core.plugins.options import AsJson, Flag
from grpo_core.storage.run_directory import RunDirectory, planned_steps
from grpo_core.validation.results import progress
from grpo_plugin_report import arms
from grpo_plugin_report.cost import Account

RUNS, CONFIG = Path("runs"), "config.toml"


@frozen(kw_only=True)
class Summary:
    """Progress and scores of a run."""

    path: Path
    state: str
    """State as in ``Run.state``, or "unreadable"."""
    step: int = 0
    """Number of the last step."""
    scores: Mapping[str, tuple[Mapping[str, float], Mapping[str, float]]] = field(factory=dict)
    """Metrics of each task in its first and last validation."""
    seconds: float | None = None
    """Mean time of a step, formatted like on a page."""
    started: datetime | None = None
    config: Mapping[str, Any] = field(factory=dict)
    cost: Account | None = None
    """Its cost so far; None without a price."""


# ---------------------------------------------------------------------------------- commands


runs = App(
    name="runs",
    help="List the runs of a directory, compare them, free their disk, or write their metrics as CSV.",
)


@runs.default
@runs.command(name="list")
def list_(directories: list[Path] | None = None, /, *, as_json: AsJson = False) -> int:
    """Print a line for each run: its state, steps, scores, start and size.

    Parameters
    ----------
    directories
        Runs, or directories of runs.  Default: runs.
    as_json
        Print the list as JSON.
    """
    directories = directories or [RUNS]
    listed = [_listed(path, named=path in directories) for path in _runs(directories)]
    found = sorted(listed, key=lambda each: (each.started or datetime.min, str(each.path)))
    if as_json:
        print(json.dumps([_as_json(each) for each in found], indent=2))
        return 0
    if not found:
        say(f"there are no runs in {', '.join(map(str, directories))}")
        return 0
    priced = any(each.cost for each in found)
    table: list[tuple[str, ...]] = [
        ("run", "state", "tasks", "steps", "learnt", "started", *(["cost"] if priced else []), "size")
    ]
    for each in found:
        learnt = ", ".join(f"{task} {score}" for task in each.scores if (score := _score(each, task)))
        started = f"{each.started:%Y-%m-%d %H:%M}" if each.started else ""
        tasks = "+".join(each.config.get("tasks", ()))
        name, size = str(each.path), decimal(_nbytes(each.path))
        cost = [str(each.cost or "")] if priced else []
        table.append((name, each.state, tasks, _steps(each), learnt, started, *cost, size))
    say(_aligned(table))
    return 0


@runs.command
def compare(directories: list[Path], /) -> int:
    """Print the settings in which runs differ, and their results, side by side.

    Parameters
    ----------
    directories
        Directories of two or more runs.
    """
    if len(directories) < 2:
        raise ConfigError("runs compare: expected the directories of two or more runs")
    found = [summary(path) for path in directories]
    settings = arms.differing([each.config for each in found])
    tasks = dict.fromkeys(task for each in found for task in each.scores)
    rows: dict[str, list[str]] = {
        "": [str(each.path) for each in found],
        **{key: [arms.shorten(value) for value in values] for key, values in settings},
        "state": [each.state for each in found],
        "steps": [_steps(each) for each in found],
        "seconds a step": ["" if each.seconds is None else f"{each.seconds:.3g}" for each in found],
        **{f"validation {task}": [_score(each, task) for each in found] for task in tasks},
        **({"cost": [str(each.cost or "") for each in found]} if any(each.cost for each in found) else {}),
    }
    say(_aligned([(name, *cells) for name, cells in rows.items()]))
    return 0


@runs.command
def prune(directories: list[Path], /, *, keep: int = 1, yes: Flag = False) -> int:
    """Remove old checkpoints of runs; the newest ones and the best one stay, and all records.

    Parameters
    ----------
    directories
        Runs, or directories of runs.  A run that is running is refused.
    keep
        Number of the newest checkpoints that stay.
    yes
        Remove the checkpoints.  Without this option, they are only listed.
    """
    if keep < 1:
        raise ConfigError(f"--keep is {keep}; expected at least 1, without which a run cannot be continued")
    paths = dict.fromkeys(_runs(directories))
    if not paths:
        raise ConfigError(f"runs prune: there are no runs in {', '.join(map(str, directories))}")
    total = 0
    with contextlib.ExitStack() as stack:
        found = [_locked(path, stack, named=path in directories) for path in paths]
        for run in found:
            for unwanted in [] if run is None else _unwanted(run, keep):
                nbytes = _nbytes(unwanted)
                total += nbytes
                say(f"{'removed' if yes else 'would remove'} {unwanted} ({decimal(nbytes)})")
                if yes:
                    shutil.rmtree(unwanted)
    action = "freed" if yes else "would free"
    say(f"{action} {decimal(total)}" + ("" if yes or not total else "; --yes removes them"))
    return 0


def _locked(path: Path, stack: contextlib.ExitStack, *, named: bool) -> RunDirectory | None:
    """Lock a run until the stack ends; print a line and return None for a found run that is running."""
    run = RunDirectory.existing(path)
    try:
        run.lock()
    except ConfigError as error:
        if named:
            raise
        complain(f"left out: {error}")
        return None
    stack.callback(lambda: run.unlock())
    return run


@runs.command
def export(directory: Path, /, *, output: Path | None = None) -> int:
    """Write the metrics of a run as CSV, with a row for each step and each validation.

    Parameters
    ----------
    directory
        Directory of the run.
    output
        File that is written.  Default: standard output, or NAME.csv where that is a terminal.
    """
    rows = Run(directory).metrics()
    names = dict.fromkeys(name for row in rows for name in ["step", *row])
    if not names:
        raise ConfigError(f"{directory}: has no metrics, so there is nothing to export")
    if output is None and sys.stdout.isatty():
        output = Path(f"{directory.resolve().name}.csv")
    with contextlib.ExitStack() as stack:
        file: TextIO = sys.stdout
        try:
            if output is not None:
                file = stack.enter_context(output.open("x", encoding="utf-8", newline=""))
        except FileExistsError:
            raise ConfigError(f"--output {output}: exists; give another name") from None
        except OSError as error:
            raise ConfigError(f"--output {output}: cannot be written: {error.strerror}") from error
        writer = csv.DictWriter(file, list(names), restval="")
        writer.writeheader()
        writer.writerows(rows)
    if output is not None:
        print(f"{output} has {len(rows):,} rows of {len(names)} columns")
    return 0


# ---------------------------------------------------------------------------------- reading


def summary(path: Path) -> Summary:
    """Read the summary of a run.  Raises ConfigError if its files cannot be read."""
    run = Run(path)
    config, rows = run.config, run.metrics()
    scores: dict[str, tuple[Mapping[str, float], Mapping[str, float]]] = {}
    for row in run.validations(rows):
        metrics = {
            name: value for name, value in row.items() if name not in ("step", "task") and value is not None
        }
        scores[row["task"]] = scores.get(row["task"], (metrics,))[0], metrics
    times = [row["time/step"] for row in rows if row.get("time/step") is not None]
    return Summary(
        path=path,
        state=run.state,
        step=max((row["step"] for row in rows), default=0),
        scores=scores,
        seconds=fmean(times) if times else None,
        started=run.started,
        config=config,
        cost=Account.of(run),
    )


def _listed(path: Path, *, named: bool) -> Summary:
    """Return a run's summary; a damaged run within a directory of runs does not hide the others."""
    try:
        return summary(path)
    except (ConfigError, OSError) as error:
        if named:
            raise
        complain(f"note: {error}")
        return Summary(path=path, state="unreadable")


def _runs(directories: Iterable[Path]) -> Iterator[Path]:
    """Yield the given runs, and the runs in given directories."""
    for directory in directories:
        if (directory / CONFIG).is_file():
            yield directory
        elif directory.is_dir():
            yield from sorted(path.parent for path in directory.glob(f"*/{CONFIG}"))
        elif directory != RUNS:
            raise ConfigError(f"{directory} is neither a run nor a directory of runs")


def _unwanted(run: RunDirectory, keep: int) -> list[Path]:
    """Return the checkpoints that are neither the newest, nor the best, nor permanent."""
    its = Run(run.path)
    steps, chosen = its.checkpoints, its.config.get("checkpoint", {})
    last, every, best = max(steps, default=0), chosen.get("keep_every", 0), chosen.get("best", "")
    spared = Retention(run.checkpoints, every=every, best=best, step=last).spared(steps)
    return [path for step, path in [*steps.items()][:-keep] if step not in spared]


# ---------------------------------------------------------------------------------- showing


def _steps(each: Summary) -> str:
    planned = planned_steps(each.config)
    return f"{each.step} of {planned}" if planned else str(each.step)


def _score(each: Summary, task: str) -> str:
    if task not in each.scores:
        return ""
    return progress(*each.scores[task])


def _nbytes(directory: Path) -> int:
    """Return the size of a directory in bytes, ignoring files that disappear meanwhile."""
    found = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):
                found += os.stat(os.path.join(parent, name)).st_size
    return found


def _aligned(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _as_json(each: Summary) -> dict[str, Any]:
    return {
        "run": str(each.path),
        "state": each.state,
        "tasks": list(each.config.get("tasks", ())),
        "step": each.step,
        "steps": planned_steps(each.config),
        "scores": {
            task: {"metric": name, "first": first.get(headline(first) or ""), "last": last.get(name)}
            for task, (first, last) in each.scores.items()
            for name in (headline(last) or "",)
        },
        "seconds_per_step": each.seconds,
        "started": each.started.isoformat(timespec="seconds") if each.started else None,
        "cost": each.cost and each.cost.as_json(),
    }
