from types import SimpleNamespace


def LoRARequest(name, number, path, load_inplace=False):  # noqa: N802 - vLLM's name
    return SimpleNamespace(path=path)
