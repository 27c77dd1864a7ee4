"""``grpo-core audit`` against the ground truth: planted defects that it finds, and false alarms.

    python tests/benchmarks/bench_audit.py [RUNS] [clean] [here]

Each defect of ``tests/planted.py`` is planted in three environments and audited as the command does it, in a
process of its own.  A defect is found if a check that names its class fails or warns.  The clean environments
are audited RUNS times (10 by default), each time with another seed; whatever fails or warns then is an alarm.
With the word "clean", only they are.  With the word "here", environments run in this process, which is
several times as quick.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median

from grpo_core.plugins.host import PluginHost
from grpo_core.testing import HostedEnvironment
from grpo_plugin_audit.audit import Audit, Extent
from grpo_plugin_audit.command import findings
from grpo_plugin_audit.records import Finding, Rate

HERE = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(HERE))
from planted import CLEAN, DEFECTS, planted  # noqa: E402

RECALL, ALARMS, SECONDS = 0.95, 0.02, 60.0
"""Limits: found defects, alarms about clean environments, seconds of an audit."""
BATCH = 256
"""Episodes of the largest call, as in a default run."""


async def audit(
    base: str, defect: str | None, seed: int, *, here: bool = False
) -> tuple[list[Finding], float]:
    """Return the findings about an environment, and the seconds that they took."""
    if here:
        begin = time.monotonic()
        run = Audit(lambda: HostedEnvironment(planted(base, defect)), BATCH, Extent(seed=seed)).run()
        return [each async for each in run], time.monotonic() - begin
    host = PluginHost.discover()
    name = f"{HERE / 'planted.py'}:planted"
    options = {"base": base} | ({} if defect is None else {"defect": defect})
    begin = time.monotonic()
    found = [each async for each in findings(host, name, options, Extent(seed=seed))]
    return found, time.monotonic() - begin


def severe(found: list[Finding]) -> set[str]:
    return {each.check for each in found if each.severity in ("failed", "warned")}


def main(runs: int, *, only_clean: bool, here: bool) -> bool:
    """Print the figures; return whether all are within their limits."""
    seconds: list[float] = []
    hits: dict[str, list[bool]] = defaultdict(list)
    for name, (_, bases, checks) in () if only_clean else DEFECTS.items():
        for base in bases:
            found, took = asyncio.run(audit(base, name, 0, here=here))
            seconds.append(took)
            hits[name].append(bool(severe(found) & checks))
            if not hits[name][-1]:
                print(f"missed: {name} in {base}; told instead: {', '.join(sorted(severe(found))) or '-'}")
        print(f"{name:28} {sum(hits[name])} of {len(hits[name])}", flush=True)
    checks_made = alarms = alarmed = 0
    for base in CLEAN:
        for seed in range(runs):
            found, took = asyncio.run(audit(base, None, seed, here=here))
            seconds.append(took)
            checks_made += len(found)
            alarms += len(severe(found))
            alarmed += bool(severe(found))
            if severe(found):
                print(f"alarm: {base}, seed {seed}: {', '.join(sorted(severe(found)))}", flush=True)
    recall = Rate(sum(map(sum, hits.values())), sum(map(len, hits.values())))
    false = Rate(alarmed, runs * len(CLEAN))
    if not only_clean:
        print(f"found defects                {recall}, limit {RECALL:.0%}")
    print(f"clean audits with an alarm   {false}, limit {ALARMS:.0%}; {alarms} of {checks_made} checks")
    took = f"median {median(seconds):.1f}, most {max(seconds):.1f}"
    print(f"seconds of an audit          {took}, limit {SECONDS:.0f}")
    return (only_clean or recall.share >= RECALL) and false.share <= ALARMS and max(seconds) <= SECONDS


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        words = sys.argv[1:]
        runs = next((int(word) for word in words if word.isdigit()), 10)
        sys.exit(not main(runs, only_clean="clean" in words, here="here" in words))
