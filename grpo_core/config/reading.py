"""Reads configurations from TOML files and settings, describes their problems, and writes them."""

from __future__ import annotations

import functools
import os
import re
import tomllib
import types
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

import attrs
import cattrs

from grpo_core.config.run import NAMED, TASK_NAME, TRUNCATIONS, Config
from grpo_core.config.sections import NO_SECTIONS, PluginSections, keys_of
from grpo_core.contracts.errors import ALIASES, ConfigError, did_you_mean
from grpo_core.contracts.records import SectionValues, name_of_class, without_nulls
from grpo_core.contracts.typed import of_plain, wrong
from grpo_core.models.files import command_hint
from grpo_core.text.credentials import secrets_in

# ---------------------------------------------------------------------------------- older keys

OLD = ("source", "dataloader", "dataloader_options")
"""Keys of a task or of a validation set that `data` and `data_options` replace."""


def new_lines(where: str, table: Mapping[str, Any]) -> str:
    """Return an error with the lines that replace the old keys of a table, or "" if it has none."""
    old = [key for key in OLD if key in table]
    if not old:
        return ""
    source = table.get("source", {})
    source = dict(source) if isinstance(source, Mapping) else {}
    path, held_out = _data(source.pop("path", "")), _data(source.pop("validation_path", ""))
    data = table.get("dataloader", path)
    if where.startswith("validation.sets."):
        data, held_out = held_out or data, ""
    dropped = [key for key in ("where", "workers") if source.pop(key, None)]
    options = {**source, **dict(table.get("dataloader_options", {}))}
    lines = {key: table[key] for key in ("env", "task") if key in table}
    lines |= {"data": data} if data else {}
    lines |= {"validation_data": held_out} if held_out else {}
    lines |= {"data_options": options} if options else {}
    names = " and ".join(f"{where}.{key}" for key in old)
    more = (
        f"\n{' and '.join(dropped)} cannot be written here: a dataloader of a few lines selects rows and "
        "reads in parallel (docs/first-dataloader.md)"
        if dropped
        else ""
    )
    return f"{names}: `data` names the prompts of a task now; write\n{lines_of(where, lines)}{more}"


def _data(path: Any) -> str:
    """Return the text of ``data`` for a path of ``source``, which may be a hub id."""
    path = str(path)
    return f"hub:{path}" if path and not Path(path).suffix and not Path(path).exists() else path


def lines_of(where: str, table: Mapping[str, Any]) -> str:
    """Return the lines of TOML of a table, whose key is ``where``."""
    import tomli_w

    return tomli_w.dumps(_below(where, table)).strip()


def _below(key: str, value: Any) -> dict[str, Any]:
    """Return ``{"a": {"b": value}}`` for the key ``a.b``."""
    for name in reversed(key.split(".")):
        value = {name: value}
    return typing.cast("dict[str, Any]", value)


def score_lines(key: str, table: Mapping[str, Any]) -> str:
    """Return an error with the lines that replace an old key of a table, or "" if it is none."""
    if key == "teacher":
        given = table[key] if isinstance(table[key], Mapping) else {"path": table[key]}
        name, lines = "teacher", {"weights" if old == "path" else old: each for old, each in given.items()}
    elif key in ("trainer.reference_every", "trainer.reference_mix"):
        every, mix = table.get("reference_every", 0), table.get("reference_mix", 1.0)
        name, lines = "reference", {"weights": "ema", "every": every, "mix": mix}
        lines = lines if every else {"weights": "start"}
    else:
        return ""
    return f"configuration key {key!r}: the {name} is a score now; write\n{lines_of(f'scores.{name}', lines)}"


# ---------------------------------------------------------------------------------- problems


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
        elif lines := score_lines(prefix + key, value):
            if not (key == "reference_mix" and "reference_every" in value):  # one error has the lines of both
                yield lines
        elif distribution := sections.install.get(prefix + key):
            yield f"configuration key {prefix + key!r} is not installed: pip install {distribution}"
        else:
            yield f"unknown configuration key {prefix + key!r}.{_nearest(key, known, prefix, sections)}"
    for key, attribute in attrs.fields_dict(kind).items():
        if attribute.default is attrs.NOTHING and key not in value:
            yield f"configuration key {prefix + key!r} is missing"


def _nearest(key: str, known: Mapping[str, Any], prefix: str, sections: PluginSections) -> str:
    """Return a hint at the key that was meant: a similar one, or one of that name in a section."""
    if prefix == "rollout." and key in TRUNCATIONS:
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
    whole = kind is int and isinstance(value, float) and value.is_integer()
    return whole or (of_plain(value, kind) and value == value)


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


# ---------------------------------------------------------------------------------- reading and writing

T = TypeVar("T")


def read_toml(path: Path) -> dict[str, Any]:
    """Return the tables of a file.  Raises ConfigError if it is missing or is not TOML.

    A path ``./NAME`` that does not exist is looked for in the directory of the file.
    """
    try:
        tables: dict[str, Any] = _beside(path.parent, tomllib.loads(path.read_text(encoding="utf-8-sig")))
        return tables
    except FileNotFoundError:
        hint = "" if path.suffix == ".toml" else command_hint(str(path))
        raise ConfigError(f"{path}: no such file; expected a TOML configuration.{hint}") from None
    except IsADirectoryError:
        hint = command_hint(str(path))
        raise ConfigError(f"{path} is a directory; expected a TOML configuration.{hint}") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        hint = "" if path.suffix == ".toml" else command_hint(str(path))
        raise ConfigError(f"{path}: not readable as TOML: {error}.{hint}") from None
    except RecursionError:
        raise ConfigError(f"{path}: not readable as TOML: its values are nested too deeply") from None


def _beside(directory: Path, value: Any) -> Any:
    """Return a value of a file with each path ``./NAME`` that exists in its directory alone."""
    if isinstance(value, dict):
        return {key: _beside(directory, each) for key, each in value.items()}
    if isinstance(value, list):
        return [_beside(directory, each) for each in value]
    name = value.partition(":")[0] if isinstance(value, str) and value.startswith("./") else ""
    if name and not os.path.exists(name) and os.path.exists(directory / name):
        return f"{directory.resolve()}{value.removeprefix('.')}"
    return value


def parse_setting(setting: str) -> dict[str, Any]:
    """Return ``"trainer.lr=1e-4"`` as ``{"trainer": {"lr": 1e-4}}``; a value that is not TOML is a string.

    Raises ConfigError if there is no key, or the value is nested too deeply.
    """
    key, equals, text = setting.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {setting}: expected section.key=value, as in --set trainer.lr=1e-4")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    except RecursionError:
        raise ConfigError(f"--set {key}: its value is nested too deeply") from None
    return _below(key.strip(), value)


def parse_settings(settings: Iterable[str], onto: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the settings of all ``--set`` as a table; later ones override earlier ones and ``onto``."""
    return functools.reduce(merge, map(parse_setting, settings), dict(onto or {}))


def check_settings(
    changes: Mapping[str, Any], read: Collection[str], why: str, *, but: Collection[str] = ()
) -> None:
    """Raise ConfigError for the first key of ``--set`` that a command would ignore.

    A section that does not exist is left to ``build``, which names the nearest key.

    Args:
        changes: the settings of ``--set``, as tables.
        read: patterns of the keys that the command reads, such as ``"trainer.*"``.
        why: says what the command does with its keys.
        but: patterns of exceptions, which the command does not read.
    """
    known = keys_of(Config)
    for key in _keys({name: value for name, value in changes.items() if name in known}):
        if not _fits(key, read) or _fits(key, but):
            raise ConfigError(f"--set {key}: {why}; it reads {', '.join(read)}")


def _keys(table: Mapping[str, Any], above: str = "") -> Iterator[str]:
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from _keys(value, f"{above}{key}.")
        else:
            yield f"{above}{key}"


def _fits(key: str, patterns: Collection[str]) -> bool:
    # tasks.*.weight is a key of each task, and no option of an environment that is called weight
    return any(
        fnmatchcase(key, pattern) and (pattern.endswith("*") or key.count(".") == pattern.count("."))
        for pattern in patterns
    )


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge tables key by key; other values of ``over`` replace those of ``base``.

    A string below a table is its ``name``, as ``correction = "token_mask"`` below ``correction.cap = 2``.
    """
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        if isinstance(below, str) and isinstance(value, Mapping):
            below = {"name": below}
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            merged[key] = merge(below, value)
        else:
            merged[key] = value
    return merged


def replace_parts(table: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table without the options of parts that ``over`` replaces."""
    kept = dict(table)
    for section, above in over.items():
        below = kept.get(section)
        if (
            isinstance(below, Mapping)
            and isinstance(above, Mapping)
            and above.get("name", below.get("name")) != below.get("name")
        ):
            kept[section] = {key: value for key, value in below.items() if key != "options"}
    return kept


def build(layers: Iterable[Mapping[str, Any]], sections: PluginSections = NO_SECTIONS) -> Config:
    """Build the configuration from tables and the sections of plugins; later tables override earlier ones.

    Raises ConfigError that names every unknown key (with the nearest known one) and every bad value.
    """
    try:
        merged: dict[str, Any] = functools.reduce(merge, layers, {})
        secrets = [
            f"configuration key {key!r} looks like a secret, and the run's files contain the "
            "configuration. Set an environment variable instead, and let the plugin read it (os.environ): "
            "child processes inherit the variables of grpo-core"
            for key in sorted(set(secrets_in(merged)))
        ]
        merged = _with_tracker_options(merged)
        if found := [*secrets, *problems(Config, merged, "", sections)]:
            raise ConfigError("\n".join(found))
        core, own = sections.split(merged)
        config = attrs.evolve(
            structured(Config, core),
            sections=tuple(
                SectionValues(
                    name=each.name,
                    kind=name_of_class(each.kind),
                    values=cattrs.unstructure(structured(each.kind, table, where=each.name)),
                )
                for each, table in own.items()
            ),
        )
        as_toml(config)
        return config
    except RecursionError:
        raise ConfigError("the configuration: a value is nested too deeply") from None


def structured(kind: type[T], table: Mapping[str, Any], *, where: str = "") -> T:
    """Convert a table, whose key is ``where``, to an object of this attrs class.

    Raises ConfigError that names every unknown key and every bad value.
    """
    if found := list(problems(kind, table, where)):
        raise ConfigError("\n".join(found))
    try:
        return cattrs.structure(table, kind)
    except cattrs.BaseValidationError as error:
        raise ConfigError("\n".join(out_of_range(error, where))) from None


def as_table(config: Config) -> dict[str, Any]:
    """Return plain dicts and lists: ``build([as_table(c)]) == c``.  Keys that are None are left out."""
    table: dict[str, Any] = cattrs.unstructure(config)
    table["tracking"] |= table["tracking"].pop("options")
    del table["sections"]
    for section in config.sections:
        table = merge(table, _below(section.name, section.values))
    return typing.cast("dict[str, Any]", without_nulls(table))


def _with_tracker_options(table: Mapping[str, Any]) -> dict[str, Any]:
    """Move the tables ``[tracking.NAME]`` to where ``TrackingConfig`` has them."""
    given = table.get("tracking")
    if not isinstance(given, Mapping):
        return dict(table)
    options = {key: value for key, value in given.items() if isinstance(value, Mapping)}
    rest = {key: value for key, value in given.items() if key not in options}
    return {**table, "tracking": {**rest, "options": options}}


def as_toml(config: Config) -> str:
    """The resolved configuration as it is written into the run's directory.

    Raises ConfigError if a path or a text is not UTF-8.
    """
    import tomli_w

    text = tomli_w.dumps(as_table(config))
    if (wrong := re.search("^.*[\ud800-\udfff].*", text, re.MULTILINE)) is not None:
        raise ConfigError(f"the configuration has a text that is not UTF-8: {wrong[0]!r}")
    return text
