"""The trainer in each process: ranks and offloaded weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import evolve
from torch import Tensor

from grpo_core import ConfigError, StepResult, TrainerSetup, Weights
from grpo_core.kit import Model, ModelSource, Ranks, TorchTrainer
from grpo_core.training import plan
from grpo_core.training.passes import Passes
from grpo_plugin_scale.config import ScaledConfig, refuse_experts
from grpo_plugin_scale.training.resting import Resting


def create(setup: TrainerSetup) -> ScaledTrainer:
    """Factory for the child process."""
    refuse_experts(setup.section(ScaledConfig), setup.model.path)  # it may be a new download
    made = ScaledTrainer.in_child(setup)
    if setup.section(ScaledConfig).offload and made.device.type == "cpu":
        raise ConfigError(
            "trainer.offload moves weights from a GPU to the machine's memory, and this trainer is on a "
            "CPU, which has them there already; leave it out"
        )
    return made


class ScaledTrainer(TorchTrainer):
    """A ``TorchTrainer`` with sharding over several processes and offloading between steps.

    With the default keys of this plugin it behaves like ``TorchTrainer``.
    """

    def __init__(self, setup: TrainerSetup) -> None:
        self._resting = Resting()
        self._section = setup.section(ScaledConfig)
        super().__init__(setup)

    def place(self) -> torch.device:
        """Select the GPU of this rank, unless the configuration names one."""
        device = super().place()
        if not self._section.divides or device != torch.device("cuda"):
            return device
        return torch.device("cuda", 0 if torch.cuda.device_count() == 1 else self.setup.rank)

    def join(self, *, leaves: bool) -> Ranks:
        if not self._section.divides:
            return super().join(leaves=leaves)
        from grpo_plugin_scale.training.group import Group  # torch.distributed.tensor is slow to import

        return Group(
            self.setup.rank,
            self.setup.ranks,
            rendezvous=self.setup.rendezvous,
            device=self.device,
            seconds=self.setup.trainer.deadline,
            leaves=leaves,
        )

    def passes(self) -> Passes:
        return evolve(super().passes(), copies=self._section.weights == "bfloat16")

    def build(self, source: ModelSource) -> Model:
        if not self._section.divides:
            return super().build(source)
        from grpo_plugin_scale.training.sharded import ShardedModel

        return ShardedModel.build(source)

    # ------------------------------------------------------------------------------ weights that rest

    def train(self, share: plan.Share) -> StepResult:
        self._resting.come_back()
        return super().train(share)

    def publish(self, canary: Sequence[tuple[int, ...]] = ()) -> Weights:
        self._resting.come_back()
        weights = super().publish(canary)
        if self._section.offload:
            self._saving.settled()
            self._resting.leave([*self.model.weights(), *self.optimizers.tensors()])
            if self.device.type == "cuda":
                torch.cuda.empty_cache()  # frees memory for the engine on the same GPU
        return weights

    def readable(self, tensor: Tensor) -> Tensor:
        return self._resting.readable(tensor)
