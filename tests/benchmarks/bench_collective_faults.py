"""Random faults of trainers and engines that exchange weights by ``collective``, in separate processes.

    python tests/benchmarks/bench_collective_faults.py [number of faults] [seed]

After each fault another engine, or the next trainer, must get whole weights, and the end that was hit by the
fault of the other must get a WeightSyncError, all within the fault's deadline.  Half of the faults are played
over a connection, half in groups of NCCL, for which ``fake_gpus`` stands in.  The processes have short time
limits: a trainer waits 0.3 s for an engine that still receives, an engine 2 s for its trainer.  Prints the
median and the longest time of each kind, and exits with an error if a deadline was exceeded.
"""

from __future__ import annotations

import json
import random
import signal
import socket
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path

from attrs import evolve

sys.path.insert(0, str(Path(__file__).parent.parent))
from ends import PATIENCE, RELEASE, SECONDS, Engine, Trainer, ends

from grpo_core.contracts.errors import WeightSyncError
from grpo_plugin_scale.weights.collective import SCHEME

SLACK = 5.0
"""Seconds for what the limits do not count: starts of processes and copies on a busy machine."""


class Watch:
    """The times of one fault."""

    def __init__(self):
        self.moment = ""

    def begin(self):
        self._began = time.perf_counter()

    def fails(self, answer):
        """Expect an error."""
        expect(isinstance(answer, WeightSyncError), f"an error, not {answer}")
        self.error = self.now()

    def now(self):
        return time.perf_counter() - self._began


def expect(holds, what):
    if not holds:
        raise AssertionError(f"expected {what}")


def engine_killed(watch, trainer, engine, other):
    first = trainer.write(1)
    expect(engine.read(first, watch.moment.replace("after", "")) in (watch.moment, 1), watch.moment)
    watch.begin()
    engine.kill()
    expect(other.read(first) == 1, "version 1 in the other engine")
    expect(other.read(trainer.write(2)) == 2, "version 2 in the other engine")


def engine_without_memory(watch, trainer, engine, other):
    first = trainer.write(1)
    watch.begin()
    watch.fails(engine.read(evolve(first, nbytes=1 << 60)))
    expect(engine.read(first) == 1, "version 1")
    expect(other.read(trainer.write(2)) == 2, "version 2 in the other engine")


def engine_stopped(watch, trainer, engine, other):
    first = trainer.write(1)
    expect(engine.read(first, watch.moment) == watch.moment, watch.moment)
    engine.signal(signal.SIGSTOP)
    watch.begin()
    expect(other.read(first) == 1, "version 1 in the other engine")
    second = trainer.write(2)
    expect(other.read(second) == 2, "version 2 in the other engine")
    engine.signal(signal.SIGCONT)
    engine.tell("go on")
    watch.fails(engine.hear())
    expect(engine.read(second) == 2, "version 2 in the engine that was stopped")


def trainer_killed(watch, trainer, engine, other):
    if watch.moment == "after":
        expect(engine.read(trainer.write(1)) == 1, "version 1")
        watch.begin()
        trainer.kill()
    else:
        engine.tell(trainer.write(1, watch.moment), "")
        expect(trainer.hear() == watch.moment, watch.moment)
        watch.begin()
        trainer.kill()
        watch.fails(engine.hear())
    with ends((Trainer, trainer.gpu)) as (following,):
        expect(engine.read(following.write(2)) == 2, "version 2 of the next trainer")


def trainer_stopped(watch, trainer, engine, other):
    engine.tell(trainer.write(1, watch.moment), "")
    expect(trainer.hear() == watch.moment, watch.moment)
    trainer.signal(signal.SIGSTOP)
    watch.begin()
    watch.fails(engine.hear())
    trainer.signal(signal.SIGCONT)
    with ends((Trainer, trainer.gpu)) as (following,):
        expect(engine.read(following.write(2)) == 2, "version 2 of the next trainer")


def stranger(watch, trainer, engine, other):
    first = trainer.write(1)
    host, port, secret, _ = json.loads(first.location.removeprefix(SCHEME))
    wrong = evolve(first, location=first.location.replace(secret, "0" * len(secret)))
    watch.begin()
    with socket.create_connection((host, port)) as connection:
        connection.sendall(SAID[watch.moment])
        watch.fails(engine.read(wrong))
        expect(engine.read(first) == 1, "version 1")
        expect(other.read(trainer.write(2)) == 2, "version 2 in the other engine")


SAID = {"says nothing": b"", "says {}": b"{}\n", "does not end": b"x" * 2000}
"""A stranger says this to the trainer, at the same time as an engine without the secret."""
FAULTS = {
    engine_killed: (("before", "during", "after"), PATIENCE + SLACK),
    engine_without_memory: (("",), PATIENCE + SLACK),
    engine_stopped: (("before", "during"), PATIENCE + RELEASE + SLACK),
    trainer_killed: (("before", "during", "after"), SLACK),
    trainer_stopped: (("before", "during"), SECONDS + SLACK),
    stranger: (tuple(SAID), SLACK),
}
"""Moments of each fault, and seconds in which all that follows from it has to be over."""


def main() -> int:
    count, seed = (*map(int, sys.argv[1:]), *(200, 0)[len(sys.argv) - 1 :])
    chance = random.Random(seed)
    ends_after, errors_after, failed = defaultdict(list), defaultdict(list), []
    for number in range(count):
        fault, (moments, deadline) = chance.choice(list(FAULTS.items()))
        there, here = chance.choice([(None, None), ("GPU-0", "GPU-1")])
        watch = Watch()
        watch.moment = chance.choice(moments)
        name = f"{fault.__name__.replace('_', ' ')}, {'NCCL' if here else 'connection'}, {watch.moment}"
        try:
            with ends((Trainer, there), (Engine, here), (Engine, here)) as processes:
                fault(watch, *processes)
                took = watch.now()
        except Exception as error:
            failed.append(f"fault {number}: {name}: {error!r}")
            continue
        ends_after[name].append(took)
        errors_after[name] += [watch.error] if hasattr(watch, "error") else []
        if took > deadline:
            failed.append(f"fault {number}: {name}: {took:.2f} s")
    print(f"{'median and longest time in seconds':40}      to the error    until all is well")
    for name, taken in sorted(ends_after.items()):
        print(f"{name:40} {len(taken):3d} {_times(errors_after[name])} {_times(taken)}")
    print("\n".join(failed[:10]))
    print(f"{f'faults of {count} that did not end well within their deadlines':60} {len(failed):10d}  <= 0")
    return int(bool(failed))


def _times(seconds):
    return f"{statistics.median(seconds):8.2f} {max(seconds):8.2f}" if seconds else " " * 17


if __name__ == "__main__":
    sys.exit(main())
