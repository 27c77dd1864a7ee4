"""vLLM as an engine of grpo-core.

    vllm       in a child process, on the CPU or on GPUs (``grpo_plugin_vllm.engine``)
    vllm:http  a running vLLM server (``grpo_plugin_vllm.http``)

vLLM is imported in the child process only, so that the plugin does not slow down the start of grpo-core.
"""

from __future__ import annotations

from collections.abc import Mapping

import grpo_core


@grpo_core.hookimpl
def grpo_engines() -> Mapping[str, grpo_core.EngineOffer]:
    return {
        "vllm": grpo_core.EngineOffer(
            "grpo_plugin_vllm.engine:VllmEngine",
            requires={"vllm": "pip install 'grpo-core[vllm]' (on a CPU, see docs/engines.md)"},
            check="grpo_plugin_vllm.options:check_run",
            memory="grpo_plugin_vllm.memory:memory",
            transports=("*",),
        ),
        "http": grpo_core.EngineOffer(
            "grpo_plugin_vllm.http:HttpEngine",
            workers="grpo_plugin_vllm.http:workers",
            transports=("shm", "collective"),
        ),
    }
