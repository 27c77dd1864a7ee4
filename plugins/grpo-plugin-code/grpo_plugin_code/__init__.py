"""Environments that run a model's code in a sandbox: ``code:python``, ``code:shell``, ``code:harbor:DIR``."""

import grpo_core as grpo


@grpo.hookimpl
def grpo_environments() -> dict[str, str]:
    return {
        "python": "grpo_plugin_code.python:PythonCode",
        "shell": "grpo_plugin_code.shell:ShellTask",
        "harbor:*": "grpo_plugin_code.harbor:Harbor",
    }
