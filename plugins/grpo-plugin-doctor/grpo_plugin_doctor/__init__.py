"""Checks whether a run fits on a machine, and estimates its memory; refuses a run that cannot fit."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import field, frozen
from attrs.validators import ge

from grpo_core import hookimpl


@frozen(kw_only=True)
class Health:
    """The keys of this plugin in the section ``health``."""

    max_memory: float = field(default=1.0, validator=ge(0))
    """The run is refused before it starts if the parts of its memory that it certainly needs take more than
    this share of the available memory of the host or of a GPU; 0 turns the check off."""


@hookimpl
def grpo_config_sections() -> Mapping[str, type]:
    return {"health": Health}


@hookimpl
def grpo_preflight() -> Mapping[str, str]:
    return {
        "memory_of_a_run": "grpo_plugin_doctor.memory:checked",
        "slow_products": "grpo_plugin_doctor.memory:slow_products",
    }
