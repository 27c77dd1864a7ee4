"""The keys of grpo-plugin-scale in the setup of a trainer."""

from __future__ import annotations

from typing import Any

import cattrs

from grpo_core.contracts.records import SectionValues, name_of_class
from grpo_plugin_scale.config import ScaledConfig

KEYS = ("offload", "ranks", "weights")


def scaled(**keys: Any) -> tuple[SectionValues, ...]:
    """The sections of a setup with these keys of ``[trainer]``."""
    kind, values = name_of_class(ScaledConfig), cattrs.unstructure(ScaledConfig(**keys))
    return (SectionValues(name="trainer", kind=kind, values=values),)
