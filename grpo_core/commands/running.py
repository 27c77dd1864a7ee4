"""The commands, called with parsed arguments."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime, time, timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from grpo_core.aio import to_the_end
from grpo_core.app import measuring, profile, run
from grpo_core.app.launch import RUNS, configure, continued, new_run, tasks_of
from grpo_core.complaints import complain, say, to_a_reader
from grpo_core.config import Config, check_settings, merge, parse_settings, read_toml
from grpo_core.errors import ConfigError
from grpo_core.inert import inert
from grpo_core.interrupts import INTERRUPTED
from grpo_core.loop.endings import GOAL_REACHED
from grpo_core.plugins.hints import install_command
from grpo_core.plugins.host import PluginHost
from grpo_core.reporting.selection import REPORT
from grpo_core.reporting.verification import verified
from grpo_core.run_directory import RunDirectory
from grpo_core.validation.results import progress, table

MEASURED_BY = (
    "seed",
    "plugins",
    "tasks.*",
    "model.*",
    "engine.*",
    "environment.*",
    "placement.*",
    "rollout.*",
    "validation.*",
    "health.canary_tolerance",
    "trainer.device",
)
"""Patterns of the keys that a validation without training depends on."""


def train(
    *,
    config_file: Path | None,
    envs: Sequence[str],
    chosen: Mapping[str, str],
    settings: Sequence[str],
    output: Path | None,
    resume: str | None,
    ray: str | None,
    block: Sequence[str],
) -> int:
    """Run ``grpo-core train``; return the exit status."""
    changes = _changes(envs, chosen, settings)
    if ray is not None:
        changes = merge(changes, {"placement": {"name": "ray", "options": {"address": ray}}})
    if resume is None:
        start = new_run([read_toml(config_file)] if config_file else [], changes, block, output=output)
    else:
        if config_file is not None or output is not None:
            raise ConfigError(
                "--resume continues a run as it was configured: leave out CONFIG.toml and --output"
            )
        if envs:
            raise ConfigError(
                "--resume continues a run with its tasks: leave out --env "
                "(--set tasks.NAME.env=... adds a task)"
            )
        path = RunDirectory.latest(RUNS) if resume == "latest" else Path(resume)
        start = continued(path, changes, block)
    view = start.config.tracking.options.get("terminal", {}).get("view")
    tell = complain if view == "json" else say  # standard output has JSON and nothing else
    for note in start.notes:
        tell(note)
    directory, again, over = start.directory, start.again(block), start.over
    if over is not None and over.complete:
        directory.unlock()
        return 0
    try:
        outcome = to_the_end(
            run.train(
                start.config,
                directory,
                host=start.host,
                resume=start.found,
                over=over,
                warnings=start.warnings,
            )
        )
    except KeyboardInterrupt:
        with to_a_reader():
            tell(f"interrupted at once; run: {directory.path} (continue with: {again})")
        return INTERRUPTED
    except Exception as error:
        if directory.has_trained():
            error.add_note(f"run: {directory.path} (continue with: {again})")
        raise
    finally:
        directory.unlock()
    with to_a_reader():
        if start.config.trainer.profile and over is None:
            tell(profile.told(directory.profile, start.config.trainer.profile))
        if REPORT in start.config.tracking.trackers and not start.host.offers("tracker", REPORT):
            page = install_command("tracker", REPORT)
            tell(f"its page: {page}, then grpo-core report {directory.path}")
        tell(_summary(outcome, again))
    return INTERRUPTED if outcome.reason == "interrupted" else 0


def time_limit(until: str, now: datetime | None = None) -> str:
    """Return the setting that ends a run before a time of day, or a date and time.

    Raises ConfigError if it is neither, or over.
    """
    now = (now or datetime.now()).astimezone()
    try:
        clock = time.fromisoformat(until) if ":" in until and "-" not in until else None
        end = datetime.combine(now.date(), clock) if clock else datetime.fromisoformat(until)
    except ValueError:
        raise ConfigError(
            f'--until is {until!r}; expected a time of day, as in "18:30", or a date and time, as in '
            '"2026-11-23T07:00"'
        ) from None
    seconds = (end.astimezone() - now).total_seconds()
    if clock and seconds <= 0:
        seconds += timedelta(days=1).total_seconds()
    if seconds <= 0:
        raise ConfigError(f"--until is {until!r}, which is over")
    return f"trainer.time_limit={seconds:.0f}"


def validate(
    *,
    target: str,
    envs: Sequence[str],
    chosen: Mapping[str, str],
    settings: Sequence[str],
    output: Path | None,
    as_json: bool,
    block: Sequence[str],
    only: Sequence[str] = (),
) -> int:
    """Run ``grpo-core validate``; return the exit status."""
    changes = _changes(envs, chosen, settings)
    why = "a model is measured as it is, and no validation depends on this key"
    check_settings(parse_settings(settings), MEASURED_BY, why, but=["tasks.*.weight"])
    measurement = measuring.prepare(target, changes, tasks=bool(envs), only=only, output=output, block=block)
    console = Console(stderr=True)

    def tell(text: str, style: str = "dim") -> None:
        console.print(Text(inert(text), style=style), soft_wrap=True)

    for note in measurement.target.notes:
        tell(note, "")
    report = to_the_end(measurement.play(tell))
    tell(f"results and rollouts: {measurement.directory}", "")
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        results, sets = report["results"], report["sets"]
        strategies = {report["validation"]: None} if set(results) - set(sets) else {}
        strategies |= dict.fromkeys(one["validation"] for one in sets.values())
        say(f"{report['model']}, version {report['version']}, measured by {', '.join(strategies)}\n")
        say(table(results))
    return 0


def verify(*, directory: Path) -> int:
    """Run ``grpo-core verify``; return the exit status."""
    found = verified(directory)
    say(str(found))
    return 1 if found.findings else 0


def configured(
    config_file: Path | None,
    *,
    envs: Sequence[str],
    chosen: Mapping[str, str],
    settings: Sequence[str],
    block: Sequence[str],
) -> tuple[Config, PluginHost]:
    """Build the configuration of a command from its file and its options; return it and the plugins."""
    tables = [read_toml(config_file)] if config_file else []
    return configure(tables, _changes(envs, chosen, settings), block)


def _changes(envs: Sequence[str], chosen: Mapping[str, str], settings: Sequence[str]) -> dict[str, Any]:
    changes: dict[str, Any] = {section: {"name": name} for section, name in chosen.items()}
    if envs:
        changes["tasks"] = tasks_of(envs)
    return parse_settings(settings, changes)


def _summary(outcome: run.Outcome, again: str) -> str:
    """Summarise a run in one line: its scores, steps, seconds and directory; ``again`` continues it."""
    scores = [(task, progress(outcome.first[task], last)) for task, last in outcome.last.items()]
    learnt = ", ".join(f"{task}: validation {told}" for task, told in scores if told)
    did = f"{outcome.step} of {outcome.steps} steps in {outcome.seconds:.0f} s"
    if outcome.unproved:
        since = "" if outcome.proved is None else f" since version {outcome.proved}"
        did += f"; weight sync unproved: {outcome.unproved} sync{'s' * (outcome.unproved > 1)}{since}"
    line = f"{outcome.reason}: {learnt + '; ' if learnt else ''}{did}; run: {outcome.directory}"
    if outcome.reason == GOAL_REACHED:
        again += " --set trainer.stop_when=''"
    if outcome.reason != "finished":
        line += f" (continue with: {again})"
    return line
