"""Makes the names of files in a configuration absolute, so that a run can be continued from any directory.

Paths in the options of plugins count from the directory in which the run was started (``plugins.paths``).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from attrs import evolve

from grpo_core.app.model_sources import scoring_model
from grpo_core.config import Config, as_table, build
from grpo_core.plugins.host import PluginHost
from grpo_core.plugins.installed import in_file
from grpo_core.plugins.paths import absolute

PATHS = frozenset({"path", "chat_template", "data", "validation_data", "python"})
"""Keys with a path, or with another name."""


def with_absolute_paths(config: Config, host: PluginHost) -> Config:
    """Return the configuration with absolute paths of files, sources, interpreters and models."""
    found = build([_absolute(as_table(config))], host.sections)
    scores = {
        name: evolve(score, weights=_existing(scoring_model(name, score.model))) if score.model else score
        for name, score in config.scores.items()
    }
    made = host.offers("model", config.model.path)
    model = evolve(found.model, path=config.model.path) if made else found.model
    return evolve(found, model=model, scores=scores)


def _absolute(value: Any, key: str = "") -> Any:
    """Return the value of a key, and all below it, with absolute names and paths."""
    if isinstance(value, Mapping):
        return {_absolute_name(name): _absolute(each, name) for name, each in value.items()}
    if isinstance(value, list):
        return [_absolute(each) for each in value]
    if not isinstance(value, str):
        return value
    if key == "env":  # a command, perhaps, as in "agent:sh ./agent.sh"
        value = re.sub(r"(?<=[: ])\.\.?/\S+", lambda found: os.path.abspath(found[0]), value)
    return _existing(value) if key in PATHS and in_file(value) is None else _absolute_name(value)


def plugin_files(config: Config) -> set[Path]:
    """Return the files of the plugins that are not installed."""
    chosen = list(config.choices())
    several = [options for kind, _, options in chosen if kind == "environment"]  # these may name others
    several += [each.values for each in config.sections]
    names = [each for task in config.tasks.values() for each in (task.data, task.validation_data)]
    names += [one.data for one in config.validation.sets.values()]
    names += [config.trainer.lr_schedule, *(name for _, name, _ in chosen)]
    names += [text for options in several for text in _texts(options) if Path(text).is_absolute()]
    words = [Path(word) for name in names if in_file(name) is None for word in name.partition(":")[2].split()]
    programs = {word for word in words if word.is_absolute() and word.is_file()}
    return {place[0] for name in names if (place := in_file(name))} | programs


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts in an environment's options that may be names of other environments."""
    if isinstance(value, str) and in_file(value):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _texts(each)


def _absolute_name(name: str) -> str:
    """Return the name of an offer of a file with the file's absolute path, and any other text as it is."""
    if (place := in_file(name)) is None or not place[0].is_file():
        return name
    return ":".join(part for part in (os.path.abspath(place[0]), place[1]) if part)


def _existing(path: str) -> str:
    """Return a path as absolute if it exists; otherwise it may be a hub id or the name of a program."""
    return absolute(path) if path and Path(path).expanduser().exists() else path
