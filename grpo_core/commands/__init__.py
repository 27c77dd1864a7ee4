"""The commands of ``grpo-core``, one module for each, and the code that they share."""

from __future__ import annotations

from collections.abc import Mapping

from grpo_core.contracts.hookspecs import Command, hookimpl


@hookimpl
def grpo_commands() -> Mapping[str, Command]:
    return {
        "train": Command("grpo_core.commands.running:train", help="Train a model with asynchronous GRPO."),
        "validate": Command(
            "grpo_core.commands.running:validate",
            help="Validate a model, or a checkpoint of a run, on held-out prompts.",
        ),
        "export": Command(
            "grpo_core.commands.export:export",
            help="Write a checkpoint of a run as a directory for transformers or peft, with a model card.",
        ),
        "verify": Command(
            "grpo_core.commands.running:verify",
            help="Check the events of a run: no prompt was lost, trained twice, or trained too late.",
        ),
        "plugins": Command(
            "grpo_core.cli:plugins",
            help="List the installed plugins with their offers, or with the reason why a plugin is broken.",
        ),
        "config": Command(
            "grpo_core.commands.defaults:config",
            help="Print the keys of the configuration with their defaults and meanings, as a TOML file for"
            " `train`.",
        ),
        "completion": Command(
            "grpo_core.cli:completion", help="Print the completion of commands and options for a shell."
        ),
    }
