"""Shows runs as pages, lists and diagnoses: ``report``, ``watch``, ``runs`` and ``explain``."""

from __future__ import annotations

from collections.abc import Mapping

from grpo_core import Offer, hookimpl


@hookimpl
def grpo_config_sections() -> Mapping[str, object]:
    from grpo_plugin_report.config import Cost  # not for each command's help

    return {"cost": Cost | None}


@hookimpl
def grpo_trackers() -> Mapping[str, Offer | str]:
    return {
        "report": Offer("grpo_plugin_report.report:ReportTracker", role="is_default"),
        "cost": "grpo_plugin_report.cost:CostTracker",
    }
