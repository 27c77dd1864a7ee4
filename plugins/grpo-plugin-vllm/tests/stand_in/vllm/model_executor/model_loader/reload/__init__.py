calls = []


def initialize_layerwise_reload(model):
    calls.append("initialize")


def finalize_layerwise_reload(model, model_config):
    calls.append("finalize")
