"""The offers of the core itself, as a plugin like any other."""

from __future__ import annotations

from collections.abc import Mapping

from grpo_core.contracts.hookspecs import EngineOffer, Offer, OptimizerOffer, TrainerOffer, hookimpl


@hookimpl
def grpo_dataloaders() -> Mapping[str, str]:
    return {"file:*": "grpo_core.data.files:file", "hub:*": "grpo_core.data.files:hub"}


@hookimpl
def grpo_players() -> Mapping[str, str]:
    return {"turns": "grpo_core.contracts.playing:turns"}


@hookimpl
def grpo_samplers() -> Mapping[str, str]:
    return {"mix": "grpo_core.data.samplers:Mix", "round_robin": "grpo_core.data.samplers:RoundRobin"}


@hookimpl
def grpo_validation_strategies() -> Mapping[str, str]:
    return {
        "batched": "grpo_core.validation.strategies:Batched",
        "pipelined": "grpo_core.validation.strategies:Pipelined",
        "greedy": "grpo_core.validation.strategies:Greedy",
    }


@hookimpl
def grpo_engines() -> Mapping[str, EngineOffer]:
    return {
        "local": EngineOffer(
            "grpo_core.engines.local.engine:LocalEngine",
            memory="grpo_core.engines.local.memory:memory",
            transports=("*",),
        )
    }


@hookimpl
def grpo_trainers() -> Mapping[str, TrainerOffer]:
    return {
        "torch": TrainerOffer(
            "grpo_core.training.process:ProcessTrainer",
            memory="grpo_core.training.memory:trainer_parts",
            scores=("start", "current", "ema", "model"),
        )
    }


@hookimpl
def grpo_trackers() -> Mapping[str, str]:
    return {
        "diagnosis": "grpo_core.diagnosis.replies:Diagnosis",
        "files": "grpo_core.reporting.files:FilesTracker",
        "terminal": "grpo_core.reporting.terminal:TerminalTracker",
    }


@hookimpl
def grpo_preflight() -> Mapping[str, str]:
    home = "grpo_core.diagnosis"
    return {
        "model": f"{home}.model_files:check_files",
        "spelling": f"{home}.first_look:spelling",
        "first_look": f"{home}.first_look:first_look",
        "leaks": f"{home}.first_look:leaks",
    }


@hookimpl
def grpo_losses() -> Mapping[str, str]:
    return {"grpo": "grpo_core.losses.clipped:grpo"}


@hookimpl
def grpo_advantages() -> Mapping[str, Offer]:
    home = "grpo_core.loop.rows"
    return {"group": Offer(f"{home}:group", check=f"{home}:check_group")}


@hookimpl
def grpo_optimizers() -> Mapping[str, OptimizerOffer]:
    home = "grpo_core.training.optimizers"
    return {
        "adamw": OptimizerOffer(
            f"{home}:adamw", check=f"{home}:check_eps", state=f"{home}:adamw_state", elementwise=True
        )
    }


@hookimpl
def grpo_filters() -> Mapping[str, Offer]:
    home = "grpo_core.loop.dynamic"
    return {"equal_rewards": Offer(f"{home}:equal_rewards", check=f"{home}:check_equal_rewards")}


@hookimpl
def grpo_placements() -> Mapping[str, str]:
    return {"local": "grpo_core.app.placement:LocalPlacement"}


@hookimpl
def grpo_transports() -> Mapping[str, str]:
    return {"shm": "grpo_core.plugins.transports:SHM"}


@hookimpl
def grpo_data_planes() -> Mapping[str, str]:
    return {"memory": "grpo_core.storage.planes:MemoryPlane"}


@hookimpl
def grpo_models() -> Mapping[str, str]:
    return {"tiny": "grpo_core.demo.source:TinyModel"}
