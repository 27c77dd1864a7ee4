"""The engine ``local``: decoding with this library's own decoder, on the CPU or one GPU."""

from __future__ import annotations

from grpo_core.engines.child import ChildEngine
from grpo_core.engines.transports import takes_weights_by
from grpo_core.records import EngineSetup


@takes_weights_by("shm", "cuda_ipc", "collective")
class LocalEngine(ChildEngine):
    """Decodes in a child process of its own (see ``ChildEngine`` and ``grpo_core.engines.local.server``).

    Args:
        device: "cpu", "cuda", or "auto".
        dtype: of weights and keys in the engine ("float32", "bfloat16"); "auto": as the trainer sends them.
        max_rows: requests decoded at once; the others wait in order (those for a single token go first).
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
