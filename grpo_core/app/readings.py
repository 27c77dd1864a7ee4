"""Reads, after each step, the engines' own metrics and the memory of a run's processes."""

from __future__ import annotations

import contextlib
import os
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from grpo_core.contracts.protocols import Engine
from grpo_core.engines.wrapped import engine_metrics
from grpo_core.processes.child import descendants, living


def of_engines(engines: Mapping[str, Engine]) -> dict[str, float]:
    """Return the metrics of engines by their sections, as ``engine_NAME/ENGINE``.

    ENGINE is ``engine`` or ``validation_engine``; in a pool its number follows, such as ``engine_0``.
    """
    found: dict[str, float] = {}
    for section, engine in engines.items():
        of = section.replace(".", "_")
        for name, value in engine_metrics(engine).items():
            metric, _, member = name.partition("/")
            found[f"engine_{metric}/{of.removesuffix('engine')}{member or 'engine'}"] = value
    return found


def memory() -> dict[str, float]:
    """Return the resident memory in MiB of the run's processes on this machine, as ``memory/PROCESS``.

    A process includes its descendants, and processes of the same name are summed.  Shared memory counts for
    each process.  Empty without ``/proc``.
    """
    found: dict[str, float] = defaultdict(float)
    named = living()
    for pid, name in [(os.getpid(), "main"), *named.items()]:
        metric = "memory/" + re.sub(r"\W+", "_", name).strip("_")  # such as "environment_of_task_sort"
        for each in descendants(pid, named.keys() if name == "main" else ()):
            with contextlib.suppress(OSError, IndexError):  # it has ended
                pages = int(Path(f"/proc/{each}/statm").read_text().split()[1])
                found[metric] += pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    return {name: mib for name, mib in found.items() if mib}
