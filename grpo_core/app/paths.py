"""Makes the paths in a configuration absolute, so that a run can be continued from any directory."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

from attrs import asdict, evolve, fields, fields_dict, frozen

from grpo_core.app.model_sources import scoring_model
from grpo_core.config import Config, PluginChoice, TaskConfig, ValidationSetConfig
from grpo_core.contracts.errors import GrpoError
from grpo_core.contracts.records import SectionValues, name_of_class
from grpo_core.data.rows import is_path
from grpo_core.plugins import values
from grpo_core.plugins.files import in_file
from grpo_core.plugins.host import Kind, PluginHost

Section = TypeVar("Section", bound=Any)

PATHS = frozenset({"path", "chat_template", "data", "validation_data", "python"})
"""Keys of the core with a path, or with another name."""


def with_absolute_paths(config: Config, host: PluginHost) -> Config:
    """Return the configuration with absolute paths of files, sources, interpreters and models.

    Options of plugins are paths if their factories annotate them so.
    """
    paths, model, tracking = _Paths(host), config.model, config.tracking
    own, python = config.validation.engine, config.environment.python
    changed: dict[str, Any] = {
        key: paths.choice("validation_strategy" if key == "validation" else cast("Kind", key), choice)
        for key in fields_dict(Config)
        if isinstance(choice := getattr(config, key), PluginChoice)
    }
    changed["validation"] = evolve(
        changed["validation"],
        engine=own and paths.choice("engine", own),
        sets={name: paths.of_set(one, config) for name, one in config.validation.sets.items()},
    )
    options = paths.of("model", model.path, model.options)
    changed["model"] = paths.section(model, options=options)
    if host.offers("model", model.path):
        changed["model"] = evolve(changed["model"], path=model.path)
    changed["scores"] = {
        name: evolve(score, weights=_existing(scoring_model(name, score.model))) if score.model else score
        for name, score in config.scores.items()
    }
    return evolve(
        config,
        tasks={name: paths.task(task, python) for name, task in config.tasks.items()},
        tracking=evolve(
            tracking,
            trackers=[_absolute_name(name) for name in tracking.trackers],
            options=paths.by_name("tracker", tracking.options),
        ),
        environment=paths.section(config.environment),
        sections=tuple(evolve(each, values=paths.of_section(each)) for each in config.sections),
        filters=paths.by_name("filter", config.filters),
        **changed,
    )


@frozen
class _Paths:
    """Makes the paths among the keys of sections and the options of plugins absolute."""

    host: PluginHost

    def section(self, section: Section, **changed: Any) -> Section:
        """Return a section with absolute names and paths, and with other changes."""
        texts = {key: each for key, each in asdict(section, recurse=False).items() if isinstance(each, str)}
        own = {
            key: _absolute_data(text) if key in PATHS else _absolute_name(text) for key, text in texts.items()
        }
        return evolve(section, **(own | changed))

    def choice(self, kind: Kind, choice: Section) -> Section:
        return self.section(choice, options=self.of(kind, choice.name, choice.options))

    def task(self, task: TaskConfig, python: str) -> TaskConfig:
        return self.section(
            task,
            env=self.name(task.env),
            options=self.of_environment(task.env, task.options, task.python or python),
            data_options=self.of_data(task.data or task.validation_data, task.data_options),
            player_options=self.of("player", task.player, task.player_options),
        )

    def of_set(self, one: ValidationSetConfig, config: Config) -> ValidationSetConfig:
        python = one.python or config.environment.python
        return self.section(
            one,
            env=self.name(one.env) if one.env else "",
            env_options=self.of_environment(one.env, one.env_options, python),
            options=self.of("validation_strategy", one.name or config.validation.name, one.options),
            data_options=self.of_data(one.data, one.data_options),
        )

    def by_name(self, kind: Kind, options: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """Return the options of several offers, by their absolute names."""
        return {_absolute_name(name): self.of(kind, name, given) for name, given in options.items()}

    def of(self, kind: Kind, name: str, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of an offer; options of an unknown offer are unchanged."""
        try:
            found = values.with_absolute_paths(self.host.find(kind, name), options) if options else {}
        except GrpoError:  # reported when it is made
            found = dict(options)
        return {key: self.part(value) for key, value in found.items()}

    def of_data(self, text: str, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of a dataloader and of its rows."""
        return self.of("dataloader", text, options) if text and not is_path(text) else dict(options)

    def name(self, env: str) -> str:
        """Return the name of an environment, which may be a path or end with one."""
        if in_file(env) is None:
            with contextlib.suppress(GrpoError):
                env = values.with_absolute_path(self.host.find("environment", env))
        return _absolute_name(env)

    def of_environment(self, env: str, options: Mapping[str, Any], python: str = "") -> dict[str, Any]:
        """Return the options of an environment; with another interpreter its file is not imported here."""
        if python and (place := in_file(env)):
            found = values.with_absolute_paths_of_file(*place, options)
            return {key: self.part(value) for key, value in found.items()}
        return self.of("environment", env, options)

    def of_section(self, section: SectionValues) -> dict[str, Any]:
        """Return the keys of a plugin's section, which may include options of an offer."""
        found = {key: self.part(value) for key, value in section.values.items()}
        for added in self.host.sections.added:
            for each in fields(added.kind) if name_of_class(added.kind) == section.kind else ():
                kind, key = each.metadata.get("options_of", ("", ""))
                if kind and (name := section.values[key]):
                    found[each.name] = self.of(kind, name, section.values[each.name])
        return found

    def part(self, value: Any) -> Any:
        """Return the value of an option or a key; it may name other offers, as in ``compose``."""
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
    return values.absolute(path) if path and Path(path).expanduser().exists() else path
