"""The model source ``smollm2``: SmolLM2-135M-Instruct from a wheel on the package index, without a hub."""

import grpo_core as grpo


@grpo.hookimpl
def grpo_models() -> dict[str, str]:
    return {"smollm2": "grpo_plugin_smollm2.source:SmolLM2"}
