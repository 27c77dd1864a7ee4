"""Converts the arguments of ``train`` and ``validate`` to a configuration and offers of objects."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import define, field, fields

from grpo_core.api.reward import added, environment_of
from grpo_core.app.launch import task_name
from grpo_core.config import Config, read_toml
from grpo_core.contracts.errors import ConfigError
from grpo_core.contracts.hookspecs import Offer
from grpo_core.contracts.protocols import Tracker, ValidationStrategy
from grpo_core.contracts.records import Prompt
from grpo_core.data.positions import columns_of
from grpo_core.data.samplers import FunctionSampler
from grpo_core.plugins.host import PROGRAM
from grpo_core.plugins.offers import Factory, Kind

SPLITS = ("train", "validation", "test")
"""Keys of data; "test" holds the held-out prompts of data without "validation"."""
FUNCTIONS: Mapping[str, Kind] = {"advantage": "advantage", "loss": "loss", "optimizer": "optimizer"}
"""Sections whose value may be a function, which is called directly."""
SHORT = {"steps": "trainer", "lr": "trainer", "prompts_per_step": "trainer"} | dict.fromkeys(
    ("group_size", "max_tokens", "temperature"), "rollout"
)
"""Keys that may be given without their section."""
ELSEWHERE = ("loss", "optimizer")
"""Sections whose function the trainer's process calls."""


@define
class Arguments:
    """A configuration's table, and the objects of the program that it names."""

    table: dict[str, Any] = field(factory=dict)
    offers: dict[Kind, dict[str, Factory | Offer]] = field(factory=dict)
    holds_out: bool = True
    """Whether there may be held-out prompts."""

    def defaults(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return defaults for a configuration: without held-out prompts there is nothing to validate."""
        validations = [table.get("validation", {}) for table in (config, self.table)]
        sets = any(isinstance(each, Mapping) and each.get("sets") for each in validations)
        several = {**config.get("tasks", {}), **self.table.get("tasks", {})}
        return {} if self.holds_out or sets or len(several) > 1 else {"validation": {"every": 0}}

    def offer(self, kind: Kind, name: str, factory: Factory | Offer) -> str:
        """Offer an object; return the name for the configuration.  Raises ConfigError for a second one."""
        known = self.offers.setdefault(kind, {})
        if name in known:
            raise ConfigError(f"two objects are called {name!r}; give them as {{name: object}}")
        known[name] = factory
        return f"{PROGRAM}:{name}"


def configuration(config: Any) -> Mapping[str, Any]:
    """Return the table of a file, or the given table.  Raises ConfigError."""
    if config is None:
        return {}
    if isinstance(config, Mapping):
        return config
    if isinstance(config, str | os.PathLike):
        return read_toml(Path(config))
    raise ConfigError(f"config is {type(config).__name__}; expected the path of a TOML file, or a dict")


def arguments(env: Any, data: Any, settings: Mapping[str, Any]) -> Arguments:
    """Return the configuration of keywords.

    Args:
        env, data: see ``train``.
        settings: sections, and values outside of sections.

    Raises ConfigError for a value of a kind that ``train`` does not describe.
    """
    settings = dict(settings)
    if (reward := settings.pop("reward", None)) is not None:
        if env is not None:
            raise ConfigError("use env or reward, not both")
        env = {"rewards": added(reward)} if isinstance(reward, list | tuple) else reward
    found, environments = Arguments(), _environments(env)
    if data is not None and len(environments) != 1:
        raise ConfigError(
            "data is for one environment, given as env, or for functions whose rewards are added: train("
            f"reward=[{', '.join(environments) or 'exact'}], data=rows); several tasks name their own data"
        )
    splits = _splits(data)
    twice = [each for each in environments.values() if not isinstance(each, str | type)]
    if len({id(each) for each in twice}) < len(twice):
        raise ConfigError("env: one object is given for two tasks; each needs its own object")
    tasks = {name: _task(found, name, each, splits) for name, each in environments.items()}
    if tasks:
        found.table["tasks"] = tasks
    short = {name: settings.pop(name) for name in SHORT if name in settings}
    for name, value in settings.items():
        found.table[name] = _section(found, name, value)
    for name, value in short.items():
        found.table[SHORT[name]] = {**found.table.get(SHORT[name], {}), name: value}
    found.holds_out = data is None or callable(splits.get("train")) or _has_rows(splits.get("validation"))
    return found


def _environments(env: Any) -> dict[str, Any]:
    """Return the environments by task."""
    if env is None:
        return {}
    if isinstance(env, Mapping):
        return dict(env)
    several = list(env) if isinstance(env, list | tuple) else [env]
    named: dict[str, Any] = {}
    for each in several:
        name = task_name(_name_of(each))
        if name in named:
            raise ConfigError(f"env: two tasks would be called {name!r}; give them as {{name: environment}}")
        named[name] = each
    return named


def _name_of(env: Any) -> str:
    if isinstance(env, str):
        return env
    inner = env.func if isinstance(env, functools.partial) else env
    name = getattr(inner, "__name__", type(inner).__name__)
    return "task" if name == "<lambda>" else str(name)


def _task(found: Arguments, name: str, env: Any, splits: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table of a task; its environment is a name or an object."""
    if isinstance(env, str):
        return {"env": env, **_data(found, name, splits)}
    if isinstance(env, type) or (isinstance(env, functools.partial) and isinstance(env.func, type)):
        return {"env": found.offer("environment", name, env), **_data(found, name, splits)}
    if any(hasattr(env, method) for method in ("evaluate", "score", "run")):
        one = Offer(lambda: env, single_use=True)
        return {"env": found.offer("environment", name, one), **_data(found, name, splits)}
    if not callable(env):
        raise ConfigError(
            f"env is {type(env).__name__}; expected the name of an environment, an environment or its "
            "class, or a function that returns the reward of a reply"
        )
    if not splits:
        raise ConfigError(
            f"env: {name} is a reward function, which has no prompts: give data, as in "
            'data=[{"prompt": "2+2=", "answer": "4"}], or the path of a file'
        )
    environment = environment_of(env, name)  # without a state, so that workers can share it
    offered = found.offer("environment", name, lambda: environment)
    return {"env": offered, **_data(found, name, splits, environment.check)}


def _splits(data: Any) -> dict[str, Any]:
    """Return the data by split: an object, or the path of a file or the name of a dataloader as a string."""
    by_split = data if isinstance(data, Mapping) else {"train": data}
    by_split = {} if data is None else by_split
    if unknown := [split for split in by_split if split not in SPLITS]:
        raise ConfigError(f"data has {unknown[0]!r}; expected the keys 'train' and 'validation' or 'test'")
    if "validation" in by_split:  # as in a DatasetDict with all three
        by_split = {split: given for split, given in by_split.items() if split != "test"}
    for split, given in by_split.items():
        if hasattr(given, "iloc"):  # iterating a DataFrame gives the names of its columns
            raise ConfigError(
                f"data[{split!r}] is a {type(given).__name__}; give its rows, as in "
                "data=frame.to_dict('records')"
            )
        readable = isinstance(given, str | os.PathLike | Iterable) or hasattr(given, "__getitem__")
        if not readable and not callable(given):
            raise ConfigError(
                f"data[{split!r}] is {type(given).__name__}; expected rows, a dataloader or a function that "
                "makes one, or a file's path"
            )
    named = {"validation" if split == "test" else split: given for split, given in by_split.items()}
    return {
        split: os.fspath(given) if isinstance(given, str | os.PathLike) else given
        for split, given in named.items()
    }


def _has_rows(given: Any) -> bool:
    """Return whether there may be held-out prompts."""
    return given is not None and not (isinstance(given, list | tuple) and not given)


def _data(
    found: Arguments,
    name: str,
    splits: Mapping[str, Any],
    check: Callable[[Collection[str], str], None] = lambda fields, what: None,
) -> dict[str, Any]:
    """Return the keys of a task's data, and offer the objects among it.

    Args:
        check: checks the fields of a row in a list.
    """
    objects = {split: given for split, given in splits.items() if not isinstance(given, str)}
    for given in objects.values():
        if isinstance(given, list | tuple):
            _check_rows(given, check)
    offered = found.offer("dataloader", name, _Objects(objects)) if objects else ""
    keys = {"train": "data", "validation": "validation_data"}
    return {keys[split]: offered if split in objects else given for split, given in splits.items()}


def _check_rows(rows: Sequence[Any], check: Callable[[Collection[str], str], None]) -> None:
    """Raise ConfigError for a row of another kind, PluginError if a function needs a field that it lacks."""
    for place, row in enumerate(rows):
        if not isinstance(row, str | Mapping | Prompt):
            raise ConfigError(
                f"data[{place}] is {type(row).__name__}; expected a text, a dict with 'prompt' and 'answer', "
                "or grpo_core.Prompt"
            )
        check(columns_of(row), f"row {place + 1}")


@define
class _Objects:
    """The factory of a dataloader that is given as an object for each split."""

    objects: Mapping[str, Any]
    """Rows, a loader, or a function that makes them, by split."""

    def __call__(self, split: str) -> Any:
        given = self.objects.get(split)
        train = self.objects.get("train")
        if split not in self.objects and callable(train) and not _is_rows(train):
            given = train
        return given(split) if callable(given) and not _is_rows(given) else given


def _is_rows(given: Any) -> bool:
    """Return whether something that can be called is rows nevertheless."""
    return not isinstance(given, type) and (hasattr(given, "__iter__") or hasattr(given, "__getitem__"))


# ---------------------------------------------------------------------------------- sections


def _section(found: Arguments, name: str, value: Any) -> Any:
    """Return the value of a section: a table, or the table that selects a name or an object."""
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, str) and name in _SELECTING:
        return {_SELECTING[name]: value}
    if isinstance(value, str | int | float | Mapping | Sequence):
        return value
    kind = _OBJECTS.get(name)
    if kind is None:
        wanted = "a name, or a table" if name in _SELECTING else "a table"
        if name in {each.name for each in fields(Config)} and value is not None:
            raise ConfigError(f"{name} is {type(value).__name__}; expected {wanted} of settings as a dict")
        return value  # the configuration says what it expects
    called = _name_of(value)
    if name in ELSEWHERE:
        return {"name": _in_its_file(name, value)}
    if kind in FUNCTIONS.values():
        return {"name": found.offer(kind, called, value)}
    return {"name": found.offer(kind, called, _factory(kind, value))}


_SELECTING = {"model": "path"} | dict.fromkeys(
    ("sampler", "engine", "validation", "placement", "trainer", *FUNCTIONS), "name"
)
"""Sections that accept a text, and the key that it sets."""
_OBJECTS: Mapping[str, Kind] = {"sampler": "sampler", "validation": "validation_strategy", **FUNCTIONS}


def _factory(kind: Kind, value: Any) -> Factory:
    """Return the factory of a sampler or strategy that is given as a class, an object or a function."""
    if isinstance(value, type):
        return value
    method, wrapper = ("sample", FunctionSampler) if kind == "sampler" else ("validate", _StrategyFunction)
    if hasattr(value, method):
        return lambda: value
    if callable(value):
        return lambda: wrapper(value)
    raise ConfigError(f"{kind}: {type(value).__name__} has no method {method!r}, and is not a function")


class _StrategyFunction(ValidationStrategy):
    """A validation strategy without a state."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    async def validate(self, context: Any) -> Any:
        found = self._function(context)
        return await found if inspect.isawaitable(found) else found


def _in_its_file(section: str, function: Any) -> str:
    """Return the name by which the trainer's process imports a function.  Raises ConfigError."""
    try:
        file = inspect.getsourcefile(function)
    except TypeError:
        file = None
    name = getattr(function, "__qualname__", "")
    module = sys.modules.get(getattr(function, "__module__", ""))
    if file is None or not Path(file).is_file() or getattr(module, name, None) is not function:
        raise ConfigError(
            f"{section}: {_name_of(function)} is computed in the trainer's process, which cannot find it; "
            f'define it at the top of a file and give its name, as in {section}="./file.py:NAME"'
        )
    return f"{os.path.abspath(file)}:{name}"


# ---------------------------------------------------------------------------------- listeners


class _Listener(Tracker):
    """Calls a function with every event."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def event(self, event: Any) -> None:
        self._function(event)


def names(key: str, given: Sequence[str]) -> Sequence[str]:
    """Return the names in a list.  Raises ConfigError for anything else, such as one text."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ConfigError(f"{key} is {given!r}; expected a list of names, as in {key}=['math']")
    return list(given)


def trackers(listeners: Sequence[Any]) -> dict[str, Tracker]:
    """Return the trackers of listeners, by name.  Raises ConfigError for another kind of object."""
    made: dict[str, Tracker] = {}
    if not isinstance(listeners, Iterable):
        raise ConfigError(
            f"listeners is {_name_of(listeners)!r}; expected a list of functions or trackers, as in "
            "listeners=[print]"
        )
    for number, each in enumerate(listeners):
        if isinstance(each, type) or not (isinstance(each, Tracker) or callable(each)):
            raise ConfigError(
                f"listeners[{number}] is {'a class' if isinstance(each, type) else type(each).__name__}; "
                "expected a function of an event, or a grpo_core.Tracker"
            )
        tracker = each if isinstance(each, Tracker) else _Listener(each)
        made[f"listener {number}: {_name_of(each)}"] = tracker
    return made
