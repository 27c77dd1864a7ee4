"""The endpoint that serves the model to agents: real clients on a real socket, and an engine that is told
what to say."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import gzip
import io
import json
import re
import socket
import tracemalloc

import aiohttp
import openai
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from test_agent_sessions import MANY, Says, a_play, check

from grpo_core import ConfigError, EngineError, Limits, PlayerSetup, PluginError
from grpo_core.kit import reported_to
from grpo_core.testing import FakeRenderer
from grpo_plugin_agents.dialects import DIALECTS, BadRequest
from grpo_plugin_agents.server import MAX_BODY, AgentServer

CALL = '<tool_call>{"name": "price", "arguments": {"item": "tea"}}</tool_call>'
TOOL = {"type": "function", "function": {"name": "price", "parameters": {"type": "object", "properties": {}}}}
ASKED = [{"role": "user", "content": "what is it"}]


class Story:
    """A server with one session."""

    def __init__(self, *texts, limits=MANY, seconds=0.0, ping=60.0):
        self.engine = Says(FakeRenderer(), *texts, seconds=lambda: seconds)
        self.limits, self.ping = limits, ping
        self.incidents = []

    async def __aenter__(self):
        self._stack = contextlib.AsyncExitStack()
        self._stack.enter_context(reported_to(self.incidents.append))
        self.server = AgentServer(PlayerSetup(), ping=self.ping)
        await self.server.start()
        self._stack.push_async_callback(self.server.aclose)
        self.play = a_play(self.engine, FakeRenderer(), temperature=0.7, limits=self.limits)
        self.session = self.server.open(self.play)
        self.client = self.session.client
        self.http = await self._stack.enter_async_context(
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20))
        )
        return self

    async def __aexit__(self, *error):
        await self._stack.aclose()

    def openai(self):
        return openai.AsyncOpenAI(base_url=self.client.base_url, api_key=self.client.api_key, max_retries=0)

    async def post(self, path, body, *, key=None, client=None, **headers):
        client = client or self.client
        key = client.api_key if key is None else key
        raw = body if isinstance(body, bytes | io.BytesIO) else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {key}", **headers}
        async with self.http.post(f"{client.base_url}{path}", data=raw, headers=headers) as response:
            return response.status, await response.json()


def story(play, *texts, **options):
    async def told():
        async with Story(*texts, **options) as scene:
            await play(scene)
            recording = await scene.session.aclose()
            check(recording, scene.engine)
            assert not scene.server._sessions
            return recording

    return asyncio.run(told())


# ---------------------------------------------------------------------------------- who may ask


@pytest.mark.parametrize("path", ["/chat/completions", "/responses", "/messages", "/messages/count_tokens"])
def test_a_key_that_belongs_to_no_running_rollout_is_refused(path):
    async def play(scene):
        for key in ("", "guess", scene.client.api_key[:-1], scene.client.api_key + "x"):
            status, body = await scene.post(path, {"messages": ASKED}, key=key)
            assert status == 401
            assert "this key does not belong to a running rollout" in body["error"]["message"]
        async with scene.http.get(f"{scene.client.base_url}/models") as response:
            assert response.status == 401
        assert scene.engine.said == []

    story(play, "yes")


def test_the_key_of_a_rollout_is_refused_when_it_has_ended():
    async def play(scene):
        assert (await scene.post("/chat/completions", {"messages": ASKED}))[0] == 200
        await scene.session.aclose()
        assert (await scene.post("/chat/completions", {"messages": ASKED}))[0] == 401

    story(play, "yes")


@pytest.mark.parametrize("path", ["/chat/completions", "/responses", "/messages", "/messages/count_tokens"])
@pytest.mark.parametrize("ended", [None, "address", "key"])
def test_the_key_of_another_rollout_of_the_group_ends_the_run(path, ended):
    """Also if one of the two has ended: the other one would fail, whichever comes first."""

    async def play(scene):
        other = scene.server.open(scene.play)
        at, key = (other, scene.session) if ended == "address" else (scene.session, other)
        if ended:
            await other.aclose()
        body = {"messages": ASKED}
        status, body = await scene.post(path, body, key=key.client.api_key, client=at.client)
        assert status == 403
        assert re.search(r"the address of rollout \d has the key of rollout \d", body["error"]["message"])
        for session in (scene.session,) if ended else (scene.session, other):
            why = await asyncio.wait_for(session.broken(), 5.0)
            assert isinstance(why, PluginError)
            assert "api_key=client.api_key" in str(why)
        assert scene.engine.said == []
        await other.aclose()

    story(play, "yes")


def test_a_late_request_of_an_ended_rollout_is_refused():
    async def play(scene):
        ended = [scene.server.open(scene.play) for _ in range(2)]
        for each in ended:
            await each.aclose()
        for key in (each.client.api_key for each in ended):
            status, _ = await scene.post("/messages", {"messages": ASKED}, key=key, client=ended[0].client)
            assert status == 401
        assert (await scene.post("/chat/completions", {"messages": ASKED}))[0] == 200, "the run goes on"

    story(play, "yes")


def test_a_key_that_names_a_rollout_and_is_not_signed_by_the_server_is_refused():
    async def play(scene):
        forged = AgentServer(PlayerSetup())
        await forged.start()
        session = forged.open(scene.play)
        assert session.client.api_key[:10] == scene.client.api_key[:10]
        assert (await scene.post("/messages", {"messages": ASKED}, key=session.client.api_key))[0] == 401
        await session.aclose()
        await forged.aclose()

    story(play, "yes")


def test_a_request_without_the_path_of_a_rollout_is_told_the_address():
    async def play(scene):
        root = scene.client.base_url.partition("/rollouts")[0]
        headers = {"Authorization": f"Bearer {scene.client.api_key}"}
        async with scene.http.post(f"{root}/v1/chat/completions", json={}, headers=headers) as response:
            assert response.status == 404
            assert "client.base_url" in (await response.json())["error"]["message"]

    story(play)


def test_the_server_listens_on_the_loopback_address_only():
    async def play(scene):
        port = int(scene.client.base_url.split(":")[2].split("/")[0])
        for address in {
            info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)
        }:
            if not address.startswith("127."):
                with pytest.raises(OSError):
                    socket.create_connection((address, port), timeout=2).close()

    story(play)


@pytest.mark.parametrize(("host", "why"), [("0.0.0.0", "all"), ("192.0.2.1", "assign"), ("x", "'x'")])
def test_an_address_at_which_no_agent_finds_the_model_is_refused(host, why):
    async def story():
        with pytest.raises(ConfigError, match=rf"environment\.agent_host = '{host}': .*{why}"):
            await AgentServer(PlayerSetup(host=host)).start()

    asyncio.run(story())


def test_two_rollouts_have_two_keys_and_no_text_has_them():
    async def play(scene):
        other = scene.server.open(scene.play)
        assert len({scene.client.api_key, other.client.api_key}) == 2
        assert len(other.client.api_key) >= 40
        assert other.client.api_key not in repr(other.client)
        await other.aclose()

    story(play)


def test_a_body_without_an_end_is_read_up_to_a_bound():
    async def play(scene):
        status, body = await scene.post("/chat/completions", io.BytesIO(b" " * (MAX_BODY + 1)))
        assert (status, body["error"]["code"]) == (413, "too_large")

    story(play)


# ---------------------------------------------------------------------------------- OpenAI, chat completions


def test_a_request_line_without_an_end_is_refused_without_a_word_in_the_terminal(capsys):
    async def play(s):
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", int(s.client.base_url.split(":")[2].split("/")[0])
        )
        writer.write(b"POST /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n")
        assert b" 400 " in (await reader.read())[:20]
        writer.close()

    story(play)
    assert not capsys.readouterr().err


@pytest.mark.long
def test_a_body_that_unfolds_to_more_than_its_bound_is_refused():
    async def play(s):
        url = f"{s.client.base_url}/chat/completions"
        headers = {"Authorization": f"Bearer {s.client.api_key}", "Content-Encoding": "gzip"}
        bomb = gzip.compress(b" " * 10 * MAX_BODY, compresslevel=1)
        assert len(bomb) < MAX_BODY
        tracemalloc.start()
        async with s.http.post(url, data=io.BytesIO(bomb), headers=headers) as response:
            assert response.status == 413
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert most < 5 * MAX_BODY

    story(play)


def test_an_openai_client_talks_over_several_turns_and_calls_tools():
    async def play(scene):
        async with scene.openai() as model:
            messages = list(ASKED)
            first = await model.chat.completions.create(model="gpt", messages=messages, tools=[TOOL])
            choice = first.choices[0]
            assert choice.finish_reason == "tool_calls"
            (call,) = choice.message.tool_calls
            assert json.loads(call.function.arguments) == {"item": "tea"}
            messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "costs 2"}]
            second = await model.chat.completions.create(model="gpt", messages=messages, tools=[TOOL])
            assert second.choices[0].message.content == "it costs 2"
            assert second.usage.completion_tokens == len("it costs 2")
            assert [each.id async for each in model.models.list()] == ["policy"]

    recording = story(play, CALL, "it costs 2")
    assert (len(recording.segments), len(recording.turn_tokens), recording.tool_calls) == (1, 2, 1)
    assert [message["role"] for message in recording.messages] == ["user", "assistant", "tool", "assistant"]


def test_a_stream_has_the_same_text_calls_and_usage():
    async def play(scene):
        async with scene.openai() as model:
            options = {"model": "any", "messages": ASKED, "tools": [TOOL]}
            async with model.chat.completions.stream(**options) as stream:
                whole = await stream.get_final_completion()
            assert whole.choices[0].message.tool_calls[0].function.name == "price"
            told = await model.chat.completions.create(
                **options, stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in told]
            assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "yes"
            assert chunks[-1].usage.completion_tokens == 3

    story(play, CALL, "yes")


@pytest.mark.parametrize("stream", [False, True])
def test_thinking_is_given_apart_from_the_reply(stream):
    """As servers give it that have a parser of reasoning: agents and judges read the content alone."""

    async def play(scene):
        async def said(prompt):
            messages.append({"role": "user", "content": prompt})
            options = {"model": "any", "messages": messages, "tools": [TOOL]}
            if stream:
                async with model.chat.completions.stream(**options) as events:
                    whole = await events.get_final_completion()
            else:
                whole = await model.chat.completions.create(**options)
            (choice,) = whole.choices
            messages.append(choice.message.model_dump(exclude_none=True, exclude={"parsed"}))
            return getattr(choice.message, "reasoning_content", None), choice.message.content, choice.message

        async with scene.openai() as model:
            messages = []
            assert (await said("what is it"))[:2] == ("is it 2?", "it costs 2")
            thought, content, message = await said("and now")
            assert (thought, content) == ("look it up", None)
            assert message.tool_calls[0].function.name == "price"
            messages.append({"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "3"})
            assert (await said("so"))[:2] == (None, "a < b")

    texts = ["<think>\nis it 2?\n</think>\n\nit costs 2", f"<think>look it up</think>{CALL}", "a < b"]
    recording = story(play, *texts)
    assert (len(recording.segments), len(recording.turn_tokens)) == (1, 3), (
        "the agent goes on, without its tags"
    )
    said = [message["content"] for message in recording.messages if message["role"] == "assistant"]
    assert said == [texts[0], "<think>look it up</think>", "a < b"], "an environment reads what was said"


@pytest.mark.parametrize(
    ("prompt", "text", "parts"),
    [
        ("what is it<think>\n", "is it 2?\n</think>\n\nyes", ("is it 2?", "yes")),
        ("what is it<think>\n", "is it", ("is it", "")),
        ("what is it", "<think>is it", ("is it", "")),
        ("what is it", "<think>\n\n</think>\n\nyes", (None, "yes")),
        ("what is it", "<think>a</think>b</think> yes", ("a</think>b", "yes")),
        ("is <think> a tag?", " yes\n", (None, " yes\n")),
    ],
)
def test_thinking_that_is_cut_off_or_begun_by_the_prompt_is_not_a_reply(prompt, text, parts):
    async def play(scene):
        body = {"messages": [{"role": "user", "content": prompt}]}
        message = (await scene.post("/chat/completions", body))[1]["choices"][0]["message"]
        assert (message.get("reasoning_content"), message["content"]) == parts

    story(play, text)


def test_an_agent_continues_from_the_completion_whose_thinking_it_sends_back():
    async def play(scene):
        body = {"messages": ASKED, "n": 2}
        choices = (await scene.post("/chat/completions", body))[1]["choices"]
        first = choices[0]["message"]
        assert first["content"] == choices[1]["message"]["content"] == "yes"
        await scene.post("/chat/completions", {"messages": [*ASKED, first, *ASKED]})
        request, _ = scene.engine.said[-1]
        assert "".join(map(chr, request.prompt_ids.tolist())) == "what is it<think>a</think>yeswhat is it"

    assert len(story(play, "<think>a</think>yes", "<think>b</think>yes", "no").segments) == 2


def test_several_completions_of_one_request_are_branches():
    async def play(scene):
        async with scene.openai() as model:
            several = await model.chat.completions.create(model="any", messages=ASKED, n=3)
            assert [choice.message.content for choice in several.choices] == ["a", "b", "c"]
            said = {"role": "assistant", "content": "b"}
            await model.chat.completions.create(model="any", messages=[*ASKED, said, *ASKED])

    assert len(story(play, "a", "b", "c", "d").segments) == 3


def test_the_last_turn_of_a_recording_is_the_last_that_was_played():
    """A question outside the conversation makes a separate row, before the row that continues after it."""

    async def play(scene):
        async with scene.openai() as model:
            ask = model.chat.completions.create
            await ask(model="any", messages=ASKED)
            await ask(model="any", messages=[{"role": "user", "content": "beside it"}])
            await ask(model="any", messages=[*ASKED, {"role": "assistant", "content": "a"}, *ASKED])

    recording = story(play, "a", "bcd", "ef")
    assert ["".join(map(chr, s.prompt_ids.tolist())) for s in recording.segments] == [
        "beside it",
        "what is it",
    ]
    assert recording.turn_tokens[0] > recording.turn_tokens[2] > recording.turn_tokens[1]


def test_fields_that_the_run_cannot_follow_are_reported_or_refused():
    async def play(scene):
        tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
        asked = {"messages": ASKED, "tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
        assert (await scene.post("/chat/completions", {**asked, "reasoning_effort": "low"}))[0] == 200
        await scene.post("/responses", {"input": "hi", "reasoning": {"effort": "low"}, "tool_choice": "auto"})
        thinking = {"type": "enabled", "budget_tokens": 5}
        await scene.post("/messages", {"messages": ASKED, "max_tokens": 5, "thinking": thinking})
        told = [incident.message for incident in scene.incidents]
        assert len(told) == 3
        assert "parallel_tool_calls, reasoning_effort, tool_choice, which has no effect" in told[0]
        schema = {"type": "json_schema", "name": "a", "schema": {}}
        for path, body, word in (
            ("/chat/completions", {"messages": ASKED, "response_format": schema}, "response_format is"),
            ("/chat/completions", {"messages": ASKED, "logprobs": True}, "logprobs are not sent"),
            ("/responses", {"input": "hi", "text": {"format": schema}}, "text.format is"),
            ("/responses", {"input": "hi", "include": ["message.output_text.logprobs"]}, "logprobs are not"),
        ):
            status, said = await scene.post(path, body)
            assert status == 400
            assert word in str(said)
        plain = {"response_format": {"type": "text"}, "logprobs": False, "tool_choice": "none"}
        assert (await scene.post("/chat/completions", {"messages": ASKED, **plain}))[0] == 200
        assert len(scene.incidents) == 3

    story(play, "a", "b", "c", "d")


def test_a_client_stops_and_shortens_completions_but_the_temperature_is_the_runs():
    async def play(scene):
        async with scene.openai() as model:
            for _ in range(2):
                await model.chat.completions.create(
                    model="any", messages=ASKED, stop="END", max_tokens=4, temperature=0.1, top_p=0.5
                )
        (request, _), _ = scene.engine.said
        assert (request.stop, request.max_tokens, request.temperature) == (("END",), 4, 0.7)
        (incident,) = scene.incidents
        assert incident.kind == "agent_option"
        assert "temperature, top_p" in incident.message

    recording = story(play, "yEND", "no way")
    assert recording.finish_reason == "length"
    assert recording.segments[0].tokens.ids.tolist() == list(map(ord, "yEND"))


# ---------------------------------------------------------------------------------- the other dialects


@pytest.mark.long
def test_an_openai_client_of_responses_continues_by_id_and_by_items():
    async def play(scene):
        async with scene.openai() as model:
            tool = {"type": "function", "name": "price", "parameters": {"type": "object"}, "strict": False}
            first = await model.responses.create(
                model="any", instructions="be good", input="what is it", tools=[tool]
            )
            (call,) = first.output
            assert (call.type, call.name) == ("function_call", "price")
            result = {"type": "function_call_output", "call_id": call.call_id, "output": "costs 2"}
            second = await model.responses.create(
                model="any", instructions="be good", input=[result], tools=[tool],
                previous_response_id=first.id,
            )  # fmt: skip
            assert second.output_text == "it costs 2"
            items = [{"role": "user", "content": "what is it"}, call.model_dump(), result]
            items += [item.model_dump() for item in second.output]
            items.append({"role": "user", "content": [{"type": "input_text", "text": "and why"}]})
            async with model.responses.stream(
                model="any", instructions="be good", input=items, tools=[tool]
            ) as stream:
                third = await stream.get_final_response()
            assert third.output_text == "because"

    recording = story(play, CALL, "it costs 2", "because")
    assert (len(recording.segments), len(recording.turn_tokens)) == (1, 3)


def test_messages_of_anthropic_with_tools_and_streams():
    async def play(scene):
        tool = {"name": "price", "description": "a price", "input_schema": {"type": "object"}}
        body = {"model": "any", "max_tokens": 90, "system": [{"type": "text", "text": "be good"}],
                "messages": list(ASKED), "tools": [tool]}  # fmt: skip
        status, first = await scene.post("/messages", body)
        assert (status, first["stop_reason"]) == (200, "tool_use")
        (use,) = first["content"]
        assert (use["name"], use["input"]) == ("price", {"item": "tea"})
        result = {"type": "tool_result", "tool_use_id": use["id"], "content": [{"type": "text", "text": "2"}]}
        body["messages"] += [
            {"role": "assistant", "content": first["content"]},
            {"role": "user", "content": [result, {"type": "text", "text": "and?"}]},
        ]
        counted = await scene.post("/messages/count_tokens", body)
        status, second = await scene.post("/messages", body)
        assert second["content"] == [{"type": "text", "text": "two"}]
        assert counted == (200, {"input_tokens": second["usage"]["input_tokens"]})
        status, wrong = await scene.post("/messages", {"messages": [{"role": "x"}]})
        assert (status, wrong["type"], wrong["error"]["type"]) == (400, "error", "invalid_request_error")

    recording = story(play, CALL, "two")
    assert len(recording.segments) == 1
    assert [m["role"] for m in recording.messages] == [
        "system", "user", "assistant", "tool", "user", "assistant",
    ]  # fmt: skip


@pytest.mark.long
def test_the_client_of_anthropic_reads_replies_and_streams():
    import anthropic

    async def play(scene):
        base = scene.client.env_vars()["ANTHROPIC_BASE_URL"]
        async with anthropic.AsyncAnthropic(base_url=base, api_key=scene.client.api_key) as model:
            options = {"model": "any", "max_tokens": 90, "messages": ASKED}
            assert (await model.messages.create(**options)).content[0].text == "yes"
            async with model.messages.stream(**options) as stream:
                whole = await stream.get_final_message()
            assert whole.content[0].text == "no"
            assert whole.usage.output_tokens == 2

    story(play, "yes", "no")


# ---------------------------------------------------------------------------------- streams that take long

STREAMS = {
    "/chat/completions": {"messages": ASKED, "stream": True},
    "/responses": {"input": "what is it", "stream": True},
    "/messages": {"messages": ASKED, "max_tokens": 90, "stream": True},
}


def held(engine, error=None):
    """Let the engine wait until the result is set."""
    go_on, generate = asyncio.Event(), engine.generate

    async def waiting(requests):
        await go_on.wait()
        if error is not None:
            raise error
        return await generate(requests)

    engine.generate = waiting
    return go_on


@pytest.mark.parametrize("path", STREAMS)
def test_a_stream_begins_at_once_and_has_comments_until_the_model_has_spoken(path):
    async def play(scene):
        go_on, headers = held(scene.engine), {"Authorization": f"Bearer {scene.client.api_key}"}
        url = f"{scene.client.base_url}{path}"
        async with scene.http.post(url, json=STREAMS[path], headers=headers) as response:
            assert (response.status, response.content_type) == (200, "text/event-stream")
            for _ in range(3):
                assert await response.content.readuntil(b"\n\n") == b": ping\n\n"
            assert scene.engine.said == []
            go_on.set()
            assert b"yes" in await response.content.read()

    story(play, "yes", ping=0.01)


@pytest.mark.parametrize("path", STREAMS)
def test_an_engine_that_fails_when_the_stream_has_begun_ends_it_with_an_error(path):
    async def play(scene):
        go_on = held(scene.engine, EngineError("engine fake: no"))
        url, key = f"{scene.client.base_url}{path}", {"Authorization": f"Bearer {scene.client.api_key}"}
        async with scene.http.post(url, json=STREAMS[path], headers=key) as response:
            assert response.status == 200
            assert await response.content.readuntil(b"\n\n") == b": ping\n\n"
            go_on.set()
            last = (await response.read()).decode().strip()
        *name, data = last.splitlines()
        assert name == ([] if path == "/chat/completions" else ["event: error"])
        told = json.loads(data.removeprefix("data: "))
        assert "engine fake: no" in told["error"]["message"]

    story(play)


@pytest.mark.parametrize("path", STREAMS)
def test_what_is_refused_before_the_model_is_asked_has_a_status_in_a_stream_too(path):
    async def play(scene):
        assert (await scene.post(path, {**STREAMS[path], "n": "many", "tools": 7}))[0] == 400
        status, told = await scene.post(path, STREAMS[path])
        assert status == 400
        assert "max_turns" in str(told)

    recording = story(play, limits=Limits(max_tokens=9, max_turns=0, context=100))
    assert recording.limited


def test_a_stream_whose_client_has_gone_is_there_for_the_one_that_asks_again():
    async def play(scene):
        go_on, body = held(scene.engine), STREAMS["/chat/completions"]
        url, key = f"{scene.client.base_url}/chat/completions", f"Bearer {scene.client.api_key}"
        async with scene.http.post(url, json=body, headers={"Authorization": key}) as response:
            await response.content.readline()
            response.close()
        async with scene.http.post(
            url, json=body, headers={"Authorization": key, "x-stainless-retry-count": "1"}
        ) as response:
            assert await response.content.readline() == b": ping\n"
            go_on.set()
            assert b"yes" in await response.content.read()
        assert len(scene.engine.said) == 1

    story(play, "yes", "no", ping=0.01)


@pytest.mark.slow
def test_clients_that_give_up_after_a_short_silence_read_a_stream_that_takes_longer():
    import anthropic

    async def chat(model):
        stream = await model.chat.completions.create(model="any", messages=ASKED, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def responses(model):
        async with model.responses.stream(model="any", input="what is it") as stream:
            return (await stream.get_final_response()).output_text

    async def messages(model):
        async with model.messages.stream(model="any", max_tokens=90, messages=ASKED) as stream:
            return await stream.get_final_text()

    async def play(scene):
        base = scene.client.env_vars()["ANTHROPIC_BASE_URL"]
        options = {"api_key": scene.client.api_key, "max_retries": 0}
        silence = {"timeout": None, "read": 1.5}
        async with (
            openai.AsyncOpenAI(
                base_url=scene.client.base_url, timeout=openai.Timeout(**silence), **options
            ) as one,
            anthropic.AsyncAnthropic(base_url=base, timeout=anthropic.Timeout(**silence), **options) as other,
        ):
            assert await asyncio.gather(chat(one), responses(one), messages(other)) == ["yes"] * 3
            with pytest.raises(openai.APITimeoutError):
                await one.chat.completions.create(model="any", messages=[*ASKED, *ASKED])
            scene.engine.fault, scene.engine.seconds = (lambda: True), (lambda: 0.0)
            for asked, model in ((chat, one), (responses, one), (messages, other)):
                with pytest.raises((openai.APIError, anthropic.APIError), match="asked again, please"):
                    await asked(model)

    story(play, "yes", seconds=3.0, ping=0.1)


# ---------------------------------------------------------------------------------- faults


def test_a_retry_of_a_client_gets_the_same_reply_and_samples_nothing():
    async def play(scene):
        body = {"messages": ASKED}
        first = await scene.post("/chat/completions", body, **{"x-stainless-retry-count": "0"})
        again = await scene.post("/chat/completions", body, **{"x-stainless-retry-count": "1"})
        other = await scene.post("/chat/completions", body, **{"x-stainless-retry-count": "0"})
        assert again == first
        assert other != first
        keyed = [
            await scene.post("/chat/completions", {"messages": [*ASKED, *ASKED]}, **{"Idempotency-Key": "k"})
            for _ in range(2)
        ]
        assert keyed[0] == keyed[1]
        status, said = await scene.post("/chat/completions", {"messages": ASKED}, **{"Idempotency-Key": "k"})
        assert status == 422
        assert "the Idempotency-Key 'k' belongs to another request" in str(said)
        assert len(scene.engine.said) == 3

    story(play, "a", "b", "c")


@pytest.mark.long
def test_a_client_that_vanished_while_the_model_wrote_gets_that_reply_when_it_asks_again():
    async def play(scene):
        with pytest.raises(asyncio.TimeoutError):
            async with asyncio.timeout(0.1):
                await scene.post("/chat/completions", {"messages": ASKED})
        status, _ = await scene.post("/chat/completions", {"messages": ASKED})
        assert status == 200
        assert len(scene.engine.said) == 1

    story(play, "a", "b", seconds=0.4)


def test_a_limit_refuses_a_turn_in_the_clients_own_words():
    async def play(scene):
        async with scene.openai() as model:
            await model.chat.completions.create(model="any", messages=ASKED)
            with pytest.raises(
                openai.BadRequestError, match=r"has had its 1 completions \(max_turns\)"
            ) as error:
                await model.chat.completions.create(model="any", messages=[*ASKED, *ASKED])
            assert error.value.code == "max_turns"
            with pytest.raises(openai.BadRequestError):
                await model.chat.completions.create(model="any", messages=[{"role": "alien", "content": "x"}])

    recording = story(play, "a", limits=Limits(max_tokens=9, max_turns=1, context=100))
    assert (recording.finish_reason, recording.limited) == ("turns", True)


@pytest.mark.parametrize(("n", "fits"), [(2, True), (3, False)])
def test_each_completion_of_a_request_is_a_turn_of_its_limit(n, fits):
    async def play(scene):
        async with scene.openai() as model:
            await model.chat.completions.create(model="any", messages=ASKED)
            asking = model.chat.completions.create(model="any", messages=[*ASKED, *ASKED], n=n)
            if fits:
                return await asking
            with pytest.raises(openai.BadRequestError, match="max_turns"):
                await asking

    recording = story(play, "a", "b", "c", "d", limits=Limits(max_tokens=9, max_turns=3, context=100))
    assert (len(recording.turn_tokens), recording.limited) == ((3, False) if fits else (1, True))


def test_a_conversation_that_is_too_long_is_refused():
    async def play(scene):
        status, body = await scene.post(
            "/chat/completions", {"messages": [{"role": "user", "content": "x" * 50}]}
        )
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")

    recording = story(play, limits=Limits(max_tokens=9, max_turns=5, context=50))
    assert recording.finish_reason == "tokens"


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{", b'{"messages": 1}', b'{"messages": []}', b'{"messages": [1]}', b"\xff" * 9,
     b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', b"[" * 100_000,
     b'{"messages": [{"role": "user", "content": ""}]}'],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/chat/completions", "/messages", "/responses"])
def test_a_request_that_makes_no_sense_is_one_clear_error(path, body):
    async def play(scene):
        status, told = await scene.post(path, body)
        assert status == 400
        assert told["error"]["message"]
        assert scene.engine.said == []

    story(play)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["", "user", "function", "text"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(["role", "content", "type", "text", "name", "id", "function", "tool_calls",
                         "arguments", "call_id", "output", "input", "tool_use_id", "parameters"]),
        inner, max_size=4,
    ),
    max_leaves=8,
)  # fmt: skip
FIELDS = ("messages", "input", "tools", "tool_choice", "n", "max_tokens", "stop", "stop_sequences", "stream",
          "stream_options", "model", "system", "instructions", "previous_response_id", "text", "include",
          "response_format", "reasoning", "thinking", "logprobs")  # fmt: skip


@pytest.mark.long
@given(body=st.dictionaries(st.sampled_from(FIELDS), ANYTHING, max_size=6))
@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
def test_a_dialect_reads_any_json_or_says_what_is_wrong(dialect, body):
    with contextlib.suppress(BadRequest):
        dialect.read({"messages": ASKED, "input": "what is it", **body}, {}.get)


def test_an_engine_that_fails_is_the_engines_fault_and_a_broken_one_ends_the_run():
    async def play(scene):
        scene.engine.fault = lambda: True
        status, _ = await scene.post("/chat/completions", {"messages": ASKED})
        assert status == 503
        scene.engine.fault = lambda: False
        failed = await scene.play.renderer.run(lambda: scene.session.recorder.recording("x"), 0)
        assert (failed.segments, scene.session.recorder.turns) == ((), 0)
        scene.engine.say = lambda request: None
        scene.engine.generate = lambda requests: asyncio.sleep(0, result=[])
        status, _ = await scene.post("/chat/completions", {"messages": [*ASKED, *ASKED]})
        assert status == 500
        assert isinstance(await scene.session.broken(), PluginError)

    assert story(play, "a").error == "engine fake: asked again, please"


@pytest.mark.long
def test_sessions_that_have_ended_leave_nothing_behind():
    async def play(scene):
        async def one():
            engine = Says(FakeRenderer(), "y" * 50, seconds=lambda: 0)
            session = scene.server.open(evolve(scene.play, engine=engine))
            messages = [{"role": "user", "content": "x" * 2000}]
            for _ in range(3):
                body = {"messages": messages}
                _, reply = await scene.post("/chat/completions", body, client=session.client)
                messages += [reply["choices"][0]["message"], {"role": "user", "content": "x" * 2000}]
            await session.aclose()

        for _ in range(10):
            await one()
        gc.collect()
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(50):
            await one()
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert len(scene.server._sessions) == 1
        assert after - before < 200_000, "one session has 100,000 bytes"

    story(play)
