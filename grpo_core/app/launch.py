"""Prepares a run: its configuration is built and checked, and its directory made or opened."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from attrs import frozen

from grpo_core.app import preflight
from grpo_core.app import resume as continuing
from grpo_core.app.model_files import check_files
from grpo_core.app.paths import with_absolute_paths
from grpo_core.config import Config, build, merge, replace_parts
from grpo_core.errors import ConfigError, wrong_input
from grpo_core.events import WarningRaised
from grpo_core.loop import checkpoint
from grpo_core.model_sources import model_source
from grpo_core.models import chat_template, directory_here
from grpo_core.plugins.configured import configured
from grpo_core.plugins.host import NO_OFFERS, Offers, PluginHost
from grpo_core.run_directory import RunDirectory
from grpo_core.validation.target import EvalTarget, without_overridden

RUNS = Path("runs")
"""The directory in which runs are made unless another one is named."""


@frozen(kw_only=True)
class Launch:
    """A run that may start: its configuration has passed all checks, and its directory is locked."""

    config: Config
    host: PluginHost
    directory: RunDirectory
    found: checkpoint.Found | None = None
    """The checkpoint from which it continues."""
    over: continuing.Over | None = None
    """Set if nothing is left to train."""
    notes: tuple[str, ...] = ()
    """Messages to the user."""
    warnings: Sequence[WarningRaised] = ()
    """Warnings of the functions of ``grpo_preflight``, which the run raises."""

    def again(self, block: Sequence[str]) -> str:
        """Return the command that continues the run."""
        command = shlex.join(["grpo-core", "train", "--resume", str(self.directory.path)])
        return command + "".join(f" --no-plugin {shlex.quote(name)}" for name in block)


def new_run(
    layers: Sequence[Mapping[str, Any]],
    changes: Mapping[str, Any],
    block: Sequence[str] = (),
    *,
    output: Path | None,
    offers: Offers = NO_OFFERS,
) -> Launch:
    """Prepare a new run.  The arguments are those of ``configure``.  Raises GrpoError for wrong input."""
    config, host = configure(layers, changes, block, offers)
    check_config(config, host)
    check_model(config, host)
    with wrong_input():
        warnings = preflight.checks_of_plugins(config, host)
    config = with_absolute_paths(config, host)
    directory = RunDirectory.create(output or _new_name(config), config)
    return Launch(config=config, host=host, directory=directory, warnings=warnings)


def continued(
    path: Path, changes: Mapping[str, Any], block: Sequence[str] = (), *, offers: Offers = NO_OFFERS
) -> Launch:
    """Prepare to continue a run with some changes.  Raises GrpoError for wrong input."""
    with wrong_input():
        resumed, host = continuing.find(path, changes, block, offers)
    warnings: list[WarningRaised] = []
    try:
        if resumed.over is None:  # otherwise no part is started
            check_config(resumed.config, host)
            check_model(resumed.config, host)
            with wrong_input():
                step = resumed.found.step if resumed.found else 0
                warnings = preflight.checks_of_plugins(resumed.config, host, step)
        continuing.begin(resumed)
    except BaseException:
        resumed.directory.unlock()
        raise
    return Launch(
        config=resumed.config,
        host=host,
        directory=resumed.directory,
        found=resumed.found,
        over=resumed.over,
        notes=resumed.notes,
        warnings=warnings,
    )


def configure(
    layers: Sequence[Mapping[str, Any]],
    changes: Mapping[str, Any],
    block: Sequence[str] = (),
    offers: Offers = NO_OFFERS,
) -> tuple[Config, PluginHost]:
    """Build the configuration from the preset, the tables and the changes; return it and the plugins.

    Args:
        layers: tables, as of a configuration's file.
        changes: a table that lies above them.
        block: plugins that are not loaded.
        offers: objects of the program that calls this.
    """
    given: dict[str, Any] = {}
    for layer in (*layers, changes):
        given = merge(given, layer)
    config, host = configured([given], block, offers)
    preset = model_source(config.model, host).preset
    return (build([replace_parts(preset, given), given], host.sections) if preset else config), host


def configure_target(
    found: EvalTarget,
    changes: Mapping[str, Any],
    block: Sequence[str] = (),
    offers: Offers = NO_OFFERS,
    *,
    tasks: bool,
    below: Sequence[Mapping[str, Any]] = (),
) -> tuple[Config, PluginHost]:
    """Build and check the configuration with which a target plays: its own, with changes.

    Args:
        tasks: whether the changes have tasks of their own.
        below: tables that lie beneath the target's.

    The other arguments are those of ``configure``.  Raises GrpoError for wrong input.
    """
    own = without_overridden(found.table, changes, tasks=tasks)
    config, host = configure([*below, own], changes, block, offers)
    check_config(config, host, trains=False)
    return config, host


def check_config(config: Config, host: PluginHost, *, trains: bool = True) -> None:
    """Check what the configuration names; whatever is wrong with it is wrong input."""
    with wrong_input():
        preflight.check(config, host, trains=trains)


def check_model(config: Config, host: PluginHost) -> list[str]:
    """Return warnings about the files of a local model.

    Raises ModelError if they contradict each other.
    """
    directory = None if host.offers("model", config.model.path) else directory_here(config.model.path)
    return [] if directory is None else check_files(directory, chat_template(config.model.chat_template))


def tasks_of(envs: Sequence[str]) -> dict[str, Any]:
    """Return the table of a task for each environment, named after the last part of its name."""
    tasks: dict[str, Any] = {}
    for env in envs:
        name = task_name(env)
        if name in tasks:
            raise ConfigError(
                f"--env {env}: a task {name!r} is there already; name your tasks in a CONFIG.toml"
            )
        tasks[name] = {"env": env}
    return tasks


def task_name(env: str) -> str:
    """Return the name of a task for an environment's name: its last part, as tasks may be called."""
    name = env.rsplit(":", 1)[-1].rsplit("/", 1)[-1].removesuffix(".py")
    return re.sub(r"[^a-z0-9_.-]", "_", name.lower())[:64]


def _new_name(config: Config) -> Path:
    """Return runs/TASKS-DATE, with a number if it exists."""
    return unused(RUNS / ("+".join(config.tasks) + datetime.now().strftime("-%Y%m%d-%H%M%S")))


def unused(path: Path) -> Path:
    """Return the path, with a number if it exists."""
    candidates = [path, *(path.with_name(f"{path.name}-{i}") for i in range(2, 1000))]
    return next(candidate for candidate in candidates if not candidate.exists())


def new_directory(path: Path) -> Path:
    """Make a directory before anything costly starts.  Raises ConfigError if it is not empty."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        if any(path.iterdir()):
            raise ConfigError(f"--output {path}: is not empty; give another directory")
    except OSError as error:
        raise ConfigError(f"--output {path}: cannot be written: {error.strerror}") from error
    return path
