"""Holds what several sections have in common: the choice of a plugin, and the names of tables."""

from __future__ import annotations

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
