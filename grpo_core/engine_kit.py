"""The building blocks of an engine, in addition to ``grpo_core.Engine`` and the records.

    ChildEngine            an engine in its own child process, which is replaced when it dies
    DecodingServer         base class of what the child runs: takes calls between decoding steps
    read_weights           the tensors of published weights, wherever they are
    takes_weights_by       declares the transports by which an engine can take weights
    check_request          refuses requests that do not fit the model
    Connection, Call       the child's end of the pipe, for a server with its own loop
    die_with               ends this process when another one ends

``examples/custom_engine.py`` is a complete engine.  Check yours with ``grpo-core check ./file.py:MyEngine``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from grpo_core._lazy import attach

if TYPE_CHECKING:
    from grpo_core.engines.child import ChildEngine as ChildEngine
    from grpo_core.engines.decoding_server import DecodingServer as DecodingServer
    from grpo_core.engines.decoding_server import check_request as check_request
    from grpo_core.engines.transports import Transport as Transport
    from grpo_core.engines.transports import takes_weights_by as takes_weights_by
    from grpo_core.processes import Call as Call
    from grpo_core.processes import Connection as Connection
    from grpo_core.processes import die_with as die_with
    from grpo_core.weights.reading import read_weights as read_weights

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "grpo_core.engines.child": ["ChildEngine"],
        "grpo_core.engines.decoding_server": [
            "DecodingServer",
            "check_request",
        ],
        "grpo_core.engines.transports": [
            "Transport",
            "takes_weights_by",
        ],
        "grpo_core.processes": [
            "Call",
            "Connection",
            "die_with",
        ],
        "grpo_core.weights.reading": ["read_weights"],
    },
)
