"""How much the endpoint adds to a call of an agent.

    python tests/benchmarks/bench_agents.py [SESSIONS]

256 agents talk at the same time, each over ten turns, with a model whose completions take 0.7 to 1.3 s and
compute nothing.  The time of a call beyond that, as the client sees it, is the overhead: the client's own
JSON, the way through the socket, reading, matching, the chat template, the tokenizer, recording and writing.
The clients run in a process of their own.

    alone    the same calls, one after another
    floor    a server that reads the body, waits as long, and answers with a constant: the machine's own share

The time that the server's process computes for a call hardly depends on what else the machine does; the
percentiles do.

    python tests/benchmarks/bench_agents.py --rollouts [SECONDS]

Rollouts a minute with 64 in flight, without and with the line ``concurrency = 64`` in the agent.  Each asks
four times; the model takes 0.2 s.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from attrs import evolve

from grpo_core.app.placement import LocalPlacement
from grpo_core.app.tasks import make_environment
from grpo_core.config import EnvironmentConfig, TaskConfig
from grpo_core.contracts.playing import Play, PlayerSetup
from grpo_core.contracts.records import Completion, GenerationRequest, Limits, Prompt, Weights
from grpo_core.contracts.tokens import Tokens
from grpo_core.loop.rollout import RolloutRequest, SamplingParams, play
from grpo_core.models.files import chat_template
from grpo_core.plugins.host import PluginHost
from grpo_core.testing import FakeEngine, FakeRenderer
from grpo_plugin_agents.server import AgentServer

TURNS, LIMIT = 10, 5.0
MODEL_SECONDS = (0.7, 1.3)
LIMITS = Limits(max_tokens=64, max_turns=1000, context=100_000)


class SleepingEngine:
    """Waits and says the same words; remembers when it was asked, and how long it took."""

    def __init__(self, ids: Sequence[int], seconds: tuple[float, float]) -> None:
        self._tokens = Tokens.generated(ids, [-1.0] * len(ids), [0] * len(ids))
        self._seconds, self._random = seconds, random.Random(0)

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        await asyncio.sleep(self._random.uniform(*self._seconds))
        return [Completion.of(self._tokens, "stop") for _ in requests]


CLIENT = """
import asyncio, json, sys, time, aiohttp

async def agent(http, url, key, turns, delay):
    await asyncio.sleep(delay)
    messages, spent = [{"role": "user", "content": "what is it " * 20}], []
    for turn in range(turns):
        begin = time.perf_counter()
        async with http.post(url + "/chat/completions", json={"messages": messages},
                             headers={"Authorization": "Bearer " + key}) as response:
            reply = await response.json()
        spent.append(time.perf_counter() - begin)
        messages += [reply["choices"][0]["message"], {"role": "user", "content": "again, and why " * 5}]
    return spent

async def main():
    told = json.loads(sys.stdin.read())
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        keys = told["keys"]
        pace = told["pace"] / max(1, len(keys))
        spent = await asyncio.gather(*(agent(http, url, key, told["turns"], i * pace)
                                       for i, (url, key) in enumerate(keys)))
    print(json.dumps(spent))

asyncio.run(main())
"""


def make_renderer():
    sys.path.insert(0, str(__file__).rpartition("/benchmarks/")[0])
    from test_segments import make_renderer

    return make_renderer(chat_template("chatml"), "<|im_end|>")


async def measured(sessions: int, turns: int, renderer, seconds: tuple[float, float], *, floor: bool):
    """Return the overheads of all calls and the computing time of one in ms, and the calls a second."""
    ids = [*renderer.encode("it is the answer " * 6), renderer.stop_token_ids[0]]
    server = AgentServer(PlayerSetup())
    await server.start()
    waits: list[float] = []

    class Timed(SleepingEngine):
        async def generate(self, requests):
            begin = time.perf_counter()
            done = await super().generate(requests)
            waits.append(time.perf_counter() - begin)
            return done

    engine = Timed(ids, seconds)
    prompt = Prompt(messages="?")
    given = Play(prompt=prompt, seed=0, group="g", limits=LIMITS, engine=engine, renderer=renderer, run=None)
    opened = [server.open(evolve(given)) for _ in range(sessions)]
    url, stop = await constant(engine, renderer) if floor else ("", None)
    keys = [(url or each.client.base_url, each.client.api_key) for each in opened]
    told = {"keys": keys, "turns": turns, "pace": seconds[1]}
    began, computed = time.perf_counter(), time.process_time()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CLIENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    output, _ = await process.communicate(json.dumps(told).encode())
    took, computed = time.perf_counter() - began, time.process_time() - computed
    spent = [second for agent in json.loads(output) for second in agent]
    for each in opened:
        await each.aclose()
    await server.aclose()
    if stop is not None:
        await stop()
    # the sums are exact; the two lists are in different orders, so each call is paired by its rank
    over = [1000 * (a - b) for a, b in zip(sorted(spent), sorted(waits), strict=True)]
    return over, 1000 * computed / len(spent), len(spent) / took


async def constant(engine, renderer):
    """A server that does nothing but wait."""
    from aiohttp import web

    request = GenerationRequest(prompt_ids=[1], max_tokens=1)

    async def handle(_request: web.Request) -> web.Response:
        await _request.read()
        await engine.generate([request])
        said = {"role": "assistant", "content": "it is the answer " * 6}
        return web.json_response({"choices": [{"message": said}]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return f"http://127.0.0.1:{runner.addresses[0][1]}/v1", runner.cleanup


AGENT = """
import aiohttp
import grpo_core as grpo

def prompts(split):
    return [grpo.Prompt(messages="what is it")]

async def run(prompt, client):
    async with aiohttp.ClientSession(headers={"Authorization": "Bearer " + client.api_key}) as http:
        for turn in range(4):
            messages = {"messages": [{"role": "user", "content": str(turn)}]}
            async with http.post(client.base_url + "/chat/completions", json=messages) as response:
                response.raise_for_status()
    return 1.0
"""
IN_FLIGHT = 64


async def rollouts_a_minute(line: str, seconds: float) -> float:
    """Play rollouts for some seconds, 64 at a time, after all processes have started."""
    host, prompt = PluginHost.discover(), Prompt(messages="what is it", id="0", environment="task")
    engine = FakeEngine(reply=lambda request, rng: "it", latency=lambda rng: 0.2)
    await engine.update_weights(Weights(version=0, location="", nbytes=0, tensors=()))
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "agent.py").write_text(line + AGENT)
        task, config = TaskConfig(env=f"{directory}/agent.py"), EnvironmentConfig()
        pool = make_environment("task", task, config, host, LocalPlacement(host))
        server = pool.player = AgentServer(PlayerSetup())
        await server.start()
        await pool.start()

        async def one(seed: int) -> None:
            (rollout,) = await play(
                [RolloutRequest(prompt=prompt, seed=seed, group=str(seed))],
                engine=engine,
                environments={"task": pool},
                renderer=FakeRenderer(),
                sampling=SamplingParams(temperature=1.0, max_tokens=8),
            )
            assert rollout.reward == 1.0, rollout.error

        async def lane(number: int) -> int:
            played = 0
            while time.monotonic() < end:
                await one(number + IN_FLIGHT * played)
                played += 1
            return played

        try:
            await asyncio.gather(*map(one, range(IN_FLIGHT)))
            begin = time.monotonic()
            end = begin + seconds
            played = await asyncio.gather(*map(lane, range(IN_FLIGHT)))
            return 60 * sum(played) / (time.monotonic() - begin)
        finally:
            await pool.aclose()
            await server.aclose()


def told(name: str, over: Sequence[float], computed: float, rate: float, limit: float = 0.0) -> None:
    cuts = statistics.quantiles(over, n=100)
    p50, p99 = cuts[49], cuts[98]
    verdict = f"  limit {limit:g} ms: {'ok' if p99 <= limit else 'OVER'}" if limit else ""
    print(
        f"{name:<16} p50 {p50:6.2f} ms  p99 {p99:6.2f} ms  computes {computed:5.2f} ms  {rate:6.0f} calls/s"
        f"{verdict}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("sessions", nargs="?", type=int, default=256)
    parser.add_argument("--rollouts", nargs="?", type=float, const=30.0, metavar="SECONDS")
    given = parser.parse_args()
    sessions = given.sessions
    if given.rollouts is not None:
        for line in ("", "concurrency = 64"):
            rate = asyncio.run(rollouts_a_minute(line, given.rollouts))
            print(f"{line or 'without the line':<16} {rate:8,.0f} rollouts a minute", flush=True)
        return
    renderer = make_renderer()
    told("alone", *asyncio.run(measured(1, 100, renderer, (0.01, 0.01), floor=False)))
    told("floor", *asyncio.run(measured(sessions, TURNS, renderer, MODEL_SECONDS, floor=True)))
    told(
        f"{sessions} sessions",
        *asyncio.run(measured(sessions, TURNS, renderer, MODEL_SECONDS, floor=False)),
        limit=LIMIT,
    )


if __name__ == "__main__":
    main()
