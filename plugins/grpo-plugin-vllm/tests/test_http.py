"""The engine `vllm:http` with a server that is slow, busy, absent or wrong."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import os
import re
import resource
import socket
import sys
import tracemalloc
from pathlib import Path

import pytest
from aiohttp import web
from attrs import evolve
from pooled import statistics

from grpo_core import (
    ConfigError,
    EngineError,
    EngineSetup,
    Feedback,
    GenerationRequest,
    Unavailable,
    WeightSyncError,
)
from grpo_core.app import making
from grpo_core.app.placement import LocalPlacement
from grpo_core.config import EngineConfig
from grpo_core.contracts.records import Canary, TensorPart, Weights
from grpo_core.kit import PluginHost, SharedMemoryWriter, read_weights, reported_to
from grpo_core.loop import canary
from grpo_core.loop.agreement import Tolerance
from grpo_core.loop.rollout import RolloutRequest, SamplingParams, play
from grpo_core.testing import FakeEnvironment, FakeRenderer, prompts
from grpo_plugin_vllm import http
from grpo_plugin_vllm.client import ServerError, checked_url
from grpo_plugin_vllm.files import connections
from grpo_plugin_vllm.http import HttpEngine

REQUEST = GenerationRequest(prompt_ids=(1, 2, 3), max_tokens=2)


class Server:
    """The routes of a vLLM server in this process; ``faults`` are answered first, by path."""

    def __init__(self):
        self.calls: list[str] = []
        self.bodies: list[object] = []
        self.faults: dict[str, list[object]] = {}
        self.version = "default"
        self.finish_reason = "length"
        self.running = 0
        self.aborted = 0
        self.most = 0
        self.gate: asyncio.Event | None = None
        self.changed = asyncio.Condition()
        self.queries = {}
        self.keys = set()
        self.port = 0

    async def __aenter__(self):
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.answer)
        self.runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self.runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    async def __aexit__(self, *error):
        await self.runner.cleanup()

    async def die(self):
        """End as a killed process does: no connection is taken, and the open ones are lost."""
        for site in list(self.runner.sites):
            await site.stop()
        for connection in self.runner.server.connections:
            connection.transport.abort()
        await self.runner.cleanup()

    async def answer(self, request):
        self.calls.append(request.path)
        self.keys.add(request.headers.get("Authorization"))
        self.queries[request.path] = dict(request.query)
        body = await request.json() if request.can_read_body else None
        self.bodies.append(body)
        if self.faults.get(request.path):
            fault = self.faults[request.path].pop(0)
            if fault == "drop":
                request.transport.close()
                return web.Response()
            if fault == "hang":
                await asyncio.Event().wait()
            if isinstance(fault, web.StreamResponse):
                return fault
            if isinstance(fault, tuple):
                return web.Response(status=fault[0], text=fault[1])
        return await getattr(self, request.path.strip("/").replace("/", "_"), self.ok)(body)

    async def count(self, n):
        async with self.changed:
            self.running += n
            self.most = max(self.most, self.running)
            self.changed.notify_all()

    async def at_once(self, n):
        """Wait until this many requests are here."""
        async with self.changed:
            await self.changed.wait_for(lambda: self.running >= n)

    async def ok(self, body):
        return web.json_response({})

    async def v1_models(self, body):
        return web.json_response({"data": [{"max_model_len": 100}]})

    async def weight_info(self, body):
        return web.json_response({"weight_version": self.version})

    async def update_weight_version(self, body):
        self.version = body["new_version"]
        return web.json_response({})

    async def finish_weight_update(self, body):
        self.version = body["weight_version"]
        return web.json_response({})

    async def inference_v1_generate(self, body):
        await self.count(+1)
        try:
            if self.gate is not None:
                await self.gate.wait()
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        finally:
            await self.count(-1)
        n = body["sampling_params"]["max_tokens"]
        choice = {
            "token_ids": [body["token_ids"][0]] * n,
            "logprobs": {"content": [{"logprob": -0.5}] * n},
            "weight_versions": [{"version": self.version, "start": 0, "end": n}],
            "finish_reason": self.finish_reason,
        }
        return web.json_response({"choices": [choice]})


def weights(version):
    import torch

    return WRITER.write(version, [("a", torch.arange(6.0)), ("b", torch.ones(3, dtype=torch.bfloat16))])


WRITER = SharedMemoryWriter()


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch):
    monkeypatch.setattr("grpo_core.environments.outages.SHORTEST", 0.01)


def played(story, *, deadline=5.0, max_requests=0, **options):
    """The story with an engine that holds version 1 and its server."""
    setup = EngineSetup(model="m", deadline=deadline, max_requests=max_requests)

    async def main():
        async with Server() as server:
            engine = HttpEngine(setup, url=server.url, **options)
            try:
                await engine.update_weights(weights(1))
                return await story(engine, server)
            finally:
                await engine.aclose()

    return asyncio.run(main())


# ---------------------------------------------------------------------------------- what is said to whom


def test_an_invalid_url_or_one_of_another_machine_is_refused():
    for url in ("127.0.0.1:8000", "ftp://127.0.0.1", "http://"):
        with pytest.raises(ConfigError, match="expected something like"):
            checked_url(url, remote=False)
    for url in ("http://10.0.0.7:8000", "https://gpu.example.org"):
        with pytest.raises(ConfigError, match=r"another machine.*replace its model"):
            checked_url(url, remote=False)
        assert checked_url(url + "/", remote=True) == url
    for url in ("http://localhost:1", "http://127.3.4.5:1", "http://[::1]:1"):
        assert checked_url(url, remote=False) == url


def test_an_update_is_the_servers_own_sequence_with_a_label_that_no_token_may_carry():
    async def story(engine, server):
        (completion,) = await engine.generate([REQUEST])
        assert (completion.token_ids.tolist(), completion.versions.tolist()) == ([1, 1], [1, 1])
        assert server.calls[:-1] == [
            "/v1/models",
            "/server_info",
            "/init_weight_transfer_engine",
            "/pause",
            "/update_weight_version",
            "/start_weight_update",
            "/update_weights",
            "/finish_weight_update",
            "/resume",
        ]
        assert server.bodies[4] == {"new_version": "updating"}
        sent = server.bodies[6]["update_info"]
        assert [tensor["name"] for tensor in sent["tensors"]] == ["a", "b"]
        assert server.bodies[-1]["sampling_params"]["logprobs"] == 0

    played(story)


@pytest.mark.parametrize(
    ("said", "dtype", "allowed"),
    [
        ({"vllm_config": {"model_config": {"dtype": "torch.bfloat16"}}}, "bfloat16", True),
        ({"vllm_config": {"model_config": {"dtype": "torch.float32"}}}, "float32", False),
        ({"vllm_config": "a text"}, "", False),
    ],
)
def test_the_servers_dtype_decides_which_differences_the_canary_allows(said, dtype, allowed):
    """The trainer and its weights are float32: it cannot know what somebody else started."""
    import torch

    async def story(engine, server):
        server.faults["/server_info"] = [web.json_response(said)]
        server.faults["/update_weights"] = ["drop"]
        await engine.update_weights(weights(2))  # the second attempt meets the server anew
        sung = Canary(prompt_ids=REQUEST.prompt_ids, token_ids=(1,), logprobs=(-0.55,))
        given = evolve(WRITER.write(3, [("a", torch.arange(6.0))]), canary=(sung,))
        await engine.update_weights(given)
        assert engine.dtype == dtype
        assert server.queries["/server_info"] == {"config_format": "json"}
        refused = pytest.raises(WeightSyncError, match=r"tolerance 0\.0003 and 0\.001")
        with contextlib.nullcontext() if allowed else refused:
            await canary.verify(engine, given, tolerance=Tolerance(), deadline=None)

    played(story)


PAGE = """# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:num_preemptions_total{engine="0",model_name="m"} 2.0
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 10.0
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 5.0
"""


def test_a_server_is_measured_by_its_own_page_of_metrics():
    async def story(engine, server):
        later = PAGE.replace(" 10.0", " 14.0").replace(" 5.0", " 8.0").replace(" 0.25", " 0.5")
        pages = [web.Response(text=PAGE), web.Response(text=later), (404, ""), (404, "")]
        server.faults["/metrics"], found = pages, []
        while pages:
            if (now := engine.metrics()) and now not in found:
                found.append(now)
            await asyncio.sleep(0)
        assert found == [
            {"cache_use": 0.25, "preemptions": 2.0, "cached_prompt_tokens": 0.5},
            {"cache_use": 0.5, "preemptions": 0.0, "cached_prompt_tokens": 0.75},
        ]

    played(story)


def test_a_request_for_a_part_of_the_distribution_says_so_to_the_server():
    async def story(engine, server):
        await engine.generate([REQUEST, evolve(REQUEST, top_p=0.9, top_k=5, min_p=0.1)])
        asked = [body["sampling_params"] for body in server.bodies[-2:]]
        assert sorted((each["top_p"], each["top_k"], each["min_p"]) for each in asked) == [
            (0.9, 5, 0.1),
            (1.0, 0, 0.0),
        ]

    played(story)


@pytest.mark.parametrize("keep_cache", [True, False])
def test_running_requests_are_kept_by_a_pause_and_their_keys_and_values_if_asked_for(keep_cache):
    async def story(engine, server):
        assert server.queries["/pause"] == {"mode": "keep", "clear_cache": str(not keep_cache).lower()}

    played(story, keep_cache=keep_cache)


def test_the_parts_of_a_trainers_ranks_are_sent_with_their_checksums():
    import torch

    from grpo_plugin_vllm.transfer import as_table, from_table

    (info,) = SharedMemoryWriter().write(3, [("a", torch.arange(6))]).tensors
    parts = tuple(TensorPart(rank=i, first=3 * i, rows=3, checksum=2**64 - i - 1) for i in range(2))
    weights = Weights(version=3, location="/w", nbytes=64, tensors=(evolve(info, parts=parts),), base="")
    assert from_table(json.loads(json.dumps(as_table(weights)))) == weights


def test_a_directory_that_both_see_takes_the_weights_of_a_server_elsewhere(tmp_path):
    async def story(engine, server):
        sent = server.bodies[6]["update_info"]
        assert sent["location"] == str(tmp_path / "w" / "weights.bin")
        from grpo_plugin_vllm.transfer import from_table

        tensors = read_weights(from_table(sent))
        assert tensors["a"].tolist() == [0, 1, 2, 3, 4, 5]

    played(story, directory=tmp_path / "w")


def test_a_server_that_shares_no_files_receives_the_weights_from_the_trainer_itself(monkeypatch):
    """This process reads none of them: nobody listens there."""
    sent = evolve(weights(1), location='collective:["127.0.0.1", 1, "secret", 1]')
    monkeypatch.setitem(globals(), "weights", lambda version: sent)

    async def story(engine, server):
        assert server.bodies[6]["update_info"]["location"] == sent.location

    played(story)
    section = EngineConfig(name="vllm:http", transport="collective")
    host = PluginHost.discover()
    assert making.transport_of(section, None, host, LocalPlacement(host), "") == "collective"


# ---------------------------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize("code", [429, 502, 503, 504])
def test_a_busy_server_is_asked_again_and_a_refusal_is_not(code):
    async def story(engine, server):
        generate = "/inference/v1/generate"
        server.faults[generate] = [(code, "no"), (code, "no")]
        assert len(await engine.generate([REQUEST])) == 1
        assert server.calls.count(generate) == 3
        for refusal in (400, 404, 422, 500):
            server.faults[generate] = [(refusal, "this is why")]
            before = server.calls.count(generate)
            with pytest.raises(ServerError, match=rf"status {refusal}: this is why"):
                await engine.generate([REQUEST])
            assert server.calls.count(generate) == before + 1

    played(story)


def test_a_busy_server_is_an_incident_and_nothing_is_printed(capfd):
    async def story(engine, server):
        server.faults["/inference/v1/generate"] = [(503, "full")] * 20
        assert len(await engine.generate([REQUEST] * 40)) == 40

    incidents = []
    with reported_to(incidents.append):
        played(story)
    assert {one.kind for one in incidents} == {"unavailable", "available"}
    assert {one.component for one in incidents} == {"engine vllm:http"}
    assert re.search(
        r"POST http://127.0.0.1:\d+/inference/v1/generate: status 503: full", incidents[0].message
    )
    assert "".join(capfd.readouterr()) == ""


def test_requests_and_weights_wait_for_a_server_that_is_away():
    incidents, away = [], asyncio.Event()

    def note(incident):
        incidents.append(incident.kind)
        if incident.kind == "unavailable":
            away.set()

    async def story(engine, server):
        await server.die()
        asked = asyncio.create_task(engine.generate([REQUEST] * 3))
        given = asyncio.create_task(engine.update_weights(weights(2)))
        await away.wait()
        server.version = "default"
        await server.__aenter__()
        assert len(await asked) == 3
        await given
        assert (await engine.generate([REQUEST]))[0].versions.tolist() == [2, 2]

    with reported_to(note):
        played(story)
    assert "available" in incidents


def test_a_server_that_stays_away_ends_the_run_with_its_name():
    async def story(engine, server):
        server.faults["/inference/v1/generate"] = [(503, "loading")] * 1000
        expected = r"unavailable for 0 s .*unavailable_for.*/v1/generate: status 503: loading"
        with pytest.raises(Unavailable, match=expected):
            await engine.generate([REQUEST])

    played(story, unavailable_for=0.05)


def test_one_of_several_servers_that_stays_busy_is_an_error_at_once():
    async def story(engine, server):
        engine = HttpEngine(EngineSetup(model="m"), url=[server.url, "http://127.0.0.1:1"])
        await engine.update_weights(weights(1))
        server.faults["/inference/v1/generate"] = [(503, "loading")] * 9
        with pytest.raises(EngineError, match="status 503: loading"):
            await engine.generate([REQUEST])
        await engine.aclose()

    played(story)


def test_every_status_of_an_update_is_looked_at():
    async def story(engine, server):
        paths = ["/pause", "/start_weight_update", "/update_weights", "/finish_weight_update", "/resume"]
        for version, path in enumerate(paths, 2):
            server.faults[path] = [(500, "out of memory")]
            with pytest.raises(
                WeightSyncError, match=rf"version {version}: .*{path}: status 500: out of memory"
            ):
                await engine.update_weights(weights(version))
            assert "/resume" in server.calls[-2:], "it generates again"
        await engine.update_weights(weights(9))
        assert (await engine.generate([REQUEST]))[0].versions.tolist() == [9, 9]

    played(story)


@pytest.mark.parametrize("elsewhere", [False, True], ids=["in memory", "in a directory"])
def test_a_server_that_cannot_read_the_weights_and_dies_says_how_it_could_get_them(tmp_path, elsewhere):
    async def story(engine, server):
        server.faults["/update_weights"] = [(500, "memory cannot be read")]
        server.faults["/resume"] = ["drop"] * 9
        with pytest.raises(WeightSyncError, match="status 500: memory cannot be read") as found:
            await engine.update_weights(weights(2))
        assert ('engine.transport = "collective"' in str(found.value)) == (not elsewhere)

    played(story, directory=tmp_path / "w" if elsewhere else None)


def test_a_dropped_update_and_a_dropped_completion_are_requested_again():
    async def story(engine, server):
        server.faults["/update_weights"] = ["drop"]
        server.calls.clear()
        await engine.update_weights(weights(2))
        steps = [path for path in server.calls if path in ("/pause", "/update_weights", "/resume")]
        assert steps == ["/pause", "/update_weights", "/resume"] * 2
        await engine.update_weights(weights(3))
        server.faults["/inference/v1/generate"] = ["drop"]
        assert (await engine.generate([REQUEST]))[0].versions.tolist() == [3, 3]

    played(story)


def test_an_unanswered_update_ends_at_its_deadline():
    async def story(engine, server):
        server.faults["/update_weights"] = ["hang"]
        engine._setup = evolve(engine._setup, deadline=0.2)
        with pytest.raises(WeightSyncError, match=r"version 2: .*no answer within 0\.2 s"):
            await engine.update_weights(weights(2))

    played(story)


@pytest.mark.long
def test_an_unanswered_completion_ends_at_its_deadline():
    async def story(engine, server):
        server.faults["/inference/v1/generate"] = ["hang"]
        with pytest.raises(EngineError, match=r"no answer within 1 s"):
            await engine.generate([REQUEST])

    played(story, request_deadline=1.0)


def test_a_missing_server_is_named_in_the_error():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"

        async def story():
            engine = HttpEngine(EngineSetup(model="m", deadline=5), url=url)
            with pytest.raises(WeightSyncError, match=rf"GET {url}/v1/models: no connection"):
                await engine.update_weights(weights(1))
            await engine.aclose()

        asyncio.run(story())


def test_a_server_that_is_starting_is_waited_for(monkeypatch):
    monkeypatch.setattr(http, "START_PAUSE", 0.0)
    incidents = []

    async def story():
        async with Server() as server:
            engine = HttpEngine(EngineSetup(model="m", deadline=60), url=server.url)
            server.faults["/v1/models"] = [(503, "starting")] * 5
            await engine.update_weights(weights(1))
            assert len(await engine.generate([REQUEST])) == 1
            await engine.aclose()

    with reported_to(incidents.append):
        asyncio.run(story())
    assert any("waiting for the server to start" in one.message for one in incidents)


@pytest.mark.long
def test_no_more_requests_are_at_the_server_than_the_user_allows():
    async def story(engine, server):
        assert len(await engine.generate([REQUEST] * 300)) == 300
        assert server.most <= 7

    played(story, max_requests=7)


ASKS = """
import asyncio, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
import torch
from grpo_core import EngineSetup, GenerationRequest
from grpo_core.kit import SharedMemoryWriter
from grpo_plugin_vllm.http import HttpEngine

async def main():
    engine = HttpEngine(EngineSetup(model="m"), url=sys.argv[1])
    await engine.update_weights(SharedMemoryWriter().write(1, [("a", torch.ones(3))]))
    request = GenerationRequest(prompt_ids=(1, 2, 3), max_tokens=1)
    print(len(await engine.generate([request] * 400)))
    await engine.aclose()

asyncio.run(main())
"""


@pytest.mark.long
def test_more_requests_than_a_process_may_open_files_are_all_answered():
    async def story():
        async with Server() as server:
            server.gate = asyncio.Event()
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", ASKS, server.url),
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            told = asyncio.create_task(process.communicate())
            many = asyncio.create_task(server.at_once(128))
            await asyncio.wait({told, many}, return_when=asyncio.FIRST_COMPLETED)
            many.cancel()
            server.gate.set()
            answered, said = await told
            return answered, said.decode(), server.most

    answered, said, seen = asyncio.run(story())
    assert answered == b"400\n", said
    assert seen <= 192
    assert "requests are at a server at the same time, not 512: this process may open 256 files" in said


@pytest.mark.parametrize("left", [100, 0], ids=["a hundred files are left", "no file is left"])
def test_the_limit_of_open_files_is_raised_as_far_as_it_may_be(left):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = max(int(name) for name in os.listdir("/dev/fd"))  # tests before this one may have left some open
    resource.setrlimit(resource.RLIMIT_NOFILE, (opened + left, hard))
    holes = []
    with contextlib.suppress(OSError):
        while not left:  # lower numbers may be free
            holes.append(os.open(os.devnull, os.O_RDONLY))
    try:
        assert connections(300, servers=2) == 300
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 600
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for number in holes:
            os.close(number)


def test_a_key_comes_from_the_environment_and_stands_in_no_message(monkeypatch):
    async def story(engine, server):
        assert server.keys == {"Bearer sesame"}
        server.faults["/inference/v1/generate"] = [(401, "who are you?")]
        with pytest.raises(EngineError, match=r"status 401: who are you\?") as error:
            await engine.generate([REQUEST])
        assert "sesame" not in repr(error.value)

    monkeypatch.setenv("MY_KEY", "sesame")
    played(story, api_key_variable="MY_KEY")
    with pytest.raises(ConfigError, match="'NO_KEY', and there is no such environment variable"):
        HttpEngine(EngineSetup(model="m"), api_key_variable="NO_KEY")


def test_a_server_that_is_not_vllm_is_refused():
    async def story(engine, server):
        server.faults["/inference/v1/generate"] = [(200, "<html>hello"), (200, "{}")]
        with pytest.raises(EngineError, match=r"expected JSON, got '<html>hello'.*; is this a vLLM server"):
            await engine.generate([REQUEST])
        with pytest.raises(EngineError, match="lacks 'choices'"):
            await engine.generate([REQUEST])

    played(story)


def choice(**lies):
    """An answer of two tokens; ``lies`` are what is wrong in it."""
    truth = {
        "token_ids": [1, 1],
        "logprobs": {"content": [{"logprob": -0.5}] * 2},
        "weight_versions": [{"version": "1", "start": 0, "end": 2}],
        "finish_reason": "length",
    }
    return {"choices": [truth | lies]}


def span(version, start, end):
    return {"weight_versions": [{"version": version, "start": start, "end": end}]}


def logprobs(*values):
    return {"logprobs": {"content": [{"logprob": value} for value in values]}}


LIES = {
    "a span of 3e8 tokens": choice(**span("1", 0, 300_000_000)),
    "a span of 1e30 tokens": choice(**span("1", 0, 10**30)),
    "a span that runs backwards": choice(
        weight_versions=[{"version": "1", "start": 0, "end": 3}, {"version": "1", "start": 3, "end": 2}]
    ),
    "a place that is a text": choice(**span("1", "0", 2)),
    "a place that is a flag": choice(**span("1", False, 2)),
    "no spans": choice(weight_versions=None),
    "spans that are a number": choice(weight_versions=7),
    "a version that is a number": choice(**span(1, 0, 2)),
    "a version that was never sent": choice(**span("2", 0, 2)),
    "a version of 4,000 digits": choice(**span("9" * 4000, 0, 2)),
    "a version in other digits": choice(**span("\N{ARABIC-INDIC DIGIT ONE}", 0, 2)),
    "ids that are texts": choice(token_ids=["1", "1"]),
    "ids that are floats": choice(token_ids=[1.0, 1.0]),
    "ids that are flags": choice(token_ids=[True, True]),
    "ids of 40 bits": choice(token_ids=[1, 2**40]),
    "ids that are one text": choice(token_ids="11"),
    "a logprob that is a text": choice(**logprobs("-0.5", "x")),
    "a logprob that is a flag": choice(**logprobs(False, -0.5)),
    "a logprob that is missing": choice(**logprobs(None, -0.5)),
    "logprobs that are no entries": choice(logprobs={"content": [-0.5, -0.5]}),
    "too few logprobs": choice(**logprobs(-0.5)),
    "another reason to finish": choice(finish_reason={"stop": 1}),
    "two choices": {"choices": choice()["choices"] * 2},
    "a choice that is a text": {"choices": ["stop"]},
    "a list": [],
    "a number": 3,
}


@pytest.mark.parametrize("lie", LIES)
def test_an_answer_that_is_not_vllms_is_an_error_of_the_engine(lie):
    async def story(engine, server):
        server.faults["/inference/v1/generate"] = [web.json_response(LIES[lie])]
        with pytest.raises(EngineError, match="engine vllm"):
            await engine.generate([REQUEST])
        assert len(await engine.generate([REQUEST])) == 1, "the next answer counts again"

    played(story)


def test_a_true_answer_in_this_form_is_taken():
    async def story(engine, server):
        server.faults["/inference/v1/generate"] = [web.json_response(choice())]
        (completion,) = await engine.generate([REQUEST])
        assert completion.token_ids.tolist() == [1, 1]

    played(story)


BODIES = {
    "deep": (b"[" * 200_000, "expected JSON"),
    "latin": (b"\xff\xfe\xe9", "expected JSON"),
    "long": (b'{"choices": "' + b"x" * 4_000_000 + b'"}', "more than 1,0[0-9]{2},[0-9]{3} bytes"),
    "digits": (b"9" * 100_000, "expected JSON"),
}


@pytest.mark.parametrize("body", BODIES)
def test_a_malformed_answer_is_an_error_of_the_engine(body):
    async def story(engine, server):
        told, message = BODIES[body]
        server.faults["/inference/v1/generate"] = [web.Response(body=told)]
        with pytest.raises(EngineError, match=message):
            await engine.generate([REQUEST])
        assert len(await engine.generate([REQUEST])) == 1

    played(story)


def test_a_body_without_an_end_is_read_up_to_a_bound():
    class Endless(web.StreamResponse):
        sent = 0

        async def prepare(self, request):
            await super().prepare(request)
            with contextlib.suppress(ConnectionError):
                while self.sent < 1 << 30:
                    await self.write(b" " * (1 << 16))
                    self.sent += 1 << 16

    async def story(engine, server):
        endless = Endless()
        server.faults["/inference/v1/generate"] = [endless]
        with pytest.raises(EngineError, match="more than"):
            await engine.generate([REQUEST])
        assert endless.sent < 1 << 27, "most of it is never sent"

    played(story)


@pytest.mark.long
def test_a_compressed_body_is_not_unfolded():
    async def story(engine, server):
        bomb = gzip.compress(b" " * (200 << 20))
        assert len(bomb) < 1 << 20
        server.faults["/inference/v1/generate"] = [
            web.Response(body=bomb, headers={"Content-Encoding": "gzip"})
        ]
        tracemalloc.start()
        with pytest.raises(EngineError, match=r"the answer is compressed \('gzip'\)"):
            await engine.generate([REQUEST])
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
        tracemalloc.stop()

    played(story)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_not_followed(status):
    async def story(engine, server):
        async with Server() as elsewhere:
            away = web.Response(status=status, headers={"Location": f"{elsewhere.url}/inference/v1/generate"})
            server.faults["/inference/v1/generate"] = [away]
            with pytest.raises(ServerError, match=rf"status {status}: .*redirects are not followed"):
                await engine.generate([REQUEST])
            server.faults["/pause"] = [web.Response(status=status, headers={"Location": elsewhere.url})]
            with pytest.raises(WeightSyncError, match="redirects are not followed"):
                await engine.update_weights(weights(2))
            assert elsewhere.calls == []

    played(story)


@pytest.mark.parametrize("answer", [[], {}, {"data": []}, {"data": [{"max_model_len": "x"}]}, 7, None])
def test_a_server_that_reports_no_size_is_refused(answer):
    async def main():
        async with Server() as server:
            server.faults["/v1/models"] = [web.json_response(answer)]
            engine = HttpEngine(EngineSetup(model="m", deadline=5), url=server.url)
            with pytest.raises(WeightSyncError, match=r"no data\.0\.max_model_len"):
                await engine.update_weights(weights(1))
            await engine.aclose()

    asyncio.run(main())


def test_damaged_weights_are_never_sent():
    async def story(engine, server):
        published, before = weights(2), len(server.calls)
        first, *rest = published.tensors
        with pytest.raises(WeightSyncError, match="tensor 'a'"):
            await engine.update_weights(evolve(published, tensors=(evolve(first, checksum=1), *rest)))
        assert len(server.calls) == before

    played(story)


# ---------------------------------------------------------------------------------- a life of its own


def test_a_server_that_was_started_again_is_given_the_weights_before_it_generates():
    async def story(engine, server):
        server.version = "default"
        with pytest.raises(EngineError, match=r"sampled with weights \['default'\].*Retry"):
            await engine.generate([REQUEST])
        assert (await engine.generate([REQUEST]))[0].versions.tolist() == [1, 1]

    incidents = []
    with reported_to(incidents.append):
        played(story)
    assert [one.kind for one in incidents] == ["died"]
    assert "the server has lost version 1 (it holds 'default')" in incidents[0].message


@pytest.mark.long
def test_hundreds_of_requests_are_with_the_server_at_once_and_leave_it_when_they_are_cancelled():
    async def story(engine, server):
        server.gate = asyncio.Event()
        task = asyncio.ensure_future(engine.generate([REQUEST] * 300))
        async with server.changed:
            await server.changed.wait_for(lambda: server.running == 300)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with server.changed:
            await server.changed.wait_for(lambda: not server.running)
        assert (server.most, server.aborted) == (300, 300)

    played(story)


def test_a_request_beyond_the_servers_context_is_refused_here():
    async def story(engine, server):
        with pytest.raises(EngineError, match="exceed the model's 100 positions"):
            await engine.generate([evolve(REQUEST, max_tokens=98)])

    played(story)


@pytest.mark.long
def test_rollouts_of_several_turns_end_where_the_server_has_no_more_room():
    """Each turn adds 38 tokens to a prompt of 8; the server takes 100, and was never asked for more."""

    def goes_on(episode):
        return Feedback(reward=1.0, done=False, messages="x" * 8)

    async def story(engine, server):
        server.finish_reason = "stop"
        (rollout,) = await play(
            [RolloutRequest(prompt=prompts(1)[0], seed=0)],
            engine=engine,
            environments={"task": FakeEnvironment(goes_on, max_turns=9)},
            renderer=FakeRenderer(),
            sampling=SamplingParams(temperature=1.0, max_tokens=30),
        )
        bodies = [body for body in server.bodies if isinstance(body, dict) and "token_ids" in body]
        asked = [body["sampling_params"]["max_tokens"] for body in bodies]
        assert asked == [30, 30, 16]
        assert (rollout.turns, rollout.finish_reason, rollout.error) == (3, "tokens", None)

    played(story)


def test_a_server_that_others_may_use_promises_no_reproducible_completions():
    with pytest.raises(ConfigError, match=r"cannot promise; use the engine vllm, or set pipeline\.policy"):
        HttpEngine(EngineSetup(model="m", reproducible=True))


def test_a_closed_engine_says_so():
    async def story(engine, server):
        await engine.aclose()
        with pytest.raises(EngineError, match="closed"):
            await engine.generate([REQUEST])

    played(story)


# ---------------------------------------------------------------------------------- several servers


def played_on(story, n=2, **options):
    """The story with the engine that a run makes of several addresses; the servers hold version 1."""

    async def main():
        async with contextlib.AsyncExitStack() as stack:
            servers = [await stack.enter_async_context(Server()) for _ in range(n)]
            given = {"url": [server.url for server in servers], **options}
            config = EngineConfig(name="vllm:http", options=given)
            host, setup = PluginHost.discover(["scale", "vllm"]), EngineSetup(model="m", deadline=20.0)
            placement, workers = host.make("placement", "local", host), making.workers_of(config, host)
            engine = placement.engine(evolve(config, workers=workers), setup, [{}], Tolerance())
            stack.push_async_callback(engine.aclose)
            await engine.update_weights(weights(1))
            await story(engine, servers)

    asyncio.run(main())


def groups(n, size=4):
    """Requests of ``n`` groups; the first token of a prompt is that of its group."""
    return [
        GenerationRequest(prompt_ids=(place, 2, 3), max_tokens=2, group=str(place))
        for place in range(n)
        for _ in range(size)
    ]


async def until(holds):
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110 - a real socket has no event to wait for
            await asyncio.sleep(0.01)


def test_several_servers_share_the_groups_and_each_gets_all_weights(tmp_path):
    async def story(engine, servers):
        answers = await engine.generate(groups(8))
        assert [each.token_ids[0] for each in answers] == [request.prompt_ids[0] for request in groups(8)]
        asked = [
            {body["token_ids"][0] for body in server.bodies if body and "token_ids" in body}
            for server in servers
        ]
        assert [len(each) for each in asked] == [4, 4], "the load is balanced"
        assert not asked[0] & asked[1], "a group stays on one server"
        await engine.update_weights(weights(2))
        assert [server.version for server in servers] == ["2", "2"]
        files = {
            body["update_info"]["location"]
            for s in servers
            for body in s.bodies
            if body and "update_info" in body
        }
        assert len(files) == 2, "each server reads a file of its own"

    played_on(story, directory=tmp_path)


@pytest.mark.long
def test_what_a_server_that_dies_has_not_answered_goes_to_another_and_it_is_waited_for(monkeypatch):
    monkeypatch.setattr(http, "START_PAUSE", 0.01)

    async def story(engine, servers):
        dying, other = servers
        dying.gate, other.gate = asyncio.Event(), asyncio.Event()
        asking = asyncio.create_task(engine.generate(groups(8)))
        await until(lambda: dying.running == other.running == 16)
        await dying.die()
        other.gate.set()
        answers = await asking
        assert [each.token_ids[0] for each in answers] == [request.prompt_ids[0] for request in groups(8)]
        await engine.update_weights(weights(2))
        assert {version for each in await engine.generate(groups(2)) for version in each.versions} == {2}
        dying.version, dying.gate = "default", None
        async with dying:
            await until(lambda: statistics(engine).serving == 2)
            assert dying.version == "2", "it is given what it has missed"
            before = len(dying.calls)
            await engine.generate(groups(8))
            assert "/inference/v1/generate" in dying.calls[before:]
            await engine.aclose()

    incidents = []
    with reported_to(incidents.append):
        played_on(story)
    told = {incident.kind for incident in incidents}
    assert "retried" in told
    assert told & {"replaced", "late"}, "an update that comes soon leaves the engine, which is late then"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"url": []}, "expected at least one address, each of them once"),
        ({"url": ["http://127.0.0.1:1", "http://127.0.0.1:1/"]}, "each of them once"),
        ({"url": ["http://127.0.0.1:1", "http://10.0.0.7:1"]}, "another machine"),
        ({"url": ["http://127.0.0.1:1", 8000]}, "expected an address or a list of addresses"),
    ],
)
def test_addresses_are_checked_before_anything_starts(options, told):
    with pytest.raises(ConfigError, match=told):
        making.workers_of(
            EngineConfig(name="vllm:http", options=options), PluginHost.discover(["scale", "vllm"])
        )


def test_another_number_of_workers_than_of_addresses_is_refused():
    config = EngineConfig(name="vllm:http", options={"url": ["http://[::1]:1", "http://[::1]:2"]}, workers=3)
    with pytest.raises(ConfigError, match=r"engine\.workers = 3: the options .* describe 2; leave out"):
        making.workers_of(config, PluginHost.discover(["scale", "vllm"]))


# ---------------------------------------------------------------------------------- the key


def test_a_server_that_repeats_the_key_does_not_put_it_into_a_message(monkeypatch):
    monkeypatch.setenv("MY_KEY", "sesame")

    async def story(engine, server):
        server.faults["/inference/v1/generate"] = [(503, "you said sesame"), (500, "Bearer sesame")]
        with pytest.raises(EngineError, match=r"status 500: Bearer \[key\]"):
            await engine.generate([REQUEST])

    incidents = []
    with reported_to(incidents.append):
        played(story, api_key_variable="MY_KEY")
    assert [incident.message for incident in incidents if "sesame" in incident.message] == []
    assert "you said [key]" in incidents[0].message


@pytest.mark.slow
def test_the_key_is_in_no_file_of_a_run(tmp_path):
    """A run that trains, until the server repeats the key in an error that ends it."""
    program = Path(sys.executable).with_name("grpo-core")

    async def story():
        async with Server() as server:
            server.faults["/inference/v1/generate"] = [(500, "Bearer sesame-4711")] * 1000
            process = await asyncio.create_subprocess_exec(
                *(program, "train", "--env", "math:sort", "--engine", "vllm:http", "--output", "run"),
                *("--set", f"engine.options.url={server.url}"),
                *("--set", "engine.options.api_key_variable=MY_KEY"),
                *("--set", "model.options.warm_start_steps=1", "--set", "trainer.steps=2"),
                cwd=tmp_path,
                env={**os.environ, "MY_KEY": "sesame-4711"},
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )
            said, _ = await process.communicate()
            assert server.keys == {"Bearer sesame-4711"}
            return process.returncode, said

    status, said = asyncio.run(story())
    assert status == 1, said
    assert b"Bearer [key]" in said
    files = {
        str(path.relative_to(tmp_path)): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()
    }
    assert {"run/config.toml", "run/events.jsonl", "run/report.html"} <= files.keys()
    assert [name for name, data in {**files, "output": said}.items() if b"sesame-4711" in data] == []
