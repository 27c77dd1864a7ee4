"""The section ``cost``: the prices of a run."""

from __future__ import annotations

from math import inf
from typing import Any

from attrs import Attribute, field, frozen
from attrs.validators import ge

from grpo_core.kit import only_with


def _price(instance: object, attribute: Attribute[Any], value: float) -> None:
    if not 0 <= value < inf:
        raise ValueError(f"'{attribute.name}' must be a finite number of at least 0: {value!r}")


@frozen(kw_only=True)
class Cost:
    """Prices, by which terminal, page and `grpo-core runs` say what a run costs; also a metric, `cost`."""

    per_hour: float = field(default=0.0, validator=_price)
    """Price of an hour of the machine, or of each of its GPUs; 0 is none."""
    gpus: int = field(default=1, validator=ge(1), metadata=only_with("per_hour"))
    """Number of GPUs that `per_hour` is the price of one of; 1 for a price of the machine."""
    per_million_tokens: float = field(default=0.0, validator=_price)
    """Price of a million tokens that a hosted engine or a service samples; 0 is none."""
    currency: str = "USD"
    """Text after each amount."""
