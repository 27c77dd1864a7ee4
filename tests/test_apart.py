"""Agents whose rollouts share a process mix nothing up, and others play one rollout in a process."""

from __future__ import annotations

import asyncio
import re
import socket

import pytest
from test_agents import HEAD as COMMON
from test_agents import played_in

from grpo_core import cli
from grpo_core.app.placement import LocalPlacement
from grpo_core.app.tasks import make_environment
from grpo_core.config import Config, EnvironmentConfig, TaskConfig
from grpo_core.contracts.errors import PluginError
from grpo_core.contracts.records import Completion, Limits
from grpo_core.environments.pool import Places
from grpo_core.plugins.host import PluginHost
from grpo_core.processes.aio import Limit, not_counted
from grpo_core.testing import FakeRenderer, clock
from grpo_plugin_agents.recorder import Conversations, Recorder

HEAD = (
    COMMON
    + """
import functools, subprocess, sys
from types import SimpleNamespace

HERE = os.path.dirname(__file__)

def mine():
    return SimpleNamespace(base_url=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])

async def meet(n):
    # wait until n rollouts play, wherever they do
    open(os.path.join(HERE, "here-%d-%d" % (os.getpid(), id(asyncio.current_task()))), "w").close()
    while sum(name.startswith("here-") for name in os.listdir(HERE)) < n:
        await asyncio.sleep(0.01)

ASKS = '''
import json, os, sys, urllib.request
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
body = json.dumps({"messages": [{"role": "user", "content": open("task.txt").read()}]}).encode()
key = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
urllib.request.urlopen(urllib.request.Request(url, body, key)).read()
'''

async def run(prompt, client):
    await play(prompt, client)
    return grpo.Feedback(reward=1.0, metrics={"pid": os.getpid()})
"""
)


def played(tmp_path, agent, groups, *, config=None, deadline=60.0, name=""):
    """Play a rollout in each of the groups by an agent as a run does; return them with the pool's remark."""
    (tmp_path / "agent.py").write_text(HEAD + agent)
    host, task = PluginHost.discover(), TaskConfig(env=f"{tmp_path}/agent.py{name}")
    given = Config(environment=config or EnvironmentConfig())

    async def story():
        pool = make_environment("task", task, given.environment, host, LocalPlacement(host))
        return await played_in(pool, groups, deadline=deadline), pool.remark

    return asyncio.run(story())


def texts(rollouts):
    return [
        "".join(map(chr, segment.prompt_ids.tolist())) for rollout in rollouts for segment in rollout.segments
    ]


def processes(rollouts):
    return len({rollout.metrics["pid"] for rollout in rollouts})


SHARED = {
    "a key in the environment variables": """
async def play(prompt, client):
    os.environ["OPENAI_API_KEY"] = client.api_key
    await meet(MEET)
    key = SimpleNamespace(base_url=client.base_url, api_key=os.environ["OPENAI_API_KEY"])
    await asyncio.to_thread(ask, key, prompt.id)
""",
    "a key that is set once": """
async def play(prompt, client):
    key = os.environ.setdefault("OPENAI_API_KEY", client.api_key)
    await meet(MEET)
    await asyncio.to_thread(ask, SimpleNamespace(base_url=client.base_url, api_key=key), prompt.id)
""",
    "an address in a module's variable": """
async def play(prompt, client):
    global URL
    URL = client.base_url
    await meet(MEET)
    await asyncio.to_thread(ask, SimpleNamespace(base_url=URL, api_key=client.api_key), prompt.id)
""",
}
BOTH = {
    "address and key in the environment variables": """
async def play(prompt, client):
    os.environ.update(client.env_vars())
    await meet(MEET)
    await asyncio.to_thread(ask, mine(), prompt.id)
    await asyncio.to_thread(ask, mine(), prompt.id, "and")
""",
    "a client in a module's variable": """
async def play(prompt, client):
    global CLIENT
    CLIENT = client
    await meet(MEET)
    await asyncio.to_thread(lambda: ask(CLIENT, prompt.id))
""",
    "environment and working directory of a program": """
async def play(prompt, client):
    os.environ.update(client.env_vars())
    here = os.path.join(HERE, "of " + client.api_key[-20:])
    os.makedirs(here)
    os.chdir(here)
    open("task.txt", "w").write(prompt.id)
    await meet(MEET)
    await asyncio.to_thread(subprocess.run, [sys.executable, "-c", ASKS], check=True)
""",
}


@pytest.mark.long
@pytest.mark.parametrize("what", [*SHARED, *BOTH])
def test_an_agent_without_concurrency_plays_one_rollout_in_a_process(what, tmp_path):
    agent = {**SHARED, **BOTH}[what].replace("MEET", "4")
    rollouts, remark = played(tmp_path, agent, ["a", "a", "b", "c"])
    assert [(each.reward, each.error) for each in rollouts] == [(1.0, None)] * 4
    assert [{text[0] for text in texts([each])} for each in rollouts] == [{"a"}, {"a"}, {"b"}, {"c"}]
    assert processes(rollouts) == 4
    assert re.search(r"processes of [1-9]\d* MiB as needed, at most 8 \(environment\.workers\)", remark)


@pytest.mark.long
@pytest.mark.parametrize("groups", [["a", "b"], ["a", "a"]], ids=["two prompts", "one group"])
@pytest.mark.parametrize("what", SHARED)
def test_a_key_at_the_address_of_another_rollout_ends_the_run(what, groups, tmp_path):
    agent = "concurrency = 64\n" + SHARED[what].replace("MEET", "2")
    with pytest.raises(PluginError, match=r"the address of rollout \d has the key of rollout \d") as raised:
        played(tmp_path, agent, groups)
    assert "api_key=client.api_key" in str(raised.value)


CONVERSATION = """
concurrency = 64
BOTH = asyncio.Barrier(2)

async def play(prompt, client):
    global SAID
    said = await asyncio.to_thread(talk, client, [prompt.id])
    SAID = [prompt.id, said, "go on"]
    await BOTH.wait()
    await asyncio.to_thread(talk, client, SAID)
    await BOTH.wait()

def talk(client, said):
    messages = [{"role": ["user", "assistant"][i % 2], "content": text} for i, text in enumerate(said)]
    request = urllib.request.Request(
        client.base_url + "/chat/completions", json.dumps({"messages": messages}).encode(),
        {"Authorization": "Bearer " + client.api_key},
    )
    return json.loads(urllib.request.urlopen(request).read())["choices"][0]["message"]["content"]
"""


@pytest.mark.long
def test_a_conversation_in_a_modules_variable_ends_the_run(tmp_path):
    with pytest.raises(PluginError, match="continues a reply that another prompt's rollout sampled"):
        played(tmp_path, CONVERSATION, ["a", "b"])


APART = """
concurrency = 64
KEYS = {}

async def play(prompt, client):
    KEYS[client.api_key] = prompt.id
    await meet(4)
    for _ in range(2):
        await asyncio.gather(*(asyncio.to_thread(ask, client, prompt.id, f"{i} {list(KEYS)}") for i in "ab"))
    await (await asyncio.create_subprocess_exec(
        sys.executable, "-c", ASKS.replace('open("task.txt").read()', repr(prompt.id)),
        env={**os.environ, **client.env_vars()},
    )).wait()
"""


@pytest.mark.long
def test_with_concurrency_one_process_plays_all_rollouts_and_nothing_is_remarked(tmp_path):
    rollouts, remark = played(tmp_path, APART, ["a", "a", "b", "c"])
    assert [{text[0] for text in texts([each])} for each in rollouts] == [{"a"}, {"a"}, {"b"}, {"c"}]
    assert [each.turns for each in rollouts] == [5] * 4
    assert (processes(rollouts), remark) == (1, "")


EASY = """
async def play(prompt, client):
    await meet(2)
    await asyncio.to_thread(ask, client, prompt.id)
    open(os.path.join(HERE, "made-%d" % os.getpid()), "w").close()
"""


@pytest.mark.long
def test_processes_start_on_demand(tmp_path):
    started = "open(os.path.join(HERE, 'made-%d' % os.getpid()), 'w').close()\n"
    rollouts, _ = played(tmp_path, started + EASY, ["a", "b"])
    assert processes(rollouts) == len(list(tmp_path.glob("made-*"))) == 2


@pytest.mark.long
def test_rollouts_beyond_the_processes_wait_and_their_wait_is_not_of_their_deadline(tmp_path):
    """Two of four hang until their deadline, and hold both processes; the others play after them."""
    agent = """
async def play(prompt, client):
    await asyncio.to_thread(ask, client, prompt.id)
    if prompt.id < "c":
        await asyncio.sleep(1000)
"""
    rollouts, remark = played(
        tmp_path, agent, ["a", "b", "c", "d"], config=EnvironmentConfig(workers=2), deadline=4.0
    )
    assert [each.finish_reason == "deadline" for each in rollouts] == [True, True, False, False]
    assert [each.reward for each in rollouts] == [None, None, 1.0, 1.0]
    assert processes(rollouts[2:]) <= 2
    assert "at most 2 (environment.workers)" in remark


@pytest.mark.long
def test_the_configuration_says_how_many_a_process_plays(tmp_path):
    agent = APART.replace("concurrency = 64", "").replace("meet(4)", "meet(2)")
    config = EnvironmentConfig(workers=2, concurrency=2)
    rollouts, _ = played(tmp_path, agent, ["a", "b", "c", "d"], config=config)
    assert [each.reward for each in rollouts] == [1.0] * 4
    assert processes(rollouts) == 2


SESSIONS = """
import grpo_core as grpo

class Agent(grpo.Environment):
    def prompts(self, split):
        return prompts(split)

    def open(self, prompt):
        return [os.getpid()]

    async def run(self, prompt, client):
        assert client.session == [os.getpid()]
        os.environ.update(client.env_vars())
        await asyncio.to_thread(ask, mine(), prompt.id)

    def evaluate(self, episodes):
        assert all(each.session == [os.getpid()] for each in episodes)
        return [grpo.Feedback(reward=1.0, metrics={"pid": os.getpid()}) for _ in episodes]
"""


@pytest.mark.long
def test_sessions_stay_in_the_process_that_opened_them(tmp_path):
    config = EnvironmentConfig(workers=3)
    rollouts, _ = played(tmp_path, SESSIONS, ["a", "a", "b", "c", "d"], config=config, name=":Agent")
    assert [(each.reward, each.error) for each in rollouts] == [(1.0, None)] * 5
    assert "".join(texts(rollouts)) == "aabcd"
    assert processes(rollouts) == 3


FIXED = """
import socket
PORT = socket.create_server(("127.0.0.1", ONE_PORT))

async def play(prompt, client):
    await meet(2)
"""


@pytest.mark.long
def test_an_agent_that_cannot_have_two_processes_is_told_the_key(tmp_path, free_port):
    with pytest.raises(PluginError, match=r"environment\.workers = 1 makes one") as raised:
        played(tmp_path, FIXED.replace("ONE_PORT", str(free_port)), ["a", "b"])
    assert "process 2 of its agent" in str(raised.value)


@pytest.fixture
def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    return port


# ---------------------------------------------------------------------------------- places and deadlines


def test_a_place_goes_to_the_longest_waiter_and_a_cancelled_one_gives_it_back():
    async def story():
        places, order = Places(2, 1), []

        async def hold(name, seconds, home=None):
            async with places.take(home) as worker:
                order.append((name, worker))
                await asyncio.sleep(seconds)

        first = asyncio.create_task(hold("a", 10.0))
        await asyncio.sleep(0)
        assert places.used == 1
        others = [asyncio.create_task(hold(name, 10.0)) for name in "bcd"]
        await asyncio.sleep(1.0)
        assert order == [("a", 0), ("b", 1)]
        gone = asyncio.create_task(hold("gone", 1.0, 0))
        at_home = asyncio.create_task(hold("home", 1.0, 1))
        await asyncio.sleep(1.0)
        for task in (others[1], first, gone):  # one waits, one holds its place, one waits for its home
            task.cancel()
        await asyncio.wait([*others, at_home])
        assert order == [("a", 0), ("b", 1), ("d", 0), ("home", 1)]
        async with places.take(None), places.take(None):
            pass

    clock.run(story())


def test_a_part_of_a_limit_has_its_own_time_and_uses_that_of_the_whole():
    async def story():
        whole = Limit(10.0)
        late = []

        async def part(wait, seconds):
            timer = Limit(None)
            try:
                async with whole.part() as timer:
                    with not_counted():
                        await asyncio.sleep(wait)
                    await asyncio.sleep(seconds)
            except TimeoutError:
                assert timer.expired
                late.append(seconds)

        async with whole:
            await asyncio.sleep(2.0)
            await asyncio.gather(part(0.0, 7.0), part(50.0, 6.0), part(0.0, 9.0))
            await asyncio.sleep(7.0)  # two seconds are used so far, whatever the parts have waited
        assert (late, whole.expired, whole.left) == ([9.0], False, 0.0)

    clock.run(story())


# ---------------------------------------------------------------------------------- check

CHECKED = "rollouts of one process send the same requests as alone"


def checked(tmp_path, capsys, agent, *options):
    (tmp_path / "agent.py").write_text(COMMON + agent)
    command = ["check", f"{tmp_path}/agent.py", *options]
    status = cli.make_app()(command, exit_on_error=True, result_action="return_value")
    return status, capsys.readouterr().out


GLOBAL = """
async def run(prompt, client):
    global TASK, CLIENT
    TASK, CLIENT = prompt.messages[0]["content"], client
    for _ in range(2):
        await asyncio.to_thread(lambda: ask(client, TASK))
    return 1.0
"""
SHARES = {
    "what it asks": GLOBAL,
    "address and key": GLOBAL.replace("ask(client, TASK)", "ask(CLIENT, 'x')"),
    "the key": """
async def run(prompt, client):
    os.environ["KEY"] = client.api_key
    for _ in range(2):
        await asyncio.to_thread(
            lambda: ask(grpo.AgentClient(base_url=client.base_url, api_key=os.environ["KEY"], model="m"), "x")
        )
    return 1.0
""",
}


@pytest.mark.parametrize("what", SHARES)
def test_check_names_an_agent_that_shares_something(what, tmp_path, capsys):
    """Without `concurrency` it plays right, and with it the check fails."""
    status, said = checked(tmp_path, capsys, SHARES[what])
    assert (status, f"note    {CHECKED}: a process must play one" in said) == (0, True)
    assert "concurrency = 64" not in said
    status, said = checked(tmp_path, capsys, "concurrency = 64\n" + SHARES[what])
    assert (status, f"FAILED  {CHECKED}: " in said) == (1, True)
    assert "Leave out concurrency" in said


def test_check_says_between_which_conversations_an_agent_is_mixed_up(tmp_path, capsys):
    _, said = checked(tmp_path, capsys, GLOBAL)
    found = re.search(r"alone a conversation ends with '(\d)a', and next to 3 others with '(\d)a'", said)
    assert found is not None, said
    assert found[1] != found[2]


def test_check_prints_the_line_that_lets_a_process_play_many(tmp_path, capsys):
    apart = GLOBAL.replace("global TASK, CLIENT", "")
    status, said = checked(tmp_path, capsys, apart)
    passed = f"ok      {CHECKED}: 4 rollouts at once in a process, two of one group"
    assert (status, f"{passed}; the line `concurrency = 64`" in said) == (0, True)
    status, said = checked(tmp_path, capsys, "concurrency = 64\n" + apart)
    assert (status, f"{passed}\n" in said) == (0, True)


def test_check_of_an_agent_that_asks_by_chance_cannot_tell(tmp_path, capsys):
    agent = GLOBAL.replace("global TASK, CLIENT", "").replace(
        "ask(client, TASK)", "ask(client, str(time.time()))"
    )
    status, said = checked(tmp_path, capsys, agent)
    assert (status, f"note    {CHECKED}: prompt '0', reply 'a': cannot be checked" in said) == (0, True)


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
