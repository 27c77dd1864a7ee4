"""Parts that several sections share: the choice of a plugin, and the names of tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import field, frozen

TASK_NAME = r"[A-Za-z0-9_.-]{1,64}"
"""Pattern of task names, which are also file names."""


NAMED = {"tasks": "task", "validation.sets": "set"}
"""Tables whose keys are such names, and the thing that each key names."""


@frozen(kw_only=True)
class PluginChoice:
    """The name of a plugin's offer, and the options of its factory."""

    name: str
    """Name of the offer, as `grpo-core plugins` lists it."""
    options: dict[str, Any] = field(factory=dict)
    """Options of the offer's factory."""


def options_of(kind: str, key: str) -> Mapping[str, Any]:
    """Return the metadata of a key with the options of an offer, which another key of the table names.

    Paths in them become absolute, as in all options.

    Args:
        kind: kind of the offer, such as "environment".
        key: the key that names the offer.
    """
    return {"options_of": (kind, key)}
