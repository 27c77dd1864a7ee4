"""The commands of this plugin, for ``grpo-core --help``; this module imports nothing else."""

from __future__ import annotations

from collections.abc import Mapping

from grpo_core import Command, hookimpl


@hookimpl
def grpo_commands() -> Mapping[str, Command]:
    return {
        "replay": Command(
            "grpo_plugin_replay.replay:replay",
            help="Compute a step of a run again from its files, and compare it bit for bit with what the "
            "run recorded.",
        ),
        "fork": Command(
            "grpo_plugin_replay.fork:fork",
            help="Compute a step of a run again with another loss, learning rate or advantage, and show "
            "what differs.",
        ),
        "bisect": Command(
            "grpo_plugin_replay.bisect:bisect",
            help="Find the first step, and there the first value, at which two runs differ.",
        ),
        "simulate": Command(
            "grpo_plugin_replay.simulate:simulate",
            help="Forecast the time of a run: the real pipeline on virtual time, with service times that "
            "you give.",
        ),
    }
