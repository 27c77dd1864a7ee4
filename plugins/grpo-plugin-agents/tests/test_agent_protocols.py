"""The fields of replies, as the clients of OpenAI and Anthropic read them, streamed and not; and as vLLM's
server sends them for the same request."""

from __future__ import annotations

import asyncio
import importlib.util
import json

import openai
import pytest
from test_agent_server import ASKED, CALL, TOOL, Story, story
from test_agent_sessions import a_play
from test_segments import Renderer

from grpo_core import Completion, EngineError, Limits
from grpo_core.kit import services
from grpo_plugin_agents.dialects.reading import ignored_fields

THOUGHT = "<think>is it 2?</think>"
STOP = {"chat": {"stop": ["END", "zz"]}, "messages": {"stop_sequences": ["END", "zz"]}}
TOOLS = {
    "chat": {"tools": [TOOL]},
    "messages": {"tools": [{"name": "price", "input_schema": {"type": "object"}}]},
    "responses": {"tools": [{"type": "function", "name": "price", "parameters": {}, "strict": False}]},
}
THINKING = {"messages": {"thinking": {"type": "enabled", "budget_tokens": 1024}}}
SHORT = {"chat": {"max_tokens": 5}, "messages": {"max_tokens": 5}, "responses": {"max_output_tokens": 5}}

# what the model says, what the client requests, and what it reads: thinking, text, calls, reason
SAID = {
    "an end": ("yes", {}, ("", "yes", 0), ("stop", "end_turn", None)),
    "nothing": ("", {}, ("", "", 0), ("stop", "end_turn", None)),
    "a limit": ("yes, of course", SHORT, ("", "yes, ", 0), ("length", "max_tokens", None)),
    "a stop sequence": ("yesENDzz", STOP, ("", "yes", 0), ("stop", "stop_sequence", "END")),
    "the other one": ("yzz no", STOP, ("", "y", 0), ("stop", "stop_sequence", "zz")),
    "stop alone": ("END", STOP, ("", "", 0), ("stop", "stop_sequence", "END")),
    "a call": (CALL, TOOLS, ("", "", 1), ("tool_calls", "tool_use", None)),
    "two calls and a text": (f"so {CALL}{CALL}", TOOLS, ("", "so", 2), ("tool_calls", "tool_use", None)),
    "a call without tools": (CALL, {}, ("", CALL, 0), ("stop", "end_turn", None)),
    "half a call": (CALL[:30], TOOLS, ("", CALL[:30], 0), ("stop", "end_turn", None)),
    "a thought": (f"{THOUGHT}yes", THINKING, ("is it 2?", "yes", 0), ("stop", "end_turn", None)),
    "a thought and a call": (
        f"{THOUGHT}{CALL}",
        {dialect: {**TOOLS[dialect], **THINKING.get(dialect, {})} for dialect in TOOLS},
        ("is it 2?", "", 1),
        ("tool_calls", "tool_use", None),
    ),
}  # fmt: skip


async def by_chat(scene, stream, options):
    async with scene.openai() as model:
        options = {"model": "any", "messages": ASKED, **options}
        if stream:
            async with model.chat.completions.stream(
                **options, stream_options={"include_usage": True}
            ) as events:
                try:
                    whole = await events.get_final_completion()
                except openai.LengthFinishReasonError as error:
                    whole = error.completion
        else:
            whole = await model.chat.completions.create(**options)
    (choice,), usage = whole.choices, whole.usage
    said = choice.message
    assert said.refusal is None
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    calls = [json.loads(call.function.arguments) for call in said.tool_calls or ()]
    read = getattr(said, "reasoning_content", None) or "", said.content or "", calls
    thought = usage.completion_tokens_details.reasoning_tokens
    return read, (choice.finish_reason,), (usage.prompt_tokens, usage.completion_tokens, thought)


async def by_messages(scene, stream, options):
    import anthropic  # takes a second

    base = scene.client.env_vars()["ANTHROPIC_BASE_URL"]
    async with anthropic.AsyncAnthropic(base_url=base, api_key=scene.client.api_key) as model:
        options = {"model": "any", "max_tokens": 900, "messages": ASKED, **options}
        if stream:
            async with model.messages.stream(**options) as events:
                whole = await events.get_final_message()
        else:
            whole = await model.messages.create(**options)
    thoughts = "".join(block.thinking for block in whole.content if block.type == "thinking")
    text = "".join(block.text for block in whole.content if block.type == "text")
    calls = [block.input for block in whole.content if block.type == "tool_use"]
    usage = whole.usage.input_tokens, whole.usage.output_tokens, None
    return (thoughts, text, calls), (whole.stop_reason, whole.stop_sequence), usage


async def by_responses(scene, stream, options):
    async with scene.openai() as model:
        options = {"model": "any", "input": "what is it", **options}
        whole = await model.responses.create(**options, stream=stream)
        if stream:
            events = [event async for event in whole]
            said = [event.delta for event in events if event.type == "response.output_text.delta"]
            whole = events[-1].response
            assert "".join(said) == whole.output_text
    cut = whole.incomplete_details and whole.incomplete_details.reason
    assert whole.status == ("incomplete" if cut else "completed")
    thoughts = "".join(
        part.text for item in whole.output if item.type == "reasoning" for part in item.content
    )
    calls = [json.loads(item.arguments) for item in whole.output if item.type == "function_call"]
    usage = whole.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    thought = usage.output_tokens_details.reasoning_tokens
    return (thoughts, whole.output_text, calls), (cut,), (usage.input_tokens, usage.output_tokens, thought)


BY = {"chat": by_chat, "messages": by_messages, "responses": by_responses}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("label", "dialect"),
    [
        pytest.param(label, dialect, marks=[pytest.mark.long] if dialect == "messages" else [])
        for label, (_, options, *_) in SAID.items()
        for dialect in BY
        if not (dialect == "responses" and options is STOP)  # it has no stop sequences
    ],
)
def test_a_client_reads_what_the_model_has_said_and_why_it_ended(label, dialect, stream):
    text, options, (thought, content, calls), (chat, messages, sequence) = SAID[label]
    ended = {
        "chat": (chat,),
        "messages": (messages, sequence),
        "responses": ("max_output_tokens" if chat == "length" else None,),
    }
    sampled = len(text[:5] if options is SHORT else text)

    async def play(scene):
        read, reason, usage = await BY[dialect](scene, stream, options.get(dialect, {}))
        assert read == (thought, content, [{"item": "tea"}] * calls)
        assert reason == ended[dialect]
        assert usage == (10, sampled, None if dialect == "messages" else len(THOUGHT) if thought else 0)

    story(play, text, limits=Limits(max_tokens=900, max_turns=9, context=9000))


def test_the_prompt_of_several_completions_is_counted_once():
    async def play(scene):
        async with scene.openai() as model:
            whole = await model.chat.completions.create(model="any", messages=ASKED, n=3)
        assert [(choice.index, choice.finish_reason) for choice in whole.choices] == [
            (0, "stop"), (1, "stop"), (2, "stop"),
        ]  # fmt: skip
        assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (10, 6)

    story(play, "a", "bb", "ccc")


def test_a_thought_is_left_out_for_a_client_of_messages_that_did_not_request_it():
    """Its first block is a text, as its agent expects; what was sampled continues all the same."""

    async def play(scene):
        body = {"max_tokens": 900, "messages": ASKED}
        _, first = await scene.post("/messages", body)
        assert first["content"] == [{"type": "text", "text": "yes"}]
        said = {"role": "assistant", "content": first["content"]}
        await scene.post("/messages", {**body, "messages": [*ASKED, said, *ASKED]})

    assert len(story(play, f"{THOUGHT}yes", "no").segments) == 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/chat/completions", {"functions": [{"name": "price"}]}),
        ("/chat/completions", {"tools": [{"type": "custom", "custom": {"name": "price"}}]}),
        ("/chat/completions", {"web_search_options": {"user_location": None}}),
        ("/chat/completions", {"modalities": ["audio"], "audio": {"voice": "alloy"}}),
        ("/chat/completions", {"structured_outputs": {"choice": ["a"]}}),
        ("/chat/completions", {"continue_final_message": True}),
        ("/responses", {"tools": [{"type": "custom", "name": "price"}]}),
        ("/responses", {"tools": [{"type": "web_search"}]}),
        ("/responses", {"conversation": "conv_1"}),
        ("/responses", {"background": True}),
        ("/messages", {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
        ("/messages", {"tools": [{"type": "bash_20250124", "name": "bash"}]}),
        ("/messages", {"messages": [*ASKED, {"role": "assistant", "content": "It is ("}]}),
        ("/messages", {"mcp_servers": [{"type": "url", "url": "http://a", "name": "a"}]}),
        ("/messages", {"output_config": {"format": {"type": "json_schema", "schema": {}}}}),
    ],
)
def test_what_the_reply_would_not_keep_is_refused(path, body):
    async def play(scene):
        common = {"input": "what is it"} if path == "/responses" else {"messages": ASKED}
        status, said = await scene.post(path, {**common, **body})
        assert (status, said["error"]["type"]) == (400, "invalid_request_error")
        assert scene.engine.said == []

    story(play, "yes")


@pytest.mark.parametrize(
    ("body", "ignored"),
    [
        ({"model": "a", "stream": False, "tools": [], "tool_choice": "auto", "store": True, "user": "a"}, ()),
        ({"parallel_tool_calls": True, "modalities": ["text"], "truncation": "disabled"}, ()),
        ({"temperature": 0, "seed": 0, "top_p": None}, ("seed", "temperature")),
        ({"min_tokens": 3, "chat_template_kwargs": {"a": 1}}, ("chat_template_kwargs", "min_tokens")),
        ({"verbosity": "low", "prediction": {"type": "content"}}, ("prediction", "verbosity")),
        ({"tool_choice": {"type": "any"}, "thinking": {"type": "disabled"}}, ("tool_choice",)),
        (
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
            ("tool_choice.disable_parallel_tool_use",),
        ),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, ("thinking.budget_tokens",)),
    ],
)
def test_each_field_without_an_effect_is_named(body, ignored):
    assert ignored_fields(body, ()) == ignored


# ---------------------------------------------------------------------------------- vLLM as an oracle

SERVED = [
    *("--served-model-name", "any", "--generation-config", "vllm", "--max-model-len", "2048"),
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--disable-log-stats"),
    *("--dtype", "float32", "--enforce-eager", "--kv-cache-memory-bytes", str(256 << 20)),
]
CAPITAL = [{"role": "user", "content": "Name the capital of France in one sentence."}]
GREEDY = {"model": "any", "temperature": 0, "max_tokens": 48}
FORCED = '<tool_call>\n{"name": "price", "arguments": {"item": "tea"}}\n</tool_call>'
LATER = [
    {"role": "system", "content": "Be brief."},
    *CAPITAL,
    {"role": "assistant", "content": "Paris."},
    {"role": "user", "content": [{"type": "text", "text": "And of Italy?"}]},
]
REQUESTS = {
    "an end": ("chat", {"messages": CAPITAL}),
    "several turns": ("chat", {"messages": LATER}),
    "a limit": ("chat", {"messages": CAPITAL, "max_tokens": 3}),
    "a newer limit": ("chat", {"messages": CAPITAL, "max_tokens": None, "max_completion_tokens": 3}),
    "a stop sequence": ("chat", {"messages": CAPITAL, "stop": "France"}),
    "several stop sequences": ("chat", {"messages": CAPITAL, "stop": ["Rome", " is", "s"]}),
    "a call": ("chat", {"messages": CAPITAL, "tools": [TOOL], "forced": FORCED}),
    "a text and a call": ("chat", {"messages": CAPITAL, "tools": [TOOL], "forced": f"Well. {FORCED}"}),
    "a call that is no JSON": ("chat", {"messages": CAPITAL, "tools": [TOOL], "forced": FORCED[:-20]}),
    "a call without tools": ("chat", {"messages": CAPITAL, "forced": FORCED}),
    "an end of messages": ("messages", {"messages": CAPITAL}),
    "several turns of messages": ("messages", {"messages": LATER[1:], "system": "Be brief."}),
    "a limit of messages": ("messages", {"messages": CAPITAL, "max_tokens": 3}),
    "a stop sequence of messages": ("messages", {"messages": CAPITAL, "stop_sequences": ["Rome", "France"]}),
    "an end of responses": ("responses", {"input": "Name the capital of France in one sentence."}),
}
PATHS = {"chat": "/chat/completions", "messages": "/messages", "responses": "/responses"}
AS_SAID = {"a text and a call", "a call that is no JSON"}
"""Calls that do not end: vLLM streams their beginning as a call, but says the text in a whole reply."""
VARYING = {"id", "created", "created_at", "completed_at", "signature"}
"""Fields that differ from one reply to the next."""


class Served:
    """An engine whose tokens come from the server's completions."""

    def __init__(self, url, forced):
        self.client, self.forced = services.Client(url, who="oracle", seconds=120.0), forced

    async def generate(self, requests):
        return [await self.one(request) for request in requests]

    async def one(self, request):
        body = {
            "model": "any",
            "prompt": request.prompt_ids.tolist(),
            "max_tokens": request.max_tokens,
            "temperature": 0,
            "stop": list(request.stop),
            "stop_token_ids": list(request.stop_token_ids),
            "include_stop_str_in_output": True,
            "return_token_ids": True,
            **self.forced,
        }
        answer = await self.client.post("/completions", body)
        if answer.status != 200:
            raise EngineError(answer.text)
        (choice,) = answer.json(dict)["choices"]
        ids = choice["token_ids"]
        return Completion(
            token_ids=ids,
            logprobs=[-1.0] * len(ids),
            versions=[0] * len(ids),
            finish_reason=choice["finish_reason"],
        )


def plain(value):
    """Return a reply without fields that are absent, vary, or are the server's own."""
    if isinstance(value, dict):
        kept = {key: plain(part) for key, part in value.items() if key not in VARYING}
        return {key: part for key, part in kept.items() if part not in (None, [], {}, "")}
    return [plain(part) for part in value] if isinstance(value, list) else value


def fields_of(dialect, reply):
    """Return the part of a reply that its dialect defines."""
    if dialect == "chat":
        usage = reply["usage"]
        choices = [
            {"index": c["index"], "finish_reason": c["finish_reason"], "message": c["message"]}
            for c in reply["choices"]
        ]
        counted = {key: usage[key] for key in ("prompt_tokens", "completion_tokens", "total_tokens")}
        return plain({"object": reply["object"], "choices": choices, "usage": counted})
    if dialect == "messages":
        names = ("type", "role", "model", "content", "stop_reason", "stop_sequence")
        usage = {key: reply["usage"][key] for key in ("input_tokens", "output_tokens")}
        return plain({**{name: reply.get(name) for name in names}, "usage": usage})
    names = ("object", "status", "incomplete_details", "output")
    usage = {key: reply["usage"][key] for key in ("input_tokens", "output_tokens", "total_tokens")}
    return plain({**{name: reply.get(name) for name in names}, "usage": usage})


async def streamed(dialect, url, key, body, extra):
    """Return a reply that the client of a dialect puts together from a stream."""
    if dialect == "messages":
        import anthropic

        said = {name: value for name, value in body.items() if name != "temperature"}
        async with (
            anthropic.AsyncAnthropic(base_url=url.removesuffix("/v1"), api_key=key) as client,
            client.messages.stream(**said, extra_body={"temperature": body["temperature"]}) as events,
        ):
            return (await events.get_final_message()).model_dump()
    async with openai.AsyncOpenAI(base_url=url, api_key=key) as client:
        if dialect == "responses":
            events = await client.responses.create(**body, stream=True)
            return [event async for event in events][-1].response.model_dump()
        chunks = await client.chat.completions.create(
            **body, stream=True, stream_options={"include_usage": True}, extra_body=extra
        )
        return assembled([chunk.model_dump() async for chunk in chunks])


def assembled(chunks):
    """Return the reply whose parts are the chunks of a stream."""
    assert [chunk["choices"] for chunk in chunks][-1] == []
    message, reason = {}, None
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        assert reason is None or not any(choice["delta"].values())
        reason = choice["finish_reason"] or reason
        for name, part in choice["delta"].items():
            if name == "tool_calls":
                for call in part or ():
                    made = message.setdefault("tool_calls", {}).setdefault(call["index"], {"arguments": ""})
                    made["name"] = call["function"]["name"] or made["name"]
                    made["arguments"] += call["function"]["arguments"] or ""
            elif part is not None:
                message[name] = message[name] + part if name == "content" and name in message else part
    choice = {"index": 0, "finish_reason": reason, "message": message}
    return {"object": "chat.completion", "choices": [choice], "usage": chunks[-1]["usage"]}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    from vllm_server import vllm_server

    from grpo_plugin_smollm2 import source

    log = tmp_path_factory.mktemp("server") / "server.log"
    with vllm_server(source.cached(), SERVED, log, {"OMP_NUM_THREADS": "1"}, seconds=300.0) as url:
        yield f"{url}/v1", Renderer.load(str(source.cached()))


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: make install-vllm")
@pytest.mark.parametrize(
    ("label", "stream"),
    [*((label, False) for label in REQUESTS), *((label, True) for label in REQUESTS if label not in AS_SAID)],
)
def test_a_reply_has_the_fields_of_the_reply_of_vllm(label, stream, served):
    dialect, given = REQUESTS[label]
    url, renderer = served
    forced = {"structured_outputs": {"choice": [text]}} if (text := given.get("forced")) else {}
    body = {**GREEDY, **{key: value for key, value in given.items() if key != "forced"}}
    if dialect == "responses":
        body["max_output_tokens"] = body.pop("max_output_tokens", body.pop("max_tokens"))
        body.pop("max_tokens", None)

    async def compare():
        engine = Served(url, forced)
        async with Story() as scene:
            scene.play = a_play(engine, renderer, limits=Limits(max_tokens=2000, max_turns=9, context=2048))
            scene.client = scene.server.open(scene.play).client
            if stream:
                theirs = await streamed(dialect, url, "any", body, forced)
                ours = await streamed(dialect, scene.client.base_url, scene.client.api_key, body, {})
            else:
                answer = await engine.client.post(PATHS[dialect], {**body, **forced})
                assert answer.status == 200, answer.text
                theirs = answer.json(dict)
                status, ours = await scene.post(PATHS[dialect], body)
                assert status == 200, ours
            await engine.client.aclose()
        return fields_of(dialect, theirs), fields_of(dialect, ours)

    theirs, ours = asyncio.run(compare())
    assert ours == theirs
