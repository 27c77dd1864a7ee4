"""Engines, environments and a trainer in Ray workers: actors on a cluster's machines, or on this one alone.

Tokens of finished rollouts can be in Ray's object store.

Nothing here decides who gets what: the pools of the core do.  Ray itself is imported when a run connects:
with this plugin installed, grpo-core starts as fast as without.
"""

from __future__ import annotations

from collections.abc import Mapping

import grpo_core


@grpo_core.hookimpl
def grpo_placements() -> Mapping[str, str]:
    return {"ray": "grpo_plugin_ray.placement:RayPlacement"}


@grpo_core.hookimpl
def grpo_trainers() -> Mapping[str, str]:
    return {"ray": "grpo_plugin_ray.trainer:RayTrainer"}


@grpo_core.hookimpl
def grpo_data_planes() -> Mapping[str, str]:
    return {"ray": "grpo_plugin_ray.data_plane:RayPlane"}
