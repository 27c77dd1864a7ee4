"""Shows runs as pages, lists and diagnoses: ``report``, ``watch``, ``runs`` and ``explain``."""

from __future__ import annotations

from collections.abc import Mapping

from grpo_core import Offer, hookimpl


@hookimpl
def grpo_trackers() -> Mapping[str, Offer]:
    return {"report": Offer("grpo_plugin_report.report:ReportTracker", role="is_default")}
