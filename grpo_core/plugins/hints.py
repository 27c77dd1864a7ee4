"""Commands that install known plugins which were not found."""

from __future__ import annotations

from collections.abc import Mapping

from grpo_core.plugins.offers import Kind

ENVIRONMENTS = (
    *("code", "gym", "inspect", "math", "mcp", "nemo_gym", "openenv", "reasoning_gym"),
    *("textarena", "trl", "verifiers"),
)
"""Plugins of environments, each in a distribution of the same name."""

OFFERED: Mapping[str, Mapping[Kind, tuple[str, ...]]] = {
    "'grpo-core[ray]'": {"data_plane": ("ray",), "placement": ("ray",)},
    "'grpo-core[vllm]'": {"engine": ("vllm",)},
    "grpo-plugin-vllm": {"engine": ("vllm:http",)},
    "grpo-plugin-agents": {"environment": ("agent",), "player": ("agents",)},
    "grpo-plugin-algorithms": {
        "advantage": ("gdpo", "gigpo", "max_rl", "pass_at_k", "reinforce_plus_plus", "turns"),
        "filter": ("mean_length", "pass_rate"),
        "loss": ("cispo", "distillation", "grpo", "gspo", "reinforce", "sapo"),
        "optimizer": ("adamw_8bit", "adamw_torchao", "muon"),
        "validation_strategy": ("majority", "paired", "pass_at_k"),
    },
    "grpo-plugin-curriculum": {
        "sampler": ("chosen", "curriculum", "learnable", "learnable_prompts", "schedule")
    },
    "grpo-plugin-report": {"tracker": ("report",)},
    "grpo-plugin-scale": {"engine": ("pool",), "transport": ("collective", "cuda_ipc")},
    "grpo-plugin-smollm2": {"model": ("smollm2",)},
    "grpo-plugin-transferqueue": {"data_plane": ("transferqueue",)},
    **{
        f"'grpo-plugin-trackers[{name}]'": {"tracker": (name,)}
        for name in ("openmetrics", "tensorboard", "wandb")
    },
    **{f"grpo-plugin-{name.replace('_', '-')}": {"environment": (name,)} for name in ENVIRONMENTS},
    "grpo-plugin-judge": {"environment": ("compose", "judge")},
}
"""Offers, or their plugins, by pip's name of the distribution."""

INSTALL: Mapping[tuple[Kind, str], str] = {
    (kind, name): f"pip install {distribution}"
    for distribution, offers in OFFERED.items()
    for kind, names in offers.items()
    for name in names
}
"""By kind, and by an offer's name or its plugin's."""

KEYS: Mapping[str, str] = {
    "audit": "grpo-plugin-audit",
    "health.max_memory": "grpo-plugin-doctor",
    "model.lora": "grpo-plugin-scale 'grpo-core[lora]'",
    "shaping": "grpo-plugin-algorithms",
    "trainer.offload": "grpo-plugin-scale",
    "trainer.ranks": "grpo-plugin-scale",
    "trainer.weights": "grpo-plugin-scale",
}
"""The distributions to install for configuration keys and tables outside of the core."""

COMMANDS: Mapping[str, str] = {
    command: f"grpo-plugin-{plugin}"
    for plugin, commands in {
        "audit": ("audit", "score"),
        "devkit": ("check", "new", "try"),
        "doctor": ("doctor",),
        "replay": ("bisect", "fork", "replay", "simulate"),
        "report": ("explain", "report", "runs", "watch"),
    }.items()
    for command in commands
}
"""Our distributions of commands outside of the core."""


def install_command(kind: Kind, name: str) -> str:
    """The command for ``name``, as ``vllm`` or ``math:sort``; empty if unknown."""
    return INSTALL.get((kind, name)) or INSTALL.get((kind, name.partition(":")[0]), "")
