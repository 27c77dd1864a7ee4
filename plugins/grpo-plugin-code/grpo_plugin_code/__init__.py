"""Code of a model against tests, in a sandbox of the operating system: ``code:python``."""

import grpo_core as grpo


@grpo.hookimpl
def grpo_environments() -> dict[str, str]:
    return {"python": "grpo_plugin_code.python:PythonCode"}
