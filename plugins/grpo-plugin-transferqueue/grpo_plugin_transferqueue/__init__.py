"""TransferQueue as a data plane: stores tokens of finished rollouts until their training.

TransferQueue is imported when a run uses it.
"""

from __future__ import annotations

from collections.abc import Mapping

import grpo_core

INSTALL = "pip install TransferQueue==0.1.11"
"""Command that installs the tested release."""


@grpo_core.hookimpl
def grpo_data_planes() -> Mapping[str, grpo_core.Offer]:
    return {
        "transferqueue": grpo_core.Offer(
            "grpo_plugin_transferqueue.data_plane:TransferQueuePlane", requires={"transfer_queue": INSTALL}
        )
    }
