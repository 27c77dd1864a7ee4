"""Describes the problems of a configuration's tables."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any

import attrs
import cattrs

from grpo_core.config.choices import NAMED, TASK_NAME
from grpo_core.config.generation import CUTS
from grpo_core.config.renamed import OLD, new_lines
from grpo_core.config.run import Config
from grpo_core.config.sections import NO_SECTIONS, PluginSections
from grpo_core.contracts.errors import ALIASES, did_you_mean
from grpo_core.contracts.typed import wrong


def problems(kind: Any, value: Any, where: str, sections: PluginSections = NO_SECTIONS) -> Iterable[str]:
    """Describe the problems of a value: unknown or missing keys, and wrong types."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if value is not None:
            yield from problems(next(k for k in arguments if k is not types.NoneType), value, where, sections)
    elif isinstance(kind, type) and attrs.has(kind):
        yield from _table_problems(kind, value, where, sections)
    elif origin is dict and isinstance(value, Mapping):
        if where in NAMED:
            for name in (name for name in value if not re.fullmatch(TASK_NAME, name)):
                yield (
                    f"configuration key {where!r}: the name {name[:80]!r} of a {NAMED[where]} must be 1 to "
                    "64 letters, digits and the characters . _ -"
                )
        for key, item in value.items():
            yield from problems(arguments[1], item, f"{where}.{key}")
    else:
        yield from (_expected(*each) for each in wrong(value, kind, where, _is_of))


def _table_problems(kind: type, value: Any, where: str, sections: PluginSections) -> Iterable[str]:
    if not isinstance(value, Mapping):
        yield _expected(where, "a table", value)
        return
    known = sections.known(kind, where)
    prefix = f"{where}." if where else ""
    renamed = new_lines(where, value) if "data_options" in known else ""
    if renamed:
        yield renamed
    for key, item in value.items():
        if renamed and key in OLD:
            continue
        if key in known:
            yield from problems(known[key], item, prefix + key, sections)
        elif distribution := sections.install.get(prefix + key):
            yield f"configuration key {prefix + key!r} is not installed: pip install {distribution}"
        else:
            yield f"unknown configuration key {prefix + key!r}.{_nearest(key, known, prefix, sections)}"
    for key, attribute in attrs.fields_dict(kind).items():
        if attribute.default is attrs.NOTHING and key not in value:
            yield f"configuration key {prefix + key!r} is missing"


def _nearest(key: str, known: Mapping[str, Any], prefix: str, sections: PluginSections) -> str:
    """Return a hint at the key that was meant: a similar one, or one of that name in a section."""
    if prefix == "rollout." and key in CUTS:
        return (
            " Training samples from the whole distribution, because its logprobs are over all tokens; "
            f"validation.{key} is for validation"
        )
    if meant := ALIASES.get(key):
        return f" Did you mean {meant!r}?"
    inside = [
        f"{section}.{key}"
        for section, kind in sections.known(Config, "").items()
        if attrs.has(kind) and key in sections.known(kind, section)
    ]
    near = did_you_mean(key, set(known))
    if inside and (prefix.count(".") == 1 or not near):
        return f" Did you mean {' or '.join(map(repr, inside))}?"
    if near or "options" not in known:
        return near
    return f" An option of a plugin is written {f'{prefix}options.{key}'!r}."


def _is_of(value: Any, kind: Any) -> bool:
    """Return whether a value of TOML is of a type; a whole number may be written as 1e3."""
    if kind not in (int, float) or isinstance(value, bool):
        return kind in (bool, str) and isinstance(value, kind)
    number = isinstance(value, int | float) and value == value
    return number and (kind is float or float(value).is_integer())


def _expected(where: str, expected: str, value: Any) -> str:
    return f"configuration key {where!r}: expected {expected}, got {value!r}"


def out_of_range(error: BaseException, where: str) -> Iterable[str]:
    """The leaves of cattrs' exception group, each with its section."""
    if not isinstance(error, cattrs.BaseValidationError):
        yield f"configuration key {where!r}: {error}" if where else f"configuration: {error}"
        return
    for inner in error.exceptions:
        names = [getattr(note, "name", None) for note in getattr(inner, "__notes__", ())]
        place = ".".join(filter(None, [where, *(name for name in names if isinstance(name, str))]))
        yield from out_of_range(inner, place)
