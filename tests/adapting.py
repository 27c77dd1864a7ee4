"""Setups of trainers with the section ``model.lora``."""

from __future__ import annotations

import attrs
import cattrs

from grpo_core import TrainerSetup
from grpo_core.contracts.records import SectionValues, name_of_class
from grpo_plugin_scale.lora import LoraConfig


def with_lora(given: TrainerSetup, lora: LoraConfig | None) -> TrainerSetup:
    """Return the setup of a trainer that trains adapters; None leaves it as it is."""
    if lora is None:
        return given
    section = SectionValues(
        name="model.lora", kind=name_of_class(LoraConfig), values=cattrs.unstructure(lora)
    )
    return attrs.evolve(given, sections=[*given.sections, section])
