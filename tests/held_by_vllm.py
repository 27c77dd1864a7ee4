"""The engine ``vllm`` that writes down what it was sent, in the dtype that it holds."""

from __future__ import annotations

from held import write_down

from grpo_core import EngineSetup, Weights
from grpo_plugin_vllm.engine import VllmEngine


class Recorded(VllmEngine):
    """The engine ``vllm`` on the CPU, with a log."""

    def __init__(self, setup: EngineSetup, *, log: str, dtype: str = "auto") -> None:
        super().__init__(setup, device="cpu", dtype=dtype, max_rows=16, cache_mib=64)
        self.log, self.held = log, dtype

    async def update_weights(self, weights: Weights) -> None:
        await super().update_weights(weights)
        write_down(self.log, weights, self.held)
