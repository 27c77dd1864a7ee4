"""The crash matrix: each process of a real run x each fault x each moment, resumed where the run ended.

    python tests/benchmarks/bench_crash.py [process] [fault] [moment] ...

Processes: main, trainer, engine, environment.  Faults: SIGKILL, SIGSTOP (the main process continues after
three seconds, the others stay stopped until a deadline passes), SIGSEGV, and a limit of the address space, so
that no memory is left.  Moments: training, the writing of a checkpoint, a weight sync, a validation.  Each of
the 64 runs has 30 steps of 3 prompts with 4 rollouts, ``max_staleness`` 2, a validation every 5 steps and a
checkpoint every 3.  An independent checker (``tests/crashing.py``) then looks for prompts that were lost or
trained twice, tokens that are too old or too new, doubled metrics, damaged checkpoints, and processes
that are left.  Exits with an error if there is any.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from crashing import FAULTS, MOMENTS, PROCESSES, crash, make_model


def main() -> int:
    wanted = [word for word in sys.argv[1:] if not word.isdigit()]
    chosen = [
        [word for word in words if word in wanted] or list(words) for words in (PROCESSES, FAULTS, MOMENTS)
    ]
    unknown = set(wanted) - {*PROCESSES, *FAULTS, *MOMENTS}
    if unknown:
        print(f"unknown: {', '.join(sorted(unknown))}")
        return 2
    runs = bad = 0
    with tempfile.TemporaryDirectory(prefix="grpo-core-") as scratch:
        model = make_model(Path(scratch))
        for process, fault, moment in itertools.product(*chosen):
            directory = Path(scratch) / f"{process}-{fault}-{moment.replace(' ', '-')}"
            directory.mkdir()
            found = crash(directory, model, process, fault, moment)
            runs += 1
            bad += bool(found.problems)
            cells = process, fault, moment, found.outcome, f"{found.seconds:.1f} s", len(found.problems)
            print(f"| {' | '.join(map(str, cells))} |", flush=True)
            for problem in found.problems[:5]:
                print(f"    {problem}", flush=True)
    print(f"{'runs of the crash matrix with a violation':60} {bad:10d}  <= 0 of {runs}")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
