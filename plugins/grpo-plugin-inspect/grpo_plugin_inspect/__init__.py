"""Tasks of Inspect as environments: ``inspect:my_evals@sums`` or ``inspect:./my_eval.py@sums``."""

import grpo_core as grpo


@grpo.hookimpl
def grpo_environments() -> dict[str, str]:
    return {"*": "grpo_plugin_inspect.environment:InspectTask"}
