"""Makes the paths in a configuration absolute, so that a run can be continued from any directory."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import cattrs
from attrs import evolve, fields, frozen, has

from grpo_core.app.model_sources import scoring_model
from grpo_core.config import Config
from grpo_core.contracts.errors import GrpoError
from grpo_core.contracts.records import name_of_class
from grpo_core.plugins.host import PluginHost
from grpo_core.plugins.installed import in_file
from grpo_core.plugins.paths import absolute
from grpo_core.plugins.paths import with_absolute_path as with_absolute_name
from grpo_core.plugins.paths import with_absolute_paths as with_absolute_options
from grpo_core.plugins.paths import with_absolute_paths_of_file as with_absolute_options_of_file

Section = TypeVar("Section", bound=Any)

PATHS = frozenset({"path", "chat_template", "data", "validation_data", "python"})
"""Keys of the core with a path, or with another name."""
OPTIONS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "env_options": (("environment", "env"),),
    "data_options": (("dataloader", "data"), ("dataloader", "validation_data")),
    "player_options": (("player", "player"),),
    "options": (("", "name"), ("environment", "env"), ("model", "path")),
}
"""Keys with the options of an offer, and the kind and the key of its name: the first that the section has."""


def with_absolute_paths(config: Config, host: PluginHost) -> Config:
    """Return the configuration with absolute paths of files, sources, interpreters and models.

    Options of plugins are paths if their factories annotate them so.
    """
    paths, model, tracking = _Paths(host, config), config.model, config.tracking
    changed = paths.section(config)
    made = host.offers("model", model.path)
    values = {
        name_of_class(each.kind): cattrs.unstructure(paths.section(config.section(each.kind)))
        for each in host.sections.added
    }
    return evolve(
        changed,
        model=evolve(changed.model, path=model.path) if made else changed.model,
        scores={
            name: evolve(score, weights=_existing(scoring_model(name, score.model))) if score.model else score
            for name, score in config.scores.items()
        },
        tracking=evolve(
            tracking,
            trackers=[_absolute_name(name) for name in tracking.trackers],
            options=paths.by_name("tracker", tracking.options),
        ),
        sections=tuple(evolve(each, values=values.get(each.kind, each.values)) for each in config.sections),
        filters=paths.by_name("filter", config.filters),
    )


@frozen
class _Paths:
    """Makes the paths among the keys of sections and the options of plugins absolute."""

    host: PluginHost
    config: Config

    def section(self, section: Section, kind: str = "") -> Section:
        """Return a section with absolute names and paths, also in its own sections.

        Args:
            kind: of the offer that it selects by its name.
        """
        changed: dict[str, Any] = {}
        for each in fields(type(section)):
            key, value = each.name, getattr(section, each.name)
            known = [each.metadata["options_of"]] if "options_of" in each.metadata else OPTIONS.get(key, ())
            if isinstance(value, str):
                change = self.name if key == "env" else _absolute_data if key in PATHS else _absolute_name
                changed[key] = change(value)
            elif has(type(value)):
                changed[key] = self.section(value, "validation_strategy" if key == "validation" else key)
            elif isinstance(value, Mapping) and any(has(type(one)) for one in value.values()):
                changed[key] = {name: self.section(one, kind) for name, one in value.items()}
            elif known:
                named = ((of or kind, getattr(section, name, None)) for of, name in known)
                of, name = next((each for each in named if each[1]), (kind, self.config.validation.name))
                changed[key] = self.of(of, name, value, getattr(section, "python", ""))
        return evolve(section, **changed)

    def by_name(self, kind: str, options: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """Return the options of several offers, by their absolute names."""
        return {_absolute_name(name): self.of(kind, name, given) for name, given in options.items()}

    def of(self, kind: Any, name: str, options: Mapping[str, Any], python: str = "") -> dict[str, Any]:
        """Return the options of an offer; options of an unknown offer are unchanged.

        An environment of another interpreter is not imported here, if it is in a file.
        """
        place = in_file(name) if python or self.config.environment.python else None
        found = dict(options)
        with contextlib.suppress(GrpoError):  # reported when it is made
            if kind == "environment" and place:
                found = with_absolute_options_of_file(*place, options)
            elif options:
                found = with_absolute_options(self.host.find(kind, name), options)
        return {key: self.part(value) for key, value in found.items()}

    def name(self, env: str) -> str:
        """Return the name of an environment, which may be a path or end with one."""
        if env and in_file(env) is None:
            with contextlib.suppress(GrpoError):
                env = with_absolute_name(self.host.find("environment", env))
        return _absolute_name(env)

    def part(self, value: Any) -> Any:
        """Return the value of an option; it may name other offers, as in ``compose``."""
        if isinstance(value, str) and (place := in_file(value)) and place[1] and place[0].is_file():
            return _absolute_name(value)
        if not isinstance(value, Mapping):
            return value
        env, given = value.get("env"), value.get("options", {})
        if isinstance(env, str) and isinstance(given, Mapping):
            options = {"options": self.of("environment", env, given)} if given else {}
            return {**value, "env": self.name(env), **options}
        return {key: self.part(each) for key, each in value.items()}


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
    if (place := in_file(name)) is None:  # a command, perhaps, as in "agent:sh ./agent.sh"
        return re.sub(r"(?<=[: ])\.\.?/\S+", lambda found: os.path.abspath(found[0]), name)
    return ":".join(part for part in (os.path.abspath(place[0]), place[1]) if part)


def _absolute_data(text: str) -> str:
    return _absolute_name(text) if in_file(text) is not None else _existing(text)


def _existing(path: str) -> str:
    """Return a path as absolute if it exists; otherwise it may be a hub id or the name of a program."""
    return absolute(path) if path and Path(path).expanduser().exists() else path
