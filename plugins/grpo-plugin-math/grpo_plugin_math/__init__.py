"""Environments with exact answers: exercises that a tiny model learns in minutes, and GSM8K."""

import grpo_core as grpo


@grpo.hookimpl
def grpo_environments() -> dict[str, str]:
    names = ("copy", "reverse", "sort", "maximum", "addition", "subtraction", "modulo")
    exercises = {name: f"grpo_plugin_math.exercises:{name}" for name in names}
    return {
        **exercises,
        "gsm8k": "grpo_plugin_math.gsm8k:GSM8K",
        "arrivals": "grpo_plugin_math.arrivals:Arrivals",
        "calculator": "grpo_plugin_math.calculator:Calculator",
    }
