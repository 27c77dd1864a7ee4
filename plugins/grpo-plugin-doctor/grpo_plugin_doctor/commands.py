"""The command of this plugin, for ``grpo-core --help``; this module imports nothing else."""

from __future__ import annotations

from collections.abc import Mapping

from grpo_core import Command, hookimpl


@hookimpl
def grpo_commands() -> Mapping[str, Command]:
    return {
        "doctor": Command(
            "grpo_plugin_doctor.doctor:doctor",
            help="Look at this machine, and estimate the memory that a run takes; start nothing.",
        )
    }
