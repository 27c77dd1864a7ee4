"""Rollouts that verifiers plays: with its tools, environments and users, and with the model of the run.

Verifiers is not among the packages that the project is developed with.  These tests need it in another
virtual environment, whose Python GRPO_VERIFIERS_PYTHON names.
"""

import asyncio
import contextlib
import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from grpo_core.config import EnvironmentConfig
from grpo_core.contracts.errors import EngineError
from grpo_core.contracts.playing import Play, PlayerSetup
from grpo_core.contracts.records import Limits, Prompt, Weights
from grpo_core.environments.process import EnvironmentProcess, EnvironmentSpec
from grpo_core.loop.rollout import RolloutRequest, SamplingParams, play
from grpo_core.testing import FakeEngine, FakeRenderer
from grpo_plugin_agents.server import AgentServer

TASKSETS = str(Path(__file__).parent.parent / "plugins" / "grpo-plugin-verifiers" / "tests" / "tasksets")
PYTHON = os.environ.get("GRPO_VERIFIERS_PYTHON", "")
PATH = os.pathsep.join(filter(None, [TASKSETS, os.environ.get("PYTHONPATH")]))

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        not PYTHON,
        reason="needs GRPO_VERIFIERS_PYTHON: a virtual environment with verifiers and without torch",
    ),
]


def staged(taskset, story, *, env_vars=None, **options):
    """Run a story with the process of a taskset, and the address at which its model is served."""

    async def main():
        config = EnvironmentConfig(python=PYTHON, env_vars={"PYTHONPATH": PATH, **(env_vars or {})})
        env = f"verifiers:{taskset}"
        process = EnvironmentProcess(EnvironmentSpec(task="task", env=env, options=options, config=config))
        process.player = server = AgentServer(PlayerSetup())
        await server.start()
        try:
            return await story(process, server)
        finally:
            await process.aclose()
            await server.aclose()

    return asyncio.run(main())


async def engine_that_says(reply, **options):
    """An engine whose reply depends on the conversation so far, in which a token is a character."""

    def says(request, rng):
        return reply("".join(map(chr, request.prompt_ids)))

    engine = FakeEngine(reply=says, **{"latency": lambda rng: 0.0, **options})
    await engine.update_weights(Weights(version=0, location="", nbytes=0, tensors=()))
    return engine


async def played(process, prompts, reply, *, max_turns=None, deadline=120.0, **options):
    """Play rollouts at once, one for each prompt."""
    return await play(
        [RolloutRequest(prompt=prompt, seed=number) for number, prompt in enumerate(prompts)],
        engine=await engine_that_says(reply, **options),
        environments={"task": process},
        renderer=FakeRenderer(),
        sampling=SamplingParams(temperature=1.0, max_tokens=100, max_turns=max_turns),
        deadline=deadline,
    )


async def everything(process):
    """The prompts of both splits, in the order of the tasks."""
    prompts = [*await process.prompts("train"), *await process.prompts("validation")]
    return sorted(prompts, key=lambda prompt: int(prompt.id))


def trained(rollout):
    """The texts that were sampled, as far as they are trained."""
    segments = [segment.tokens for segment in rollout.segments]
    return ["".join(map(chr, tokens.ids[tokens.sampled].tolist())) for tokens in segments]


# ---------------------------------------------------------------------------------- tools

CALL = '<tool_call>{"name": "prices_price", "arguments": {"item": "%s"}}</tool_call>'


def looks_up(conversation):
    """Ask for the price of what the question names, and say it."""
    return CALL % conversation.rstrip("?") if conversation.endswith("?") else conversation[-2:]


REWARDS_OF_VERIFIERS = """
import asyncio, json, sys
from types import SimpleNamespace
from verifiers.v1.utils.loaders import load_taskset, taskset_config_type

tasks = list(load_taskset(taskset_config_type("shop_of_verifiers")(id="shop_of_verifiers")))
for task, (said, calls) in zip(tasks, json.loads(sys.argv[1])):
    trace = SimpleNamespace(last_reply=said, tool_messages=calls, info={"asked": task.data.prompt})
    given = {"exact": [trace], "looked": [trace, None]}
    print(sum(asyncio.run(each(*given[each.__name__])) * each._vf_weight for each in task.hooks("reward")))
"""


def test_a_taskset_with_tools_setup_and_finalize_is_played_and_its_turns_are_trained():
    def reply(conversation):
        if conversation == "jam?":
            return "34"
        if "ink?" in conversation:
            return "raise" if conversation != "ink?" else CALL % "ink"
        if "oil?" in conversation and conversation != "oil?":
            return "99"
        return looks_up(conversation)

    async def story(process, server):
        prompts = await everything(process)
        rollouts = await played(process, prompts, reply)
        return prompts, rollouts, await played(process, prompts[:1], reply, max_turns=1)

    prompts, (tea, jam, ink, oil), (stopped,) = staged("shop_of_verifiers", story)
    assert [prompt.messages[0]["content"] for prompt in prompts] == ["tea?", "jam?", "ink?", "oil?"]
    assert (tea.reward, tea.turns) == (1.5, 2)
    assert tea.metrics["exact"] == tea.metrics["looked"] == 1.0
    assert tea.metrics["turns"] == 2.0
    assert [message["role"] for message in tea.messages] == ["user", "assistant", "tool", "assistant"]
    assert trained(tea) == [CALL % "tea" + "12"], "what the model said is trained, and not what the tool said"
    assert (jam.reward, trained(jam)) == (1.0, ["34"])
    assert (oil.reward, oil.turns) == (0.5, 2)
    told = subprocess.run(
        [PYTHON, "-c", REWARDS_OF_VERIFIERS, json.dumps([["12", [1]], ["34", []]])],
        capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": PATH},
    )  # fmt: skip
    assert [tea.reward, jam.reward] == [float(line) for line in told.stdout.split()]
    assert ink.reward is None, "a reward that raises is no reward of 0"
    assert "the till is away" in ink.error
    assert not ink.lost
    assert (stopped.reward, stopped.turns, stopped.finish_reason) == (0.0, 1, "turns"), "scored as it is"
    assert stopped.metrics["turns"] == 1.0


def test_thinking_reaches_verifiers_apart_from_the_reply():
    def reply(conversation):
        return {"0": "<think>\nis it w1?\n</think>\n\nw0", "1": "<think>w1", "2": "w2"}[conversation[-2]]

    async def story(process, server):
        return await played(process, (await everything(process))[:3], reply)

    parted, cut, plain = staged("words_of_verifiers", story, mode="rollout")
    assert (parted.reward, parted.metrics["thought"], parted.metrics["length"]) == (3.0, 9.0, 2.0)
    assert trained(parted) == ["<think>\nis it w1?\n</think>\n\nw0"], "thinking is trained"
    assert (cut.reward, cut.metrics["thought"], cut.metrics["length"]) == (1.0, 2.0, 0.0)
    assert (plain.reward, plain.metrics["thought"]) == (3.0, 0.0)


# ---------------------------------------------------------------------------------- environments of its own


def halves(conversation):
    """Guess a digit by halving what is left."""
    if conversation.endswith(":"):
        return "4"
    last, hint = conversation[-2:]
    return str(int(last) + {"4": 2}.get(last, 1) * (1 if hint == "+" else -1))


@pytest.mark.parametrize("thought", ["", "<think>4, or 2?</think>"])
def test_an_environment_that_answers_plays_many_rollouts_at_once(thought):
    def says(conversation):
        return thought + halves(conversation)

    async def story(process, server):
        prompts = await everything(process)
        return prompts, await played(process, prompts, says), len(server._sessions)

    prompts, rollouts, left = staged("guess_of_verifiers", story)
    assert len(rollouts) == 14
    assert left == 0
    assert {rollout.reward for rollout in rollouts} == {1.0}
    for rollout, prompt in zip(rollouts, prompts, strict=True):
        assert rollout.messages[0] == prompt.messages[0], "each has the conversation of its own task"
        assert rollout.metrics["guesses"] == rollout.turns
    guesses = {1: "421", 2: "42", 3: "423", 4: "4", 5: "465", 6: "46", 7: "467"}
    expected = [["".join(thought + guess for guess in guesses[n % 7 + 1])] for n in range(14)]
    assert [trained(rollout) for rollout in rollouts] == expected, "its thinking is trained, in one segment"


def test_what_cannot_be_played_to_its_end_is_unscored_or_lost_and_the_next_rollout_plays():
    def broken(request):
        return EngineError("engine fake: out of order") if "".join(map(chr, request.prompt_ids)) else None

    async def story(process, server):
        (prompt, *_) = await everything(process)
        (raised,) = await played(process, [prompt], lambda conversation: "raise")
        (lost,) = await played(process, [prompt], halves, fault=broken)
        (late,) = await played(process, [prompt], halves, latency=lambda rng: 1000.0, deadline=2.0)
        return raised, lost, late, await played(process, [prompt], halves)

    raised, lost, late, (fine,) = staged("guess_of_verifiers", story)
    assert (raised.reward, raised.lost) == (None, False)
    assert "the dice are lost" in raised.error
    assert (lost.reward, lost.lost) == (None, True), "a broken engine is no fault of the model"
    assert "out of order" in lost.error
    assert (late.reward, late.lost) == (None, True)
    assert fine.reward == 1.0


async def started(directory):
    """Wait until a server of the slow taskset is starting, which says so by a file."""
    async with asyncio.timeout(60):
        while not list(directory.iterdir()):  # noqa: ASYNC110 - another process makes the file
            await asyncio.sleep(0.1)


def left_of(home):
    """The processes that run with this home, and what verifiers keeps there for their runtimes."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"HOME={home}".encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found, list((home / ".cache/verifiers/runtimes/subprocess").glob("*"))


def slow(story, home, config):
    starts = home / "starts"
    starts.mkdir()
    env_vars = {"HOME": str(home), "SLOW_STARTS": str(starts)}

    async def told(process, server):
        return await story(process, await everything(process), starts)

    return staged("slow_of_verifiers", told, env_vars=env_vars, config=config)


@pytest.mark.slow
@pytest.mark.parametrize("stubborn", [False, True])
@pytest.mark.parametrize("whose", ["taskset", "task"])
def test_a_server_that_is_still_starting_ends_with_the_environment(whose, stubborn, tmp_path):
    tools = {"tools": {"stubborn": stubborn}}

    async def story(process, prompts, starts):
        playing = asyncio.create_task(played(process, prompts[:2], lambda conversation: "?"))
        await started(starts)
        running, kept = left_of(tmp_path)
        assert len(running) >= 2, "the environment, and its server"
        assert kept
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)
        await process.aclose()

    slow(story, tmp_path, tools if whose == "taskset" else {"task": tools})
    assert left_of(tmp_path) == ([], [])


@pytest.mark.slow
@pytest.mark.parametrize("stubborn", [False, True])
def test_a_server_that_is_still_starting_ends_with_its_rollout(stubborn, tmp_path):
    async def story(process, prompts, starts):
        playing = asyncio.create_task(played(process, prompts[:1], lambda conversation: "?"))
        await started(starts)
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)
        await asyncio.sleep(7)  # by then, a call that goes on after its cancellation has cost the process
        await process.prompts("train")
        running, kept = left_of(tmp_path)
        assert (len(running), kept, process.starts) == (1, [], 1), "the environment alone, the same one"

    slow(story, tmp_path, {"task": {"tools": {"stubborn": stubborn}}})


def test_a_simulated_user_is_a_separate_model_and_is_not_trained():
    """The environment is one of verifiers; the user is served at an address, as anybody's model would be."""

    def user(conversation):
        return "###DONE###" if not conversation.endswith("today?") else re.findall(r"w\d+", conversation)[0]

    async def story():
        server = AgentServer(PlayerSetup())
        await server.start()
        limits = Limits(max_tokens=100, max_turns=100, context=100_000)
        given = Play(
            prompt=Prompt(messages="?"),
            seed=1,
            limits=limits,
            engine=await engine_that_says(user),
            renderer=FakeRenderer(),
            run=None,
        )
        user_session = server.open(given)
        at = {"type": "eval", "base_url": user_session.client.base_url, "api_key_var": "USER_API_KEY"}
        spec = EnvironmentSpec(
            task="task",
            env="verifiers:words_of_verifiers",
            options={"environment": {"id": "user-sim", "user": {"model": "user", "client": at}}},
            config=EnvironmentConfig(
                python=PYTHON, env_vars={"PYTHONPATH": PATH, "USER_API_KEY": user_session.client.api_key}
            ),
        )
        process = EnvironmentProcess(spec)
        process.player = server
        try:
            prompts = await everything(process)
            rollouts = await played(process, prompts[:3], lambda conversation: conversation[-2:])
            return rollouts, len((await user_session.aclose()).turn_tokens)
        finally:
            await process.aclose()
            await server.aclose()

    rollouts, turns_of_user = asyncio.run(story())
    assert [rollout.reward for rollout in rollouts] == [3.0] * 3
    assert [trained(rollout) for rollout in rollouts] == [["w0"], ["w1"], ["w2"]]
    assert {rollout.metrics["user_turns"] for rollout in rollouts} == {2.0}
    assert turns_of_user == 6
