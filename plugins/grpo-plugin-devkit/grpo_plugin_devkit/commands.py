"""The commands that this distribution adds to ``grpo-core``."""

from __future__ import annotations

from collections.abc import Mapping

from grpo_core import Command, hookimpl


@hookimpl
def grpo_commands() -> Mapping[str, Command]:
    return {
        "check": Command(
            "grpo_plugin_devkit.check:check",
            help="Check that an environment, or any other offer of a plugin, keeps its contract.",
        ),
        "try": Command(
            "grpo_plugin_devkit.trying:try_",
            help="Play against an environment in the terminal, or let a model play and show all that "
            "happens.",
        ),
        "new": Command(
            "grpo_plugin_devkit.new:new",
            help="Write a new plugin into the directory grpo-plugin-NAME: code, a test, and what a package"
            " needs.",
        ),
    }
