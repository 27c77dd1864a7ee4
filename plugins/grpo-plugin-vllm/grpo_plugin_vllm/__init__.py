"""vLLM as an engine of grpo-core.

    vllm       in its own child process, on the CPU or on GPUs (``grpo_plugin_vllm.engine``)
    vllm:http  a vLLM server that runs already (``grpo_plugin_vllm.http``)

vLLM itself is imported in the child alone: with this plugin installed, grpo-core starts as fast as without.
"""

from __future__ import annotations

from collections.abc import Mapping

import grpo_core


@grpo_core.hookimpl
def grpo_engines() -> Mapping[str, str]:
    return {
        "vllm": "grpo_plugin_vllm.engine:VllmEngine",
        "http": "grpo_plugin_vllm.http:HttpEngine",
    }
