"""Two servers behind ``vllm:http`` against one: requests a second, with servers of a fixed service time.

    python tests/benchmarks/bench_servers.py
    python tests/benchmarks/bench_servers.py --few-files

A server answers 8 requests at a time, each after 0.5 s, as an engine with a full batch would.  The servers
are in this process; what limits them is their service time, not a processor.

With ``--few-files`` a server in another process answers 5,000 requests of 6 s each, as many at once as come,
while the engine's process may open 256 files: all of them have to be answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import resource
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import torch
from aiohttp import web

from grpo_core import EngineSetup, GenerationRequest, Weights
from grpo_core.app.parts import Parts
from grpo_core.config import Config, EngineConfig
from grpo_core.kit import PluginHost, SharedMemoryWriter
from grpo_plugin_vllm.http import HttpEngine

ROWS, SECONDS, GROUPS, SIZE = 8, 0.5, 32, 8
FILES, FEW_FILES_REQUESTS, FEW_FILES_SECONDS = 256, 5_000, 6.0
LEAST = 1.9
"""Smallest ratio of the rates."""


@contextlib.asynccontextmanager
async def server(at_once: int = ROWS, seconds: float = SECONDS) -> AsyncIterator[str]:
    """A server with the routes that the engine asks for."""
    rows, held = asyncio.Semaphore(at_once), {"version": "default"}

    async def answer(request: web.Request) -> web.Response:
        body = await request.json() if request.can_read_body else {}
        if request.path == "/v1/models":
            return web.json_response({"data": [{"max_model_len": 100}]})
        if request.path == "/finish_weight_update":
            held["version"] = body["weight_version"]
        if request.path != "/inference/v1/generate":
            return web.json_response({})
        async with rows:
            await asyncio.sleep(seconds)
        choice = {
            "token_ids": [5],
            "logprobs": {"content": [{"logprob": -0.5}]},
            "weight_versions": [{"version": held["version"], "start": 0, "end": 1}],
            "finish_reason": "length",
        }
        return web.json_response({"choices": [choice]})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


async def rate(servers: int, weights: Weights) -> float:
    """Return the requests a second of an engine with so many servers."""
    async with contextlib.AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(server()) for _ in range(servers)]
        config = EngineConfig(name="vllm:http", options={"url": urls})
        parts = Parts(Config(), PluginHost.discover(["scale", "vllm"]))
        engine = parts.engine(config, EngineSetup(model="m"))
        stack.push_async_callback(engine.aclose)
        await engine.update_weights(weights)
        requests = [
            [GenerationRequest(prompt_ids=(group, 2), max_tokens=1, group=str(group))] * SIZE
            for group in range(GROUPS)
        ]
        began = time.perf_counter()
        await asyncio.gather(*(engine.generate(each) for each in requests))
        return GROUPS * SIZE / (time.perf_counter() - began)


def serve(seconds: float, told: Any) -> None:
    """Serve any number of requests at once, until this process is killed."""

    async def forever() -> None:
        async with server(FEW_FILES_REQUESTS, seconds) as url:
            told.send(url)
            await asyncio.Event().wait()

    asyncio.run(forever())


async def answered(url: str, weights: Weights) -> int:
    """Return how many of the requests were answered."""
    engine = HttpEngine(EngineSetup(model="m"), url=url)
    await engine.update_weights(weights)
    request = GenerationRequest(prompt_ids=(1, 2), max_tokens=1)
    answers = await asyncio.gather(
        *(engine.generate([request]) for _ in range(FEW_FILES_REQUESTS)), return_exceptions=True
    )
    await engine.aclose()
    return sum(not isinstance(answer, BaseException) for answer in answers)


def few_files(weights: Weights) -> int:
    """Ask for more than the process may open files."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    child = spawn.Process(target=serve, args=(FEW_FILES_SECONDS, there), daemon=True)
    child.start()
    url = here.recv()
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES))
    began = time.perf_counter()
    got = asyncio.run(answered(url, weights))
    seconds = time.perf_counter() - began
    child.kill()
    print(
        f"{got} of {FEW_FILES_REQUESTS} requests of {FEW_FILES_SECONDS} s answered in {seconds:.0f} s, "
        f"with {FILES} open files"
    )
    return 0 if got == FEW_FILES_REQUESTS else 1


def main() -> int:
    weights = SharedMemoryWriter().write(1, [("a", torch.ones(3))])
    if sys.argv[1:] == ["--few-files"]:
        return few_files(weights)
    one, two = (asyncio.run(rate(servers, weights)) for servers in (1, 2))
    good = two >= LEAST * one
    print(f"requests/s with one server {one:.1f}, with two {two:.1f}: {two / one:.3f}x, at least {LEAST}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
