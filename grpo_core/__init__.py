"""Asynchronous GRPO for language models: domains are plugins, async RL is the core.

What a plugin author imports is here.  Everything is loaded on first use, so that importing the package
costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo_core import errors
    from grpo_core.errors import ConfigError, GrpoError, PluginError
    from grpo_core.hookspecs import hookimpl
    from grpo_core.protocols import (
        Engine,
        Environment,
        Loader,
        Sampler,
        ValidationContext,
        ValidationStrategy,
    )
    from grpo_core.records import (
        Completion,
        EngineSetup,
        Episode,
        Feedback,
        GenerationRequest,
        Group,
        Message,
        Prompt,
        Rollout,
        SampleRequest,
        Weights,
    )
    from grpo_core.tokens import Tokens as Tokens

    __version__: str

__all__ = [
    "Completion",
    "ConfigError",
    "Engine",
    "EngineSetup",
    "Environment",
    "Episode",
    "Feedback",
    "GenerationRequest",
    "Group",
    "GrpoError",
    "Loader",
    "Message",
    "PluginError",
    "Prompt",
    "Rollout",
    "SampleRequest",
    "Sampler",
    "ValidationContext",
    "ValidationStrategy",
    "Weights",
    "__version__",
    "errors",
    "hookimpl",
]

_HOMES = {
    "grpo_core.errors": ("ConfigError", "GrpoError", "PluginError"),
    "grpo_core.hookspecs": ("hookimpl",),
    "grpo_core.protocols": (
        "Engine",
        "Environment",
        "Loader",
        "Sampler",
        "ValidationContext",
        "ValidationStrategy",
    ),
    "grpo_core.records": (
        "Completion",
        "EngineSetup",
        "Episode",
        "GenerationRequest",
        "Group",
        "Message",
        "Prompt",
        "Rollout",
        "SampleRequest",
        "Feedback",
        "Weights",
    ),
    "grpo_core.tokens": ("Tokens",),  # not in __all__: importing * would load numpy
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("grpo-core")
    elif name == "errors":
        value = importlib.import_module("grpo_core.errors")
    elif name in _HOME_OF:
        value = getattr(importlib.import_module(_HOME_OF[name]), name)
    else:
        raise AttributeError(f"module 'grpo_core' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
