"""Several engines as one, in this process and in Ray workers.

    python tests/benchmarks/bench_pool.py [--no-ray]

Two engines against one that only sleep; the driver's CPU time per rollout through Ray against the in-process
path and what Ray takes for its calls alone, in turn in one run; how long it takes from the death of a Ray
worker with the engine `local` to the answer of another, and what is generated again.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from sleepy import Sleepy

from grpo_core.contracts.protocols import Engine
from grpo_core.contracts.records import EngineSetup, Feedback, GenerationRequest, Weights
from grpo_core.engines import wire
from grpo_core.loop.rollout import RolloutRequest, SamplingParams, play
from grpo_core.plugins.host import PluginHost
from grpo_core.testing import FakeEnvironment, FakeRenderer, prompts
from grpo_plugin_ray import cluster
from grpo_plugin_ray.engines import RayEngine, Store, WorkerSetup
from grpo_plugin_scale.engines.pool import EnginePool

SLEEPY = f"{Path(__file__).with_name('sleepy.py')}:Sleepy"
GROUP, TOKENS = 8, 64
ROUNDS = 5


class Renderer(FakeRenderer):
    """A token is a character, whichever it is."""

    def text(self, token_ids: Any) -> str:
        return "a" * len(token_ids)


def nothing(version: int, path: Path) -> Weights:
    path.write_bytes(b"\0" * 4096)
    return Weights(version=version, location=str(path), nbytes=4096, tensors=())


def sleepy_in_ray(workers: int, **options: Any) -> EnginePool:
    store = Store()
    origin = cluster.PluginRequirement.of(PluginHost.discover([]).find("engine", SLEEPY))
    made_from = WorkerSetup(origin=origin, setup=EngineSetup(model=""), options=options)
    return EnginePool(
        lambda number: RayEngine(f"engine {number}", made_from, store=store, resources={"num_cpus": 0}),
        workers,
        hold=store.hold,
        deadline=60.0,
    )


def groups(n: int, tokens: int) -> list[list[GenerationRequest]]:
    return [
        [
            GenerationRequest(
                prompt_ids=tuple(range(40)), max_tokens=tokens, seed=GROUP * g + i, group=str(g)
            )
            for i in range(GROUP)
        ]
        for g in range(n)
    ]


async def seconds_for(engine: Engine, path: Path) -> float:
    """Seconds for 24 groups that are asked for at once."""
    await engine.update_weights(nothing(0, path))
    began = time.perf_counter()
    await asyncio.gather(*map(engine.generate, groups(24, TOKENS)))
    return time.perf_counter() - began


# ---------------------------------------------------------------------------------- figures


async def speed_up(path: Path, make: Callable[[int], EnginePool], where: str) -> None:
    seconds = []
    for workers in (1, 2):
        pool = make(workers)
        seconds.append(await seconds_for(pool, path))
        await pool.aclose()
    show(f"two engines that sleep, {where} (times one)", seconds[0] / seconds[1], 1.9, at_least=True)


async def driver_cpu(path: Path) -> None:
    """Everything that the driver does for a rollout: ``play``, with an engine that answers at once."""
    in_process, through_ray = Sleepy(EngineSetup(model=""), rows=4096), sleepy_in_ray(2, rows=4096)
    await in_process.update_weights(nothing(0, path))
    await through_ray.update_weights(nothing(0, path))
    plain, ray, calls = [], [], []
    for _ in range(ROUNDS):  # in turn, so that a busy machine is busy for all
        plain.append(await cpu_per_rollout(lambda: rollouts(in_process)))
        ray.append(await cpu_per_rollout(lambda: rollouts(through_ray)))
        calls.append(await cpu_per_rollout(bare_calls))
    await through_ray.aclose()
    here, there, call = map(statistics.median, (plain, ray, calls))
    show("driver CPU per rollout, in process (us)", here * 1e6)
    show("driver CPU per rollout, through Ray (us)", there * 1e6)
    show("driver CPU of Ray's own calls, one for each group, per rollout (us)", call * 1e6)
    show("through Ray / (1.5 x in process + Ray's own calls)", there / (1.5 * here + call), 1.0)


BATCH = 64
"""Groups at once: the slots of a step."""


async def rollouts(engine: Engine) -> int:
    environment = FakeEnvironment(lambda episode: Feedback(reward=1.0), seconds=0.0)

    async def one(prompt: Any) -> None:
        requests = [RolloutRequest(prompt=prompt, seed=i, group=prompt.id) for i in range(GROUP)]
        await play(
            requests,
            engine=engine,
            environments={"task": environment},
            renderer=Renderer(),  # type: ignore[arg-type]
            sampling=SamplingParams(temperature=1.0, max_tokens=TOKENS),
            deadline=60.0,
        )

    await asyncio.gather(*map(one, prompts(BATCH)))
    return BATCH * GROUP


class Echo:
    """The cost of Ray's calls by themselves: a group's requests there, its completions back."""

    async def call(self, requests: Any) -> Any:
        return [((5,) * TOKENS, (-1.0,) * TOKENS, (0,) * TOKENS, "length") for _ in requests]


_echo: list[Any] = []


async def bare_calls() -> int:
    if not _echo:
        actor: Any = cluster.load().remote(Echo)
        _echo.append(actor.options(num_cpus=0).remote())
    packed = [wire.pack_requests(group) for group in groups(BATCH, TOKENS)]
    await asyncio.gather(*(_echo[0].call.remote(some) for some in packed))
    return BATCH * GROUP


async def cpu_per_rollout(run: Callable[[], Awaitable[int]]) -> float:
    """CPU seconds of this process, with the threads that Ray has in it."""
    await run()
    began, n = time.process_time(), 0
    while time.process_time() - began < 0.3:
        n += await run()
    return (time.process_time() - began) / n


async def restart(scratch: Path) -> None:
    from grpo_core.demo.tiny import encode, make_tiny_model
    from grpo_core.weights.layout import load_tensors
    from grpo_core.weights.shm import SharedMemoryWriter

    make_tiny_model(scratch / "model", [("12=", "12"), ("21=", "12")], warm_start_steps=1)
    store = Store()
    origin = cluster.PluginRequirement.of(PluginHost.discover([]).find("engine", "local"))
    made_from = WorkerSetup(origin=origin, setup=EngineSetup(model=str(scratch / "model")))
    made: list[RayEngine] = []

    def make(number: int) -> Engine:
        made.append(RayEngine(f"engine {number}", made_from, store=store, resources={"num_cpus": 0}))
        return made[-1]

    pool = EnginePool(make, 1, hold=store.hold, deadline=60.0)
    writer = SharedMemoryWriter()
    await pool.update_weights(writer.write(0, load_tensors(scratch / "model")))
    requests = [GenerationRequest(prompt_ids=encode("12="), max_tokens=1 + i, seed=i) for i in range(64)]
    await pool.generate(requests)
    call = asyncio.create_task(pool.generate(requests))
    first = made[0]
    while len(first._open) > 32 or not first._open:  # noqa: ASYNC110
        await asyncio.sleep(0)
    finished = 64 - len(first._open)
    os.kill(int(first.name.rsplit("process ", 1)[1].rstrip(")")), signal.SIGKILL)
    began = time.perf_counter()
    await call
    show("a killed Ray worker: seconds to the answer of another", time.perf_counter() - began)
    again = next(made[1]._tickets)
    show("of 64 requests, finished before its death", finished)
    show("generated again, of those", max(0, again - (64 - finished)), 0)
    await pool.aclose()


def show(name: str, value: float, limit: float | None = None, *, at_least: bool = False) -> None:
    feedback = ""
    if limit is not None:
        good = value >= limit if at_least else value <= limit
        feedback = f"{'>=' if at_least else '<='} {limit:g}  {'ok' if good else 'short'}"
    print(f"{name:70} {value:10.3f}  {feedback}", flush=True)


async def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--no-ray", action="store_true")
    options = parser.parse_args()
    slow = {"rows": 16, "seconds_per_token": 0.002}
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "weights"
        await speed_up(path, lambda n: EnginePool(lambda i: Sleepy(EngineSetup(model=""), **slow), n), "here")
        if options.no_ray or importlib.util.find_spec("ray") is None:
            print("Ray is left out, or not installed")
            return
        with cluster.connected("", cpus=4):
            await speed_up(path, lambda n: sleepy_in_ray(n, **slow), "in Ray workers")
            await driver_cpu(path)
            await restart(Path(scratch))


if __name__ == "__main__":
    asyncio.run(main())
