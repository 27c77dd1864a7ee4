"""Outages of services: calls wait and retry; nothing is lost or scored as 0."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import itertools
import json
import socket
import subprocess
import sys
import textwrap
import threading
import time
import urllib.request

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from test_kept_work import saving
from test_pipeline import Run
from test_sessions import environment

import grpo_core as grpo
from grpo_core.config import EnvironmentConfig
from grpo_core.contracts.errors import Unavailable
from grpo_core.contracts.events import PromptSkipped
from grpo_core.contracts.incidents import reported_to
from grpo_core.contracts.records import Episode, Feedback, Prompt, SessionStart
from grpo_core.environments.host import EnvironmentHost
from grpo_core.environments.outages import LONGEST, Outage, unavailable
from grpo_core.environments.pool import EnvironmentPool
from grpo_core.environments.process import EnvironmentProcess, EnvironmentSpec
from grpo_core.plugins.installed import PluginSelection
from grpo_core.testing import FakeEngine, FakeEnvironment, clock
from grpo_core.text.credentials import Mask
from grpo_core.validation.runner import Context, run_strategy
from grpo_core.validation.strategies import Greedy

# ---------------------------------------------------------------------------------- the rules

REFUSED = Unavailable("refused")


def late(message="late"):
    error = Unavailable(message)
    error.timed_out = True
    return error


def test_pauses_grow_with_jitter_up_to_the_longest_and_end_at_the_budget():
    outage, now, pauses = Outage(600.0, lambda: 0.5), 100.0, []
    outage.answered(0.0)
    while not outage.over:
        assert outage.failed(now)
        pauses.append(outage.due - now)
        now = outage.due
    assert pauses[:6] == [1.25, 2.5, 5.0, 10.0, 20.0, LONGEST * 1.25]
    assert now == outage.until == 700.0


@given(st.lists(st.floats(0, 50), min_size=1), st.floats(0, 1), st.floats(1, 1000))
def test_whatever_fails_when_the_next_call_is_a_second_later_at_least_and_no_later_than_the_budget(
    gaps, jitter, budget
):
    outage = Outage(budget, lambda: jitter)
    outage.answered(0.0)
    now = 10.0
    for gap in gaps:
        outage.failed(now)
        assert outage.over or min(outage.until, now + 1.0) - 1e-9 <= outage.due or now < outage.due
        assert outage.due <= 10.0 + budget
        now += gap


def test_a_service_that_has_never_answered_has_thirty_seconds():
    outage = Outage(600.0, lambda: 0.0)
    outage.failed(5.0)
    assert outage.until == 35.0
    outage.answered(6.0)
    outage.failed(10.0)
    assert outage.until == 610.0


def test_a_service_may_ask_for_a_longer_pause():
    outage = Outage(600.0, lambda: 0.0)
    outage.answered(0.0)
    outage.failed(0.0, retry_after=120.0)
    assert outage.due == 120.0
    outage.failed(120.0, retry_after=1e6)
    assert outage.due == outage.until == 600.0


def test_an_answer_to_a_call_from_before_the_outage_does_not_end_it():
    outage = Outage(600.0, lambda: 0.0)
    outage.failed(10.0)
    outage.answered(9.0)
    assert outage.since == 10.0
    outage.answered(10.5)
    assert outage.since is None


# ---------------------------------------------------------------------------------- runs on a virtual clock


class Away(FakeEnvironment):
    """A judge whose service is away for some seconds from a time on; it logs when it is asked meanwhile."""

    def __init__(self, begin, seconds, *, error=REFUSED, takes=0.1, **options):
        super().__init__(**options)
        self.begin, self.end, self.error, self.takes = begin, begin + seconds, error, takes
        self.asked = []

    async def evaluate(self, episodes):
        now = asyncio.get_running_loop().time()
        if not self.begin <= now < self.end:
            return await super().evaluate(episodes)
        self.asked.append(now)
        await asyncio.sleep(self.takes)
        return [Feedback(error=str(self.error), unavailable=self.error)] * len(episodes)

    @property
    def calls_a_second(self):
        """Largest number of calls in a second after the first one, which finds that the service is away."""
        return max((sum(a <= b < a + 1.0 for b in self.asked[1:]) for a in self.asked[1:]), default=0)


def waiting(away, *, run=Run, **changes):
    """Return a run whose environment waits, and the incidents."""
    options = EnvironmentConfig(**changes.pop("config", {}))
    return run(environment=EnvironmentPool([away], options), **changes), []


def ended(story, incidents, seed=None):
    with reported_to(incidents.append):
        return story(seed=seed)


@pytest.mark.parametrize("seconds", [0.5, 2.0, 30.0, 300.0, 570.0])
@pytest.mark.parametrize("seed", range(3))
def test_a_run_survives_an_outage_and_loses_nothing(seconds, seed):
    away = Away(20.0, seconds)
    story, incidents = waiting(away)
    ended(story, incidents, seed)
    assert story.result == "finished"
    assert sorted(story.trained) == sorted({f"{i}" for i in range(48)} & {*story.trained}), "each once"
    assert len(story.trained) == 48
    assert not story.of(PromptSkipped)
    assert story.buffer.statistics().attempts == story.buffer.statistics().dispatched, "no attempt counts"
    assert away.calls_a_second <= 1
    assert {incident.kind for incident in incidents} <= {"unavailable", "available"}
    if seconds > 1:
        assert incidents[0].kind == "unavailable"
        assert incidents[-1].kind == "available"
        assert "unavailable since" in incidents[0].message
        assert "refused" in incidents[0].message


@pytest.mark.parametrize("seed", range(3))
def test_a_run_whose_service_stays_away_ends_with_a_checkpoint_and_continues_from_there(seed):
    away = Away(20.0, 660.0)
    story, incidents = waiting(away, run=saving, config={"unavailable_for": 600.0}, steps=20)
    with pytest.raises(
        Unavailable,
        match=r"environment of task 'task': its service has been unavailable for 600 s "
        r"\(environment.unavailable_for\), since .* the last with: refused. Start it again",
    ) as caught:
        ended(story, incidents, seed)
    (note,) = caught.value.__notes__
    assert "the newest that was finished, is saved" in note
    assert away.calls_a_second <= 1
    assert len(away.asked) < 40
    assert not story.of(PromptSkipped)
    assert 619.0 < away.asked[-1] < 622.0, "the last call is at the end of the budget"
    step, state = story.saved[-1][0], story.saved[-1]
    assert step == story.trainer.version > 0
    from test_kept_work import goes_on

    assert goes_on(story, steps=20) == list(range(80)), state


def test_a_service_that_never_answers_ends_the_run_in_half_a_minute():
    away = Away(0.0, 1e9)
    story, incidents = waiting(away)
    with pytest.raises(
        Unavailable, match=r"unavailable for 30 s \(environment.unavailable_for; it has never answered\)"
    ):
        ended(story, incidents)
    assert len(away.asked) < 12


class TwoTasks:
    """Draws prompts of two tasks in turn."""

    def __init__(self, draw):
        self.draw = draw

    def __call__(self, request):
        names = itertools.cycle(["task", "other"])
        return [evolve(prompt, environment=next(names)) for prompt in self.draw(request)]


def test_other_tasks_and_the_trainer_continue_while_one_task_waits():
    away, other = Away(20.0, 300.0), FakeEnvironment()
    story, incidents = waiting(away, max_staleness=8, steps=30)
    story.pipeline.playing.environments["other"] = other
    story.pipeline.prompts.draw = TwoTasks(story.pipeline.prompts.draw)
    times = []
    step = story.trainer.step

    async def timed(batch):
        times.append(asyncio.get_running_loop().time())
        return await step(batch)

    story.trainer.step = timed
    ended(story, incidents)
    assert story.result == "finished"
    assert not story.of(PromptSkipped)
    assert sum(20.2 < at < 320.0 for at in times) >= 3, "it trains what there is"


@pytest.mark.parametrize("mode", ["pipelined", "batched"])
def test_a_validation_waits_and_no_reply_is_scored_as_zero(mode):
    away = Away(1.0, 300.0, feedback=lambda episode: Feedback(reward=1.0))
    pool = EnvironmentPool([away], EnvironmentConfig(max_batch=4))

    async def story():
        engine = FakeEngine()
        await engine.update_weights(grpo.Weights(version=0, location="", nbytes=0, tensors=()))
        context = Context(
            version=0,
            prompts={"task": [Prompt(messages=f"{i}", id=f"{i}", environment="task") for i in range(20)]},
            engine=engine,
            environments={"task": pool},
            renderer=Run().pipeline.playing.renderer,
            sampling=Run().pipeline.playing.sampling,
            deadline=60.0,
        )
        assert (await pool.evaluate(of("first")))[0].reward == 1.0
        await asyncio.sleep(1.0)
        return await run_strategy("greedy", Greedy(mode=mode), context)

    results = clock.run(story())["task"]
    assert results["reward"] == 1.0
    assert results["errors"] == 0.0
    assert away.calls_a_second <= 1


def test_a_service_that_hangs_is_away_when_calls_with_two_prompts_took_too_long():
    away = Away(20.0, 300.0, error=late(), takes=30.0)
    story, incidents = waiting(away, schedule={"rollout_deadline": 150.0})
    ended(story, incidents)
    assert story.result == "finished"
    assert not story.of(PromptSkipped)
    assert story.buffer.statistics().attempts <= story.buffer.statistics().dispatched + 4
    assert len(away.asked) < 20
    assert "unavailable since" in incidents[0].message


@pytest.mark.parametrize("error", [late(), REFUSED])
def test_a_prompt_that_no_call_answers_is_unscored_alone_and_the_run_continues(error):
    """One poisoned prompt hangs its judge, or makes it drop the connection."""

    def feedback(episode):
        if episode.prompt.id == "7":
            return Feedback(error=str(error), unavailable=error)
        return Feedback(reward=float(episode.reply.startswith("a")))

    story, incidents = waiting(FakeEnvironment(feedback), config={"max_batch": 4}, max_staleness=3)
    ended(story, incidents)
    assert [event.prompt for event in story.of(PromptSkipped)] == ["7"]
    assert story.result == "finished"


def test_a_deadline_of_a_rollout_still_ends_what_is_late_for_another_reason():
    story, incidents = waiting(Away(20.0, 100.0), engine=FakeEngine(latency=lambda rng: 61.0), steps=1)
    with pytest.raises(Exception, match=r"deadline|pipeline: waited"):
        ended(story, incidents)


# ---------------------------------------------------------------------------------- tools, sessions, agents


class Host:
    """A worker of a pool that plays an environment in this process, without batches."""

    player = None

    def __init__(self, made):
        self.host = EnvironmentHost(made)
        self.about = evolve(self.host.description(), slots="none", concurrency=0, agents=0, combine={})

    async def start(self):
        return None

    async def call(self, method, items, slots):
        return await (self.evaluate(items) if method == "evaluate" else self.open(dict(items)))

    async def evaluate(self, episodes):
        return self.host.call("evaluate", episodes)

    async def open(self, prompts):
        return self.host.call("open", list(prompts.items()))

    async def close(self, sessions):
        return None

    async def aclose(self):
        return None


def counted(fails, name="look"):
    """A tool whose service is away for its first calls."""
    calls = []

    def look(arguments):
        calls.append(arguments)
        if len(calls) <= fails:
            raise ConnectionRefusedError(111, "Connection refused")
        return f"seen {len(calls)}"

    return grpo.Tool(name=name, call=look), calls


def pooled(made, story, **config):
    async def main():
        pool = EnvironmentPool([Host(made)], EnvironmentConfig(**config))
        await pool.start()
        return await story(pool)

    incidents = []
    with reported_to(incidents.append):
        return clock.run(main()), incidents


def asking(*calls, id="p"):
    message = {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": f"call{n}", "function": {"name": name, "arguments": arguments}}
            for n, (name, arguments) in enumerate(calls)
        ],
    }
    return Episode(prompt=Prompt(messages="x", id=id), messages=(message,), session=None)


def test_a_tool_whose_service_is_away_is_called_again_and_the_tools_before_it_are_not():
    first, once = counted(0, "first")
    look, calls = counted(3)

    async def story(pool):
        return await pool.evaluate([asking(("first", {}), ("look", {}), ("first", {}))])

    (feedback,), incidents = pooled(environment(tools=[first, look], max_turns=2), story)
    assert [message["content"] for message in feedback.messages] == ["seen 1", "seen 4", "seen 2"]
    assert (feedback.done, feedback.error, len(once), len(calls)) == (False, None, 2, 4)
    assert [incident.kind for incident in incidents] == ["unavailable"] * 2 + ["available"]


def test_a_tool_that_answers_does_not_end_the_outage_of_another():
    here, _ = counted(0, "here")
    gone, calls = counted(10**6, "gone")

    async def story(pool):
        async def others():
            for i in itertools.count():
                await pool.evaluate([asking(("here", {}), id=f"{i}")])
                await asyncio.sleep(0.5)

        task = asyncio.create_task(others())
        try:
            with pytest.raises(Unavailable, match="Connection refused"):
                await pool.evaluate([asking(("here", {}), ("gone", {}))])
        finally:
            task.cancel()

    pooled(environment(tools=[here, gone], max_turns=2), story)
    assert len(calls) < 12


def test_an_address_that_the_model_wrote_is_the_models_fault():
    def fetch(arguments):
        raise socket.gaierror(-2, "Name or service not known")

    tool = grpo.Tool(name="fetch", call=fetch)

    async def story(pool):
        return await pool.evaluate([asking(("fetch", {"url": "http://nowhere.example/"}))])

    (feedback,), incidents = pooled(environment(tools=[tool], max_turns=2), story)
    assert feedback.messages[0]["content"].startswith("error: gaierror")
    assert not incidents


def test_a_session_is_opened_when_its_service_answers():
    opened = []

    def open(self, prompt):
        opened.append(prompt.id)
        if len(opened) < 5:
            raise grpo.Unavailable("no room", retry_after=7.0)
        return "session"

    async def story(pool):
        began = asyncio.get_running_loop().time()
        starts = await pool.open({"0": Prompt(messages="x", id="a"), "1": Prompt(messages="y", id="b")})
        return starts, asyncio.get_running_loop().time() - began

    (starts, seconds), incidents = pooled(environment(open=open), story)
    assert starts == [SessionStart(), SessionStart()]
    assert 21.0 <= seconds < 30.0
    assert incidents[-1].kind == "available"


# ---------------------------------------------------------------------------------- clients


class Server:
    """An HTTP server on loopback that misbehaves while ``mode`` is set; ``calls`` has times and modes.

    Modes: "refuse" (the port is closed), "reset", "half" (a reset in the middle of the body), "hang", "503",
    "503 later" (with Retry-After) and "" (it answers).
    """

    def __init__(self, mode=""):
        self.calls, self._mode, self._held = [], "", []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/"
        self._listen()
        self.mode = mode

    def _listen(self):
        listening = self._socket
        threading.Thread(target=self._accept, args=(listening,), daemon=True).start()

    @property
    def mode(self):
        return self._mode

    @mode.setter
    def mode(self, mode):
        if mode == "refuse" != self._mode:
            self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()
        elif self._mode == "refuse" != mode:
            self._socket = socket.create_server(("127.0.0.1", self.port))
            self._listen()
        self._mode = mode

    def close(self):
        self.mode = "refuse"
        for held in self._held:
            held.close()

    def _accept(self, listening):
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=self._serve, args=(listening.accept()[0],), daemon=True).start()

    def _serve(self, client):
        data = b""
        while b"\r\n\r\n" not in data:
            if not (part := client.recv(65536)):
                client.close()
                return
            data += part
        head, _, body = data.partition(b"\r\n\r\n")
        lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        while lengths and len(body) < int(lengths[0].split(b":")[1]):
            body += client.recv(65536)
        mode = self.mode
        self.calls.append((time.monotonic(), mode))
        if mode == "hang":
            self._held.append(client)
            return
        text = json.dumps([0.5 + len(reply) % 2 / 2 for reply in json.loads(body or b"[]")]).encode()
        if mode.startswith("503"):
            later = b"Retry-After: 1\r\n" if mode == "503 later" else b""
            client.sendall(
                b"HTTP/1.1 503 Busy\r\nConnection: close\r\n" + later + b"Content-Length: 0\r\n\r\n"
            )
        elif mode != "reset":
            client.sendall(
                b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n" % len(text) + (text[:1] if mode == "half" else text)
            )
        if mode in ("reset", "half"):
            time.sleep(0.05)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        client.close()


@pytest.fixture
def server():
    with contextlib.closing(Server()) as server:
        yield server


async def by_httpx(url, seconds):
    import httpx

    async with httpx.AsyncClient(timeout=seconds) as client:
        (await client.post(url, json=["a"])).raise_for_status().json()


async def by_aiohttp(url, seconds):
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=seconds)
    async with (
        aiohttp.ClientSession(timeout=timeout, raise_for_status=True) as session,
        session.post(url, json=["a"]) as response,
    ):
        await response.json()


async def by_openai(url, seconds):
    import openai

    async with openai.AsyncOpenAI(base_url=url, api_key="none", timeout=seconds, max_retries=0) as client:
        await client.post("/", body=["a"], cast_to=object)


async def by_requests(url, seconds):
    import requests

    requests.post(url, json=["a"], timeout=seconds).raise_for_status()  # noqa: ASYNC210


async def by_urllib(url, seconds):
    request = urllib.request.Request(url, b'["a"]')
    try:
        with urllib.request.urlopen(request, timeout=seconds) as response:  # noqa: ASYNC210
            response.read()
    except urllib.error.HTTPError as error:
        error.close()
        raise


async def by_a_wrapper(url, seconds):
    try:
        await by_httpx(url, seconds)
    except Exception as error:
        raise RuntimeError("the judge failed") from error


async def by_a_group(url, seconds):
    async with asyncio.TaskGroup() as group:
        for _ in range(2):
            group.create_task(by_aiohttp(url, seconds))


CLIENTS = [by_httpx, by_aiohttp, by_openai, by_requests, by_urllib, by_a_wrapper, by_a_group]


@pytest.mark.parametrize("mode", ["refuse", "reset", "half", "hang", "503", "503 later"])
@pytest.mark.parametrize("ask", CLIENTS)
def test_the_errors_of_the_usual_clients_say_that_a_service_is_away(server, ask, mode):
    asyncio.run(ask(server.url, 5.0))
    server.mode = mode
    with pytest.raises(Exception) as caught:
        asyncio.run(ask(server.url, 0.5))
    away = unavailable(caught.value)
    assert away is not None, repr(caught.value)
    assert away.timed_out == (mode == "hang")
    assert away.retry_after == (1.0 if mode == "503 later" else None)
    if ask in (by_httpx, by_aiohttp, by_openai, by_requests) and mode in ("refuse", "503"):
        assert str(server.port) in str(away), str(away)


def raised(module, *names, **values):
    """An error whose classes, the last one first, are a library's."""
    kind = Exception
    for name in reversed(names):
        kind = type(name, (kind,), {"__module__": module})
    error = kind("a text")
    vars(error).update(values)
    return error


@pytest.mark.parametrize(
    ("error", "late"),
    [
        (raised("botocore.exceptions", "EndpointConnectionError", "ConnectionError", "BotoCoreError"), False),
        (raised("botocore.exceptions", "ConnectionClosedError", "HTTPClientError", "BotoCoreError"), False),
        (raised("redis.exceptions", "ConnectionError", "RedisError"), False),
        (raised("redis.exceptions", "TimeoutError", "RedisError"), True),
        (raised("groq", "InternalServerError", "APIStatusError", "APIError", status_code=503), False),
    ],
    ids=lambda value: type(value).__module__ if isinstance(value, Exception) else None,
)
def test_the_errors_of_clients_that_are_not_here_are_known_by_their_names(error, late):
    away = unavailable(error)
    assert away is not None
    assert away.timed_out == late


@pytest.mark.parametrize(
    "error",
    [
        raised("botocore.exceptions", "NoCredentialsError", "BotoCoreError"),
        raised("redis.exceptions", "ResponseError", "RedisError"),
        raised("my_judge", "ConnectionError"),
    ],
    ids=lambda error: f"{type(error).__module__}.{type(error).__name__}",
)
def test_other_errors_of_such_clients_are_errors(error):
    assert unavailable(error) is None


@pytest.mark.parametrize(
    "error",
    [ValueError("503"), KeyError("x"), FileNotFoundError("x"), OSError("disk full"), RuntimeError("refused")],
)
def test_other_errors_say_nothing_about_a_service(error):
    assert unavailable(error) is None
    assert unavailable(ExceptionGroup("two", [ConnectionError(), error])) is None


def test_an_answer_with_another_status_is_an_answer(server):
    import httpx

    for status in (400, 404, 500):
        response = httpx.Response(status, request=httpx.Request("GET", server.url))
        with pytest.raises(httpx.HTTPStatusError) as caught:
            response.raise_for_status()
        assert unavailable(caught.value) is None


def test_the_text_of_an_unavailable_service_hides_secrets_and_keeps_what_it_asked_for():
    error = Unavailable("no secret-value", retry_after=3.0)
    hidden = Mask({"KEY": "secret-value"}).error(error)
    assert "secret-value" not in str(hidden)
    assert hidden.retry_after == 3.0


# ---------------------------------------------------------------------------------- real processes

JUDGES = '''
    import asyncio, os, urllib.request, json
    import httpx
    import grpo_core as grpo

    class Batched(grpo.Environment):
        def __init__(self, url, concurrency=0, deadline=60.0):
            self.url, self.concurrency, self.deadline = url, concurrency, deadline

        def prompts(self, split):
            return [grpo.Prompt(messages=f"say {i}", answer=str(i)) for i in range(16)]

        async def evaluate(self, episodes):
            async with httpx.AsyncClient(timeout=30.0) as client:
                answer = await client.post(self.url, json=[episode.reply for episode in episodes])
                return answer.raise_for_status().json()

    class Slow(Batched):
        """Waits for its service outside of asyncio, and so is killed."""

        def evaluate(self, episodes):
            request = urllib.request.Request(self.url, json.dumps([e.reply for e in episodes]).encode())
            with urllib.request.urlopen(request) as response:
                return json.load(response)
'''


@pytest.fixture
def judges(tmp_path):
    path = tmp_path / "judges.py"
    path.write_text(textwrap.dedent(JUDGES))
    return path


def of(*ids):
    return [
        Episode(
            prompt=Prompt(messages="?", id=id, environment="play"),
            messages=({"role": "assistant", "content": "a" * n},),
            group=id,
        )
        for n, id in enumerate(ids)
    ]


def away_in_a_process(judges, server, mode, *, seconds=2.5, name="Batched", calls=64, **options):
    """Judge many episodes of a real environment, one submission each, while the server is away.

    It is there again some seconds after it was missed.
    """

    incidents, missed = [], asyncio.Event()

    def heard(incident):
        incidents.append(incident)
        missed.set()

    async def back():
        await missed.wait()
        await asyncio.sleep(seconds)
        server.mode = ""

    async def main():
        settings = EnvironmentConfig()
        spec = EnvironmentSpec(task="play", env=f"{judges}:{name}", options={"url": server.url, **options})
        process = EnvironmentProcess(spec, plugins=PluginSelection(allow=()))
        pool = EnvironmentPool([process], settings, name="play")
        await pool.start()
        try:
            assert [each.reward for each in await pool.evaluate(of("first"))] == [0.5]
            server.mode = mode
            judged = (pool.evaluate(of(f"{i}", f"{i}")) for i in range(calls))
            _, *found = await asyncio.gather(back(), *judged)
            return found, process.starts
        finally:
            await pool.aclose()

    with reported_to(heard):
        found, starts = asyncio.run(main())
    assert all([each.reward for each in some] == [0.5, 1.0] for some in found)
    return incidents, starts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "concurrency"),
    [
        ("refuse", 0), ("reset", 8), ("half", 0), ("503", 8), ("503 later", 0),
        *(
            pytest.param(mode, concurrency, marks=pytest.mark.nightly)
            for mode, concurrency in [("refuse", 8), ("reset", 0), ("half", 8), ("503", 0), ("503 later", 8)]
        ),
    ],
)  # fmt: skip
def test_an_environment_in_its_process_waits_with_one_call_at_a_time(judges, server, mode, concurrency):
    incidents, starts = away_in_a_process(judges, server, mode, concurrency=concurrency)
    asked = [at for at, how in server.calls if how]
    begun = max(1, concurrency)  # calls that ran when it went away
    assert len(asked) <= begun + 3, "no batch is taken apart, and one call asks for all"
    assert starts == 1
    assert {incident.kind for incident in incidents} == {"unavailable", "available"}


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["Batched", "Slow"])
def test_an_environment_whose_service_hangs_waits_as_well(judges, server, name):
    incidents, _ = away_in_a_process(judges, server, "hang", seconds=12.0, name=name, calls=16, deadline=2.0)
    assert "unavailable" in {incident.kind for incident in incidents}
    assert len([at for at, how in server.calls if how]) <= 12


def train(judges, server, output, *settings, steps=8):
    """Train a tiny model; return the finished process."""
    command = [sys.executable, "-m", "grpo_core", "train"]
    given = [
        *("trainer.prompts_per_step=8", "rollout.group_size=4", "model.options.warm_start_steps=5"),
        *(f"trainer.steps={steps}", "checkpoint.every=100", f'tasks.judged.options.url="{server.url}"'),
        *settings,
    ]
    if output.exists():
        command += ["--resume", str(output)]
    else:
        config = output.with_suffix(".toml")
        config.write_text(f'[tasks.judged]\nenv = "{judges}:Batched"\n')
        command += [str(config), "--output", str(output)]
    command += [part for each in given for part in ("--set", each)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=500, cwd=output.parent, check=False
    )


def away_from_call(server, number, mode, seconds):
    """Let the server be away for some seconds from a call on."""

    def watch():
        while len(server.calls) < number:
            time.sleep(0.001)
        server.mode = mode
        if seconds:
            time.sleep(seconds)
            server.mode = ""

    threading.Thread(target=watch, daemon=True).start()


def verified(output):
    command = [sys.executable, "-m", "grpo_core", "verify", str(output)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def events_of(output):
    return [json.loads(line) for line in (output / "events.jsonl").read_text().splitlines()]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("mode", "seconds"),
    [
        ("reset", 12.0),
        ("refuse", 30),
        ("half", 12),
        ("503", 12),
        ("503 later", 12),
        ("hang", 70),
    ],
)
def test_a_real_run_waits_for_its_judge_and_says_so(judges, server, tmp_path, mode, seconds):
    away_from_call(server, 6, mode, seconds)
    done = train(judges, server, tmp_path / "run", "validation.every=3", "validation.prompts=8")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "its service has been unavailable since" in done.stdout
    assert "its service answers again" in done.stdout
    events = collections.Counter(event["event"] for event in events_of(tmp_path / "run"))
    assert events["PromptSkipped"] == 0
    assert events["StepEnded"] == 8
    asked = [at for at, how in server.calls if how]
    assert len(asked) / seconds <= 1.0
    checked = verified(tmp_path / "run")
    assert checked.returncode == 0, checked.stdout


@pytest.mark.nightly
def test_a_real_run_whose_judge_stays_away_ends_with_a_checkpoint_and_is_continued(judges, server, tmp_path):
    away_from_call(server, 6, "refuse", 0)
    done = train(judges, server, tmp_path / "run", "environment.unavailable_for=4", "validation.every=0")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "environment of task 'judged': its service has been unavailable for 4 s" in done.stderr
    assert "Traceback" not in done.stderr
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))
    server.mode = ""
    again = train(judges, server, tmp_path / "run")
    assert again.returncode == 0, again.stdout + again.stderr
    checked = verified(tmp_path / "run")
    assert checked.returncode == 0, checked.stdout
