"""The commands, called with parsed arguments."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
from collections.abc import Coroutine, Mapping, Sequence
from datetime import datetime, time, timedelta
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.text import Text

from grpo_core.app import memory, preflight, profile, run
from grpo_core.app import resume as continuing
from grpo_core.app.paths import with_absolute_paths
from grpo_core.config import Config, build, merge, parse_setting, read_toml, replace_parts
from grpo_core.errors import ConfigError, wrong_input
from grpo_core.events import ValidationPlayed
from grpo_core.inert import inert
from grpo_core.loop import checkpoint
from grpo_core.model_sources import model_source
from grpo_core.models import directory_here
from grpo_core.plugins.host import PluginHost
from grpo_core.reporting.audit import audit
from grpo_core.reporting.report import write as write_report
from grpo_core.reporting.stored import write_validation
from grpo_core.run_directory import CONFIG, RunDirectory
from grpo_core.validation.results import shown, table
from grpo_core.validation.target import drop_overridden, find

T = TypeVar("T")

INTERRUPTED = 130
"""Exit status after ctrl-C or SIGTERM."""

RUNS = Path("runs")
"""The directory in which runs are made unless ``--output`` names another one."""


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
    found: checkpoint.Found | None = None
    if resume is None:
        config, host = configure([read_toml(config_file)] if config_file else [], changes, block)
        _check(config, host)
        _check_memory(config, host)
        config = with_absolute_paths(config, host)
        directory = RunDirectory.create(output or _new_name(config), config)
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
        with wrong_input():
            resumed, host = continuing.find(path, changes, block)
        directory, config, found = resumed.directory, resumed.config, resumed.found
        _check(config, host)
        _check_memory(config, host)
        continuing.begin(resumed)
        for note in resumed.notes:
            _say(note)
    again = shlex.join(["grpo-core", "train", "--resume", str(directory.path)])
    again += "".join(f" --no-plugin {shlex.quote(name)}" for name in block)
    try:
        outcome = _run(run.train(config, directory, host=host, resume=found))
    except KeyboardInterrupt:
        _say(f"interrupted at once; run: {directory.path} (continue with: {again})")
        return INTERRUPTED
    finally:
        directory.unlock()
    if config.trainer.profile:
        _say(profile.told(directory.profile, config.trainer.profile))
    _say(_summary(outcome, again))
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

    def offered(name: str) -> bool:
        return PluginHost.discover(changes.get("plugins"), block).offers("model", name)

    with wrong_input():
        measured = drop_overridden(find(target, offered), changes, tasks=bool(envs))
    config, host = configure([measured.table], changes, block)
    _check_only(only, config)
    _check(config, host, trains=False)
    console = Console(stderr=True)
    for note in measured.notes:
        console.print(Text(inert(note)), soft_wrap=True)
    directory = _new_directory(output or _validation_name(Path(target), config))
    played: list[ValidationPlayed] = []
    try:
        results = _run(
            run.validate(
                config,
                measured.model,
                adapters=measured.adapters,
                version=measured.version,
                host=host,
                only=only,
                status=lambda text: console.print(Text(inert(text), style="dim"), soft_wrap=True),
                emit=lambda event: played.append(event) if isinstance(event, ValidationPlayed) else None,
            )
        )
    finally:
        for event in played:
            write_validation(directory, event.version, event.groups)
    about = {"model": measured.name, "version": measured.version, "validation": config.validation.name}
    resolved = {name: config.validation.of_set(name) for name in config.validation.sets if name in results}
    sets = {name: {"validation": one.name, "options": one.options} for name, one in resolved.items()}
    report = {
        **about,
        "options": config.validation.options,
        "sets": sets,
        "seed": config.seed,
        "results": results,
    }
    text = json.dumps(report, indent=2)
    (directory / "results.json").write_text(text + "\n", encoding="utf-8")
    console.print(Text(inert(f"results and rollouts: {directory}")), soft_wrap=True)
    if as_json:
        print(text)
    else:
        strategies = {config.validation.name: None} if set(results) - set(sets) else {}
        strategies |= dict.fromkeys(one.name for one in resolved.values())
        _say(f"{measured.name}, version {measured.version}, measured by {', '.join(strategies)}\n")
        _say(table(results))
    return 0


def _check_only(only: Sequence[str], config: Config) -> None:
    known = [*config.tasks, *config.validation.sets]
    if unknown := [name for name in only if name not in known]:
        raise ConfigError(
            f"--only {unknown[0]}: is no task and no validation set; there are {', '.join(known)}"
        )


def _validation_name(target: Path, config: Config) -> Path:
    """Return RUN/validated/DATE for a run, and runs/TASKS-validated-DATE for a model."""
    now = datetime.now().strftime("%Y%m%d-%H%M%S")
    a_run = (target / CONFIG).is_file()
    first = (
        target / "validated" / now
        if a_run
        else RUNS / f"{'+'.join(config.tasks or config.validation.sets)}-validated-{now}"
    )
    candidates = [first, *(first.with_name(f"{first.name}-{i}") for i in range(2, 1000))]
    return next(path for path in candidates if not path.exists())


def _new_directory(path: Path) -> Path:
    """Make a directory before anything costly starts.  Raises ConfigError if it is not empty."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        if any(path.iterdir()):
            raise ConfigError(f"--output {path}: is not empty; give another directory")
    except OSError as error:
        raise ConfigError(f"--output {path}: cannot be written: {error.strerror}") from error
    return path


def verify(*, directory: Path) -> int:
    """Run ``grpo-core verify``; return the exit status."""
    verdict = audit(directory)
    _say(str(verdict))
    return 1 if verdict.findings else 0


def report(*, directory: Path) -> int:
    """Run ``grpo-core report``; return the exit status."""
    RunDirectory.existing(directory)
    _say(str(write_report(directory)))
    return 0


def _check(config: Config, host: PluginHost, *, trains: bool = True) -> None:
    """Check what the configuration names; whatever is wrong with it is wrong input."""
    with wrong_input():
        preflight.check(config, host, trains=trains)


def _check_memory(config: Config, host: PluginHost) -> None:
    """Refuse a run that cannot fit, if its model is on this machine."""
    if not host.offers("model", config.model.path) and (directory := directory_here(config.model.path)):
        memory.checked(config, host, directory)


def configure(
    layers: Sequence[Mapping[str, Any]], changes: Mapping[str, Any], block: Sequence[str] = ()
) -> tuple[Config, PluginHost]:
    """Build the configuration from the preset, the tables and the command line; return it and the plugins."""
    given: dict[str, Any] = {}
    for layer in (*layers, changes):
        given = merge(given, layer)
    config = build([given])
    host = PluginHost.discover(config.plugins, block)
    preset = model_source(config.model, host).preset
    return (build([replace_parts(preset, given), given]) if preset else config), host


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
        changes["tasks"] = _tasks(envs)
    for setting in settings:
        changes = merge(changes, parse_setting(setting))
    return changes


def _tasks(envs: Sequence[str]) -> dict[str, Any]:
    """Make a task for each environment, named after the last part of its name."""
    tasks: dict[str, Any] = {}
    for env in envs:
        name = env.rsplit(":", 1)[-1].rsplit("/", 1)[-1].removesuffix(".py").lower()
        name = re.sub(r"[^a-z0-9_.-]", "_", name)[:64]
        if name in tasks:
            raise ConfigError(
                f"--env {env}: a task {name!r} is there already; name your tasks in a CONFIG.toml"
            )
        tasks[name] = {"env": env}
    return tasks


def _say(text: str) -> None:
    print(inert(text), flush=True)


def _new_name(config: Config) -> Path:
    """Return runs/TASKS-DATE, with a number if it exists."""
    name = "+".join(config.tasks) + datetime.now().strftime("-%Y%m%d-%H%M%S")
    candidates = [RUNS / name, *(RUNS / f"{name}-{i}" for i in range(2, 1000))]
    return next(path for path in candidates if not path.exists())


def _run(main: Coroutine[Any, Any, T]) -> T:
    try:
        return asyncio.run(main)
    except asyncio.CancelledError:  # a second ctrl-C
        raise KeyboardInterrupt from None


def _summary(outcome: run.Outcome, again: str) -> str:
    """Summarise a run in one line: its scores, steps, seconds and directory; ``again`` continues it."""
    learnt = ", ".join(
        f"{task}: validation {metric} {shown(metric, outcome.first[task])} -> {shown(metric, value)}"
        for task, value in outcome.last.items()
        for metric in (outcome.measured[task],)
    )
    did = f"{outcome.step} of {outcome.steps} steps in {outcome.seconds:.0f} s"
    line = f"{outcome.reason}: {learnt + '; ' if learnt else ''}{did}; run: {outcome.directory}"
    if outcome.reason != "finished":
        line += f" (continue with: {again})"
    return line
