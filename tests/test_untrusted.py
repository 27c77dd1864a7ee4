"""Random answers of servers, agents and models: every reader takes them, or raises what it declares."""

from __future__ import annotations

import asyncio
import contextlib
import json
import pickle
import time

import pytest
from aiohttp import web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving import serving
from test_segments import PLAIN, make_renderer

import grpo_core as grpo
from grpo_core.contracts.unicode import DEEPEST, lone_surrogate, well_formed
from grpo_core.engines.text import TextRenderer
from grpo_core.environments.host import EnvironmentHost
from grpo_core.kit import read_json
from grpo_core.processes.services import read_body
from grpo_core.testing import run
from grpo_core.text.messages import MessageError, normalised, parsed
from grpo_core.text.response_formats import assistant_message
from grpo_core.text.thoughts import split_thought
from grpo_plugin_agents.dialects import DIALECTS, BadRequest
from grpo_plugin_agents.program import _result as result_of
from grpo_plugin_agents.repeats import Attempt
from grpo_plugin_agents.session import Session as AgentSession
from grpo_plugin_audit.misses import LONGEST_ANSWER, MISSES
from grpo_plugin_audit.records import Solution
from grpo_plugin_code import values
from grpo_plugin_code.blocks import program_of
from grpo_plugin_code.commands import Ran
from grpo_plugin_code.harbor import rewards_of
from grpo_plugin_judge.environment import Judge
from grpo_plugin_math.answers import equal, extract
from grpo_plugin_nemo_gym.client import Client, Refused, Session
from grpo_plugin_nemo_gym.environment import NeMoGym
from grpo_plugin_openai.engine import _read as hosted_reply
from grpo_plugin_openenv.actions import Actions
from grpo_plugin_openenv.connection import Rejected
from grpo_plugin_openenv.connection import _data as data_of
from grpo_plugin_openenv.environment import OpenEnv
from grpo_plugin_vllm.client import Client as VllmClient
from grpo_plugin_vllm.client import ServerError
from grpo_plugin_vllm.http import HttpEngine
from grpo_plugin_vllm.statistics import between, of_page

KEYS = (
    "role", "content", "tool_calls", "function", "function_call", "name", "arguments", "id", "type", "text",
    "messages", "tools", "model", "input", "tool_choice", "max_tokens", "n", "stop", "stream", "system",
    "previous_response_id", "call_id", "output", "reward", "metrics", "answer", "data", "errors", "msg",
    "message", "code", "choices", "token_ids", "logprobs", "logprob", "weight_versions", "version", "start",
    "end", "finish_reason", "result", "mcp", "url_path", "headers", "observation", "info", "tool_outputs",
    "terminated", "done", "response_format", "stream_options", "input_schema", "parameters", "description",
    "stop_sequences", "include", "reasoning", "call", "paths", "/reset", "/step", "/verify", "/seed_session",
)  # fmt: skip
WORDS = ("user", "assistant", "tool", "system", "function", "tool_result", "tool_use", "error", "message",
         "list", "dict", "set", "int", "float", "str", "complex", "tuple", "stop", "1", "",
         "\ud800")  # fmt: skip
TEXTS = st.sampled_from(WORDS) | st.text(st.characters(exclude_categories=[]), max_size=8)
NUMBERS = (
    st.integers() | st.floats() | st.sampled_from([10**400, -(10**400), 2**70, 1e308, True, False, None])
)
JSON = st.recursive(
    TEXTS | NUMBERS,
    lambda parts: (
        st.lists(parts, max_size=4) | st.dictionaries(st.sampled_from(KEYS) | TEXTS, parts, max_size=5)
    ),
    max_leaves=20,
)
"""Plain data whose keys are often such as the readers look for."""
PROPERTIES = JSON | st.dictionaries(TEXTS, st.fixed_dictionaries({"type": TEXTS | JSON}))
SCHEMA = st.fixed_dictionaries({"properties": PROPERTIES, "required": JSON})
DEEP = st.integers(DEEPEST - 2, 3000).map(lambda n: '{"a":[' * n + "]}" * n) | st.just("[" * 20_000)
WRITTEN = JSON.map(json.dumps) | DEEP | TEXTS | st.just("9" * 5000) | st.just("1e999999")
"""Texts, most of them JSON."""
BYTES = WRITTEN.map(lambda text: text.encode(errors="surrogatepass")) | st.binary(max_size=40)
CALLS = WRITTEN.map(lambda text: f"so: <tool_call>{text}</tool_call> <tool_call>")
REPLIES = (
    WRITTEN | CALLS | WRITTEN.map(lambda text: f"</think> \\boxed{{{text}}} ```py\n{text}\n``` #### {text}")
)

often = settings(suppress_health_check=list(HealthCheck))


def sent(value):
    """Check that another process and a log can get a value."""
    assert not lone_surrogate(value)
    json.dumps(value)
    return value


# ---------------------------------------------------------------------------------- the shared reader


@pytest.mark.long
@often
@given(BYTES | WRITTEN)
def test_json_of_others_is_plain_data_or_a_value_error(written):
    for kind in (dict, list, object):
        with contextlib.suppress(ValueError):
            value = sent(read_json(written, kind))
            assert isinstance(value, kind)


@pytest.mark.parametrize(
    ("written", "why"),
    [
        ("", "Expecting value"),
        ("null", "expected a JSON object, got null"),
        ('["a"]', r"expected a JSON object, got \[\"a\"\]"),
        (b"\xff", "can't decode byte"),
        ("[" * 101 + "]" * 101, "more than 100 deep"),
        ("[" * 100_000, "more than 100 deep"),
        ("1" * 5000, "Exceeds the limit"),
    ],
)
def test_a_value_error_says_what_was_written(written, why):
    with pytest.raises(ValueError, match=why):
        read_json(written, dict)


def test_half_a_character_is_replaced():
    assert read_json(b'{"a": "\\ud800!"}', dict) == {"a": "\ufffd!"}


def test_a_body_is_read_up_to_its_limit_and_only_as_it_is():
    taken = []

    async def parts():
        for part in (b"ab", b"cd", b"ef"):
            taken.append(part)
            yield part

    assert asyncio.run(read_body(parts(), {}, 6)) == b"abcdef"
    taken.clear()
    with pytest.raises(ValueError, match="more than 3 bytes"):
        asyncio.run(read_body(parts(), {}, 3))
    assert taken == [b"ab", b"cd"], "the rest is not read"
    with pytest.raises(ValueError, match="compressed \\('gzip'\\)"):
        asyncio.run(read_body(parts(), {"Content-Encoding": "gzip"}, 100))


# ---------------------------------------------------------------------------------- models and programs


def form_in(text):
    for read in (values.form_in, values.text_in):
        with contextlib.suppress(ValueError):
            read(text)


def action_of(reply):
    for types in ({"x": "string"}, {"x": "integer"}, {"x": "number"}, {"x": "string", "y": "integer"}):
        properties = {name: {"type": kind} for name, kind in types.items()}
        with contextlib.suppress(ValueError):
            Actions({"properties": properties, "required": list(types)}).of(reply)


def rewards_in(text):
    for path in ("/logs/verifier/reward.txt", "/logs/verifier/reward.json"):
        rewards_of(Ran(status=0, output="", tree="", files={path: text}))


READERS = {
    "a reply": split_thought,
    "tool calls": lambda text: sent(assistant_message(text, tools=True).get("tool_calls")),
    "arguments": lambda text: parsed(text),
    "a boxed answer": lambda text: equal(extract(text) or "", "12"),
    "an answer of an audit": Solution(prompt=grpo.Prompt(messages="?"), text="12").deserves,
    "changes of an answer": lambda text: [miss.make(text[:LONGEST_ANSWER]) for miss in MISSES],
    "an action": action_of,
    "a program": program_of,
    "a value of a sandbox": form_in,
    "rewards of a sandbox": rewards_in,
    "the result of an agent's program": result_of,
}
"""Readers of texts; they declare no exception."""


@pytest.mark.long
@often
@given(REPLIES)
def test_a_reader_takes_whatever_a_model_or_a_program_writes(text):
    for read in READERS.values():
        read(text)


REPEATED = ("<answer>", "answer ", "####", "\\boxed{", "```\n", "{", "[", "<tool_call>", "</tool_call>",
            "<think>", "</think>", " ", "\n", "1", "1.", "1,", "-", "\\", '"', '{"a":', "x=")  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("reader", READERS)
def test_a_reader_takes_a_long_repetition_in_a_time_that_grows_with_its_length(reader):
    slowest = {}
    for piece in REPEATED:
        begin = time.process_time()
        READERS[reader](piece * (100_000 // len(piece)) + "!")
        slowest[piece] = time.process_time() - begin
    assert max(slowest.values()) < 2, slowest


@pytest.mark.long
@often
@given(JSON)
def test_messages_are_readable_or_refused(value):
    for sampled in (True, False):
        with contextlib.suppress(MessageError):
            normalised(value, sampled=sampled)


@pytest.mark.long
@often
@given(BYTES, st.sampled_from(sorted(DIALECTS)))
def test_a_request_of_an_agent_is_read_or_refused(body, path):
    with contextlib.suppress(BadRequest, ValueError):
        request = DIALECTS[path].read(read_json(body, dict), lambda id: None)
        sent([request.messages, request.tools, request.stop, request.model])


MESSAGES = st.lists(st.fixed_dictionaries({"role": TEXTS, "content": JSON}), max_size=3)
SHAPE = dict.fromkeys(("input", "system", "tools", "stop"), JSON) | {
    "messages": JSON | MESSAGES,
    "n": NUMBERS,
    "max_tokens": NUMBERS,
}
REQUESTS = st.fixed_dictionaries({}, optional=SHAPE).map(json.dumps).map(str.encode) | BYTES
RENDERER = make_renderer(PLAIN, "<|end|>")


async def at_once(work, size):
    return work()


class Speaks:
    async def generate(self, requests):
        said = {"token_ids": [5], "logprobs": [-1.0], "versions": [0], "finish_reason": "stop"}
        return [grpo.Completion(**said) for _ in requests]


@pytest.mark.long
@often
@given(REQUESTS, st.sampled_from(sorted(DIALECTS)))
def test_a_session_answers_or_refuses_whatever_an_agent_sends(body, path):
    """An agent's request is never a fault of the run."""
    RENDERER.run = at_once
    play = grpo.Play(
        prompt=grpo.Prompt(messages="?"),
        engine=Speaks(),
        renderer=RENDERER,
        run=None,
        seed=1,
        group="g",
        limits=grpo.Limits(max_tokens=4, max_turns=9, context=900),
    )

    async def asked():
        client = grpo.AgentClient(base_url="http://127.0.0.1:1/v1", api_key="key", model="policy")
        session = AgentSession(client=client, play=play)
        _, reply = await session.reply(DIALECTS[path], body, Attempt(body=b"1", key="", retries=0))
        assert reply.status in (200, 400), reply.body
        recording = await session.aclose()
        pickle.dumps(recording)

    run(asked(), seed=0)


@pytest.mark.long
@often
@given(st.dictionaries(TEXTS, JSON, max_size=3) | SCHEMA, JSON, TEXTS)
def test_a_call_of_a_tool_that_a_server_describes_is_answered(schema, arguments, name):
    async def call(given):
        return given

    class Tools(grpo.Environment):
        max_turns = 2
        tools = (grpo.Tool(name="tool", description="", parameters=schema, call=call),)

        def evaluate(self, episodes):
            return [1.0] * len(episodes)

    functions = [{"name": each, "arguments": arguments} for each in (name, "tool")]
    called = [{"id": "1", "function": function} for function in well_formed(functions)]
    said = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": called}]
    host = EnvironmentHost(Tools())
    episode = grpo.Episode(prompt=grpo.Prompt(messages="?"), messages=said)
    (feedback,) = host.call("evaluate", [episode])
    host.end()
    sent([dict(message) for message in feedback.messages])


# ---------------------------------------------------------------------------------- servers


@pytest.mark.long
@often
@given(WRITTEN)
def test_a_message_of_an_openenv_server_is_data_or_a_refusal(text):
    with contextlib.suppress(grpo.Unavailable, Rejected):
        sent(data_of(text, "step"))


SPAN = st.fixed_dictionaries({"version": JSON | st.just("1"), "start": NUMBERS, "end": NUMBERS})
CHOICE = st.fixed_dictionaries(
    {
        "token_ids": JSON | st.lists(NUMBERS, max_size=3),
        "logprobs": JSON
        | st.fixed_dictionaries({"content": st.lists(st.fixed_dictionaries({"logprob": NUMBERS}))}),
        "weight_versions": JSON | st.lists(SPAN, max_size=3),
        "finish_reason": TEXTS,
    }
)


@pytest.mark.long
@often
@given(WRITTEN)
def test_the_statistics_of_a_server_are_numbers_or_a_value_error(text):
    with contextlib.suppress(ValueError):
        between({}, of_page(f"vllm:num_preemptions_total {text}\nvllm:num_preemptions_total{{{text}}} 1"))


@pytest.mark.long
@often
@given(JSON | CHOICE.map(lambda choice: {"choices": [choice]}))
def test_a_completion_of_a_vllm_server_is_one_or_an_engine_error(answer):
    engine = HttpEngine(grpo.EngineSetup(model="m", deadline=5.0), url="http://127.0.0.1:1")
    engine._newest = 1
    with contextlib.suppress(grpo.EngineError):
        engine._read(answer)


class Liar:
    """A server whose every answer is what the test says."""

    status, body, headers = 200, b"", {}

    async def answer(self, request):
        return web.Response(status=self.status, body=self.body, headers=self.headers)


@pytest.fixture(scope="module")
def liar():
    lies, app = Liar(), web.Application()
    app.router.add_route("*", "/{path:.*}", lies.answer)
    with serving(app) as url:
        lies.url = url
        yield lies


STATUS = st.sampled_from([200, 200, 200, 204, 302, 400, 500])
HEADERS = st.sampled_from(
    [{}, {}, {"Content-Encoding": "gzip"}, {"Content-Encoding": "br"}, {"Set-Cookie": "a"}]
)


@pytest.mark.long
@often
@given(STATUS, BYTES, HEADERS)
def test_a_lying_server_is_unavailable_loses_the_session_or_refuses(liar, status, body, headers):
    liar.status, liar.body, liar.headers = status, body, headers

    async def asked():
        nemo = Client(liar.url, "", 5.0, 0)
        vllm = VllmClient(liar.url, seconds=5.0, connect_seconds=5.0, remote=False)
        try:
            with contextlib.suppress(grpo.Unavailable, grpo.SessionLost, Refused):
                sent(await nemo.post("/x", {}, Session()))
            with contextlib.suppress(ServerError):
                await vllm.post("/x", {})
            with contextlib.suppress(ServerError):
                await vllm.page("/x", seconds=5.0)
        finally:
            await nemo.aclose()
            await vllm.aclose()

    asyncio.run(asked())
    with contextlib.suppress(grpo.Unavailable):
        grpo.fetch_json(f"{liar.url}/x")


ENDPOINT = st.fixed_dictionaries(
    {"url_path": TEXTS | JSON, "headers": JSON | st.dictionaries(TEXTS, TEXTS, max_size=2)}
)
STEP = st.fixed_dictionaries(
    {"reward": NUMBERS, "info": JSON | st.fixed_dictionaries({"tool_outputs": JSON})}
)


CALL = st.fixed_dictionaries({"function": JSON | st.fixed_dictionaries({"name": JSON, "arguments": JSON})})
HOSTED = st.fixed_dictionaries(
    {
        "choices": st.lists(
            st.fixed_dictionaries(
                {
                    "message": st.fixed_dictionaries(
                        {"content": JSON | REPLIES, "tool_calls": st.lists(CALL | JSON, max_size=2) | JSON}
                    )
                }
            )
            | JSON,
            max_size=2,
        ),
        "usage": JSON | st.fixed_dictionaries({"completion_tokens": NUMBERS, "prompt_tokens": NUMBERS}),
    }
)


@pytest.mark.long
@settings(often, max_examples=500)
@given(HOSTED | JSON)
def test_an_answer_of_a_hosted_model_is_a_reply_or_a_declared_error(answer):
    given = read_json(json.dumps(answer).encode(), object)
    with contextlib.suppress(grpo.EngineError, grpo.PluginError):
        reply, _ = hosted_reply(given, "http://there/", ())
        renderer = TextRenderer()
        ids = renderer.prompt_ids([{"role": "user", "content": "?"}], ())
        made = renderer.completion(reply, grpo.GenerationRequest(prompt_ids=ids, max_tokens=5))
        assert made.finish_reason in ("stop", "length")
        assert reply.completion_tokens >= 0
        sent(dict(reply.message))
        normalised([renderer.message("", token_ids=made.token_ids)], sampled=True)


SAID = st.fixed_dictionaries({"message": JSON | st.fixed_dictionaries({"content": JSON | REPLIES})})
COMPLETIONS = st.lists(SAID | JSON, max_size=2).map(lambda found: json.dumps({"choices": found}).encode())


@pytest.mark.long
@settings(often, max_examples=60)
@given(STATUS, BYTES | COMPLETIONS, HEADERS)
def test_a_lying_judge_gives_a_score_or_none(liar, status, body, headers):
    liar.status, liar.body, liar.headers = status, body, headers
    environment = Judge(rubric="?", model="m", url=liar.url, retries=0)
    prompt = grpo.Prompt(messages="hi")
    episode = grpo.Episode(prompt=prompt, messages=[*prompt.messages, {"role": "assistant", "content": "ho"}])

    async def judged():
        try:
            return await environment.score(episode)
        finally:
            await environment.aclose()

    feedback = asyncio.run(judged())
    assert (feedback.reward is None) == (feedback.error is not None)


@pytest.mark.long
@often
@given(JSON | ENDPOINT.map(lambda mcp: {"mcp": mcp}) | STEP, st.booleans())
def test_a_lying_resources_server_gives_feedback_or_a_declared_error(liar, value, steps):
    paths = ("/reset", "/step") if steps else ("/seed_session", "/verify")
    liar.status, liar.headers = 200, {}
    liar.body = json.dumps({"paths": dict.fromkeys(paths)}).encode()
    environment = NeMoGym(liar.url, retries=0)
    row = {"responses_create_params": {"input": "hi", "tools": []}}
    prompt = grpo.Prompt(messages="hi", info={"row": row, "observation": ""})
    said = [*prompt.messages, {"role": "assistant", "content": "ho"}]
    liar.body = json.dumps(value).encode()

    async def played():
        try:
            with contextlib.suppress(grpo.Unavailable, grpo.SessionLost, Refused, grpo.PluginError):
                await environment.open(prompt)
            liar.body = json.dumps(value if isinstance(value, dict) else {"reward": value}).encode()
            episode = grpo.Episode(prompt=prompt, messages=said, session=Session())
            (feedback,) = await environment.evaluate([episode])
            assert isinstance(feedback, grpo.Feedback)
        finally:
            await environment.aclose()

    asyncio.run(played())


@pytest.mark.long
@often
@given(JSON | st.fixed_dictionaries({"paths": JSON}) | st.fixed_dictionaries({"action": JSON | SCHEMA}))
def test_a_server_that_describes_itself_falsely_is_refused_at_the_start(liar, value):
    liar.status, liar.headers, liar.body = 200, {}, json.dumps(value).encode()
    for offer in (NeMoGym, OpenEnv):
        with contextlib.suppress(grpo.ConfigError):
            offer(liar.url)
