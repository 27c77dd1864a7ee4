"""The engine ``openai``: a hosted model behind OpenAI's chat API, for validation only."""

from __future__ import annotations

from collections.abc import Mapping

import grpo_core


@grpo_core.hookimpl
def grpo_engines() -> Mapping[str, grpo_core.EngineOffer]:
    return {
        "openai": grpo_core.EngineOffer(
            "grpo_plugin_openai.engine:OpenAIEngine", output="text", check="grpo_plugin_openai.engine:check"
        )
    }
