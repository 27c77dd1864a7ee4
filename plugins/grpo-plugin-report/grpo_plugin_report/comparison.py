"""The command ``report``, and pages that compare curves, results, settings and rollouts of several runs.

Runs that differ only in their seed form an arm, which is shown as a mean with an interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from attrs import frozen

from grpo_core import ConfigError, Run
from grpo_core.commands.complaints import say
from grpo_plugin_report import arms, browsing, overlay
from grpo_plugin_report.arms import Arm
from grpo_plugin_report.explain.causes import Finding
from grpo_plugin_report.pages import rendered, save
from grpo_plugin_report.report import Files, browse
from grpo_plugin_report.report import write as write_one

MOST_RUNS = 26
"""Largest number of runs of a page, since an arm is a letter of the alphabet."""


@frozen(kw_only=True)
class Member:
    """A row of the page's list of runs."""

    mark: str
    """Letter of the arm, with a number if the arm has several runs."""
    name: str
    index: int
    """Index of the arm's colour and dashes in the palette."""
    seed: Any
    state: str
    step: int
    cause: Finding | None
    """First finding of ``grpo-core explain``."""


def report(runs: list[Path] | None = None, /, *, output: Path | None = None) -> int:
    """Write report.html for a finished, running or killed run, or one page that compares several runs.

    The page of several runs draws their curves over one another, and shows their results, their settings and
    their rollouts side by side.  Runs that differ in nothing but their seed are shown as a mean with an
    interval of 95%.

    Parameters
    ----------
    runs
        Directories of the runs.
    output
        File of the page.  Several runs need it; default for one: RUN/report.html.
    """
    if not runs:
        there = sorted(str(each.parent) for each in Path("runs").glob("*/config.toml"))
        raise ConfigError(
            f"report: name a run, as in grpo-core report runs/NAME; here: {', '.join(there) or 'none'}"
        )
    if len(runs) == 1:
        page = write_one(runs[0], output)
    elif output is None:
        raise ConfigError(
            "report: several runs need --output and the name of their page, as --output compared.html"
        )
    else:
        page = write(runs, output)
    say(str(page))
    return 0


def write(paths: Sequence[Path], output: Path) -> Path:
    """Write the page of several runs; return the file.

    Raises ConfigError if the runs cannot be compared, or the file cannot be written.
    """
    return save(output, lambda: render(read(paths)))


def read(paths: Sequence[Path]) -> list[Files]:
    """Read the files of runs.  Raises ConfigError if they cannot be compared."""
    if len(paths) > MOST_RUNS:
        raise ConfigError(f"report: {len(paths)} runs; a page has room for {MOST_RUNS}")
    for path in paths:
        Run(path)
    for one, other in combinations(paths, 2):
        if one.resolve() == other.resolve():
            raise ConfigError(f"report: {one} and {other} are the same run; give each run once")
    files = [Files.read(path) for path in paths]
    for each in files:
        if not each.steps and not each.validations:
            raise ConfigError(
                f"{each.run.path}: has no metrics of a step or a validation yet; leave it out, or wait for "
                "its first step"
            )
    common_tasks(files)
    return files


def common_tasks(files: Sequence[Files]) -> list[str]:
    """Return the tasks that all runs have.  Raises ConfigError if there is none."""
    common, names = files[0].tasks(), _names(files)
    for each, name in zip(files[1:], names[1:], strict=True):
        its = each.tasks()
        if not (both := [task for task in common if task in its]):
            different = " and ".join(f"{name} has {', '.join(tasks) or 'none'}" for name, tasks in
                                ((names[0], common), (name, its)))  # fmt: skip
            raise ConfigError(f"report: these runs have no task in common: {different}")
        common = both
    return common


def render(files: Sequence[Files]) -> str:
    """Render the page."""
    from markupsafe import Markup

    names = _names(files)
    found = arms.grouped([each.run.configs for each in files], names)
    tasks = common_tasks(files)
    members = _members(files, names, found)
    pieces: browsing.Pieces = {}
    selections = [browse(each, pieces, len(files)) for each in files]
    marks = [f"{member.mark} {member.name}" for member in members]
    kept = sum(selection.kept for selection in selections)
    newest = [files[arm.runs[0]].table for arm in found]
    return rendered(
        "compared.html",
        arms=found,
        members=sorted(members, key=lambda member: member.index),
        settings=[(key, [arms.shorten(value) for value in values]) for key, values in arms.differing(newest)],
        changed=[member for member, each in zip(members, files, strict=True) if len(each.run.configs) > 1],
        tasks=tasks,
        repeated=_repeated(members),
        left_out=sorted({task for each in files for task in each.tasks()} - set(tasks)),
        most_tasks=overlay.MOST_TASKS,
        results=[overlay.results(found, files, task) for task in tasks],
        columns=[(name, percent) for name, _, percent in overlay.SPEED],
        speed=overlay.speed(found, files),
        sections=overlay.charts(found, files, tasks),
        unreadable=sum(each.unreadable for each in files),
        browser=Markup(browsing.as_script(selections, marks)) if kept else "",
        rules=[(mark, selection.rule()) for mark, selection in zip(marks, selections, strict=True)],
    )


def _repeated(members: Sequence[Member]) -> list[str]:
    """Return the runs that repeat a seed of their arm and thus add no evidence."""
    keys = [(member.index, str(member.seed)) for member in members]
    return [f"{each.mark} {each.name}" for place, each in enumerate(members) if keys[place] in keys[:place]]


def _names(files: Sequence[Files]) -> list[str]:
    """Return as much of the paths of runs as tells them apart."""
    paths = [each.run.path.resolve() for each in files]
    most = max(len(path.parts) for path in paths)
    depth = next(n for n in range(1, most + 1) if len({path.parts[-n:] for path in paths}) == len(paths))
    return ["/".join(path.parts[-depth:]) for path in paths]


def _members(files: Sequence[Files], names: Sequence[str], found: Sequence[Arm]) -> list[Member]:
    """Return the rows of the list of runs, in order."""
    members = {}
    for arm in found:
        for number, index in enumerate(arm.runs, 1):
            each = files[index]
            rows = [n for row in (*each.steps, *each.validations) if isinstance(n := row.get("step"), int)]
            members[index] = Member(
                mark=f"{arm.mark}{number}" if len(arm.runs) > 1 else arm.mark,
                name=names[index],
                index=arm.index,
                seed=each.table.get("seed", "-"),
                state=each.run.state,
                step=max(rows, default=0),
                cause=next(iter(each.causes()), None),
            )
    return [members[index] for index in range(len(files))]
