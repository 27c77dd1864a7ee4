"""TransferQueue as a data plane: tokens of finished rollouts wait in its storage units for their training.

TransferQueue itself is imported when a run starts that uses it.
"""

from __future__ import annotations

from collections.abc import Mapping

import grpo_core


@grpo_core.hookimpl
def grpo_data_planes() -> Mapping[str, str]:
    return {"transferqueue": "grpo_plugin_transferqueue.data_plane:TransferQueuePlane"}
