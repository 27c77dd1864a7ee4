"""TransferQueue as a data plane: tokens of finished rollouts wait in its storage units for their training.

TransferQueue itself is imported when a run starts that uses it.
"""

from __future__ import annotations

from collections.abc import Mapping

import grpo_core

INSTALL = "pip install TransferQueue==0.1.11"
"""The command for the release that the tests run."""


@grpo_core.hookimpl
def grpo_data_planes() -> Mapping[str, grpo_core.Offer]:
    return {
        "transferqueue": grpo_core.Offer(
            "grpo_plugin_transferqueue.data_plane:TransferQueuePlane", requires={"transfer_queue": INSTALL}
        )
    }
