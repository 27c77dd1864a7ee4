"""Sections that plugins add to the configuration: new tables, and keys in tables of the core."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any

import attrs
from attrs import field, frozen

from grpo_core.config.run import Config
from grpo_core.contracts.records import name_of_class


def keys_of(kind: type) -> dict[str, Any]:
    """Return the types of the keys of a table, by name."""
    known = {each.name: each.type for each in attrs.fields(attrs.resolve_types(kind))}
    if kind is Config:
        del known["sections"]
    return known


@frozen
class PluginSection:
    """A section that a plugin adds."""

    name: str
    """Name of the table, as "budget" or "model.lora", or of a core table to which it adds keys."""
    kind: type[Any]
    """An attrs class, whose fields are the keys."""
    optional: bool = False
    """Whether the section is missing unless the configuration has the table."""

    @classmethod
    def of(cls, name: str, offered: Any) -> PluginSection:
        """Make a section from a hook's offer.  Raises ValueError if it cannot be one."""
        kinds = [offered]
        if isinstance(offered, types.UnionType):
            kinds = [each for each in typing.get_args(offered) if each is not types.NoneType]
        kind = kinds[0]
        if len(kinds) != 1 or not (isinstance(kind, type) and attrs.has(kind)):
            raise ValueError(f"section {name!r} is {offered!r}; expected an attrs class, or `Class | None`")
        for each in attrs.fields(kind):
            if each.default is attrs.NOTHING:
                raise ValueError(f"section {name!r}: the key {each.name!r} has no default")
        section = cls(name, kind, optional=offered is not kind)
        above, _, last = name.rpartition(".")
        tables = {key: each for key, each in keys_of(Config).items() if attrs.has(each)}
        if above and (above not in tables or above == "tracking"):
            raise ValueError(f"section {name!r}: {above!r} is not a core table with subtables")
        if not re.fullmatch(r"[a-z]\w*", last):
            raise ValueError(f"section {name!r}: expected lower-case letters, digits and _")
        if section.adds_keys and section.optional:
            raise ValueError(f"section {name!r} is a core table, which cannot be optional")
        core = {*keys_of(Config), *(f"{table}.{key}" for table in tables for key in keys_of(tables[table]))}
        for key in section.keys & core:
            raise ValueError(f"section {name!r}: the core already has a key {key!r}")
        return section

    @property
    def adds_keys(self) -> bool:
        """Whether it adds keys to a table of the core."""
        table = keys_of(Config).get(self.name)
        return table is not None and attrs.has(table)

    @property
    def keys(self) -> set[str]:
        """Full names of the keys that it adds to core tables, or the name of its own table."""
        return {f"{self.name}.{key}" for key in keys_of(self.kind)} if self.adds_keys else {self.name}


@frozen
class PluginSections:
    """The sections that the plugins of a process add."""

    added: tuple[PluginSection, ...] = ()
    install: Mapping[str, str] = field(factory=dict)
    """Distributions that add a key or a table, by its full name."""

    def known(self, kind: type, where: str) -> dict[str, Any]:
        """Return the types of all keys of a table."""
        known = keys_of(kind)
        for each in self.added:
            above, _, last = each.name.rpartition(".")
            if each.name == where and each.adds_keys:
                known |= keys_of(each.kind)
            elif above == where and not each.adds_keys:
                known[last] = each.kind
        return known

    def split(
        self, table: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[PluginSection, Mapping[str, Any]]]:
        """Split a configuration's tables into the core's tables and the tables of plugin sections.

        A section that is optional and missing is left out.
        """
        rest = dict(table)
        found: dict[PluginSection, Mapping[str, Any]] = {}
        for each in self.added:
            above, _, last = each.name.rpartition(".")
            if each.adds_keys:
                given = rest.get(each.name, {})
                found[each] = {key: value for key, value in given.items() if key in keys_of(each.kind)}
                rest[each.name] = {key: value for key, value in given.items() if key not in found[each]}
                continue
            holder = rest
            if above:
                holder = rest[above] = dict(rest.get(above, {}))
            own = holder.pop(last, None)
            if own is not None or not each.optional:
                found[each] = own or {}
        return rest, found


NO_SECTIONS = PluginSections()


def offered_sections(offered: Any, others: Iterable[PluginSection] = ()) -> tuple[PluginSection, ...]:
    """Return the sections of a plugin.  Raises ValueError if they are wrong, or in use by ``others``."""
    if not isinstance(offered, Mapping):
        raise ValueError(f"returned {type(offered).__name__}, expected a dict of name: attrs class")
    found = tuple(PluginSection.of(name, kind) for name, kind in offered.items())
    for section in found:
        for other in others:
            if both := section.keys & other.keys:
                raise ValueError(f"another plugin adds {min(both)!r} ({name_of_class(other.kind)})")
    return found
