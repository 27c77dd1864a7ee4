"""Makes the paths in a configuration absolute, so that a run can be continued from any directory."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

from attrs import evolve, fields, fields_dict, frozen

from grpo_core.app.model_sources import scoring_model
from grpo_core.config import Config, PluginChoice, ValidationSetConfig
from grpo_core.contracts.errors import GrpoError
from grpo_core.contracts.records import SectionValues, name_of_class
from grpo_core.data.rows import is_path
from grpo_core.plugins.host import Kind, PluginHost
from grpo_core.plugins.installed import in_file
from grpo_core.plugins.paths import absolute
from grpo_core.plugins.paths import with_absolute_path as with_absolute_name
from grpo_core.plugins.paths import with_absolute_paths as with_absolute_options
from grpo_core.plugins.paths import with_absolute_paths_of_file as with_absolute_options_of_file

Choice = TypeVar("Choice", bound=PluginChoice)


def with_absolute_paths(config: Config, host: PluginHost) -> Config:
    """Return the configuration with absolute paths of files, sources, interpreters and models.

    Options of plugins are paths if their factories annotate them so.
    """
    options, path = _Options(host), config.model.path
    model = evolve(
        config.model,
        path=path if host.offers("model", path) else _existing(path),
        options=options.of("model", path, config.model.options),
        chat_template=_existing(config.model.chat_template),
    )
    scores = {
        name: evolve(score, weights=_existing(scoring_model(name, score.model))) if score.model else score
        for name, score in config.scores.items()
    }
    choices: dict[str, Any] = {}
    for section in fields_dict(Config):
        if isinstance(choice := getattr(config, section), PluginChoice):
            kind = "validation_strategy" if section == "validation" else cast("Kind", section)
            choices[section] = options.of_choice(kind, choice)
    own = config.validation.engine
    choices["validation"] = evolve(
        choices["validation"],
        engine=own and options.of_choice("engine", own),
        sets={name: _absolute_set(one, config, options) for name, one in config.validation.sets.items()},
    )
    trainer = choices["trainer"]
    choices["trainer"] = evolve(trainer, lr_schedule=_absolute_name(trainer.lr_schedule))
    tasks = {
        name: evolve(
            task,
            env=options.name(task.env),
            options=options.of_environment(task.env, task.options, task.python or config.environment.python),
            data=_absolute_data(task.data),
            data_options=options.of_data(task.data or task.validation_data, task.data_options),
            validation_data=_absolute_data(task.validation_data),
            player=task.player and _absolute_name(task.player),
            player_options=options.of("player", task.player, task.player_options),
            python=_existing(task.python),
        )
        for name, task in config.tasks.items()
    }
    environment = evolve(config.environment, python=_existing(config.environment.python))
    tracking = evolve(
        config.tracking,
        trackers=[_absolute_name(name) for name in config.tracking.trackers],
        options={
            _absolute_name(name): options.of("tracker", name, given)
            for name, given in config.tracking.options.items()
        },
    )
    return evolve(
        config,
        model=model,
        scores=scores,
        tasks=tasks,
        tracking=tracking,
        environment=environment,
        sections=tuple(evolve(each, values=options.of_section(each)) for each in config.sections),
        filters={
            _absolute_name(name): options.of("filter", name, given) for name, given in config.filters.items()
        },
        **choices,
    )


@frozen
class _Options:
    """Makes the paths among the options of plugins absolute."""

    host: PluginHost

    def of(self, kind: Kind, name: str, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of an offer; options of an unknown offer are unchanged."""
        try:
            found = with_absolute_options(self.host.find(kind, name), options) if options else {}
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
                env = with_absolute_name(self.host.find("environment", env))
        return _absolute_name(env)

    def of_choice(self, kind: Kind, choice: Choice) -> Choice:
        return evolve(
            choice, name=_absolute_name(choice.name), options=self.of(kind, choice.name, choice.options)
        )

    def of_environment(self, env: str, options: Mapping[str, Any], python: str = "") -> dict[str, Any]:
        """Return the options of an environment; with another interpreter its file is not imported here."""
        if python and (place := in_file(env)):
            found = with_absolute_options_of_file(*place, options)
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


def _absolute_set(one: ValidationSetConfig, config: Config, options: _Options) -> ValidationSetConfig:
    return evolve(
        one,
        env=options.name(one.env) if one.env else "",
        env_options=options.of_environment(one.env, one.env_options, one.python or config.environment.python),
        options=options.of("validation_strategy", one.name or config.validation.name, one.options),
        name=one.name and _absolute_name(one.name),
        data=_absolute_data(one.data),
        data_options=options.of_data(one.data, one.data_options),
        python=_existing(one.python),
    )


def _absolute_data(text: str) -> str:
    return _absolute_name(text) if in_file(text) is not None else _existing(text)


def _existing(path: str) -> str:
    """Return a path as absolute if it exists; otherwise it may be a hub id or the name of a program."""
    return absolute(path) if path and Path(path).expanduser().exists() else path
