"""Calls the checks of ``grpo_preflight``, each when all that its parameters name is there."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from grpo_core.app.parts import Parts
from grpo_core.contracts.errors import PluginError, plugin_errors
from grpo_core.plugins.offers import Selected

STAGES = (("config", "host"), ("model",), ("renderer", "held_out", "prompts", "environments"))
"""Parameters that are known before anything starts, when the model is here, and before the first rollout."""


def preflight(parts: Parts, **there: Any) -> list[tuple[str, str]]:
    """Call the checks of a stage; return causes and messages of their warnings.  Raises GrpoError.

    Args:
        there: what is there of the stage; nothing: ``config`` and ``host`` alone.
    """
    found: list[tuple[str, str]] = []
    for selected, check in _checks(parts, there):
        with plugin_errors(str(selected)):
            found += _warnings(selected, check())
    return found


async def preflight_async(parts: Parts, **there: Any) -> list[tuple[str, str]]:
    """Do the same off the event loop; checks may be async."""
    found: list[tuple[str, str]] = []
    for selected, check in _checks(parts, there):
        with plugin_errors(str(selected)):
            result = await asyncio.to_thread(check)
            found += _warnings(selected, await result if inspect.isawaitable(result) else result)
    return found


def _checks(parts: Parts, there: Mapping[str, Any]) -> Iterator[tuple[Selected, Callable[[], Any]]]:
    known = {"config": parts.config, "host": parts.plugins, **there}
    for plugin in parts.plugins.plugins:
        for name, offer in plugin.offers.get("preflight", {}).items():
            selected = Selected("preflight", name, plugin, offer)
            function = selected.load()
            takes = inspect.signature(function).parameters
            needed = {each for each, parameter in takes.items() if parameter.default is parameter.empty}
            if unknown := needed.difference(*STAGES):
                raise PluginError(
                    f"{selected}: no run has its parameter {min(unknown)!r}; expected some of "
                    + ", ".join(each for stage in STAGES for each in stage)
                )
            if _stage(takes) == _stage(known) and needed <= known.keys():
                yield selected, partial(function, **{each: known[each] for each in takes if each in known})


def _stage(names: Iterable[str]) -> int:
    return max((i for i, stage in enumerate(STAGES) if not set(stage).isdisjoint(names)), default=0)


def _warnings(selected: Selected, returned: Any) -> Iterable[tuple[str, str]]:
    """Return causes and messages; texts without a cause have the name of their check."""
    if isinstance(returned, Mapping):
        return returned.items()
    return [(selected.name, message) for message in returned]
