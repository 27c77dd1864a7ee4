"""The page records.md of the site: the fields of every record of the plugin contracts.

The records are the attrs classes that ``grpo_core`` exports, and the events.  Names, types and defaults are
those of their attributes; meanings are the attributes' docstrings.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

import attrs

import grpo_core
from grpo_core import events
from grpo_core.config.meanings import meanings
from grpo_core.contracts import records

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from _options import _code, _default, _paragraph, _plain  # noqa: E402

HEAD = """\
# Records

Plugins receive and return these records. `import grpo_core as grpo` has all of them: `grpo.Prompt`.
They are frozen: `attrs.evolve(prompt, answer="4")` makes a changed copy. `Ids` are read-only arrays."""


def page() -> str:
    """Return the page."""
    tables = [_record(kind).replace("### ", "## ", 1) for kind in exported()]
    return "\n\n".join([HEAD, *tables, _events()]) + "\n"


def exported() -> list[type]:
    """The records that ``grpo_core`` exports: the ones of ``contracts.records`` first, in its order."""
    values = [getattr(grpo_core, name) for name in grpo_core.__all__]
    kinds = [value for value in values if inspect.isclass(value) and attrs.has(value)]
    ours = records.__name__
    return sorted(kinds, key=lambda kind: (kind.__module__ != ours, kind.__module__, _line(kind)))


def _record(kind: type) -> str:
    rows = [f"| {' | '.join(cells)} |" for cells in (*_fields(kind), *_properties(kind))]
    head = ["| field | type | default | meaning |", "|---|---|---|---|"]
    return "\n".join([f"### {kind.__name__}", "", _plain(_paragraph(kind)), "", *head, *rows])


def _fields(kind: type) -> Iterator[tuple[str, str, str, str]]:
    texts = meanings(kind)
    for one in attrs.fields(kind):
        if not one.name.startswith("_"):
            yield f"`{one.name}`", _code(str(one.type)), _of(one), _plain(texts.get(one.name, ""))


def _of(one: attrs.Attribute[object]) -> str:
    if isinstance(one.default, attrs.Factory):  # type: ignore[arg-type]
        return "empty"
    if inspect.isfunction(one.default):
        return "does nothing"
    default = inspect.Parameter.empty if one.default is attrs.NOTHING else one.default
    return "`None`" if default is None else _default(_parameter(one.name, default))


def _parameter(name: str, default: object) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)


def _properties(kind: type) -> Iterator[tuple[str, str, str, str]]:
    for name, value in vars(kind).items():
        if isinstance(value, property):
            returned = inspect.signature(value.fget).return_annotation if value.fget else ""
            yield f"`{name}`", _code(returned), "computed", _plain(_paragraph(value))


def _events() -> str:
    kinds = [
        kind for kind in vars(events).values() if inspect.isclass(kind) and issubclass(kind, events.Event)
    ]
    lines = [
        "## Events", "",
        "`grpo_core.events` defines the events. Each has a `step`, the version of the weights, and a `time`",
        "in seconds since 1970.", "",
        "| event | fields | meaning |", "|---|---|---|",
    ]  # fmt: skip
    for kind in kinds:
        own = [one for one in attrs.fields(kind) if not one.inherited]
        if kind is not events.Event:
            fields = ", ".join(_code(f"{one.name}: {one.type}") for one in own)
            lines.append(f"| `{kind.__name__}` | {fields} | {_plain(_paragraph(kind))} |")
    return "\n".join(lines)


def _line(kind: type) -> int:
    return inspect.getsourcelines(kind)[1]


if __name__ == "__main__":
    print(page())
