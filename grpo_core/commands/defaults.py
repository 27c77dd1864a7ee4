"""Prints the keys of a configuration with their values and meanings, as a TOML file that a run accepts."""

from __future__ import annotations

import textwrap
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import attrs
import tomli_w

from grpo_core import config as configuration
from grpo_core.app.launch import configure
from grpo_core.config import Config, RowOptions, parse_settings
from grpo_core.config.meanings import meanings
from grpo_core.config.sections import PluginSection, keys_of
from grpo_core.contracts.errors import ConfigError, did_you_mean
from grpo_core.plugins.options import Settings

WIDTH = 100
"""Columns of the comments."""
NAMED: Mapping[str, tuple[str, type | None]] = {
    "tasks": ("tasks", configuration.TaskConfig),
    "scores": ("scores", configuration.ScoreConfig),
    "filters": ("filters", None),
    "tracking.options": ("tracking", None),
    "validation.sets": ("validation.sets", configuration.ValidationSetConfig),
    "optimizer.groups": ("optimizer.groups", configuration.ParameterGroupConfig),
}
"""Tables that a user names, by their key: their place, and their kind unless it is options."""
HEADER = (
    "These are the defaults for the model {model!r}; `grpo-core config --set model.path=PATH` prints those "
    "of another one. A key behind a # without a space is not set."
)


def config(*sections: str, settings: Settings = None) -> int:
    """Print the keys of the configuration with their defaults and meanings, as a TOML file for `train`.

    Parameters
    ----------
    sections
        A section, as in "trainer"; may be repeated.  Default: all.
    settings
        Set a configuration key, as in "model.path=my-model", which may change defaults; may be repeated.
    """
    print(text(sections, settings or []), end="")
    return 0


def text(sections: Sequence[str] = (), settings: Sequence[str] = ()) -> str:
    """Return the configuration of a run with these settings, with a comment above each key.

    Raises ConfigError for an unknown section or setting.
    """
    config, host = configure([], parse_settings(settings))
    known = host.sections.known(Config, "")
    for section in sections:
        if section not in known:
            raise ConfigError(
                f"there is no section {section!r}.{did_you_mean(section, set(known))} The sections: "
                f"{', '.join(known)}"
            )
    header = "\n".join(_comment(HEADER.format(model=config.model.path)))
    added = {each: config.section(each.kind, None) for each in host.sections.added}
    keys = "\n".join(_table("", Config, config, only=sections, added=added))
    return f"{header}\n\n{keys.strip()}\n"


def _table(
    name: str,
    kind: type,
    value: Any,
    *,
    meaning: str = "",
    only: Sequence[str] = (),
    added: Mapping[PluginSection, Any] = MappingProxyType({}),
) -> Iterator[str]:
    """Yield the lines of a table: its keys first, then its tables; a table without a value is not set.

    Sections that plugins add to it are in ``added``, with their values.
    """
    texts = meanings(kind)
    if name:
        yield from _comment(meaning or texts[""].split("\n\n")[0])
        yield _set(f"[{name}]", value)
    inner: list[Iterator[str]] = []
    for field in attrs.fields(attrs.resolve_types(kind)):
        if (only and field.name not in only) or field.name not in keys_of(kind):
            continue
        path = f"{name}.{field.name}" if name else field.name
        own = None if value is None else getattr(value, field.name)
        if path in NAMED:
            inner.append(_named(*NAMED[path], texts.get(field.name, ""), own or {}))
        elif field.name == "data_options":
            inner.append(_row_options(path, texts.get(field.name, ""), own or {}))
        elif (table := _table_of(field.type)) is not None:
            inner.append(_table(path, table, own, meaning=texts.get(field.name, ""), added=added))
        else:
            yield from _key(field, value, texts.get(field.name, ""))
    for section, own in added.items():
        above, _, last = section.name.rpartition(".")
        if section.adds_keys and section.name == name:
            for field in attrs.fields(attrs.resolve_types(section.kind)):
                yield from _key(field, own, meanings(section.kind).get(field.name, ""))
        elif not section.adds_keys and above == name and not (only and not name and last not in only):
            inner.append(_table(section.name, section.kind, own))
    for lines in inner:
        yield ""
        yield from lines


def _named(where: str, kind: type | None, meaning: str, given: Mapping[str, Any]) -> Iterator[str]:
    """Yield the tables that a user has named, or an example of one that is not set."""
    for name, value in (given or {"NAME": None}).items():
        table = f"{where}.{_name(name)}"
        if kind is not None:
            yield from _table(table, kind, value)
            continue
        yield from _comment(meaning)
        yield _set(f"[{table}]", value)
        yield from (f"{_name(key)} = {_inline(each)}" for key, each in (value or {}).items())


def _row_options(table: str, meaning: str, given: Mapping[str, Any]) -> Iterator[str]:
    """Yield the keys of ``data_options`` that the core reads, and the dataloader's options that are set."""
    texts = meanings(RowOptions)
    yield from _comment(meaning)
    yield _set(f"[{table}]", given or None)
    for field in attrs.fields(RowOptions):
        yield from _comment(texts.get(field.name, ""))
        value = given.get(field.name)
        yield _set(f"{field.name} = {_inline(field.default if value is None else value)}", value)
    yield from (f"{_name(key)} = {_inline(each)}" for key, each in given.items() if key not in texts)


def _key(field: attrs.Attribute[Any], table: Any, meaning: str) -> Iterator[str]:
    """Yield the comment of a key of a table, and the key with its value."""
    value: Any = field.default if table is None else getattr(table, field.name)
    if isinstance(value, attrs.Factory):  # type: ignore[arg-type]
        value = value.factory()
    yield from _comment(meaning)
    if typing.get_origin(field.type) is typing.Literal:
        yield from _comment("One of " + ", ".join(map(_inline, typing.get_args(field.type))) + ".")
    known = value is not None and value is not attrs.NOTHING
    line = f"{field.name} = {_inline(value)}" if known else f"{field.name} ="
    yield _set(line, table if known else None)


def _set(line: str, value: Any) -> str:
    """Return a line, commented out if there is no value."""
    return f"#{line}" if value is None else line


def _table_of(kind: Any) -> type | None:
    """Return the class of a table, also of an optional one; None for the type of a plain value."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        kind = next((each for each in typing.get_args(kind) if each is not types.NoneType), None)
    return kind if isinstance(kind, type) and attrs.has(kind) else None


def _inline(value: Any) -> str:
    """Return a value as TOML in one line."""
    if isinstance(value, Mapping):
        pairs = [f"{_name(key)} = {_inline(each)}" for key, each in value.items()]
        return "{ " + ", ".join(pairs) + " }" if pairs else "{}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_inline, value)) + "]"
    return tomli_w.dumps({"key": value}).removeprefix("key = ").strip()


def _name(key: str) -> str:
    return tomli_w.dumps({key: 0}).removesuffix(" = 0\n")


def _comment(text: str) -> list[str]:
    return textwrap.wrap(" ".join(text.split()), WIDTH, initial_indent="# ", subsequent_indent="# ")
