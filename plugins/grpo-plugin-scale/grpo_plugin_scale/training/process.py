"""The trainer ``torch`` of this plugin, in front of its process."""

from __future__ import annotations

from grpo_core.kit import ProcessTrainer


class ScaledProcess(ProcessTrainer):
    """A ``ScaledTrainer`` in a child process, or in one for each rank."""

    target = "grpo_plugin_scale.training.trainer:create"
