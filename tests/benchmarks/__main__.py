"""All benchmarks, one after the other; each prints a line for every figure: name, value, limit, feedback."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

HERE = Path(__file__).parent
APART = {
    "bench_peers",  # these need environments of their own; the first one is ``make bench-peers``
    "bench_nemo_gym",
    "bench_openenv",
    "bench_learning",  # these train for hours, into a file that has to be named
    "bench_selection",
}
"""Benchmarks that are run by themselves, since they need an argument."""


def main() -> int:
    """Returns how many ended with an error."""
    words = sys.argv[1:]
    numbers = [word for word in words if word.isdigit()]  # for the one that is named and takes some
    wanted, failed = set(words) - set(numbers), 0
    for path in sorted(HERE.glob("bench_*.py")):
        if path.stem not in APART and (not wanted or path.stem.removeprefix("bench_") in wanted):
            print(f"\n{path.stem}", flush=True)
            sys.argv = [str(path), *numbers]
            try:
                runpy.run_path(str(path), run_name="__main__")
            except SystemExit as end:
                failed += end.code not in (None, 0)
    return failed


if __name__ == "__main__":
    sys.exit(main())
