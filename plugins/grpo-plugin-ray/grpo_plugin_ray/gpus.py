"""Reserves the trainer's GPU on the driver's machine in Ray."""

from __future__ import annotations

import os
from typing import Any

from grpo_core import ConfigError
from grpo_plugin_ray.cluster import load

PATIENCE = 30.0
"""Time limit in seconds for Ray to grant a GPU, which is immediate if one is free."""


def gpus_here() -> int:
    """Return Ray's number of GPUs on this machine; 0 if it is not part of the cluster."""
    ray = load()
    if ray.util.client.ray.is_connected():
        return 0  # a client from outside of the cluster
    here = ray.get_runtime_context().get_node_id()
    return sum(int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["NodeID"] == here)


class Holder:
    """An actor that reserves a GPU for the trainer."""

    def visible(self) -> str:
        """Return Ray's value of ``CUDA_VISIBLE_DEVICES``."""
        return os.environ["CUDA_VISIBLE_DEVICES"]


class Reservation:
    """A GPU of this machine that Ray reserves while the driver is connected.

    Raises ConfigError if none is free.
    """

    def __init__(self) -> None:
        ray = load()
        strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=False
        )
        actor: Any = ray.remote(Holder)
        self._holder = actor.options(num_cpus=0, num_gpus=1, scheduling_strategy=strategy).remote()
        try:
            self.gpu: str = ray.get(self._holder.visible.remote(), timeout=PATIENCE)
        except ray.exceptions.GetTimeoutError:
            ray.kill(self._holder)
            raise ConfigError(
                f"the trainer needs a GPU of this machine, and Ray gave it none within {PATIENCE:g} s; the "
                f"cluster has {ray.available_resources()} free. End what uses the GPUs, or set "
                'trainer.device = "cpu"'
            ) from None

    def env_vars(self) -> dict[str, str]:
        """Return environment variables that make only this GPU visible."""
        return {"CUDA_VISIBLE_DEVICES": self.gpu}
