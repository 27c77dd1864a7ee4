"""The engine ``local``: decoding with this library's own decoder, on the CPU or one GPU."""

from __future__ import annotations

from grpo_core.contracts.records import EngineSetup
from grpo_core.engines.child import ChildEngine


class LocalEngine(ChildEngine):
    """Decodes with grpo-core's own decoder in a child process, on the CPU or one GPU.

    Args:
        device: "cpu", "cuda", or "auto": a GPU if there is one.
        dtype: type of weights, keys and values: "float32", "bfloat16", or "auto" for the trainer's type.
        max_rows: requests decoded at once.  The others wait in order; requests for one token go first.
    """

    def __init__(
        self, setup: EngineSetup, *, device: str = "auto", dtype: str = "auto", max_rows: int = 512
    ) -> None:
        super().__init__(
            setup,
            name="local",
            server="grpo_core.engines.local.server:Server",
            options={"device": device, "dtype": dtype, "max_rows": max_rows},
        )

    async def sampled(self) -> list[list[int]]:
        """Return the tokens that each running request has so far."""
        return await self.ask("sampled") or []
