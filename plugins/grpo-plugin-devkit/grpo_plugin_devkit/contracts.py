"""The contracts of losses, advantages and filters, as tests and for ``grpo-core check``.

check_loss, check_advantage, check_filter    each is a whole test
"""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from grpo_core import GrpoError, PluginError
from grpo_core.kit import PluginHost, Selected, TrainerConfig, needs_of, scratch_directory
from grpo_core.testing import Finding, finding_of
from grpo_plugin_devkit.filters import FilterContract, check_filter, groups
from grpo_plugin_devkit.model_sources import ModelSourceContract, check_model_source
from grpo_plugin_devkit.objectives import AdvantageContract, LossContract, check_advantage, check_loss
from grpo_plugin_devkit.placements import PlacementContract, check_placement
from grpo_plugin_devkit.trainers import TrainerContract, check_trainer

__all__ = [
    "check_advantage",
    "check_filter",
    "check_loss",
    "check_model_source",
    "check_placement",
    "check_trainer",
]


def objective(host: PluginHost, offer: Selected, options: Mapping[str, Any]) -> Iterator[Finding]:
    """Check a loss or an advantage function."""
    kind, name = offer.kind, offer.name
    contract: Iterable[Callable[[], object]]
    try:
        if kind == "loss":
            loss = host.function("loss", name, **options)
            needed = needs_of(loss.function, loss.options)
            contract = LossContract(loss, needed)
            yield Finding("what it needs", "noted", ", ".join(sorted(needed)) or "nothing")
        else:
            contract = AdvantageContract(host.function("advantage", name, **options))
    except PluginError as error:
        yield Finding("its options", "failed", str(error))
        return
    for clause in contract:
        yield finding_of(clause.__name__.replace("_", " "), clause)


def of_filter(host: PluginHost, offer: Selected, options: Mapping[str, Any]) -> Iterator[Finding]:
    """Check a filter, and say how many groups it rejects."""
    name = offer.name
    try:
        host.check_values("filter", name, options, group_size=4)
        rejects = host.function("filter", name, **options)
    except GrpoError as error:
        yield Finding("its options", "failed", str(error))
        return
    failed = False
    for clause in FilterContract(rejects):
        found = finding_of(clause.__name__.replace("_", " "), clause)
        failed |= found.outcome == "failed"
        yield found
    if not failed:
        rejected = sum(rejects(group) is not None for group in groups())
        yield Finding("what it rejects", "noted", f"{rejected} of the {len(groups())} groups that were tried")


def part(host: PluginHost, offer: Selected, options: Mapping[str, Any]) -> Iterator[Finding]:
    """Check a trainer, a source of models or a placement, whose clauses build on each other."""
    make: Callable[..., Any] = functools.partial(host.make, offer.kind, offer.name)
    try:
        host.check_values(offer.kind, offer.name, options, section=TrainerConfig())  # of a trainer
        with contextlib.ExitStack() as stack:
            contract: Iterable[Callable[[], object]]
            if offer.kind == "trainer":
                contract = stack.enter_context(TrainerContract(lambda setup: make(setup, **options)))
            elif offer.kind == "model":
                directory = stack.enter_context(scratch_directory())
                contract = ModelSourceContract(lambda: make(**options), Path(directory))
            else:
                contract = stack.enter_context(PlacementContract(lambda plugins: make(plugins, **options)))
            for clause in contract:
                with contextlib.redirect_stderr(io.StringIO()):
                    found = finding_of(clause.__name__.replace("_", " "), clause)
                yield found
    except GrpoError as error:
        yield Finding("it can be made", "failed", str(error))
