"""Publication of the weights by one process and by several ranks of a trainer on a CPU.

    python tests/benchmarks/bench_publication.py [--transport shm|collective] [RANKS ...]

Publishes a random model of 41 million parameters in float32, without training it.  For each number of
ranks: the bytes by which the memory of a rank grows at its peak (VmHWM of /proc/PID/status), in its first
publication and in a later one; the bytes that all ranks write to files and sockets in a publication (wchar
of /proc/PID/io), which is what they send each other; and the fastest of several publications, and of
several readings of all buckets, as an engine reads them.  The limit of a rank's growth is its part, 10%,
and the largest tensor.  Needs Linux.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

from bench_update_memory import MIB, make_model

from grpo_core.config import ModelConfig, TrainerConfig
from grpo_core.config.run import TrainerSetup
from grpo_core.processes.child import Child
from grpo_core.weights.reading import read_buckets
from grpo_plugin_scale.training.process import ScaledProcess, Together
from grpo_plugin_scale.weights import collective

sys.path.insert(0, str(Path(__file__).parents[1]))
from scaled import scaled

LAYERS, TIMES = 4, 7


def figure(path: str, name: str) -> int:
    """Return the number after a name in a file of /proc."""
    (line,) = (line for line in Path(path).read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1])


class Watch:
    """Measures the memory and the writes of some processes from now on."""

    def __init__(self, pids: list[int]) -> None:
        self._pids = pids
        for pid in pids:
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak begins anew
        self._before = [figure(f"/proc/{pid}/status", "VmRSS") for pid in pids]
        self._written = [figure(f"/proc/{pid}/io", "wchar") for pid in pids]

    def grown(self) -> int:
        """The bytes by which the memory of one of them has grown at its peak, at most."""
        peaks = [figure(f"/proc/{pid}/status", "VmHWM") for pid in self._pids]
        return max(peak - was for peak, was in zip(peaks, self._before, strict=True)) * 1024

    def written(self) -> int:
        """The bytes that all of them have written."""
        return sum(figure(f"/proc/{pid}/io", "wchar") for pid in self._pids) - sum(self._written)


async def measured(ranks: int, model: str, transport: str) -> dict[str, float]:
    trainer = ScaledProcess(
        TrainerSetup(
            model=ModelConfig(path=model, dtype="float32"),
            trainer=TrainerConfig(device="cpu", threads=1),
            sections=scaled(ranks=ranks),
            transport=transport,  # type: ignore[arg-type]
            plugins=("scale",),
        )
    )
    try:
        await trainer.started()
        processes = trainer.process.ranks if isinstance(trainer.process, Together) else [trainer.process]
        pids = [child.pid for child in processes if isinstance(child, Child)]
        watch = Watch(pids)
        weights = await trainer.publish()
        found: dict[str, float] = {"first": watch.grown()}
        watch = Watch(pids)
        weights = await trainer.publish()
        found |= {"later": watch.grown(), "sent": watch.written(), "nbytes": weights.nbytes}
        publishing, reading = [], []
        for _ in range(TIMES):
            began = time.perf_counter()
            weights = await trainer.publish()
            publishing.append(time.perf_counter() - began)
            began = time.perf_counter()
            for bucket in read_buckets(weights):
                del bucket
            reading.append(time.perf_counter() - began)
        return found | {"publishing": min(publishing), "reading": min(reading)}
    finally:
        await trainer.aclose()
        collective._hang_up()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("ranks", nargs="*", type=int, default=[1, 2, 4])
    parser.add_argument("--transport", choices=("shm", "collective"), default="shm")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = make_model(Path(scratch), LAYERS)
        largest = max(parameter.nbytes for parameter in model.parameters())
        for ranks in given.ranks:
            found = asyncio.run(measured(ranks, scratch, given.transport))
            limit = 1.1 * found["nbytes"] / ranks + largest
            verdict = "ok" if found["first"] <= limit else "above"
            print(
                f"{ranks} ranks, {given.transport}: {found['nbytes'] / MIB:.0f} MiB; a rank grows by "
                f"{found['first'] / MIB:.1f} MiB  limit {limit / MIB:.1f}  {verdict}; later by "
                f"{found['later'] / MIB:.1f} MiB; {found['sent'] / MIB:.3f} MiB are written; published in "
                f"{found['publishing']:.3f} s, read in {found['reading']:.3f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
