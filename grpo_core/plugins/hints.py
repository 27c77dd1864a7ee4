"""Which command installs a plugin that is known and was not found."""

from __future__ import annotations

from collections.abc import Mapping

from grpo_core.plugins.offers import Kind, Selected

VLLM = "pip install 'grpo-core[vllm]'"

ALGORITHMS: Mapping[Kind, tuple[str, ...]] = {
    "advantage": ("gdpo", "gigpo", "max_rl", "pass_at_k", "reinforce_plus_plus", "turns"),
    "filter": ("mean_length", "pass_rate"),
    "loss": ("cispo", "distillation", "dppo", "gspo", "reinforce", "sapo", "vespo"),
    "optimizer": ("adamw_8bit", "adamw_torchao", "muon"),
    "validation_strategy": ("majority", "paired", "pass_at_k"),
}

INSTALL: Mapping[tuple[Kind, str], str] = {
    **{
        (kind, name): "pip install grpo-plugin-algorithms"
        for kind, names in ALGORITHMS.items()
        for name in names
    },
    ("data_plane", "ray"): "pip install 'grpo-core[ray]'",
    ("data_plane", "transferqueue"): "pip install grpo-plugin-transferqueue",
    ("engine", "pool"): "pip install grpo-plugin-scale",
    ("engine", "vllm"): VLLM,
    ("environment", "agent"): "pip install grpo-plugin-agents",
    ("environment", "code"): "pip install grpo-plugin-code",
    ("environment", "compose"): "pip install grpo-plugin-judge",
    ("environment", "gym"): "pip install grpo-plugin-gym",
    ("environment", "inspect"): "pip install grpo-plugin-inspect",
    ("environment", "judge"): "pip install grpo-plugin-judge",
    ("environment", "math"): "pip install grpo-plugin-math",
    ("environment", "mcp"): "pip install grpo-plugin-mcp",
    ("environment", "nemo_gym"): "pip install grpo-plugin-nemo-gym",
    ("environment", "openenv"): "pip install grpo-plugin-openenv",
    ("environment", "reasoning_gym"): "pip install grpo-plugin-reasoning-gym",
    ("environment", "textarena"): "pip install grpo-plugin-textarena",
    ("environment", "trl"): "pip install grpo-plugin-trl",
    ("environment", "verifiers"): "pip install grpo-plugin-verifiers",
    ("model", "smollm2"): "pip install grpo-plugin-smollm2",
    ("placement", "ray"): "pip install 'grpo-core[ray]'",
    ("player", "agents"): "pip install grpo-plugin-agents",
    ("sampler", "chosen"): "pip install grpo-plugin-curriculum",
    ("sampler", "curriculum"): "pip install grpo-plugin-curriculum",
    ("sampler", "learnable"): "pip install grpo-plugin-curriculum",
    ("sampler", "learnable_prompts"): "pip install grpo-plugin-curriculum",
    ("sampler", "schedule"): "pip install grpo-plugin-curriculum",
    ("tracker", "report"): "pip install grpo-plugin-report",
    ("tracker", "openmetrics"): "pip install 'grpo-plugin-trackers[openmetrics]'",
    ("tracker", "tensorboard"): "pip install 'grpo-plugin-trackers[tensorboard]'",
    ("tracker", "wandb"): "pip install 'grpo-plugin-trackers[wandb]'",
    ("transport", "collective"): "pip install grpo-plugin-scale",
    ("transport", "cuda_ipc"): "pip install grpo-plugin-scale",
}
"""By kind, and by an offer's name or its plugin's."""

EXTENDED: Mapping[tuple[Kind, str], str] = {("loss", "grpo"): "grpo-plugin-algorithms"}
"""Distributions whose offer replaces the core's of the same name, with the same results and more options."""

KEYS: Mapping[str, str] = {
    "audit": "grpo-plugin-audit",
    "health.max_memory": "grpo-plugin-doctor",
    "shaping": "grpo-plugin-algorithms",
}
"""Distributions of the keys and tables of the configuration that are ours and not the core's."""

COMMANDS: Mapping[str, str] = {
    "audit": "grpo-plugin-audit",
    "bisect": "grpo-plugin-replay",
    "check": "grpo-plugin-devkit",
    "doctor": "grpo-plugin-doctor",
    "explain": "grpo-plugin-report",
    "fork": "grpo-plugin-replay",
    "new": "grpo-plugin-devkit",
    "replay": "grpo-plugin-replay",
    "report": "grpo-plugin-report",
    "runs": "grpo-plugin-report",
    "score": "grpo-plugin-audit",
    "simulate": "grpo-plugin-replay",
    "try": "grpo-plugin-devkit",
    "watch": "grpo-plugin-report",
}
"""Distributions of the commands that are ours and not the core's."""


def install_command(kind: Kind, name: str) -> str:
    """The command for ``name``, as ``vllm`` or ``math:sort``; empty if it is not known."""
    return INSTALL.get((kind, name)) or INSTALL.get((kind, name.partition(":")[0]), "")


def more_options(selected: Selected) -> str:
    """The sentence about a distribution whose offer of this name has more options; else empty."""
    extension = EXTENDED.get((selected.kind, selected.name), "")
    return f". More options: pip install {extension}" if extension and selected.plugin.name == "core" else ""
