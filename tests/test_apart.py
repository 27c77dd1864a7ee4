"""Agents that know their rollout by something that a process has once: no two rollouts are mixed up."""

from __future__ import annotations

import re

import pytest
from test_agents import played

from grpo_core import cli
from grpo_core.config import EnvironmentConfig
from grpo_core.contracts.errors import PluginError
from grpo_core.contracts.limits import Limits
from grpo_core.contracts.records import Completion
from grpo_core.testing import FakeRenderer
from grpo_plugin_agents.recorder import Conversations, Recorder

pytestmark = pytest.mark.long

HEAD = """
import concurrent.futures, functools, socket, subprocess, sys, threading
import aiohttp
from aiohttp import web

TOGETHER = asyncio.Barrier(2)  # two rollouts play, and each waits for the other

def post(base_url, key, *said):
    messages = [{"role": "user", "content": text} for text in said]
    body, headers = json.dumps({"messages": messages}).encode(), {"Authorization": "Bearer " + key}
    request = urllib.request.Request(base_url + "/chat/completions", body, headers)
    return json.loads(urllib.request.urlopen(request).read())["choices"][0]["message"]["content"]

@functools.cache
def http():
    return aiohttp.ClientSession()

async def send(base_url, key, *said):
    messages = [{"role": "user", "content": text} for text in said]
    async with http().post(
        base_url + "/chat/completions",
        json={"messages": messages},
        headers={"Authorization": "Bearer " + key},
    ) as response:
        response.raise_for_status()
        return (await response.json())["choices"][0]["message"]["content"]

ASKS = '''
import json, os, sys, urllib.request
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
body = json.dumps({"messages": [{"role": "user", "content": sys.argv[1]}]}).encode()
key = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
urllib.request.urlopen(urllib.request.Request(url, body, key)).read()
'''

async def run(prompt, client):
    await play(prompt, client)
    return 1.0
"""

KEY = "with the key of another rollout"
PROGRAM = "the environment variable OPENAI_API_KEY has the key of another rollout"
SHARED = {
    "an environment variable": (
        """
async def play(prompt, client):
    os.environ["OPENAI_API_KEY"] = client.api_key
    await TOGETHER.wait()
    await send(client.base_url, os.environ["OPENAI_API_KEY"], prompt.id)
""",
        KEY,
    ),
    "a variable that is set once": (
        """
async def play(prompt, client):
    os.environ.setdefault("OPENAI_API_KEY", client.api_key)
    await send(client.base_url, os.environ["OPENAI_API_KEY"], prompt.id)
    await TOGETHER.wait()
""",
        KEY,
    ),
    "a thread": (
        """
async def play(prompt, client):
    os.environ["OPENAI_API_KEY"] = client.api_key
    await TOGETHER.wait()
    await asyncio.to_thread(lambda: post(client.base_url, os.environ["OPENAI_API_KEY"], prompt.id))
""",
        KEY,
    ),
    "a thread of a pool": (
        """
POOL = concurrent.futures.ThreadPoolExecutor(2)

async def play(prompt, client):
    os.environ["OPENAI_API_KEY"] = client.api_key
    await TOGETHER.wait()
    ask = lambda: post(client.base_url, os.environ["OPENAI_API_KEY"], prompt.id)
    await asyncio.get_running_loop().run_in_executor(POOL, ask)
""",
        KEY,
    ),
    "an environment variable, over a socket that takes parts": (
        """
def post_parts(address, key):
    head = f"POST /v1/chat/completions HTTP/1.1\\r\\nHost: a\\r\\nAuthorization: Bearer {key}\\r\\n\\r\\n"
    with socket.create_connection(address) as connection:
        connection.sendmsg([])
        connection.sendmsg([head.encode(), b"{}"])

async def play(prompt, client):
    os.environ["OPENAI_API_KEY"] = client.api_key
    await TOGETHER.wait()
    host, port = client.base_url.split("/")[2].split(":")
    await asyncio.to_thread(post_parts, (host, int(port)), os.environ["OPENAI_API_KEY"])
""",
        KEY,
    ),
    "a module's variable": (
        """
async def play(prompt, client):
    global CLIENT
    CLIENT = client
    await TOGETHER.wait()
    await asyncio.gather(*(send(CLIENT.base_url, CLIENT.api_key, f"{prompt.id} {i}") for i in range(2)))
""",
        KEY,
    ),
    "a client that is made once": (
        """
@functools.cache
def client_of_all(*, made=[]):
    return made[0]

async def play(prompt, client):
    made = client_of_all.__wrapped__.__kwdefaults__["made"]
    made.append(client)
    await TOGETHER.wait()
    await send(client_of_all().base_url, client_of_all().api_key, prompt.id)
""",
        KEY,
    ),
    "a task that outlives its rollout": (
        """
OVER, LATE = asyncio.Event(), asyncio.Event()

async def late(base_url, prompt):
    await LATE.wait()
    await send(base_url, os.environ["OPENAI_API_KEY"], prompt.id)

async def play(prompt, client):
    await send(client.base_url, client.api_key, prompt.id)
    if prompt.id == "0":
        globals()["LEFT"] = asyncio.create_task(late(client.base_url, prompt))
        asyncio.current_task().add_done_callback(lambda _: OVER.set())
        return
    await OVER.wait()
    os.environ["OPENAI_API_KEY"] = client.api_key
    LATE.set()
    await asyncio.wait([LEFT])
    assert isinstance(LEFT.exception(), aiohttp.ClientError), LEFT.exception()
""",
        "",
    ),
    "a program": (
        """
async def play(prompt, client):
    os.environ.update(client.env_vars())
    await TOGETHER.wait()
    await asyncio.to_thread(subprocess.run, [sys.executable, "-c", ASKS, prompt.id], check=True)
""",
        PROGRAM,
    ),
    "the working directory": (
        """
async def play(prompt, client):
    os.makedirs(prompt.id, exist_ok=True)
    os.chdir(prompt.id)
    open("task.txt", "w").write(prompt.id)
    await TOGETHER.wait()
    await send(client.base_url, client.api_key, open("task.txt").read())
    await TOGETHER.wait()
""",
        "in the working directory",
    ),
    "a conversation in a module's variable": (
        """
async def play(prompt, client):
    global SAID
    SAID = [{"role": "user", "content": prompt.id}]
    for _ in range(3):
        async with http().post(
            client.base_url + "/chat/completions",
            json={"messages": SAID},
            headers={"Authorization": "Bearer " + client.api_key},
        ) as response:
            response.raise_for_status()
            said = (await response.json())["choices"][0]["message"]
        SAID = [*SAID, said, {"role": "user", "content": "go on"}]
        await TOGETHER.wait()
""",
        "a rollout continues a reply that another prompt's rollout sampled: 'ab'",
    ),
}


def texts(rollouts):
    return [
        "".join(map(chr, segment.prompt_ids.tolist())) for rollout in rollouts for segment in rollout.segments
    ]


@pytest.mark.parametrize("what", [what for what, (_, told) in SHARED.items() if told])
def test_a_rollout_that_would_ask_as_another_one_ends_the_run(what, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    agent, told = SHARED[what]
    with pytest.raises(PluginError, match=told) as raised:
        played(tmp_path, HEAD + agent, 2)
    assert "Give each client its key in run" in str(raised.value)


def test_what_a_rollout_has_left_behind_asks_in_no_other_one(tmp_path):
    rollouts, _ = played(tmp_path, HEAD + SHARED["a task that outlives its rollout"][0], 2)
    assert texts(rollouts) == ["0", "1"]


APART = {
    "its own key, over connections that all share": """
async def play(prompt, client):
    for turn in range(5):
        asking = (send(client.base_url, client.api_key, prompt.id, f"{turn} {i}") for i in range(3))
        await asyncio.gather(*asking)
        await asyncio.to_thread(ask, client, prompt.id)
        await TOGETHER.wait()
""",
    "a server that the first rollout has started": """
RELAY = []

async def relay(request):
    said = (await request.json())["said"]
    return web.Response(text=await send(request.headers["url"], request.headers["key"], said))

async def started():
    app = web.Application()
    app.router.add_post("/", relay)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    RELAY.append(f"http://127.0.0.1:{runner.addresses[0][1]}/")

async def play(prompt, client):
    if prompt.id == "0":
        await started()
    await TOGETHER.wait()
    headers = {"url": client.base_url, "key": client.api_key}
    async with http().post(RELAY[0], json={"said": prompt.id}, headers=headers) as response:
        assert await response.text() == "ab"
    await TOGETHER.wait()
""",
    "a key in the environment of its own program": """
async def play(prompt, client):
    await TOGETHER.wait()
    program = await asyncio.create_subprocess_exec(
        sys.executable, "-c", ASKS, prompt.id, env={**os.environ, **client.env_vars()}
    )
    assert await program.wait() == 0
""",
    "a directory that it leaves before it waits": """
async def play(prompt, client):
    here = os.getcwd()
    os.makedirs(prompt.id, exist_ok=True)
    for _ in range(3):
        os.chdir(prompt.id)
        os.chdir(here)
        await TOGETHER.wait()
        await send(client.base_url, client.api_key, prompt.id)
""",
    "a directory that all change to": """
async def play(prompt, client):
    os.chdir("/")
    await TOGETHER.wait()
    await send(client.base_url, client.api_key, prompt.id)
""",
    "a key of another rollout in a text": """
KEYS = {}

async def play(prompt, client):
    KEYS[prompt.id] = client.api_key
    await TOGETHER.wait()
    await send(client.base_url, client.api_key, f"{prompt.id} {sorted(KEYS.values())}")
""",
}


@pytest.mark.parametrize("what", APART)
def test_agents_that_keep_their_rollouts_apart_are_not_stopped(what, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rollouts, _ = played(tmp_path, HEAD + APART[what], 2)
    assert [(rollout.reward, rollout.error) for rollout in rollouts] == [(1.0, None)] * 2
    assert [sorted({text[0] for text in texts([rollout])}) for rollout in rollouts] == [["0"], ["1"]]


ALONE = """
async def play(prompt, client):
    os.environ["OPENAI_API_KEY"] = client.api_key
    for turn in range(3):
        await send(client.base_url, os.environ["OPENAI_API_KEY"], prompt.id)
        await asyncio.sleep(0)
"""


def test_an_agent_that_needs_the_environment_variables_plays_one_rollout_at_a_time(tmp_path):
    one = EnvironmentConfig(concurrency=1)
    rollouts, _ = played(tmp_path, HEAD + ALONE, 4, config=one)
    assert texts(rollouts) == [text for text in "0123" for _ in range(3)]


# ---------------------------------------------------------------------------------- check

CHECKED = "concurrent rollouts send the same requests as alone"
ASKED = """
async def run(prompt, client):
    await asyncio.to_thread(ask, client, {text})
    return 1.0
"""


def checked(tmp_path, capsys, agent, *options):
    from test_agents import HEAD as COMMON

    (tmp_path / "agent.py").write_text(COMMON + agent)
    command = ["check", f"{tmp_path}/agent.py", *options]
    status = cli.make_app()(command, exit_on_error=True, result_action="return_value")
    return status, capsys.readouterr().out


GLOBAL = """
async def run(prompt, client):
    global TASK
    TASK = prompt.messages[0]["content"]
    for _ in range(2):
        await asyncio.to_thread(lambda: ask(client, TASK))
    return 1.0
"""


def test_check_sees_that_rollouts_share_what_they_ask(tmp_path, capsys):
    status, said = checked(tmp_path, capsys, GLOBAL)
    assert status == 1
    assert re.search(
        rf"FAILED  {CHECKED}: .* alone a conversation ends with '0a', and next to 3 others with '[123]a'",
        said,
    )


def test_check_plays_rollouts_at_the_same_time_and_passes_those_that_stay_apart(tmp_path, capsys):
    status, said = checked(tmp_path, capsys, GLOBAL.replace("global TASK", ""))
    assert (status, f"ok      {CHECKED}: 4 rollouts\n" in said) == (0, True)


def test_check_of_an_agent_that_asks_by_chance_cannot_tell(tmp_path, capsys):
    agent = GLOBAL.replace("global TASK", "").replace("ask(client, TASK)", "ask(client, str(time.time()))")
    status, said = checked(tmp_path, capsys, agent)
    assert (status, f"note    {CHECKED}: prompt '0', reply 'a': cannot be checked" in said) == (0, True)


def test_check_of_an_agent_that_plays_one_rollout_at_a_time_does_not_wait_for_others(tmp_path, capsys):
    status, said = checked(tmp_path, capsys, GLOBAL, "--set", "environment.concurrency=1")
    assert (status, f"ok      {CHECKED}: they play one after another\n" in said) == (0, True)


# ---------------------------------------------------------------------------------- conversations


def sampled(recorder, *conversation):
    messages = [
        {"role": "assistant" if place % 2 else "user", "content": text}
        for place, text in enumerate(conversation)
    ]
    turn = recorder.turn(messages, (), FakeRenderer())
    assert recorder.admit(turn) is None
    completion = Completion(token_ids=[97], logprobs=[-1.0], versions=[0], finish_reason="stop")
    recorder.record(turn, completion, {"role": "assistant", "content": "a"})


def recorders(*groups):
    conversations = Conversations()
    return [
        Recorder(Limits(max_tokens=9, max_turns=9, context=999), group, conversations) for group in groups
    ]


def test_a_conversation_of_another_prompts_rollout_is_refused_until_that_has_ended():
    one, other = recorders("1", "2")
    sampled(one, "x")
    with pytest.raises(PluginError, match="another prompt's rollout sampled: 'a'"):
        sampled(other, "x", "a", "go on")
    one.end()
    sampled(other, "x", "a", "go on")


def test_a_rollout_may_edit_its_reply_to_what_another_one_has_sampled():
    one, other = recorders("1", "2")
    sampled(one, "x")
    other.record(
        other.turn([{"role": "user", "content": "x"}], (), FakeRenderer()),
        Completion(token_ids=[98], logprobs=[-1.0], versions=[0], finish_reason="stop"),
        {"role": "assistant", "content": "The answer is a"},
    )
    sampled(other, "x", "a", "go on")


def test_rollouts_of_one_prompt_may_continue_with_each_others_replies():
    one, other = recorders("1", "1")
    sampled(one, "x")
    sampled(other, "x", "a", "go on")
