"""Opening a source of millions of rows: seconds, and the memory that it takes.

    python tests/benchmarks/bench_sources.py [--rows 5000000] [--formats jsonl csv parquet]

Writes a file of each format into a temporary directory and opens it in a process of its own, as a run does:
each row is read once and made a prompt.  Then it draws 1,000 rows by chance, and looks for near duplicates of
500 held-out prompts.  Prints the process's peak of private memory over what it took before, which does not
count the mapped file: the system takes that memory back when it likes.  The peak of all resident memory, with
the libraries, counts it.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

DRAWN, HELD_OUT = 1000, 500
LIMIT_MIB = 1024
"""Largest private memory of a source, in MiB, with any number of rows up to 5,000,000."""


def row(place: int) -> dict[str, str]:
    """Return an exercise of about 110 characters."""
    first, second = place * 7919 % 9973, place // 9973
    question = (
        f"Exercise {place}: a train goes {first} km on one day and {second} km on the next. How far in all?"
    )
    return {"question": question, "answer": str(first + second)}


def write(path: Path, rows: int) -> None:
    """Write a file in the format of its suffix, a part at a time."""
    if path.suffix == ".jsonl":
        with open(path, "w") as file:
            file.writelines(json.dumps(row(place)) + "\n" for place in range(rows))
        return
    import pyarrow
    import pyarrow.csv
    import pyarrow.parquet

    schema = pyarrow.schema([("question", pyarrow.string()), ("answer", pyarrow.string())])
    writer = pyarrow.csv.CSVWriter if path.suffix == ".csv" else pyarrow.parquet.ParquetWriter
    with writer(str(path), schema) as file:
        for begin in range(0, rows, 100_000):
            part = [row(place) for place in range(begin, min(begin + 100_000, rows))]
            file.write_table(pyarrow.Table.from_pylist(part, schema=schema))


def private_mib() -> float:
    """Return the memory of this process that no file backs."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024


class Peak:
    """The highest private memory while the block runs, looked at 50 times a second."""

    def __enter__(self) -> Peak:
        self.before = self.most = private_mib()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._over.wait(0.02):
            self.most = max(self.most, private_mib())

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self.most = max(self.most, private_mib())


def open_one(path: str) -> None:
    """Print the figures of a file, in the process that opens it."""
    import numpy as np  # noqa: F401  what a run has loaded before

    from grpo_core.config import RowOptions, ValidationConfig
    from grpo_core.contracts.records import Prompt
    from grpo_core.data.files import file
    from grpo_core.data.rows import ReadRows, RowReader
    from grpo_core.diagnosis.first_look import leaks
    from grpo_core.validation.runner import HeldOut

    if not path.endswith(".jsonl"):
        import pyarrow.csv
        import pyarrow.parquet  # noqa: F401  libraries are no memory of the rows

    begin, computing = time.perf_counter(), time.process_time()
    with Peak() as peak:
        rows = file(Path(path), "train")
        source = ReadRows(rows, RowReader("sums", path, RowOptions()))
        opened, computed = time.perf_counter() - begin, time.process_time() - computing
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    chance, begin = random.Random(0), time.perf_counter()
    for _ in range(DRAWN):
        source[chance.randrange(len(source))]
    drawn = (time.perf_counter() - begin) / DRAWN
    held_out = [Prompt(messages=row(-place)["question"], id=str(place)) for place in range(1, HELD_OUT + 1)]
    config = ValidationConfig(prompts=HELD_OUT)
    begin = time.perf_counter()
    found = leaks(
        {"sums": source}, [HeldOut(name="", config=config, prompts={"sums": held_out}, environments={})]
    )
    compared = time.perf_counter() - begin
    print(
        json.dumps(
            {
                "rows": len(source),
                "opened_s": opened,
                "computed_s": computed,
                "resident": resident,
                "mib": peak.most - peak.before,
                "drawn_us": drawn * 1e6,
                "compared_s": compared,
                "warnings": len(found),
            }
        )
    )


def measured(folder: Path, suffix: str, rows: int) -> Iterator[str]:
    """Yield the line of a format; raise SystemExit if it takes too much memory."""
    path = folder / f"rows.{suffix}"
    write(path, rows)
    command = [sys.executable, __file__, "--open", str(path)]
    told = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    yield (
        f"{suffix:8} {told['rows']:>10,} rows  {path.stat().st_size / 2**20:6.0f} MiB on disk  opened in "
        f"{told['opened_s']:6.1f} s, {told['computed_s']:6.1f} s of computing  private memory "
        f"{told['mib']:5.0f} MiB (limit {LIMIT_MIB}), resident {told['resident']:5.0f} MiB  a row "
        f"drawn in {told['drawn_us']:4.0f} us  duplicates looked for in {told['compared_s']:4.1f} s"
    )
    path.unlink()
    if told["mib"] > LIMIT_MIB:
        raise SystemExit(f"{suffix}: {told['mib']:.0f} MiB, more than {LIMIT_MIB}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=5_000_000)
    parser.add_argument("--formats", nargs="+", default=["jsonl", "csv", "parquet"])
    parser.add_argument("--open", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.open:
        open_one(given.open)
        return
    with tempfile.TemporaryDirectory() as folder:
        for suffix in given.formats:
            for line in measured(Path(folder), suffix, given.rows):
                print(line, flush=True)


if __name__ == "__main__":
    main()
