"""Makes the paths in a configuration absolute, so that a run can be continued from any directory."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attrs import evolve, fields_dict

from grpo_core.app.teacher import teacher_model
from grpo_core.config import Config, PluginChoice, SourceConfig, ValidationSetConfig
from grpo_core.data.files import LINES, TABLES
from grpo_core.plugins.host import PluginHost
from grpo_core.plugins.installed import in_file


def with_absolute_paths(config: Config, host: PluginHost) -> Config:
    """Return the configuration with absolute paths of files, sources, interpreters and models.

    Options of plugins are left as they are: only their plugin knows what they mean.
    """
    model = config.model
    if not host.offers("model", model.path) and Path(model.path).expanduser().is_dir():
        model = evolve(model, path=_absolute(model.path))
    if model.chat_template and Path(model.chat_template).expanduser().is_file():
        model = evolve(model, chat_template=_absolute(model.chat_template))
    teacher = config.teacher
    if teacher.path and Path(teacher.path).expanduser().is_dir():
        teacher = evolve(teacher, path=_absolute(teacher_model(teacher.path)))
    choices: dict[str, Any] = {
        section: evolve(choice, name=_absolute_name(choice.name)) for section, choice in _choices(config)
    }
    own = config.validation.engine
    choices["validation"] = evolve(
        choices["validation"],
        engine=own and evolve(own, name=_absolute_name(own.name)),
        sets={name: _absolute_set(one) for name, one in config.validation.sets.items()},
    )
    tasks = {
        name: evolve(
            task,
            env=_absolute_name(task.env),
            source=_absolute_source(task.source),
            python=_absolute_python(task.python),
        )
        for name, task in config.tasks.items()
    }
    environment = evolve(config.environment, python=_absolute_python(config.environment.python))
    tracking = evolve(
        config.tracking,
        trackers=[_absolute_name(name) for name in config.tracking.trackers],
        options={_absolute_name(name): options for name, options in config.tracking.options.items()},
    )
    return evolve(
        config,
        model=model,
        teacher=teacher,
        tasks=tasks,
        tracking=tracking,
        environment=environment,
        filters={_absolute_name(name): options for name, options in config.filters.items()},
        **choices,
    )


def plugin_files(config: Config) -> set[Path]:
    """Return the files of the plugins that are no installed ones."""
    names = [choice.name for _, choice in _choices(config)]
    names += [task.env for task in config.tasks.values()] + list(config.tracking.trackers)
    names += list(config.filters)
    names += [config.validation.engine.name] if config.validation.engine else []
    names += [name for one in config.validation.sets.values() for name in (one.env, one.name) if name]
    words = [Path(word) for name in names if in_file(name) is None for word in name.partition(":")[2].split()]
    programs = {word for word in words if word.is_absolute() and word.is_file()}
    return {place[0] for name in names if (place := in_file(name))} | programs


def _choices(config: Config) -> Iterator[tuple[str, PluginChoice]]:
    for section in fields_dict(Config):
        choice = getattr(config, section)
        if isinstance(choice, PluginChoice):
            yield section, choice


def _absolute_name(name: str) -> str:
    if (place := in_file(name)) is None:  # a command, perhaps, as in "agent:sh ./agent.sh"
        return re.sub(r"(?<=[: ])\.\.?/\S+", lambda found: os.path.abspath(found[0]), name)
    return ":".join(part for part in (os.path.abspath(place[0]), place[1]) if part)


def _absolute_set(one: ValidationSetConfig) -> ValidationSetConfig:
    return evolve(
        one,
        env=_absolute_name(one.env) if one.env else "",
        name=one.name and _absolute_name(one.name),
        source=_absolute_source(one.source),
        python=_absolute_python(one.python),
    )


def _absolute_python(python: str) -> str:
    """Return the absolute path of an interpreter or virtual environment; a bare name may be a program."""
    return _absolute(python) if python and Path(python).expanduser().exists() else python


def _absolute_source(source: SourceConfig) -> SourceConfig:
    """Return the source with absolute paths; a hub id is not a path."""
    paths: dict[str, Any] = {
        key: _absolute(path)
        for key in ("path", "validation_path")
        if (path := getattr(source, key)) and (Path(path).suffix in (*LINES, *TABLES) or Path(path).exists())
    }
    return evolve(source, **paths)


def _absolute(path: str) -> str:
    return os.path.abspath(Path(path).expanduser())
