"""The commands that this distribution adds to ``grpo-core``."""

from __future__ import annotations

from collections.abc import Mapping

from grpo_core import Command, hookimpl


@hookimpl
def grpo_commands() -> Mapping[str, Command]:
    return {
        "audit": Command(
            "grpo_plugin_audit.command:audit",
            help="Find out whether the rewards of an environment mean anything: what is paid, and what "
            "should not be.",
        ),
        "score": Command(
            "grpo_plugin_audit.score:score",
            help="Judge stored rollouts again, as after a correction of a reward, and show what changes.",
        ),
    }
