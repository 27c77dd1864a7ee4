"""The offers of the core itself, as a plugin like any other."""

from __future__ import annotations

from collections.abc import Mapping

from grpo_core.hookspecs import hookimpl


@hookimpl
def grpo_environments() -> Mapping[str, str]:
    return {
        "agent:*": "grpo_core.environments.program:AgentProgram",
        "compose": "grpo_core.environments.compose:Compose",
    }


@hookimpl
def grpo_players() -> Mapping[str, str]:
    return {"turns": "grpo_core.playing:turns"}


@hookimpl
def grpo_samplers() -> Mapping[str, str]:
    return {
        "mix": "grpo_core.data.samplers:Mix",
        "round_robin": "grpo_core.data.samplers:RoundRobin",
    }


@hookimpl
def grpo_validation_strategies() -> Mapping[str, str]:
    return {
        "batched": "grpo_core.validation.strategies:Batched",
        "pipelined": "grpo_core.validation.strategies:Pipelined",
        "greedy": "grpo_core.validation.strategies:Greedy",
    }


@hookimpl
def grpo_engines() -> Mapping[str, str]:
    return {"local": "grpo_core.engines.local.engine:LocalEngine"}


@hookimpl
def grpo_trainers() -> Mapping[str, str]:
    return {"torch": "grpo_core.training.process:ProcessTrainer"}


@hookimpl
def grpo_trackers() -> Mapping[str, str]:
    return {
        "files": "grpo_core.reporting.files:FilesTracker",
        "terminal": "grpo_core.reporting.terminal:TerminalTracker",
    }


@hookimpl
def grpo_losses() -> Mapping[str, str]:
    return {"grpo": "grpo_core.losses.named:grpo"}


@hookimpl
def grpo_advantages() -> Mapping[str, str]:
    return {"group": "grpo_core.loop.advantages:group"}


@hookimpl
def grpo_optimizers() -> Mapping[str, str]:
    return {"adamw": "grpo_core.training.optimizers:adamw"}


@hookimpl
def grpo_filters() -> Mapping[str, str]:
    return {
        "equal_rewards": "grpo_core.loop.filters:equal_rewards",
        "pass_rate": "grpo_core.loop.filters:pass_rate",
        "mean_length": "grpo_core.loop.filters:mean_length",
    }


@hookimpl
def grpo_placements() -> Mapping[str, str]:
    return {"local": "grpo_core.app.placement:LocalPlacement"}


@hookimpl
def grpo_data_planes() -> Mapping[str, str]:
    return {"memory": "grpo_core.planes:MemoryPlane"}


@hookimpl
def grpo_models() -> Mapping[str, str]:
    return {"tiny": "grpo_core.demo.source:TinyModel"}
