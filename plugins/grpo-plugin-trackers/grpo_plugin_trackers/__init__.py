"""Trackers that send a run's numbers elsewhere: ``tensorboard``, ``wandb``, ``trackio``, ``openmetrics``."""

import grpo_core as grpo


@grpo.hookimpl
def grpo_trackers() -> dict[str, str]:
    return {
        "tensorboard": "grpo_plugin_trackers.tensorboard:TensorBoard",
        "wandb": "grpo_plugin_trackers.weights_and_biases:WeightsAndBiases",
        "trackio": "grpo_plugin_trackers.trackio:Trackio",
        "openmetrics": "grpo_plugin_trackers.openmetrics:OpenMetrics",
    }
