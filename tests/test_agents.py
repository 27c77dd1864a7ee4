"""Agents in the processes of a run: real clients train, and nothing that dies loses or doubles a rollout."""

from __future__ import annotations

import asyncio
import json
import random
import re
import subprocess
import sys
import tempfile
import time
import tracemalloc
import urllib.request
from pathlib import Path

import pytest
from documents import ROOT
from forks import grpo
from killing import GRPO, Run

from grpo_core import cli
from grpo_core.contracts.incidents import reported_to
from grpo_core.contracts.playing import PlayerSetup
from grpo_core.contracts.protocols import Environment
from grpo_core.contracts.records import AgentClient, Prompt, Weights
from grpo_core.environments.process import EnvironmentProcess, EnvironmentSpec
from grpo_core.loop.rollout import RolloutRequest, SamplingParams, cause, play
from grpo_core.testing import FakeEngine, FakeRenderer
from grpo_plugin_agents.program import AgentProgram
from grpo_plugin_agents.server import AgentServer
from grpo_plugin_devkit.environments import check_environment

HEAD = """
import asyncio, json, os, time, urllib.request
import grpo_core as grpo

def ask(client, *said):
    messages = [{"role": "user", "content": text} for text in said]
    request = urllib.request.Request(
        client.base_url + "/chat/completions", json.dumps({"messages": messages}).encode(),
        {"Authorization": "Bearer " + client.api_key},
    )
    return json.loads(urllib.request.urlopen(request).read())["choices"][0]["message"]["content"]

def prompts(split):
    return [grpo.Prompt(messages=f"{i}", answer="a") for i in range(8)]
"""


def played(tmp_path, agent, n=1, *, spec="./agent.py", options=None, **given):
    """Play rollouts of an agent in its process; returns them with the incidents."""
    (tmp_path / "agent.py").write_text(HEAD + agent)
    incidents = []

    async def story():
        env = spec.replace("./", f"{tmp_path}/")
        process = EnvironmentProcess(EnvironmentSpec(task="task", env=env, options=options or {}))
        with reported_to(incidents.append):
            return await played_in(process, map(str, range(n)), **given)

    return asyncio.run(story()), incidents


async def played_in(environment, groups, *, engine=None, renderer=None, sampling=None, deadline=20.0):
    """Play a rollout in each of the groups in an environment, which is started and closed here."""
    engine = engine or FakeEngine(reply=lambda request, rng: "ab", latency=lambda rng: 0.0)
    server = environment.player = AgentServer(PlayerSetup())
    await server.start()
    try:
        await environment.start()
        await engine.update_weights(Weights(version=0, location="", nbytes=0, tensors=()))
        requests = [
            RolloutRequest(
                prompt=Prompt(messages=group, id=group, environment="task", answer="ab"), seed=i, group=group
            )
            for i, group in enumerate(groups)
        ]
        rollouts = await play(
            requests,
            engine=engine,
            environments={"task": environment},
            renderer=renderer or FakeRenderer(),
            sampling=sampling or SamplingParams(temperature=1.0, max_tokens=50),
            deadline=deadline,
        )
        assert not server._sessions
        return rollouts
    finally:
        await environment.aclose()
        await server.aclose()


pytestmark = pytest.mark.long


def test_an_agent_plays_many_rollouts_at_once_and_says_the_reward(tmp_path):
    agent = """
async def run(prompt, client):
    first = await asyncio.to_thread(ask, client, prompt.messages[0]["content"])
    await asyncio.to_thread(ask, client, "and " + first)
    return grpo.Feedback(reward=0.5, metrics={"asked": 2}, done=False)
"""
    rollouts, incidents = played(tmp_path, agent, 30)
    assert not incidents
    assert {(r.reward, r.turns, len(r.segments), r.metrics["asked"]) for r in rollouts} == {(0.5, 2, 2, 2.0)}
    assert [r.messages[0]["content"] for r in rollouts] == ["and ab"] * 30


def test_evaluate_judges_the_conversation_of_an_agent_that_returns_nothing(tmp_path):
    agent = """
async def run(prompt, client):
    await asyncio.to_thread(ask, client, "hello")

def evaluate(episodes):
    assert all(e.completion_tokens == 2 and e.turn == 0 for e in episodes)
    return [float(e.reply == e.prompt.answer) for e in episodes]
"""
    rollouts, _ = played(tmp_path, agent, 3)
    assert [r.reward for r in rollouts] == [1.0] * 3


class Reading(FakeRenderer):
    """Reads calls of tools that nobody has offered, as response formats do."""

    def message(self, text, **_):
        return super().message(text, tools=[{}])


@pytest.mark.slow
@pytest.mark.parametrize("page", ["examples/agent.py", "docs/first-agent.md"])
def test_the_examples_take_a_reply_that_is_a_call_for_a_wrong_answer(page, tmp_path):
    pytest.importorskip("openai")
    text = (ROOT / page).read_text()
    if page.endswith(".md"):
        (text,) = re.findall(r'```python title="my_agent.py"\n(.*?)```', text, re.S)
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    (rollout,), _ = played(
        tmp_path,
        text,
        engine=FakeEngine(reply=lambda request, rng: call, latency=lambda rng: 0.0),
        renderer=Reading(),
        sampling=SamplingParams(temperature=1.0, max_tokens=100),
    )
    assert (rollout.reward, rollout.error) == (0.0, None)
    assert rollout.messages[-1]["tool_calls"]


def test_an_agent_that_fails_is_at_fault_and_one_that_a_limit_stopped_is_not(tmp_path):
    agent = """
async def run(prompt, client):
    if prompt.id == "1":
        return 1.0
    for i in range(9):
        await asyncio.to_thread(ask, client, str(i))
        if prompt.id == "0":
            raise ValueError("no idea")

def evaluate(episodes):
    return [float(e.finish_reason == "turns") for e in episodes]
"""
    limited = SamplingParams(temperature=1.0, max_tokens=50, max_turns=3)
    (failed, silent, stopped), _ = played(tmp_path, agent, 3, sampling=limited)
    assert (failed.reward, failed.lost) == (None, False)
    assert "no idea" in failed.error
    assert "requested no completion" in silent.error
    assert (stopped.reward, stopped.turns, stopped.finish_reason) == (1.0, 3, "turns")


@pytest.mark.slow
def test_an_agent_that_hangs_ends_with_its_deadline_and_its_process_lives_on(tmp_path):
    agent = """
async def run(prompt, client):
    await asyncio.to_thread(ask, client, "hello")
    await asyncio.sleep(1000 if prompt.id == "0" else 0)
    return float(os.getpid())
"""
    (hung, *others), _ = played(tmp_path, agent, 4, deadline=4.0)
    assert (hung.lost, cause(hung)) == (True, "rollouts_late")
    assert len({other.reward for other in others}) == 1


def test_an_agent_that_dies_with_its_process_loses_the_rollouts_that_it_played(tmp_path):
    agent = """
async def run(prompt, client):
    await asyncio.to_thread(ask, client, "hello")
    await asyncio.sleep(0.5)
    os._exit(3)
"""
    rollouts, incidents = played(tmp_path, agent, 3)
    assert {(r.reward, r.lost) for r in rollouts} == {(None, True)}
    assert [incident.kind for incident in incidents].count("died") == 1


def test_an_enginethat_gives_up_is_at_fault_and_not_the_agent(tmp_path):
    from grpo_core.contracts.errors import EngineError

    agent = """
async def run(prompt, client):
    await asyncio.to_thread(ask, client, "hello")
    return 1.0
"""
    engine = FakeEngine(latency=lambda rng: 0.0, fault=lambda request: EngineError("engine fake: no"))
    (rollout,), _ = played(tmp_path, agent, engine=engine)
    assert rollout.lost
    assert "engine fake: no" in rollout.error


def test_a_function_that_is_not_async_is_refused_with_advice(tmp_path):
    from grpo_core.contracts.errors import PluginError

    agent = """
class Agent(grpo.Environment):
    def prompts(self, split):
        return prompts(split)
    def run(self, prompt, client):
        return 1.0
"""
    with pytest.raises(PluginError, match=r"run is not async.*await asyncio.to_thread"):
        played(tmp_path, agent, spec="./agent.py:Agent")


PROGRAM = """
import json, os, sys, urllib.request
assert sys.stdin.read() == json.loads(os.environ["GRPO_PROMPT"])[-1]["content"]
def ask(text):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"messages": [{"role": "user", "content": text}]}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    return json.loads(urllib.request.urlopen(request).read())["choices"][0]["message"]["content"]
said = ask("hello")
"""


@pytest.mark.parametrize(
    ("end", "reward", "error"),
    [
        ("print('thinking'); print(json.dumps({'reward': 0.25, 'metrics': {'n': 1}}))", 0.25, None),
        ("print('done')", None, "ended with the line 'done'"),
        ("sys.exit(7)", None, "exit status 7"),
    ],
)
def test_a_program_is_an_agent(tmp_path, end, reward, error):
    (tmp_path / "program.py").write_text(PROGRAM + end)
    (rollout,), _ = played(tmp_path, "", spec="agent:./program.py")
    assert rollout.reward == reward
    assert rollout.error is None if error is None else error in rollout.error


def test_a_program_may_begin_with_a_byte_order_mark(tmp_path):
    program = tmp_path / "notepad.py"
    program.write_text("print('{\"reward\": 0.5}')", encoding="utf-8-sig")
    client = AgentClient(base_url="http://127.0.0.1:1/v1", api_key="key", model="policy")
    assert asyncio.run(AgentProgram(f"{program}").run(Prompt(messages="?"), client)).reward == 0.5


def test_of_a_program_that_prints_without_end_the_end_is_read(tmp_path):
    program = tmp_path / "talks.py"
    program.write_text("for _ in range(50): print('x' * 1_000_000)\nprint('{\"reward\": 0.5}')")
    client = AgentClient(base_url="http://127.0.0.1:1/v1", api_key="key", model="policy")
    tracemalloc.start()
    try:
        result = asyncio.run(AgentProgram(f"{program}").run(Prompt(messages="?"), client))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert result.reward == 0.5
    assert most < 10_000_000


def test_another_environment_judges_a_program(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    judge = """
class Judge(grpo.Environment):
    success = 1.0
    def prompts(self, split):
        return prompts(split)
    def evaluate(self, episodes):
        return [float(e.reply == e.prompt.answer) for e in episodes]
"""
    options = {"reward": f"{tmp_path}/agent.py:Judge"}
    (rollout,), _ = played(tmp_path, judge, spec="agent:./program.py", options=options)
    assert (rollout.reward, rollout.success) == (1.0, True)


@pytest.mark.slow
def test_a_program_that_hangs_is_killed_with_all_that_it_has_started(tmp_path):
    (tmp_path / "hang.sh").write_text(
        f"echo $$ > {tmp_path}/pid; sleep 1000 & echo $! >> {tmp_path}/pid; wait\n"
    )
    (rollout,), _ = played(tmp_path, "", spec="agent:sh ./hang.sh", deadline=3.0)
    assert rollout.lost
    pids = [int(pid) for pid in (tmp_path / "pid").read_text().split()]
    assert len(pids) == 2
    assert _are_gone(pids)


def _are_gone(pids):
    """Wait a little until whoever is the parent of the killed processes now has noticed."""
    end = time.monotonic() + 5
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < end:
        time.sleep(0.05)
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.parametrize("own_session", [False, True])
def test_what_a_program_leaves_running_costs_no_time_and_is_killed(tmp_path, own_session):
    end = f"""
import subprocess
left = subprocess.Popen(["sleep", "1000"], start_new_session={own_session})
open({str(tmp_path / "pid")!r}, "w").write(str(left.pid))
print(json.dumps({{"reward": 0.5}}), flush=True)
os._exit(0)
"""
    (tmp_path / "program.py").write_text(PROGRAM + end)
    (rollout,), _ = played(tmp_path, "", spec="agent:./program.py", deadline=10.0)
    assert rollout.reward == 0.5, rollout.error
    assert _are_gone([int((tmp_path / "pid").read_text())])


# ---------------------------------------------------------------------------------- check

ASKED = 'said = await asyncio.to_thread(ask, client, prompt.messages[0]["content"])'
PLAYS = "its agent plays a rollout"
CHECKED = {
    "right": (f"{ASKED}; return float(said == prompt.answer)", 0, f"ok      {PLAYS}: 4 of 4"),
    "raises": ('raise KeyError("gold")', 1, f"FAILED  {PLAYS}: prompt '0', .* KeyError: 'gold'"),
    "raises later": (f'{ASKED}; raise KeyError("gold")', 1, f"FAILED  {PLAYS}: .* KeyError: 'gold'"),
    "asks nothing": ("return 1.0", 1, f"FAILED  {PLAYS}: .* its agent requested no completion; the model is"),
    "says a word": (f'{ASKED}; return "yes"', 1, r"FAILED  .* run returned 'yes' \(str\), expected a float"),
    "is unsteady": (f"{ASKED}; return time.time()", 0, "note    the same replies get the same reward: "),
}


@pytest.mark.long
@pytest.mark.parametrize("agent", CHECKED)
def test_check_finds_what_an_agent_does_wrong(agent, tmp_path, capsys):
    body, status, said = CHECKED[agent]
    (tmp_path / "agent.py").write_text(f"{HEAD}\nasync def run(prompt, client):\n    {body}\n")
    command = ["check", f"{tmp_path}/agent.py"]
    assert cli.make_app()(command, exit_on_error=True, result_action="return_value") == status
    assert re.search(said, capsys.readouterr().out)


class Asks(Environment):
    """An agent of this process, as an author tests it."""

    success = 1.0

    def __init__(self, says="right"):
        self.says, self.loops = says, set()

    def prompts(self, split):
        return [Prompt(messages=f"{split} {i}", answer=f"a{i}") for i in range(8)]

    async def open(self, prompt):
        self.loops.add(asyncio.get_running_loop())
        return prompt.answer

    async def run(self, prompt, client):
        self.loops.add(asyncio.get_running_loop())
        assert len(self.loops) == 1, "what a call has made is of use to the next one"
        request = urllib.request.Request(
            f"{client.base_url}/chat/completions",
            json.dumps({"messages": list(prompt.messages)}).encode(),
            {"Authorization": f"Bearer {client.api_key}"},
        )
        reply = json.loads(urllib.request.urlopen(request).read())  # noqa: ASYNC210 - a client that blocks
        match self.says:
            case "right":
                assert client.session == prompt.answer
                return None
            case "hangs":
                await asyncio.sleep(1000)
        raise KeyError(reply["choices"][0]["message"]["content"])

    async def evaluate(self, episodes):
        return [float(episode.reply == episode.prompt.answer) for episode in episodes]


def test_an_agent_is_checked_in_the_process_of_its_test():
    check_environment(Asks)


def test_what_an_agent_does_wrong_in_the_process_of_its_test_is_reported():
    with pytest.raises(AssertionError, match=r"its agent plays a rollout: .* KeyError: 'a0'"):
        check_environment(lambda: Asks("wrong"))


def test_an_agent_that_hangs_in_the_process_of_its_test_is_cancelled(monkeypatch):
    monkeypatch.setattr("grpo_plugin_devkit.agents.SECONDS", 0.5)
    with pytest.raises(AssertionError, match=r"its agent plays a rollout: .*deadline"):
        check_environment(lambda: Asks("hangs"))


# ---------------------------------------------------------------------------------- whole runs

WORDS = """
import asyncio, random
from openai import AsyncOpenAI
import grpo_core as grpo

MODEL = AsyncOpenAI(base_url="http://unused", api_key="unused")
success = 1.0

def prompts(split):
    return [grpo.Prompt(messages=f"t{i}=", answer=str(i % 10)) for i in range(40)]

def solve(prompt):
    return prompt.answer
"""
LOOP = """
async def run(prompt, client):
    model = MODEL.with_options(base_url=client.base_url, api_key=client.api_key)
    messages = list(prompt.messages)
    for _ in range(2):
        reply = await model.chat.completions.create(model=client.model, messages=messages)
        said = reply.choices[0].message
        messages += [said, {"role": "user", "content": "again:"}]
    return float(said.content == prompt.answer)
"""
FRAMEWORK = """
from pydantic_ai import Agent, UnexpectedModelBehavior
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

async def run(prompt, client):
    model = MODEL.with_options(base_url=client.base_url, api_key=client.api_key)
    agent = Agent(OpenAIChatModel(client.model, provider=OpenAIProvider(openai_client=model)))
    try:
        result = await agent.run(prompt.messages[0]["content"])
    except UnexpectedModelBehavior:  # the model says nothing, again and again
        return 0.0
    return float(result.output.strip() == prompt.answer)
"""
CURL = """
said=$(curl -sS "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer $OPENAI_API_KEY" \\
    -d "{\\"model\\": \\"$GRPO_MODEL\\", \\"messages\\": $GRPO_PROMPT}" \\
    | sed 's/.*"content": "\\([^"]*\\)".*/\\1/')
if [ "$said" = 7 ]; then echo '{"reward": 1}'; else echo '{"reward": 0}'; fi
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "turns"),
    [
        ("./loop.py", 2),
        pytest.param("./framework.py", 1, marks=pytest.mark.nightly),
        pytest.param("agent:sh ./curl.sh", 1, marks=pytest.mark.nightly),
    ],
)
def test_clients_that_know_nothing_of_us_are_trained(env, turns, tmp_path):
    (tmp_path / "loop.py").write_text(WORDS + LOOP)
    (tmp_path / "framework.py").write_text(WORDS + FRAMEWORK)
    (tmp_path / "curl.sh").write_text(CURL)
    rows = [{"prompt": f"t{i}=", "answer": str(i % 10)} for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"trainer.steps": 2, "trainer.prompts_per_step": 4, "rollout.group_size": 4,
                "rollout.max_tokens": 4, "validation.every": 0,
                "model.options.warm_start_steps": 5}  # fmt: skip
    if env.startswith("agent"):
        (tmp_path / "config.toml").write_text('[tasks.t]\nenv = "agent:sh ./curl.sh"\ndata = "rows.jsonl"\n')
    task = ["config.toml"] if env.startswith("agent") else ["--env", env]
    chosen = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    done = grpo(tmp_path, "train", *task, *chosen, "--output", "run", timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    grpo(tmp_path, "verify", "run").check_returncode()
    metrics = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    found = [value for each in metrics for name, value in each.items() if name.startswith("turns/")]
    assert found
    assert all(turns <= mean <= turns + 1 for mean in found), "a framework asks again if a reply is empty"


@pytest.mark.nightly
def test_agents_whose_process_is_killed_lose_nothing_and_double_nothing(tmp_path):
    run = AgentRun(tmp_path)
    for _ in range(3):
        steps = run.steps
        run.wait(lambda steps=steps: run.steps > steps)
        run.kill("environment")
    said = run.end(seconds=200)
    assert run.process.returncode == 0, said
    verified = subprocess.run([GRPO, "verify", run.directory], capture_output=True, text=True)
    assert verified.returncode == 0, verified.stdout
    assert " 0 skipped" in verified.stdout


TWICE = """
async def run(prompt, client):
    first = await asyncio.to_thread(ask, client, prompt.messages[0]["content"])
    second = await asyncio.to_thread(ask, client, prompt.messages[0]["content"], first)
    return float(second == prompt.answer)

def solve(prompt):
    return prompt.answer
"""


class AgentRun(Run):
    """A run whose environment is an agent that asks twice."""

    def __init__(self, cwd, steps=12):
        (cwd / "twice.py").write_text(HEAD.replace("range(8)", "range(40)") + TWICE)
        settings = {"trainer.steps": steps, "trainer.prompts_per_step": 4, "trainer.updates_per_step": 1,
                    "rollout.group_size": 4, "rollout.max_tokens": 4, "validation.every": 0,
                    "checkpoint.every": 5, "rollout.max_retries": 20,
                    "model.options.warm_start_steps": 5}  # fmt: skip
        super().__init__(cwd, settings=settings)

    def _start(self, *arguments):
        super()._start(*("./twice.py" if each == "./words.py:Words" else each for each in arguments))


def main(kills: int) -> None:
    """Kill processes of runs at random moments, this often: python tests/test_agents.py KILLS."""
    rng, made = random.Random(0), 0
    killed: dict[str, int] = {}
    while made < kills:
        with tempfile.TemporaryDirectory() as directory:
            run = AgentRun(Path(directory), steps=60)
            while run.running and made < kills:
                steps = (
                    run.steps
                )  # it is started again before the next kill: three deaths at a start end a run
                while run.running and run.steps <= steps:
                    time.sleep(0.02)
                time.sleep(rng.uniform(0.0, 0.5))
                who = rng.choice([*["environment"] * 3, "engine", "trainer", "main", "all"])
                ends = who in ("trainer", "main", "all")
                if ends and not list((run.directory / "checkpoints").glob("step-*")):
                    continue
                if run.running and (who in ("main", "all") or who in run.processes()):
                    run.kill(who)
                    made += 1
                    killed[who] = killed.get(who, 0) + 1
                if ends:
                    run.process.wait()
                    run.resume()
            said = run.end(seconds=600)
            verified = subprocess.run([GRPO, "verify", run.directory], capture_output=True, text=True)
            print(made, "kills:", killed, run.process.returncode, verified.stdout.splitlines()[0], flush=True)
            assert run.process.returncode == 0, said
            assert verified.returncode == 0, verified.stdout


if __name__ == "__main__":
    main(int(sys.argv[1]))
