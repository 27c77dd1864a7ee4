"""Servers that misbehave in every way that we know, asked through each plugin that asks one.

After each answer the caller has either a reply that counts, or an error that names the server in one line,
within its seconds and its memory.  No error repeats the key, and nothing becomes a score of 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import re
import resource
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

import grpo_core as grpo
from grpo_core import EngineSetup, GenerationRequest
from grpo_core.kit import read_json, services
from grpo_core.processes.services import LONGEST_WAIT, NotSent, ServiceError, read_body, retry_after
from grpo_plugin_judge.environment import Judge
from grpo_plugin_mcp.server import Server, ToolFailed
from grpo_plugin_openai.engine import OpenAIEngine
from grpo_plugin_vllm.client import Client as VllmClient
from grpo_plugin_vllm.http import HttpEngine

KEY = "sk-SECRETKEY-4711"
SECONDS, MEMORY = 12, 200 << 20
"""Most seconds and bytes that an answer may cost, with the retries of the plugin."""
TIMEOUT = 0.5
ESCAPES = "\x1b[2J\x1b]0;owned\x07\r\n‮grpo-core: all is well"


def head(status="200 OK", *headers, length=None):
    lines = [f"HTTP/1.1 {status}", "Content-Type: application/json", *headers]
    if length is not None:
        lines.append(f"Content-Length: {length}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def whole(body, status="200 OK", *headers):
    data = body if isinstance(body, bytes) else (body if isinstance(body, str) else json.dumps(body)).encode()
    return head(status, *headers, length=len(data)) + data


def error(status, text=f"bad key Bearer {KEY} {ESCAPES}", *headers):
    return whole({"error": {"message": text}}, status, *headers)


def chat(message, reason="stop", **more):
    return {"choices": [{"message": message, "finish_reason": reason}], **more}


BOMB = gzip.compress(bytes(64 << 20))
DEEP = "[" * 100_000 + "]" * 100_000
DATE = "Wed, 21 Oct 2099 07:28:00 GMT"

ANSWERS = {
    # what no client can use, whatever it asks
    "closes at once": b"",
    "half a status line": b"HTTP/1.1 20",
    "not HTTP": b"220 smtp.example ESMTP ready\r\n",
    "an alert of TLS": b"\x15\x03\x01\x00\x02\x02\x16",
    "the key in a malformed header": b"HTTP/1.1 200 OK\r\nrefused Bearer " + KEY.encode() + b": x\r\n\r\n",
    "a header without an end": b"HTTP/1.1 200 OK\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
    "a thousand headers": head("200 OK", *[f"X-{i}: {KEY}" for i in range(1000)], length=2) + b"{}",
    "half a body": head(length=1000) + b'{"choices": [',
    "less than its length": head(length=10) + b"{}",
    "a negative length": head("200 OK", "Content-Length: -1") + b"{}",
    "two lengths": head("200 OK", "Content-Length: 2", "Content-Length: 3") + b"{}",
    "a broken chunk": head("200 OK", "Transfer-Encoding: chunked") + b"zz\r\n{}\r\n",
    "chunks without an end": head("200 OK", "Transfer-Encoding: chunked") + b"2\r\n{}\r\n",
    "a bomb of gzip": whole(BOMB, "200 OK", "Content-Encoding: gzip"),
    "a bomb of an error": whole(BOMB, "500 Oops", "Content-Encoding: gzip"),
    "another compression": whole(b"{}", "200 OK", "Content-Encoding: br"),
    "bytes that are not UTF-8": whole(b"\xff\xfe{}"),
    "nothing": whole(b""),
    "a page": whole("<html>hello"),
    "a text": whole('"hello"'),
    "a list": whole([]),
    "a number": whole("1"),
    "null": whole("null"),
    "too deep": whole(DEEP),
    "a number of 100,000 digits": whole("9" * 100_000),
    "another object": whole({"detail": f"bad key Bearer {KEY} {ESCAPES}"}),
    "no choices": whole({"choices": []}),
    "choices of another kind": whole({"choices": {"0": {}}}),
    "choices that are null": whole({"choices": [None]}),
    "a choice without a message": whole({"choices": [{}]}),
    "a message that is a text": whole({"choices": [{"message": "1"}]}),
    "a refused request": error("400 Bad Request"),
    "a wrong key": error("401 Unauthorized"),
    "a forbidden key": error("403 Forbidden"),
    "nowhere": error("404 Not Found"),
    "a late request": error("408 Request Timeout"),
    "a conflict": error("409 Conflict"),
    "too long a request": error("413 Payload Too Large"),
    "no teapot": error("418 I'm a teapot"),
    "too early": error("425 Too Early"),
    "too many": error("429 Too Many Requests", "slow down", "Retry-After: 0"),
    "too many, until a date": error("429 Too Many Requests", "slow down", f"Retry-After: {DATE}"),
    "too many, for ever": error("429 Too Many Requests", "slow down", "Retry-After: 1e300"),
    "too many, not a number": error("429 Too Many Requests", "slow down", "Retry-After: nan"),
    "broken": error("500 Internal Server Error"),
    "a bad gateway": error("502 Bad Gateway"),
    "away": error("503 Service Unavailable", ESCAPES, "Retry-After: 0"),
    "a status beyond": error("599 Nothing"),
    "an informational status": b"HTTP/1.1 100 Continue\r\n\r\n" * 100,
    "a redirect to another host": error("307 Temporary Redirect", "", "Location: http://127.0.0.2:9/v1"),
    "a redirect by GET": error("303 See Other", "", "Location: http://127.0.0.2:9/v1"),
    "a redirect to another scheme": error("301 Moved", "", "Location: file:///etc/passwd"),
    "a redirect to itself": error("302 Found", "", "Location: /v1/chat/completions"),
    "a redirect to nowhere": error("308 Permanent Redirect", ""),
    "a new protocol": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\n",
}
"""Bytes that a server answers to every request, and then closes the connection."""

REPLIES = {
    "withheld by a filter": chat({"role": "assistant", "content": None}, "content_filter"),
    "a part withheld by a filter": chat({"role": "assistant", "content": "Score: 1"}, "content_filter"),
    "an unknown finish reason": chat({"role": "assistant", "content": "Score: 1"}, "tired"),
    "a finish reason of another kind": chat({"role": "assistant", "content": "Score: 1"}, ["stop"]),
    "no content": chat({"role": "assistant", "content": None}),
    "content that is a number": chat({"role": "assistant", "content": 7}),
    "content that is an object": chat({"role": "assistant", "content": {"text": "7"}}),
    "calls that are a text": chat({"role": "assistant", "content": None, "tool_calls": "add"}),
    "a call without a function": chat({"role": "assistant", "content": None, "tool_calls": [{}]}),
}
"""Chat completions that are no replies."""


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)


def asked(answer, ask):
    """Return what ``ask(url)`` returns or raises, where a server sends ``answer`` to every request."""

    async def main():
        async def serve(reader, writer):
            try:
                await reader.readuntil(b"\r\n\r\n")
                if callable(answer):
                    await answer(writer)
                else:
                    writer.write(answer)
                    await writer.drain()
            except (ConnectionError, asyncio.IncompleteReadError):
                pass
            finally:
                writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        try:
            return await ask(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        finally:
            server.close()

    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    try:
        result = asyncio.run(main())
    except grpo.GrpoError as failure:
        result = failure
    assert time.monotonic() - began < SECONDS
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MEMORY
    return result


async def of_openai(url):
    options = {"timeout": TIMEOUT, "unavailable_for": 0.1, "replies": ""}
    engine = OpenAIEngine(EngineSetup(model="m"), model="m", base_url=f"{url}/v1", **options)
    try:
        request = GenerationRequest(prompt_ids=(1,), max_tokens=4)
        return await engine.chat([{"role": "user", "content": "1+1="}], [], request)
    finally:
        await engine.aclose()


async def of_judge(url):
    judge = Judge(rubric="Is it kind?", model="m", url=f"{url}/v1", timeout=TIMEOUT, retries=0)
    message = {"role": "assistant", "content": "hello"}
    prompt = grpo.Prompt(messages="Be kind.", id="0")
    try:
        return await judge.score(grpo.Episode(prompt=prompt, messages=(message,)))
    finally:
        await judge.aclose()


async def of_vllm(url):
    client = VllmClient(url, seconds=TIMEOUT, connect_seconds=TIMEOUT, remote=False, api_key=KEY)
    engine = HttpEngine(EngineSetup(model="m"), url=url)
    try:
        return engine._read(await client.post("/inference/v1/generate", {}))
    finally:
        await client.aclose()
        await engine.aclose()


ASKING = {"openai": of_openai, "judge": of_judge, "vllm:http": of_vllm}


def is_refused(result):
    """Check that a result is an error of one safe line, or unscored with one."""
    if isinstance(result, grpo.Feedback):
        assert result.reward is None, result
        text = result.error
    else:
        assert isinstance(result, grpo.GrpoError), result
        text = str(result)
    assert text
    assert KEY not in text
    assert not re.search(r"[\x00-\x1f\x7f-\x9f‮]", text), repr(text)
    assert len(text) < 2000
    return text


@pytest.mark.parametrize("plugin", ASKING)
@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_an_answer_that_cannot_be_used_is_an_error_of_one_line(answer, plugin):
    text = is_refused(asked(answer, ASKING[plugin]))
    assert "127.0.0.1" in text or plugin in text


@pytest.mark.parametrize("plugin", ["openai", "judge"])
@pytest.mark.parametrize("reply", REPLIES.values(), ids=REPLIES)
def test_a_reply_that_is_withheld_or_malformed_is_unscored(reply, plugin):
    is_refused(asked(whole(reply), ASKING[plugin]))


async def drip(writer):
    for byte in head(length=10_000) + b" " * 10_000:
        writer.write(bytes([byte]))
        await writer.drain()
        await asyncio.sleep(0.05)


async def drip_of_an_error(writer):
    writer.write(head("500 Oops", length=10_000))
    for _ in range(10_000):
        writer.write(b" ")
        await writer.drain()
        await asyncio.sleep(0.05)


async def informational_without_an_end(writer):
    while True:
        writer.write(b"HTTP/1.1 103 Early Hints\r\n\r\n")
        await writer.drain()
        await asyncio.sleep(0.05)


async def endless(writer):
    writer.write(head("200 OK", "Transfer-Encoding: chunked"))
    while True:
        writer.write(b"10000\r\n" + bytes(65536) + b"\r\n")
        await writer.drain()


async def endless_error(writer):
    writer.write(head("400 Bad Request", "Transfer-Encoding: chunked"))
    while True:
        writer.write(b"10000\r\n" + bytes(65536) + b"\r\n")
        await writer.drain()


async def silent(writer):
    await asyncio.sleep(3600)


SLOW = [drip, drip_of_an_error, informational_without_an_end, endless, endless_error, silent]


@pytest.mark.parametrize("plugin", ASKING)
@pytest.mark.parametrize("answer", SLOW, ids=lambda answer: answer.__name__)
def test_time_and_size_of_a_whole_answer_are_bounded(answer, plugin):
    is_refused(asked(answer, ASKING[plugin]))


SPANS = {
    "a gap": [[0, 1], [2, 3]],
    "an overlap": [[0, 2], [1, 3]],
    "another order": [[1, 3], [0, 1]],
    "beyond the end": [[0, 4]],
    "before the beginning": [[-1, 3]],
    "too few": [[0, 2]],
    "none": [],
}


@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
def test_versions_that_do_not_cover_a_completion_are_refused(spans):
    is_refused(asked(whole(generated([1, 2, 3], spans)), of_vllm))


@pytest.mark.parametrize("ids", [[2**31], [2**70], [-1], [1.5], ["1"], [None], [True]], ids=str)
def test_token_ids_that_no_vocabulary_has_are_refused(ids):
    async def checked(url):
        completion = await of_vllm(url)
        request = GenerationRequest(prompt_ids=(1,), max_tokens=4)
        from grpo_core.contracts.playing import check_completions

        check_completions([completion], [request], vocabulary=100)

    is_refused(asked(whole(generated(ids, [[0, 1]])), checked))


def generated(ids, spans):
    versions = [{"version": "-1", "start": start, "end": end} for start, end in spans]
    for span in versions:
        span["version"] = "0"
    return {
        "choices": [
            {
                "token_ids": ids,
                "logprobs": {"content": [{"logprob": -0.5} for _ in ids]},
                "weight_versions": versions,
                "finish_reason": "stop",
            }
        ]
    }


LINES = {
    "a line that is no JSON": "not json",
    "a list": "[]",
    "an empty object": "{}",
    "half an answer": '{"jsonrpc": "2.0", "id":',
    "an answer without a result": '{"jsonrpc": "2.0", "id": ID}',
    "an unknown id": '{"jsonrpc": "2.0", "id": 4711, "result": {"content": []}}',
    "a result of another kind": '{"jsonrpc": "2.0", "id": ID, "result": "fine"}',
    "content of another kind": '{"jsonrpc": "2.0", "id": ID, "result": {"content": "fine"}}',
    "an error without a code": '{"jsonrpc": "2.0", "id": ID, "error": {"message": "no"}}',
    "a lone surrogate": '{"jsonrpc": "2.0", "id": ID, "result": {"content": "\\ud800"}}',
    "too deep": "[" * 5000,
    "nothing": "",
    "the end": None,
}
"""Lines that an MCP server writes in place of the answer to a call."""
MCP = """
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    if asked["method"] == "tools/call":
        said = %r
        if said is None:
            sys.exit(3)
        print(said.replace("ID", str(asked["id"])), flush=True)
        continue
    if asked["method"] == "initialize":
        told = {"protocolVersion": asked["params"]["protocolVersion"], "capabilities": {"tools": {}},
                "serverInfo": {"name": "s", "version": "1"}}
    elif asked["method"] == "tools/list":
        told = {"tools": [{"name": "t", "inputSchema": {"type": "object"}}]}
    else:
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "error": {"code": -32601, "message": "no"}}),
              flush=True)
        continue
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": told}), flush=True)
"""


@pytest.mark.long
@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_an_mcp_server_that_answers_nonsense_loses_its_session_and_is_replaced(line, tmp_path):
    (tmp_path / "server.py").write_text(MCP % line)

    async def story():
        server = Server([sys.executable, str(tmp_path / "server.py")], {}, 20.0)
        await server.start()
        server._timeout = 2.0
        try:
            with pytest.raises((grpo.SessionLost, ToolFailed)) as failure:
                await server.call("t", {})
            return failure.value, server.ended
        finally:
            await server.close()

    failure, ended = asyncio.run(story())
    assert ended or isinstance(failure, ToolFailed)


# ---------------------------------------------------------------------------------- the client alone


def client(url, **options):
    return services.Client(url, who="a test", key=KEY, **{"seconds": TIMEOUT, **options})


def test_a_key_that_no_header_can_have_is_refused_before_any_request():
    for bad in (f"{KEY}\r", f"{KEY}\n", f" {KEY}", "schlüssel"):
        with pytest.raises(grpo.ConfigError, match="no header may have") as refused:
            services.Client("http://127.0.0.1:9", who="a test", key=bad, seconds=1.0)
        assert bad not in str(refused.value)


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:8000", "ftp://127.0.0.1", "http://", "http://a:0", "http://a:x"]
)
def test_an_address_of_another_kind_is_refused(url):
    with pytest.raises(grpo.ConfigError, match="no address"):
        services.Client(url, who="a test", seconds=1.0)


def test_a_redirect_names_both_hosts():
    async def ask(url):
        one = client(url)
        try:
            await one.get("/v1")
        finally:
            await one.aclose()

    found = asked(ANSWERS["a redirect to another host"], ask)
    assert isinstance(found, ServiceError)
    assert "from 127.0.0.1:" in str(found)
    assert "to http://127.0.0.2:9" in str(found)


def test_a_call_is_repeated_after_the_pause_that_the_server_asks_for(monkeypatch):
    calls = []

    async def busy():
        calls.append(1)
        raise NotSent("busy", retry_after=0.0)

    with pytest.raises(NotSent):
        asyncio.run(services.retried(busy, 3))
    assert len(calls) == 4

    async def busy_for_long():
        calls.append(1)
        raise NotSent("busy", retry_after=3600.0)

    calls.clear()
    with pytest.raises(NotSent):
        asyncio.run(services.retried(busy_for_long, 3))
    assert len(calls) == 1, "the caller decides whether it waits for an hour"


@given(
    st.text(max_size=40)
    | st.floats().map(str)
    | st.datetimes().map(lambda d: d.strftime("%a, %d %b %Y %H:%M:%S GMT"))
)
def test_a_pause_that_a_server_asks_for_is_bounded(text):
    seconds = retry_after({"Retry-After": text})
    assert seconds is None or 0.0 <= seconds <= LONGEST_WAIT


@given(st.text())
def test_what_a_server_says_is_one_safe_line(text):
    line = services.said(text)
    assert len(line) <= 300
    assert not re.search(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e]", line)


@given(st.binary() | st.text() | st.recursive(st.none() | st.floats() | st.text(), st.lists).map(json.dumps))
def test_reading_json_raises_nothing_but_value_errors(data):
    with contextlib.suppress(ValueError):
        read_json(data, object)


@given(st.lists(st.binary(max_size=50)), st.sampled_from(["identity", "gzip", ""]), st.integers(0, 100))
def test_reading_a_body_raises_nothing_but_value_errors(parts, encoding, largest):
    async def stream():
        for part in parts:
            yield part

    try:
        body = asyncio.run(read_body(stream(), {"Content-Encoding": encoding}, largest))
    except ValueError:
        assert encoding != "identity" or sum(map(len, parts)) > largest
    else:
        assert body == b"".join(parts)
        assert len(body) <= largest
