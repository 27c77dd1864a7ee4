"""All benchmarks, one after the other; each prints a line for every figure: name, value, limit, verdict."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

HERE = Path(__file__).parent
PEERS = {"bench_peers"}
"""Need an environment of their own: ``make bench-peers``."""


def main() -> None:
    wanted = set(sys.argv[1:])
    for path in sorted(HERE.glob("bench_*.py")):
        if path.stem not in PEERS and (not wanted or path.stem.removeprefix("bench_") in wanted):
            print(f"\n{path.stem}", flush=True)
            runpy.run_path(str(path), run_name="__main__")


if __name__ == "__main__":
    main()
