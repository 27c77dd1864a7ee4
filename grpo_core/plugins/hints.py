"""Commands that install known plugins which were not found."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files

from grpo_core.plugins.offers import Kind

INSTALLS: Mapping[str, Mapping[str, str]] = json.loads(
    files(__package__).joinpath("installs.json").read_text("utf-8")
)
"""Pip's names of our distributions, by kind and by the name of an offer or of its plugin.

``docs/_installs.py`` writes the file from ``plugins/``.
"""
KEYS = INSTALLS["key"]
"""The distributions to install for configuration keys and tables outside of the core."""
COMMANDS = INSTALLS["command"]
"""Our distributions of commands outside of the core."""


def install_command(kind: Kind, name: str) -> str:
    """The command for ``name``, as ``vllm`` or ``math:sort``; empty if unknown."""
    known = INSTALLS.get(kind, {})
    distribution = known.get(name) or known.get(name.partition(":")[0])
    return f"pip install {distribution}" if distribution else ""
