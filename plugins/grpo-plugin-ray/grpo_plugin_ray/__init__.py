"""Engines, environments and a trainer in Ray actors, on a cluster or on this machine alone.

Tokens of finished rollouts can be in Ray's object store.

Scheduling is left to the pools of the core.  Ray is imported when a run connects, so that the plugin does not
slow down the start of grpo-core.
"""

from __future__ import annotations

from collections.abc import Mapping

import grpo_core

RAY = {"ray": "pip install 'grpo-core[ray]'"}


@grpo_core.hookimpl
def grpo_placements() -> Mapping[str, grpo_core.Offer]:
    placement = "grpo_plugin_ray.placement:RayPlacement"
    return {"ray": grpo_core.Offer(placement, requires=RAY, role="crosses_machines")}


@grpo_core.hookimpl
def grpo_trainers() -> Mapping[str, grpo_core.TrainerOffer]:
    return {
        "ray": grpo_core.TrainerOffer(
            "grpo_plugin_ray.trainer:ray_trainer",
            placement="ray",
            check="grpo_plugin_ray.trainer:check",
            workers="grpo_plugin_ray.trainer:ranks",
            scores=("start", "current", "ema", "model"),
        )
    }


@grpo_core.hookimpl
def grpo_data_planes() -> Mapping[str, grpo_core.Offer]:
    return {"ray": grpo_core.Offer("grpo_plugin_ray.data_plane:RayPlane", requires=RAY)}
