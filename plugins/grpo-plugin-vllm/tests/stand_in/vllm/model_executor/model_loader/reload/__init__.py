from .layerwise import get_layerwise_info

calls = []
collected = []
"""Layers whose tensors wait until all are there, as vLLM's wrapped loaders have them."""


def initialize_layerwise_reload(model):
    calls.append("initialize")
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if not info.can_load():
            info.load_numel_total = 1
            collected.append(type(layer).__name__)


def finalize_layerwise_reload(model, model_config):
    calls.append("finalize")
    for layer in model.modules():
        get_layerwise_info(layer).reset()
