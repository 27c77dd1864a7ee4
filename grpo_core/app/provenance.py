"""The files that a configuration names, from any directory, and the software that a run uses.

Paths in the options of plugins are stored as absolute.  What only another process knows as a path is stored
as absolute if it begins with ``./`` or ``../``; otherwise it counts from the directory of the run
(``plugins.values``).
``provenance.jsonl`` in the directory of a run has a line for each start, so it shows a resume with other
versions.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

from attrs import evolve

from grpo_core._version import __version__
from grpo_core.app.model_sources import scoring_model
from grpo_core.config import Config, as_table, build
from grpo_core.contracts.errors import GrpoError
from grpo_core.models.files import directory_here, text_files
from grpo_core.plugins.files import in_file
from grpo_core.plugins.host import BUILT_IN, Kind, PluginHost
from grpo_core.plugins.values import absolute, with_paths
from grpo_core.storage.disk import fingerprint
from grpo_core.storage.run_directory import PROVENANCE


def with_absolute_paths(config: Config, host: PluginHost, directory: str = "") -> Config:
    """Return the configuration with absolute paths of files, sources, interpreters and models.

    Paths in options count from ``directory``, by default the working directory.
    """
    found = build([_absolute(as_table(config))], host.sections)
    scores = dict(found.scores)
    for name, score in scores.items():
        if score.model:
            with suppress(GrpoError):  # reported when it is made
                scores[name] = evolve(score, weights=_existing(scoring_model(name, score.model)))
    tasks = [*found.tasks.values(), *found.validation.environments(found.validation.sets).values()]
    elsewhere = {task.env for task in tasks if task.python or found.environment.python}
    choices = list(found.choices())
    tables = [options for _, name, options in choices if name not in elsewhere]
    for table in (*tables, *(each.values for each in found.sections)):
        choices += _environments(table, host)
    for kind, name, options in choices:
        if not any(isinstance(each, (str, list)) for each in options.values()):
            continue
        with suppress(GrpoError):  # reported when it is made
            selected = host.find(cast(Kind, kind), name)
            if kind == "environment" and (name in elsewhere or isinstance(selected.offer.factory, str)):
                for key, each in options.items():
                    if isinstance(each, str) and each.startswith(("./", "../")):
                        options[key] = absolute(each, directory)
            else:
                options.update(with_paths(selected.load(), options, directory, str))
    if host.offers("model", config.model.path):
        found = evolve(found, model=evolve(found.model, path=config.model.path))
    return evolve(found, scores=scores, directory=found.directory and absolute(found.directory))


def _environments(value: Any, host: PluginHost) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield the environments within options: ``options`` beside a name, as of the parts of a reward."""
    if not isinstance(value, Mapping):
        return
    for each in value.values():
        yield from _environments(each, host)
        if isinstance(each, str) and isinstance(options := value.get("options"), dict):
            place = in_file(each)
            if place[0].is_file() if place else host.offers("environment", each):
                yield "environment", each, options


def _absolute(value: Any, *place: str) -> Any:
    """Return the value at a place of the table, and all below it, with absolute names and paths."""
    if isinstance(value, Mapping):
        name = _absolute_name if place in (("filters",), ("tracking",)) else str
        return {name(key): _absolute(each, *place, key) for key, each in value.items()}
    if isinstance(value, list):
        return [_absolute(each, *place) for each in value]
    if not isinstance(value, str):
        return value
    match place:
        case (*_, "env"):
            # a command, perhaps, as in "agent:sh ./agent.sh"
            value = re.sub(r"(?<=[: ])\.\.?/\S+", lambda found: os.path.abspath(found[0]), value)
        case (
            ("model", "path" | "chat_template")
            | ("environment", "python")
            | ("tasks", _, "data" | "validation_data" | "python")
            | ("validation", "sets", _, "data" | "python")
        ) if in_file(value) is None:
            return _existing(value)
    return _absolute_name(value, agent=place[-1] == "env")


def plugin_files(config: Config) -> set[Path]:
    """Return the files of the plugins that are not installed."""
    names = [name for _, name, _ in config.choices() if in_file(name) is None]
    words = [Path(word) for name in names for word in name.partition(":")[2].split()]
    programs = {word for word in words if word.is_absolute() and os.path.isfile(word)}
    files = {place[0] for text in _texts(as_table(config)) if (place := in_file(text))}
    return {file for file in files if file.is_absolute()} | programs


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts in a value of the configuration, which may be names of offers, and its keys."""
    if isinstance(value, Mapping | list):
        for each in [*value, *(value.values() if isinstance(value, Mapping) else ())]:
            yield from _texts(each)
    elif isinstance(value, str):
        yield value


def _absolute_name(name: str, *, agent: bool = False) -> str:
    """Return the name of an offer of a file with its absolute path; only an agent's file may be the name."""
    place = in_file(name)
    if place is None or not (place[1] or agent) or not os.path.isfile(place[0]):
        return name
    return ":".join(part for part in (os.path.abspath(place[0]), place[1]) if part)


def _existing(path: str) -> str:
    """Return a path as absolute if it exists; otherwise it may be a hub id or the name of a program."""
    return absolute(path) if path and os.path.exists(os.path.expanduser(path)) else path


# ---------------------------------------------------------------------------------- software

LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "peft")
"""Libraries whose version may change numerical results, as may that of those that plugins need."""


def write(directory: Path, config: Config, host: PluginHost, *, resumed_from: int | None = None) -> None:
    """Append a line to the provenance of a run."""
    line = {
        "time": datetime.now().astimezone().isoformat(timespec="seconds"),
        "resumed_from": resumed_from,
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        **software(config, host),
    }
    with (directory / PROVENANCE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def software(config: Config, host: PluginHost) -> dict[str, Any]:
    """Return the versions of the software that a configuration uses, and the hashes of its files."""
    every = [offers for plugin in host.plugins for offers in plugin.offers.values()]
    names = {*LIBRARIES}.union(*(offer.requires for offers in every for offer in offers.values()))
    return {
        "grpo_core": __version__,
        "plugins": {
            plugin.name: f"{plugin.distribution} {plugin.version}"
            for plugin in host.plugins
            if plugin.fault is None and plugin.name != BUILT_IN and plugin.version
        },
        "files": file_hashes(config),
        "libraries": {name: known for name in sorted(names) if (known := installed(name)) is not None},
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
    }


def file_hashes(config: Config) -> dict[str, str]:
    """Return the sha256 of plugin files, of the tokenizer and of the chat template."""
    model = directory_here(config.model.path)
    files = {*plugin_files(config), Path(config.model.chat_template)} | (
        text_files(model) if model else set()
    )
    return {str(path): fingerprint(path)["sha256"] for path in sorted(files) if os.path.isfile(path)}


def installed(distribution: str) -> str | None:
    """Return the version of a distribution, or None without it."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
