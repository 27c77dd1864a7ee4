"""Sessions and tools in a real child process: opened and closed once each, whatever dies."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections import Counter

import pytest

from grpo_core.config import EnvironmentConfig
from grpo_core.contracts.errors import PluginError, Unavailable
from grpo_core.contracts.playing import EnvironmentClient
from grpo_core.contracts.protocols import Environment, Tool
from grpo_core.contracts.records import Episode, Judgement, Prompt, SessionStart, Weights
from grpo_core.environments.host import EnvironmentHost
from grpo_core.environments.process import EnvironmentProcess, EnvironmentSpec
from grpo_core.loop.rollout import RolloutRequest, SamplingParams, play
from grpo_core.plugins.installed import PluginSelection
from grpo_core.testing import FakeEngine, FakeRenderer

PLAYGROUND = """
    import asyncio, itertools, os, signal
    from pathlib import Path
    import grpo_core as grpo

    NUMBERS = itertools.count()

    class Game:
        def __init__(self, log):
            self._name, self._log, self._value = f"{os.getpid()}-{next(NUMBERS)}", log, 0

        def add(self, amount: int) -> int:
            '''Adds.

            Args:
                amount: what
            '''
            self._value += amount
            return self._value

        async def ask(self, question: str) -> str:
            '''Asks.

            Args:
                question: what
            '''
            await asyncio.sleep(0)
            return question + "!"

        def _write(self, word):
            with open(self._log, "a") as log:
                print(word, self._name, file=log)

    class Playground(grpo.Environment):
        max_turns = 4

        def __init__(self, log):
            self.log = log

        def prompts(self, split):
            return [grpo.Prompt(messages=f"{i}") for i in range(4)]

        def open(self, prompt):
            if prompt.messages[0]["content"] == "no":
                raise OSError("nothing left")
            if prompt.messages[0]["content"] == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            game = Game(self.log)
            game._write("open")
            return game

        def evaluate(self, episodes):
            for episode in episodes:
                match episode.reply:
                    case "die": os.kill(os.getpid(), signal.SIGKILL)
                    case "hang":
                        while True: pass
                    case "raise": raise KeyError("gold")
            return [float(episode.session._value) for episode in episodes]

        def close(self, session):
            session._write("close")
            if session._value == 13:
                raise RuntimeError("bad luck")

    class Judged(grpo.Environment):
        '''Tells how many of its calls ran beside each other, and how many episodes each had.'''

        def __init__(self):
            self.running = self.most = 0

        def prompts(self, split):
            return [grpo.Prompt(messages="?")]

        async def evaluate(self, episodes):
            self.running += 1
            self.most = max(self.most, self.running)
            await asyncio.sleep(0.1)
            self.running -= 1
            if episodes[0].reply == "raise":
                raise KeyError("gold")
            measured = {"most": self.most, "size": len(episodes)}
            return [grpo.Feedback(reward=1.0, metrics=measured)] * len(episodes)
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "playground.py"
    path.write_text(textwrap.dedent(PLAYGROUND))
    return path


def tell(file, story, *, name="Playground", **config):
    """Run a story with a playground in its process; returns what it returns and the log."""
    log = file.with_name("sessions")
    log.touch()

    async def main():
        options = {"log": str(log)} if name == "Playground" else {}
        settings = EnvironmentConfig(**config)
        spec = EnvironmentSpec(task="play", env=f"{file}:{name}", options=options, config=settings)
        process = EnvironmentProcess(spec, plugins=PluginSelection(allow=()))
        try:
            return await story(process)
        finally:
            await process.aclose()

    return asyncio.run(main()), log.read_text().split("\n")[:-1]


def opened_and_closed(log):
    """The number of sessions that were opened and closed; none was closed twice, or without being open."""
    opened = Counter(line.split()[1] for line in log if line.startswith("open"))
    closed = Counter(line.split()[1] for line in log if line.startswith("close"))
    assert set(opened.values()) | set(closed.values()) <= {1}
    assert set(closed) <= set(opened)
    return len(opened), len(closed)


def asked(*messages):
    return {str(i): Prompt(messages=message, environment="play") for i, message in enumerate(messages)}


def saying(session, *, reply="", call=None, turn=0):
    message = {"role": "assistant", "content": reply}
    if call is not None:
        name, arguments = call
        message["tool_calls"] = [{"id": "call00000", "function": {"name": name, "arguments": arguments}}]
    return Episode(prompt=Prompt(messages="x"), messages=(message,), session=session, turn=turn)


@pytest.mark.slow
def test_sessions_are_opened_played_and_closed_in_the_process(file):
    async def story(process):
        environment: EnvironmentClient = process
        first, second, no = await environment.open(asked("a", "b", "no"))
        assert [tool["function"]["name"] for tool in first.tools] == ["add", "ask"]
        assert first == second
        assert no.error.endswith(" in open: OSError: nothing left")
        assert no.fault.kind == "OSError"
        calls = [saying("0", call=("add", {"amount": 2})), saying("1", call=("ask", {"question": "why"}))]
        answers = await environment.evaluate([*calls, saying("0")])
        assert [v.done for v in answers] == [False, False, True]
        assert [v.messages[0]["content"] for v in answers[:2]] == ["2", "why!"]
        assert await environment.evaluate([saying("0"), saying("1")]) == [
            Judgement(reward=2.0),
            Judgement(reward=0.0),
        ]
        await environment.close(["0", "1", "no such session"])
        await environment.close(["0"])
        assert await environment.evaluate([saying("9")]) == [
            Judgement(error="its session ended with the process that held it", lost=True)
        ]
        return process.starts

    starts, log = tell(file, story)
    assert (starts, opened_and_closed(log)) == (1, (2, 2))


@pytest.mark.slow
@pytest.mark.parametrize("last_words", ["nothing", "handed over", "busy"])
def test_open_sessions_are_closed_at_the_end(file, last_words):
    async def story(process):
        await process.open(asked("a", "b", "c"))
        if last_words == "handed over":
            await process.close(["0", "2"])
        if last_words == "busy":
            running = asyncio.create_task(process.evaluate([saying("0", call=("add", {"amount": 13}))]))
            await asyncio.sleep(0)
            running.cancel()
            await process.close(["0"])

    assert opened_and_closed(tell(file, story)[1]) == (3, 3)


@pytest.mark.slow
@pytest.mark.parametrize("death", ["die", "hang", "killed from outside"])
def test_sessions_die_with_their_process_and_their_rollouts_are_lost(file, death):
    async def story(process):
        await process.open(asked("a", "b", "c"))
        if death == "killed from outside":
            os.kill(process._child.pid, signal.SIGKILL)
        first, second = await process.evaluate([saying("0", reply=death), saying("1")])
        assert first.lost
        assert second.lost
        await process.close(["0", "1"])
        fresh = asked("d")["0"]
        await process.open({"7": fresh})
        kept, (third, seventh) = (
            await process.evaluate([saying("7")]),
            await process.evaluate([saying("2"), saying("7")]),
        )
        assert third.lost
        assert kept == [seventh] == [Judgement(reward=0.0)]
        await process.close(["2", "7"])
        return process.starts

    starts, log = tell(file, story, deadline=3.0 if death == "hang" else 30.0)
    assert starts == 2
    assert opened_and_closed(log) == (4, 1), "those of the dead process are gone, the others are closed"


@pytest.mark.slow
def test_an_episode_that_is_alone_with_its_death_is_to_blame(file):
    async def story(process):
        await process.open(asked("a"))
        (feedback,) = await process.evaluate([saying("0", reply="die")])
        assert not feedback.lost
        assert "died (killed by SIGKILL)" in feedback.error

    tell(file, story)


@pytest.mark.slow
def test_a_session_that_kills_while_it_is_opened_is_found(file):
    async def story(process):
        first, dead, third = await process.open(asked("a", "die", "c"))
        assert [first.error, third.error] == [None, None]
        assert "died (killed by SIGKILL)" in dead.error
        assert await process.evaluate([saying("2")]) == [Judgement(reward=0.0)]

    tell(file, story)


@pytest.mark.slow
def test_an_evaluation_that_raises_costs_no_session(file):
    async def story(process):
        await process.open(asked("a", "b"))
        feedback = await process.evaluate([saying("0", reply="raise"), saying("1")])
        assert [v.fault and v.fault.kind for v in feedback] == ["KeyError", None]
        await process.close(["0", "1"])
        return process.starts

    starts, log = tell(file, story)
    assert (starts, opened_and_closed(log)) == (1, (2, 2))


def played(process, engine, n=3):
    return play(
        [RolloutRequest(prompt=Prompt(messages="a", environment="play"), seed=i) for i in range(n)],
        engine=engine,
        environments={"play": process},
        renderer=FakeRenderer(),
        sampling=SamplingParams(temperature=1.0, max_tokens=99),
    )


@pytest.mark.slow
def test_a_rollout_whose_session_died_is_played_again_in_a_new_process(file):
    async def story(process):
        engine = FakeEngine(reply=lambda *_: "die", latency=lambda rng: 0.0, update_seconds=0.0)
        await engine.update_weights(Weights(version=0, location="", nbytes=0, tensors=()))
        lost = await played(process, engine)
        assert [(r.reward, r.lost) for r in lost] == [(None, True)] * 3
        engine.reply = lambda *_: "fine"
        assert [r.reward for r in await played(process, engine)] == [0.0] * 3

    _, log = tell(file, story)
    assert opened_and_closed(log) == (6, 3)


@pytest.mark.slow
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_closes_open_sessions(file, stop):
    """The program plays while its engine never answers."""
    program = f"""
        import asyncio, signal, sys
        sys.path.insert(0, {os.path.dirname(__file__)!r})
        from test_sessions import *

        class Waiting(FakeEngine):
            async def generate(self, requests):
                print("ready", flush=True)
                await asyncio.Future()

        async def main():
            task = asyncio.current_task()
            asyncio.get_running_loop().add_signal_handler({int(stop)}, task.cancel)
            options = {{"log": {str(file.with_name("log"))!r}}}
            spec = EnvironmentSpec(task="play", env={f"{file}:Playground"!r}, options=options)
            process = EnvironmentProcess(spec, plugins=PluginSelection(allow=()))
            try:
                await played(process, Waiting())
            finally:
                await process.aclose()

        try:
            asyncio.run(main())
        except asyncio.CancelledError:
            pass
    """
    run = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, start_new_session=True
    )
    assert run.stdout.readline() == b"ready\n"
    os.killpg(run.pid, stop)
    assert run.wait(60) == 0
    run.stdout.close()
    assert opened_and_closed(file.with_name("log").read_text().splitlines()) == (3, 3)


# ---------------------------------------------------------------------------------- async judges


@pytest.mark.slow
@pytest.mark.parametrize(("concurrency", "most", "size"), [(0, 1, 8), (3, 3, 1), (99, 8, 1)])
def test_async_evaluate_runs_concurrently_up_to_a_bound(file, concurrency, most, size):
    async def story(process):
        episodes = [saying(None) for _ in range(8)]
        (*_, last) = await process.evaluate(episodes)
        assert last.metrics == {"most": most, "size": size}

    tell(file, story, name="Judged", concurrency=concurrency)


@pytest.mark.slow
def test_only_the_failing_one_of_concurrent_calls_is_unscored(file):
    async def story(process):
        feedback = await process.evaluate([saying(None), saying(None, reply="raise"), saying(None)])
        assert [v.fault and v.fault.kind for v in feedback] == [None, "KeyError", None]

    tell(file, story, name="Judged", concurrency=2)


# ---------------------------------------------------------------------------------- in this process


def test_tools_run_once_although_the_batch_is_tried_again():
    ran = []

    class Raising(Environment):
        max_turns = 2

        def __init__(self):
            def tool() -> str:
                """Leaves a trace."""
                ran.append(1)
                return "ok"

            self.tools = [tool]

        def prompts(self, split):
            return [Prompt(messages="x")]

        def evaluate(self, episodes):
            raise KeyError("gold")

    host = EnvironmentHost(Raising())
    calling, judged = saying(None, call=("tool", {})), saying(None)
    with pytest.raises(KeyError):
        host.call("evaluate", [calling, judged])
    assert ran == []
    (answer,) = host.call("evaluate", [calling])
    assert (answer.messages[0]["content"], ran) == ("ok", [1])


def undocumented(x: int) -> int:
    return x


class Exits:
    def leave(self) -> str:
        """Raises something other than an Exception."""
        sys.exit(3)

    async def fail(self) -> str:
        """Fails after a while."""
        await asyncio.sleep(0)
        raise ValueError("later")


def environment(**fields):
    class Made(Environment):
        def prompts(self, split):
            return [Prompt(messages="x")]

        def evaluate(self, episodes):
            return [1.0] * len(episodes)

    for name, value in fields.items():
        setattr(Made, name, value)
    return Made()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"tools": [undocumented], "max_turns": 2},
            "tool 'undocumented' cannot be shown to a model: .*no docstring",
        ),
        (
            {"tools": [Exits().leave]},
            r"Made has tools, but max_turns is 1: a model that calls one needs another turn",
        ),
        ({"tools": [Exits().leave] * 2, "max_turns": 2}, "two tools are called 'leave'"),
    ],
)
def test_tools_that_cannot_be_used_are_refused_at_start(fields, message):
    with pytest.raises(PluginError, match=message):
        EnvironmentHost(environment(**fields))


def test_a_session_whose_methods_cannot_be_tools_is_closed_again():
    class Odd:
        def move(self, where):
            """No type, no description."""

    closed = []
    made = environment(
        open=lambda self, prompt: Odd(), close=lambda self, session: closed.append(session), max_turns=2
    )
    with pytest.raises(PluginError, match="tool 'move' cannot be shown to a model"):
        EnvironmentHost(made).call("open", [("0", Prompt(messages="x"))])
    assert len(closed) == 1


def test_errors_of_tools_are_reported_to_the_model():
    host = EnvironmentHost(environment(open=lambda self, prompt: Exits(), max_turns=2))
    host.call("open", [("0", Prompt(messages="x"))])
    for name, told in (("leave", "error: SystemExit: 3"), ("fail", "error: ValueError: later")):
        (feedback,) = host.call("evaluate", [saying("0", call=(name, {}))])
        assert feedback.messages[0]["content"] == told
    host.end()


def add(arguments):
    return arguments["a"] + arguments.get("b", 0)


async def search(arguments):
    await asyncio.sleep(0)
    raise Unavailable("the search engine does not answer")


NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {}}, "required": ["a"]}
ADD = Tool(name="add-up", description="Adds.", parameters=NUMBERS, call=add)
SEARCH = Tool(name="search", call=search)


def test_a_tool_may_bring_its_schema_and_a_session_such_tools():
    class Game:
        tools = (ADD,)

    host = EnvironmentHost(environment(tools=[SEARCH], open=lambda self, prompt: Game(), max_turns=2))
    (start,) = host.call("open", [("0", Prompt(messages="x"))])
    assert [tool["function"]["name"] for tool in start.tools] == ["search", "add-up"]
    assert start.tools[1]["function"]["parameters"] == NUMBERS
    for arguments, told in (
        ({"a": 1, "b": 2}, "3"),
        ({"b": 2}, "error: add-up: missing a required argument: 'a'"),
        ({"a": "1"}, "error: add-up: argument 'a' is '1', expected an integer"),
    ):
        (feedback,) = host.call("evaluate", [saying("0", call=("add-up", arguments))])
        assert feedback.messages[0]["content"] == told
    host.end()


def test_a_session_whose_attribute_tools_is_something_else_has_no_tools_by_it():
    class Shed:
        tools = ("hammer", "saw")

    host = EnvironmentHost(environment(open=lambda self, prompt: Shed()))
    assert host.call("open", [("0", Prompt(messages="x"))]) == [SessionStart()]
    host.end()


def test_a_tool_that_is_unavailable_leaves_its_episode_unscored_and_the_others_continue():
    host = EnvironmentHost(environment(tools=[ADD, SEARCH], max_turns=2))
    episodes = [saying("0", call=("search", {})), saying("1", call=("add-up", {"a": 1}))]
    lost, answered = host.call("evaluate", episodes)
    assert (lost.done, lost.reward, lost.error) == (True, None, "the search engine does not answer")
    assert [message["content"] for message in answered.messages] == ["1"]
    host.end()


@pytest.mark.long
def test_a_schema_needs_no_torch():
    program = """
        import sys
        from grpo_core.environments.tools import Toolbox

        def price(item: str, tags: list[str], count: int = 1) -> float:
            '''What it costs.

            Args:
                item: its name
                tags: of it
                count: how many
            '''

        print(Toolbox([price], "test").schemas[0]["function"]["parameters"]["properties"]["count"]["type"])
        print("torch" in sys.modules)
    """
    told = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True
    ).stdout
    assert told == "integer\nFalse\n"
