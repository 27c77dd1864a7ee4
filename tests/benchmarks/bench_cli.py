"""How long the short commands take, against importing what they cannot do without in the same Python.

    python tests/benchmarks/bench_cli.py

Prints one line per figure: name, value, limit, ok or short.  The processes are started in turns, so that
whatever else the machine does meets all of them alike.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROUNDS = 15
LIMIT = 1.3
BARE = "import pluggy, attrs, cyclopts; from importlib.metadata import entry_points; entry_points()"


ENVIRON = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
"""Modules are compiled once, as on a user's machine."""


def seconds(command: list[str]) -> float:
    begin = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=ENVIRON)
    return time.perf_counter() - begin


def main() -> None:
    program = str(Path(sys.executable).parent / "grpo-core")
    commands = {
        "bare": [sys.executable, "-c", BARE],
        "grpo-core --help": [program, "--help"],
        "grpo-core plugins": [program, "plugins"],
    }
    for command in commands.values():
        seconds(command)  # reads files into the cache and compiles
    times: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(ROUNDS):
        for name, command in commands.items():
            times[name].append(seconds(command))
    bare = statistics.median(times.pop("bare"))
    print(f"bare imports            {bare * 1000:6.1f} ms")
    for name, taken in times.items():
        ratio = statistics.median(taken) / bare
        feedback = "ok" if ratio <= LIMIT else "short"
        print(
            f"{name:<22}  {statistics.median(taken) * 1000:6.1f} ms  {ratio:.2f}x  limit {LIMIT}x  {feedback}"
        )


if __name__ == "__main__":
    main()
