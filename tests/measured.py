"""A plugin file whose engine measures something, which has to be in the metrics of a run."""

MEASURED = """
import grpo_core
from grpo_core.engines.local.engine import LocalEngine

class Measured(LocalEngine):
    def metrics(self):
        return {"cache_use": 0.5}

@grpo_core.hookimpl
def grpo_engines():
    return {"measured": Measured}
"""
