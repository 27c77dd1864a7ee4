"""The commands of grpo-plugin-report, by name."""

from __future__ import annotations

from collections.abc import Mapping

from grpo_core import Command, hookimpl


@hookimpl
def grpo_commands() -> Mapping[str, Command]:
    return {
        "report": Command(
            "grpo_plugin_report.comparison:report",
            help="Write report.html for a finished, running or killed run, or one page that compares "
            "several runs.",
        ),
        "watch": Command(
            "grpo_plugin_report.watch:watch",
            help="Show the report of a run in a browser during the run.",
        ),
        "explain": Command(
            "grpo_plugin_report.explain.command:explain",
            help="Say what is wrong with a run: the likeliest causes, each with its evidence and a fix.",
        ),
        "runs": Command(
            "grpo_plugin_report.runs:runs",
            help="List the runs of a directory, compare them, free their disk, or write their metrics as "
            "CSV.",
        ),
    }
