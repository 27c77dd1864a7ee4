"""Measures what a data plane costs and saves the process of a run: bytes, memory and CPU for each rollout.

    python tests/benchmarks/bench_plane.py [GROUPS]

A group has 8 rollouts, of one segment or of four with an advantage each: a later segment begins with all that
came before it.  "sent" is the call that gives a step to a trainer of one rank.  "held" is what a
rollout that waits to be trained takes in the process of the run.  "CPU" is that of ``put`` in that process.
With Ray installed, the same is measured with a cluster of this machine; with TransferQueue, too.
"""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import os
import pickle
import sys
import time
import tracemalloc
from collections.abc import Sequence

import numpy as np
from attrs import evolve

from grpo_core.app.placement import Placement
from grpo_core.contracts.protocols import DataPlane
from grpo_core.contracts.records import Group, Prompt, Rollout, Segment
from grpo_core.contracts.tokens import Tokens, as_ids
from grpo_core.loop.rows import make_batch
from grpo_core.plugins.host import PluginHost
from grpo_core.processes.served import Call

GROUPS, GROUP = 40, 8
LENGTHS = (1024, 4096, 16384)
SEGMENTS = (1, 4)
GROWTH = 1.02
"""Largest ratio of the bytes sent for the longest rollouts to those for the shortest."""


def main() -> int:
    given = [int(word) for word in sys.argv[1:] if word.isdigit()]
    groups = given[0] if given else GROUPS
    failed = asyncio.run(measure("memory", "local", groups, limit=None))
    if installed("ray", "grpo_plugin_ray"):
        failed += asyncio.run(measure("ray", "ray", groups, limit=GROWTH))
        if installed("transfer_queue", "grpo_plugin_transferqueue"):
            failed += asyncio.run(measure("transferqueue", "ray", groups, limit=GROWTH))
    return failed


def installed(*modules: str) -> bool:
    return all(importlib.util.find_spec(module) is not None for module in modules)


async def measure(name: str, where: str, groups: int, *, limit: float | None) -> int:
    """Print the figures of a plane; return how many miss their limits."""
    host = PluginHost.discover()
    placement: Placement = host.make("placement", where, host)
    plane: DataPlane = host.make("data_plane", name, placement)
    missed = 0
    with placement.connected(os.cpu_count() or 1):
        await plane.started()
        try:
            await plane.put(group(8))
            for segments in SEGMENTS:
                sizes: dict[int, float] = {}
                for length in LENGTHS:
                    sizes[length], held, seconds = await cost(plane, length, groups, segments)
                    print(
                        f"{name:13} {length:6,} tokens in {segments}: {sizes[length]:9,.0f} bytes sent, "
                        f"{held:9,.0f} held, {seconds * 1e6:6.0f} us of CPU for a rollout",
                        flush=True,
                    )
                ratio = sizes[LENGTHS[-1]] / sizes[LENGTHS[0]]
                of = f", limit {limit}" if limit else ""
                print(f"{name:13} bytes sent in {segments}, longest / shortest: {ratio:.3f}{of}")
                missed += limit is not None and ratio > limit
        finally:
            await plane.aclose()
    return missed


async def cost(plane: DataPlane, length: int, groups: int, segments: int) -> tuple[float, float, float]:
    """Return bytes that are sent and held, and CPU seconds, for each rollout."""
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    kept: list[Group] = [await plane.put(group(length, segments)) for _ in range(groups)]
    gc.collect()
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    batch = make_batch([taught(each) for each in kept], step=0, temperature=1.0)
    sent = len(pickle.dumps(Call(1, "step", (batch,)), protocol=pickle.HIGHEST_PROTOCOL))
    del kept, batch
    fresh: Sequence[Group] = [group(length, segments) for _ in range(groups)]
    began = time.process_time()
    for each in fresh:
        await plane.put(each)
    seconds = time.process_time() - began
    n = groups * GROUP
    return sent / n, held / n, seconds / n


def group(length: int, segments: int = 1) -> Group:
    """Return a finished group of rollouts of so many tokens."""
    chance, prompt = np.random.default_rng(length), as_ids(range(100))

    def rollout() -> Rollout:
        parts = np.array_split(chance.integers(0, 150_000, length).astype(np.int32), segments)
        befores = [prompt, *(as_ids(np.concatenate([prompt, *parts[:n]])) for n in range(1, segments))]
        return Rollout(
            segments=[
                Segment(
                    prompt_ids=before,
                    tokens=Tokens.generated(
                        ids, -chance.random(len(ids)).astype(np.float32), np.zeros(len(ids), np.int32)
                    ),
                )
                for before, ids in zip(befores, parts, strict=True)
            ],
            reward=1.0,
            advantage=1.0,
            trained=True,
        )

    return Group(
        prompt=Prompt(messages="1+1=", id="0", environment="task"),
        rollouts=tuple(rollout() for _ in range(GROUP)),
        generation_version=0,
        target_version=0,
    )


def taught(group: Group) -> Group:
    """Return the group with an advantage for each segment, as ``with_advantages`` gives them."""
    return evolve(
        group,
        rollouts=tuple(
            evolve(
                rollout,
                token_advantages=np.repeat(
                    np.arange(len(rollout.segments)) + 1.0,
                    [segment.tokens.n_sampled for segment in rollout.segments],
                ),
            )
            for rollout in group.rollouts
        ),
    )


if __name__ == "__main__":
    sys.exit(main())
