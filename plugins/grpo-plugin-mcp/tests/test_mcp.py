"""Tools of MCP servers: the real library on both sides, with a server in a child process."""

import asyncio
import contextlib
import os
import sys
from pathlib import Path

import pytest

import grpo_core as grpo
from grpo_core.testing import HostedEnvironment, make_offer
from grpo_plugin_mcp.server import Server

SERVER = Path(__file__).with_name("server_for_mcp.py")
COMMAND = f"{sys.executable} {SERVER}"
JUDGE = '''
import asyncio
import grpo_core as grpo

class Counted(grpo.Environment):
    success = 1.0

    def prompts(self, split):
        return [grpo.Prompt(messages="Count to 5.", answer="5")]

    def evaluate(self, episodes):
        return [float(episode.reply == episode.prompt.answer) for episode in episodes]

class Awaited(Counted):
    async def evaluate(self, episodes):
        return super().evaluate(episodes)

class Few(Counted):
    concurrency = 2
    at_once = 0

    async def evaluate(self, episodes):
        self.at_once += 1
        assert self.at_once <= self.concurrency
        await asyncio.sleep(0)
        self.at_once -= 1
        return super().evaluate(episodes)

class Notes:
    def __init__(self, log):
        self._log, self._notes = log, []

    def note(self, text: str) -> str:
        """Notes a text.

        Args:
            text: what is noted
        """
        self._notes.append(text)
        return f"{len(self._notes)} notes"

class Sessions(Counted):
    max_turns = 4
    events = []

    def open(self, prompt):
        asyncio.run(asyncio.sleep(0))  # what is not async may do that
        self.events.append("opened")
        return Notes(self.events)

    def close(self, session):
        asyncio.run(asyncio.sleep(0))
        self.events.append(f"closed {session._notes}")

    def evaluate(self, episodes):
        return [float(episode.session._notes == [episode.reply]) for episode in episodes]

class Later(Sessions):
    concurrency = 2
    deadline = 50.0

    async def open(self, prompt):
        await asyncio.sleep(0)
        self.events.append("opened")
        return Notes(self.events)

    async def close(self, session):
        await asyncio.sleep(0)
        self.events.append(f"closed {session._notes}")

    async def evaluate(self, episodes):
        return super().evaluate(episodes)

class Clumsy(Sessions):
    def close(self, session):
        self.events.append("closed")
        raise ValueError("it cannot be closed")

class Adding:
    def add(self, number: int) -> int:
        """Adds.

        Args:
            number: what is added
        """
        return number

class Clash(Sessions):
    def open(self, prompt):
        return Adding()

    def close(self, session):
        self.events.append("closed")

class Agent(Counted):
    async def run(self, prompt, client):
        return 1.0
'''


@pytest.fixture
def judge(tmp_path):
    (tmp_path / "judge.py").write_text(JUDGE)
    return f"{tmp_path}/judge.py"


def offered(judge, *, name="Counted", command=COMMAND, **options):
    return make_offer("environment", f"mcp:{command}", plugins=["mcp"], env=f"{judge}:{name}", **options)


@contextlib.contextmanager
def hosting(*args, **options):
    host = HostedEnvironment(offered(*args, **options)).host
    try:
        yield host
    finally:
        host.end()


PROMPT = grpo.Prompt(messages="Count to 5.", answer="5", id="0")


def called(host, session, name, **arguments):
    tool_call = {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}
    said = {"role": "assistant", "content": "", "tool_calls": [tool_call]}
    (feedback,) = host.call("evaluate", [grpo.Episode(prompt=PROMPT, messages=[said], session=session)])
    return feedback


def answered(host, session, name, **arguments):
    return called(host, session, name, **arguments).messages[0]["content"]


def reward(host, session, reply):
    messages = [*PROMPT.messages, {"role": "assistant", "content": reply}]
    (feedback,) = host.call("evaluate", [grpo.Episode(prompt=PROMPT, messages=messages, session=session)])
    return feedback.reward


@pytest.mark.long
@pytest.mark.parametrize("name", ["Counted", "Awaited"])
def test_the_model_calls_the_tools_of_a_server_and_the_other_environment_judges(judge, name):
    with hosting(judge, name=name) as host:
        (start,) = host.call("open", [("a", PROMPT)])
        by_name = {tool["function"]["name"]: tool["function"] for tool in start.tools}
        assert by_name["add"]["description"] == "Adds to the counter."
        assert by_name["add"]["parameters"]["required"] == ["number"]
        assert answered(host, "a", "add", number=2) == "2"
        assert answered(host, "a", "add", number=1, times=3) == "5"
        assert (reward(host, "a", "5"), reward(host, "a", "6")) == (1.0, 0.0)
        assert host.description().success == 1.0


@pytest.mark.long
def test_each_rollout_has_its_own_server_or_all_share_one(judge):
    for kind, second in (("rollout", "2"), ("worker", "3")):
        with hosting(judge, server=kind) as host:
            host.call("open", [("a", PROMPT), ("b", PROMPT)])
            assert answered(host, "a", "add", number=1) == "1"
            assert answered(host, "b", "add", number=2) == second


@pytest.mark.long
def test_errors_of_tools_are_read_by_the_model_and_an_outage_is_unscored(judge):
    with hosting(judge, timeout=20.0) as host:
        host.call("open", [("a", PROMPT)])
        assert "Error executing tool fail" in answered(host, "a", "fail")
        assert answered(host, "a", "add", number="x").startswith("error: add: argument 'number' is 'x'")
        assert "the market is closed" in answered(host, "a", "market")
        lost = called(host, "a", "die")
        assert (lost.reward, lost.done) == (None, True)
        assert "mcp: the server" in lost.error
        again = called(host, "a", "add", number=1)
        assert "ended before the call of 'add'" in again.error


@pytest.mark.long
def test_a_shared_server_that_has_ended_is_started_again(judge):
    with hosting(judge, server="worker") as host:
        host.call("open", [("a", PROMPT)])
        assert called(host, "a", "die").error
        host.call("close", ["a"])
        host.call("open", [("b", PROMPT)])
        assert answered(host, "b", "add", number=1) == "1"


def names(start):
    return {tool["function"]["name"] for tool in start.tools}


@pytest.mark.long
@pytest.mark.parametrize("name", ["Sessions", "Later"])
def test_the_model_has_the_tools_of_the_server_and_those_of_the_other_environments_session(judge, name):
    environment = offered(judge, name=name)
    events = type(environment._environment).events
    host = HostedEnvironment(environment).host
    try:
        first, second = host.call("open", [("a", PROMPT), ("b", PROMPT)])
        assert {"add", "note"} <= names(first) == names(second)
        assert answered(host, "a", "add", number=2) == "2"
        assert answered(host, "a", "note", text="5") == "1 notes"
        assert (reward(host, "a", "5"), reward(host, "b", "5")) == (1.0, 0.0)
        host.call("close", ["a"])
        assert events == ["opened", "opened", "closed ['5']"]
    finally:
        host.end()
    assert events[3:] == ["closed []"]


@pytest.mark.long
def test_a_session_is_closed_where_its_server_does_not_start(judge):
    environment = offered(judge, name="Later", command=f"{COMMAND} --broken")
    host = HostedEnvironment(environment).host
    (start,) = host.call("open", [("a", PROMPT)])
    host.end()
    assert "--broken' did not start" in start.error
    assert type(environment._environment).events == ["opened", "closed []"]


@pytest.mark.long
def test_a_session_that_cannot_be_closed_leaves_no_server(judge, capfd):
    environment = offered(judge, name="Clumsy")
    host = HostedEnvironment(environment).host
    host.call("open", [("a", PROMPT)])
    server = host._sessions["a"].value.server
    host.call("close", ["a"])
    assert server.ended
    assert "it cannot be closed" in capfd.readouterr().err
    host.end()


@pytest.mark.long
def test_two_tools_of_one_name_are_refused_and_both_sides_are_closed(judge):
    environment = offered(judge, name="Clash")
    host = HostedEnvironment(environment).host
    with pytest.raises(grpo.PluginError, match="two tools are called 'add'"):
        host.call("open", [("a", PROMPT)])
    host.end()
    assert type(environment._environment).events == ["closed"]
    with hosting(judge, name="Clash", tools=["fail"]) as chosen:
        (start,) = chosen.call("open", [("a", PROMPT)])
        assert names(start) == {"add", "fail"}


def test_a_limit_of_an_environment_with_sessions_holds_for_all_calls(judge):
    environment = offered(judge, name="Later")
    assert (environment.concurrency, environment.deadline) == (2, 30.0 + 10.0 + 50.0)
    judges = offered(judge, name="Few")
    assert (judges.concurrency, judges.deadline) == (32, 16 * 30.0)


@pytest.mark.slow
def test_a_server_without_an_answer_in_time_is_unscored(judge):
    with hosting(judge, timeout=3.0) as host:
        (start,) = host.call("open", [("a", PROMPT)])
        if start.error is None:  # a slow machine may need longer to start it
            assert "within 3 s" in called(host, "a", "hang").error


@pytest.mark.long
def test_a_server_gets_the_variables_that_are_named_and_no_others(judge, monkeypatch):
    monkeypatch.setenv("COUNTER_KEY", "of-counter")
    monkeypatch.setenv("OTHER_KEY", "of-others")
    with hosting(judge, variables=["COUNTER_KEY"], tools=["secret"]) as host:
        (start,) = host.call("open", [("a", PROMPT)])
        assert [tool["function"]["name"] for tool in start.tools] == ["secret"]
        assert answered(host, "a", "secret") == "of-counter None"


@pytest.mark.long
def test_a_server_that_does_not_start_says_so(judge):
    with hosting(judge, command=f"{COMMAND} --broken") as host:
        (start,) = host.call("open", [("a", PROMPT)])
    assert "--broken' did not start" in start.error


MUTE = "import time; time.sleep(60)"
ENDLESS = """
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    about = {"capabilities": {"tools": {}}, "serverInfo": {"name": "endless", "version": "1"}}
    version = asked.get("params", {}).get("protocolVersion")
    told = {
        "initialize": {"result": {"protocolVersion": version, **about}},
        "tools/list": {"result": {"tools": [], "nextCursor": "more"}},
    }.get(asked.get("method"), {"error": {"code": -32601, "message": "unknown"}})
    if "id" in asked:
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], **told}), flush=True)
"""


@pytest.mark.long
def test_a_server_that_hangs_while_it_starts_is_ended_and_says_so():
    async def story():
        server = Server([sys.executable, "-c", MUTE], {}, 0.5)
        with pytest.raises(grpo.Unavailable, match=r"did not start within 0.5 s"):
            async with asyncio.timeout(20):
                await server.start()
        assert server.ended

    asyncio.run(story())


@pytest.mark.long
def test_a_start_that_is_cancelled_is_cancelled_and_ends_its_server():
    async def story():
        server = Server([sys.executable, "-c", MUTE], {}, 60.0)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await server.start()
        assert server._task.done()

    asyncio.run(story())


@pytest.mark.long
def test_a_list_of_tools_without_an_end_is_refused():
    async def story():
        server = Server([sys.executable, "-c", ENDLESS], {}, 30.0)
        with pytest.raises(grpo.Unavailable, match="more than 100 pages"):
            await server.start()

    asyncio.run(story())


@pytest.mark.long
def test_a_tool_that_the_server_lacks_is_found_at_the_start(judge):
    with pytest.raises(grpo.PluginError, match="the server has no tool 'ad'"):
        offered(judge, tools=["ad"]).prompts("train")
    assert offered(judge, tools=["add"]).prompts("train")


def test_the_other_environment_judges_no_more_at_once_than_it_allows(judge):
    async def story():
        environment = offered(judge, name="Few")
        said = [*PROMPT.messages, {"role": "assistant", "content": "5"}]
        episode = grpo.Episode(prompt=PROMPT, messages=said, session=None)
        assert environment.concurrency == 32
        found = await asyncio.gather(*(environment.evaluate([episode]) for _ in range(6)))
        assert found == [[1.0]] * 6

    asyncio.run(story())


@pytest.mark.long
def test_a_tool_that_the_server_lacks_says_says_what_there_is(judge):
    with hosting(judge, tools=["ad"]) as host:
        (start,) = host.call("open", [("a", PROMPT)])
    assert "the server has no tool 'ad'. Did you mean 'add'?" in start.error


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("Counted", {"command": "no-such-program --x"}, "there is no program 'no-such-program'"),
        ("Counted", {"command": "python 'x"}, "cannot be split"),
        ("Counted", {"timeout": 0}, "timeout = 0"),
        ("Counted", {"server": "all"}, "expected 'rollout' or 'worker'"),
        ("Counted", {"variables": ["NO_SUCH_KEY"]}, "the environment variable NO_SUCH_KEY is not set"),
        ("Agent", {}, "env is an agent"),
        ("Missing", {}, "Missing"),
    ],
)
def test_a_mistake_in_the_configuration_is_one_clear_line(judge, name, options, why):
    assert "NO_SUCH_KEY" not in os.environ
    with pytest.raises(grpo.PluginError) as raised:
        offered(judge, name=name, **options)
    assert why in str(raised.value)


def test_prompts_and_solutions_are_those_of_the_other_environment(judge):
    environment = offered(judge)
    (prompt,) = environment.prompts("train")
    row = {"prompt": prompt.messages, "answer": "7", "id": "0", "level": 1}
    made = environment.prompt(row)
    assert (prompt.answer, environment.solve(prompt)) == ("5", "5")
    assert (made.messages, made.answer, made.info) == (prompt.messages, "7", {"level": 1})
