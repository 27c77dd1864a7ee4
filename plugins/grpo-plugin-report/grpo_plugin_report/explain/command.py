"""The command ``grpo-core explain``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import attrs

from grpo_core import ConfigError, Run
from grpo_core.commands.complaints import complain, say
from grpo_core.plugins.options import AsJson
from grpo_plugin_report.explain.causes import Finding
from grpo_plugin_report.explain.decisions import CAUSES, explained
from grpo_plugin_report.explain.facts import Facts

PAGE = "https://github.com/grpo-core/grpo-core/blob/main/docs/explain.md"
SHOWN = 3
"""Number of causes to print."""


def explain(run: Path, /, *, as_json: AsJson = False) -> int:
    """Say what is wrong with a run: the likeliest causes, each with its evidence and a fix.

    The exit status is 0 also if a cause is found; it is 2 if the directory is not a run.

    Parameters
    ----------
    run
        Directory of a run that has ended, was killed, or is running.
    as_json
        Print all causes that were found as JSON.
    """
    facts = Facts.read(Run(run, strict=False))
    if facts.is_empty:
        raise ConfigError(
            f"{run}: nothing to explain:  {' and '.join(facts.missing) or 'its other files'} "
            f"{'is' if len(facts.missing) == 1 else 'are'} missing, empty or damaged"
        )
    found = explained(facts)
    if as_json:
        table = {
            "run": str(facts.path),
            "steps": facts.steps,
            "findings": [attrs.asdict(finding) for finding in found],
            "looked_for": list(CAUSES),
            "notes": _notes(facts),
        }
        print(json.dumps(table, indent=2))
        return 0
    for note in _notes(facts):
        complain(f"note: {note}")
    say(_text(facts, found))
    return 0


def _text(facts: Facts, found: Sequence[Finding]) -> str:
    if not found:
        return (
            f"{facts.path}: nothing found in {facts.steps} steps; {len(CAUSES)} causes were checked, which "
            f"{PAGE} lists"
        )
    parts = []
    for index, finding in enumerate(found[:SHOWN], 1):
        evidence = "\n".join(f"     - {line}" for line in finding.evidence)
        parts.append(f"{index}. {finding.title} ({finding.cause})\n{evidence}\n     fix: {finding.fix}")
    if (more := len(found) - SHOWN) > 0:
        others = ", ".join(finding.cause for finding in found[SHOWN:])
        parts.append(f"{more} more: {others} (--json shows all)")
    return "\n\n".join(parts)


def _notes(facts: Facts) -> list[str]:
    """Return notes about missing and damaged files."""
    notes = [f"{name} is missing: its facts were not checked" for name in facts.missing]
    notes += [
        f"{count} line{'s' * (count > 1)} of {name} cannot be read" for name, count in facts.damaged.items()
    ]
    if facts.resumed_at:
        notes.append(f"it was continued at step {facts.resumed_at}: earlier numbers have earlier settings")
    if facts.running:
        notes.append("the run is still running: its files will change")
    return notes
