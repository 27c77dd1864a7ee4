"""Trackers for other tools: ``tensorboard``, ``wandb``, ``trackio`` and ``openmetrics``."""

import grpo_core as grpo


@grpo.hookimpl
def grpo_trackers() -> dict[str, grpo.Offer]:
    return {
        "tensorboard": grpo.Offer(
            "grpo_plugin_trackers.tensorboard:TensorBoard",
            requires={"tensorboard": "pip install 'grpo-plugin-trackers[tensorboard]'"},
        ),
        "wandb": grpo.Offer(
            "grpo_plugin_trackers.weights_and_biases:WeightsAndBiases",
            requires={"wandb": "pip install 'grpo-plugin-trackers[wandb]'"},
        ),
        "trackio": grpo.Offer(
            "grpo_plugin_trackers.trackio:Trackio", requires={"trackio": "pip install trackio"}
        ),
        "openmetrics": grpo.Offer(
            "grpo_plugin_trackers.openmetrics:OpenMetrics",
            requires={"prometheus_client": "pip install 'grpo-plugin-trackers[openmetrics]'"},
        ),
    }
