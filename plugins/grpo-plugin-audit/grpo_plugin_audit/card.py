"""The quality card of an environment: the findings of an audit as JSON."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import field, frozen

from grpo_core import __version__
from grpo_plugin_audit.records import Finding, Severity

SCHEMA = "2"
"""Version of the report's schema: that of OpenEnv's RFC 008 (``report-v2.schema.json`` of openenv 0.10)."""
STATUS: Mapping[Severity, str] = {
    "failed": "fail",
    "warned": "fail",
    "noted": "pass",
    "passed": "pass",
    "not applicable": "skip",
}
"""The grader's finding in that schema, in which a policy says how severe a failure is."""


@frozen(kw_only=True)
class Card:
    """The findings of an audit.

    Attributes:
        name: name of the environment, as it was given.
        offer: description of the plugin's offer.
        options: options of the environment.
        seconds: time of the whole audit.
        code: hashes of the files that the audit played: the environment's package, and those it names.
    """

    name: str
    offer: str
    options: Mapping[str, Any]
    findings: Sequence[Finding]
    seconds: float
    code: Mapping[str, str] = field(factory=dict)

    @property
    def verdict(self) -> str:
        """Return "fail", "warn" or "pass"."""
        severities = {finding.severity for finding in self.findings}
        return "fail" if "failed" in severities else "warn" if "warned" in severities else "pass"

    def report(self) -> dict[str, Any]:
        """Return the card as the report of RFC 008.

        ``results`` have exactly its fields; ours are among the measured values.  ``signature`` names our kind
        of package, which its list of kinds lacks, and there is no manifest.  The digest covers options and
        code.
        """
        return {
            "report_schema_version": SCHEMA,
            "target": self.name,
            "source_digest": hashlib.sha256(
                json.dumps(
                    [self.offer, dict(self.options), sorted(self.code.values())], sort_keys=True, default=str
                ).encode()
            ).hexdigest(),
            "signature": "grpo-core",
            "manifest": None,
            "policy_version": f"grpo-core {__version__}",
            "lane": "local",
            "levels_run": [2, 3, 4],
            "results": [_result(finding) for finding in self.findings],
            "verdict": self.verdict,
        }

    def write_json(self, path: Path) -> None:
        path.write_text(json.dumps(self.report(), indent=2, default=str) + "\n", encoding="utf-8")


def _result(finding: Finding) -> dict[str, Any]:
    told = [finding.told] + ([finding.evidence] if finding.evidence else [])
    return {
        "check_id": finding.check,
        "status": STATUS[finding.severity],
        "measured": {"severity": finding.severity, "title": finding.title, **finding.measured},
        "evidence": told,
        "remediation": finding.advice or None,
        "duration_s": round(finding.seconds, 6),
    }
