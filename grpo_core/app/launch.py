"""Prepares a run: builds and checks its configuration, and makes or opens its directory."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from attrs import evolve

from grpo_core.app import resume as continuing
from grpo_core.app.make import make, preflight
from grpo_core.app.parts import Parts
from grpo_core.app.paths import with_absolute_paths
from grpo_core.app.resume import Launch
from grpo_core.app.target import EvalTarget, without_overridden
from grpo_core.config import Config, build, merge, replace_parts
from grpo_core.contracts.errors import ConfigError, wrong_input
from grpo_core.models.files import directory_here
from grpo_core.plugins.configured import configured
from grpo_core.plugins.host import NO_OFFERS, Offers, PluginHost
from grpo_core.processes import secrets
from grpo_core.storage.run_directory import RunDirectory

RUNS = Path("runs")
"""The default parent directory of runs."""


def new_run(
    layers: Sequence[Mapping[str, Any]],
    changes: Mapping[str, Any],
    block: Sequence[str] = (),
    *,
    output: Path | None,
    offers: Offers = NO_OFFERS,
) -> Launch:
    """Prepare a new run.  The arguments are those of ``configure``.  Raises GrpoError for wrong input."""
    parts = make(*configure(layers, changes, block, offers))
    try:
        warnings = _checked(parts)
        parts.config = config = with_absolute_paths(parts.config, parts.plugins)
        if output is None:
            output = unused(RUNS / ("+".join(config.tasks) + datetime.now().strftime("-%Y%m%d-%H%M%S")))
        directory = RunDirectory.create(output, config)
    except BaseException:
        parts.close()
        raise
    return Launch(parts=parts, directory=directory, warnings=warnings, notes=(_opening(parts),))


def _opening(parts: Parts) -> str:
    """Return the first line of a new run: what it trains, on what, and about how long."""
    config = parts.config
    chosen, model = config.trainer, config.model.path
    length = f"{chosen.epochs:g} epochs" if chosen.epochs else f"{chosen.steps} steps"
    about = getattr(parts.model, "about", lambda steps: "") if model else None
    told = about and about(0 if chosen.epochs else chosen.steps)
    tasks = ", ".join(task.env for task in config.tasks.values())
    return f"training {model or config.engine.name} on {tasks}, {length}" + (f": {told}" if told else "")


def continued(
    path: Path, changes: Mapping[str, Any], block: Sequence[str] = (), *, offers: Offers = NO_OFFERS
) -> Launch:
    """Prepare to continue a run with some changes.  Raises GrpoError for wrong input."""
    with wrong_input():
        resumed = continuing.find(path, changes, block, offers)
    try:
        if resumed.over is None:  # otherwise no part starts
            if resumed.found is not None:
                continuing.check_states(resumed.found.directory, resumed.parts)
            resumed = evolve(resumed, warnings=_checked(resumed.parts))
        continuing.begin(resumed)
    except BaseException:
        resumed.parts.close()
        resumed.directory.unlock()
        raise
    return resumed


def configure(
    layers: Sequence[Mapping[str, Any]],
    changes: Mapping[str, Any],
    block: Sequence[str] = (),
    offers: Offers = NO_OFFERS,
) -> tuple[Config, PluginHost]:
    """Build the configuration from the preset, the tables and the changes; return it and the plugins.

    Args:
        layers: tables, as of a configuration's file.
        changes: a table that overrides them.
        block: plugins that are not to be loaded.
        offers: objects of the calling program.
    """
    given: dict[str, Any] = functools.reduce(merge, (*layers, changes), {})
    secrets.learn(given)
    config, host = configured([given], block, offers)
    with wrong_input():
        parts = Parts(config, host, trains=False)
        preset = {} if parts.text_engine else parts.model.preset
    return (build([replace_parts(preset, given), given], host.sections) if preset else config), host


def configure_target(
    found: EvalTarget,
    changes: Mapping[str, Any],
    block: Sequence[str] = (),
    offers: Offers = NO_OFFERS,
    *,
    tasks: bool,
    below: Sequence[Mapping[str, Any]] = (),
) -> Parts:
    """Make the parts to play a target, whose configuration is its own with changes.

    Args:
        tasks: whether the changes define tasks.
        below: tables that the target's override.

    The other arguments are those of ``configure``.  Raises GrpoError for wrong input.
    """
    own = without_overridden(found.table, changes, tasks=tasks)
    return make(*configure([*below, own], changes, block, offers), trains=False)


def _checked(parts: Parts) -> list[tuple[str, str]]:
    """Check the model's files; return causes and messages of the plugins' warnings."""
    check_model(parts)
    with wrong_input():
        return preflight(parts)


def check_model(parts: Parts) -> list[str]:
    """Return warnings about the files of a local model.

    Raises ModelError if they contradict each other.
    """
    path = parts.config.model.path
    directory = None if parts.plugins.offers("model", path) else directory_here(path)
    return [] if directory is None else parts.odd_files(directory)


def tasks_of(envs: Sequence[str]) -> dict[str, Any]:
    """Return the table of a task for each environment, named after the last part of its name."""
    tasks: dict[str, Any] = {}
    for env in envs:
        name = task_name(env)
        if name in tasks:
            raise ConfigError(f"--env {env}: task {name!r} already exists; name your tasks in a CONFIG.toml")
        tasks[name] = {"env": env}
    return tasks


def task_name(env: str) -> str:
    """Return a valid task name from the last part of an environment's name."""
    name = env.rsplit(":", 1)[-1].rsplit("/", 1)[-1].removesuffix(".py")
    return re.sub(r"[^a-z0-9_.-]", "_", name.lower())[:64]


def unused(path: Path) -> Path:
    """Return the path, with a number if it exists."""
    candidates = [path, *(path.with_name(f"{path.name}-{i}") for i in range(2, 1000))]
    return next(candidate for candidate in candidates if not candidate.exists())


def new_directory(path: Path) -> Path:
    """Make a directory before costly work starts.  Raises ConfigError if it is not empty."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        if any(path.iterdir()):
            raise ConfigError(f"--output {path} is not empty; give another directory")
    except OSError as error:
        raise ConfigError(f"--output {path}: cannot be written: {error.strerror}") from error
    return path
