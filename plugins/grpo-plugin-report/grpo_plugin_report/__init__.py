"""Shows runs as pages, lists and diagnoses: ``report``, ``watch``, ``runs`` and ``explain``."""

from __future__ import annotations

from collections.abc import Mapping

from grpo_core import hookimpl


@hookimpl
def grpo_trackers() -> Mapping[str, str]:
    return {"report": "grpo_plugin_report.report:ReportTracker"}
