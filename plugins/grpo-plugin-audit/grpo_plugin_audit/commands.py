"""The commands that this distribution adds to ``grpo-core``."""

from __future__ import annotations

from collections.abc import Mapping

from grpo_core import Command, hookimpl


@hookimpl
def grpo_commands() -> Mapping[str, Command]:
    return {
        "audit": Command(
            "grpo_plugin_audit.command:audit",
            help="Check whether the rewards of an environment mean anything: what it rewards, and what it "
            "should not.",
        ),
        "score": Command(
            "grpo_plugin_audit.score:score",
            help="Judge stored rollouts again, such as after a reward was corrected, and show what changes.",
        ),
    }
