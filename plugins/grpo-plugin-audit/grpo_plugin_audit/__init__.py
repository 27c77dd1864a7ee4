"""Audits of rewards, a second environment that checks successes during a run, and rescoring of rollouts."""

from __future__ import annotations

from collections.abc import Mapping

from grpo_core import hookimpl


@hookimpl
def grpo_config_sections() -> Mapping[str, object]:
    from grpo_plugin_audit.section import AuditConfig  # not for each command's help

    return {"audit": AuditConfig | None}


@hookimpl
def grpo_preflight() -> Mapping[str, str]:
    return {"second_opinion": "grpo_plugin_audit.opinion:checked"}


@hookimpl
def grpo_trackers() -> Mapping[str, str]:
    return {"audit": "grpo_plugin_audit.opinion:SecondOpinion"}
