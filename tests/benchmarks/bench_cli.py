"""How long ``grpo-core --help`` takes, against a program of as many commands whose help Cyclopts writes.

That program makes the same imports, and its commands do nothing.

    python tests/benchmarks/bench_cli.py

``grpo-core plugins``, which imports all plugins, is shown without a limit.  The processes are started in
turns, so that whatever else the machine does meets all of them alike.
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
PEER = """
import pluggy, attrs, cyclopts
from importlib.metadata import entry_points
entry_points()
app = cyclopts.App(name="peer", help="Train a model.")
for number in range(24):
    app.command(lambda: None, name=f"command-{number}", help="Do one of the things that a program does.")
app(["--help"])
"""

ENVIRON = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
"""Modules are compiled once, as on a user's machine."""


def seconds(command: list[str]) -> float:
    begin = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=ENVIRON)
    return time.perf_counter() - begin


def main() -> None:
    program = str(Path(sys.executable).parent / "grpo-core")
    commands = {
        "peer --help": [sys.executable, "-c", PEER],
        "grpo-core --help": [program, "--help"],
        "grpo-core plugins": [program, "plugins"],
    }
    for command in commands.values():
        seconds(command)  # reads files into the cache and compiles
    times: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(ROUNDS):
        for name, command in commands.items():
            times[name].append(seconds(command))
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    for name, taken in medians.items():
        print(f"{name:<18} {taken * 1000:6.1f} ms")
    ratio = medians["grpo-core --help"] / medians["peer --help"]
    print(f"grpo-core --help / peer: {ratio:.2f}x, limit {LIMIT}x, {'ok' if ratio <= LIMIT else 'short'}")


if __name__ == "__main__":
    main()
