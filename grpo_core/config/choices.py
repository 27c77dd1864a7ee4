"""Holds what several sections have in common: the choice of a plugin, and the names of tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import field, frozen

TASK_NAME = r"[A-Za-z0-9_.-]{1,64}"
"""Names of tasks; they are names of files, too."""


NAMED = {"tasks": "task", "validation.sets": "set"}
"""Tables whose keys are such names, and what they name."""


@frozen(kw_only=True)
class PluginChoice:
    """The name of a plugin's offer, and the options of its factory."""

    name: str
    """Name of the offer, as `grpo-core plugins` lists it."""
    options: dict[str, Any] = field(factory=dict)
    """Options are passed to the offer's factory."""


def options_of(kind: str, key: str) -> Mapping[str, Any]:
    """Return the metadata of a key with the options of an offer that another key of its table names.

    Paths among them become absolute, as those of all options do.

    Args:
        kind: kind of the offer, such as "environment".
        key: the key that names it.
    """
    return {"options_of": (kind, key)}
