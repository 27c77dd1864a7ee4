"""Tasksets of verifiers as environments: rewards, and refused tasksets.

Verifiers is not among the packages that the project is developed with.  Most tests need it in the Python that
runs them; one needs it in another virtual environment, whose Python GRPO_VERIFIERS_PYTHON names.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import grpo_core as grpo
from grpo_core.testing import HostedEnvironment, finished, make_offer

HERE = Path(__file__).parent
OTHER = os.environ.get("GRPO_VERIFIERS_PYTHON", "")
INSTALLED = importlib.util.find_spec("verifiers") is not None
with_verifiers = pytest.mark.skipif(not INSTALLED, reason="needs verifiers: pip install verifiers")
PATH = os.pathsep.join(filter(None, [str(HERE / "tasksets"), os.environ.get("PYTHONPATH")]))


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """Let verifiers find the tasksets of these tests, as if they were installed."""
    monkeypatch.syspath_prepend(HERE / "tasksets")


def run(taskset, story, **options):
    """Run a story with an environment, as the core calls it."""
    offer = make_offer("environment", f"verifiers:{taskset}", plugins=["verifiers"], **options)
    hosted = HostedEnvironment(offer)
    try:
        return finished(story(hosted))
    finally:
        hosted.host.end()


def episode(prompt, reply):
    return grpo.Episode(prompt=prompt, messages=[*prompt.messages, {"role": "assistant", "content": reply}])


SCORED_BY_VERIFIERS = '''
import asyncio, sys
import verifiers.v1 as vf
from verifiers.v1.utils.loaders import load_taskset, taskset_config_type

class Said:
    """Answers what verifiers' own rewards ask of a trace."""
    def __init__(self, reply):
        self.last_reply = reply

task = next(iter(load_taskset(taskset_config_type("words_of_verifiers")(id="words_of_verifiers"))))
for reply in sys.argv[1:]:
    parts = [asyncio.run(each(Said(reply))) * each._vf_weight for each in task.hooks("reward")]
    print(sum(parts))
'''


@with_verifiers
@pytest.mark.long
def test_rewards_and_metrics_are_those_of_the_taskset():
    said = ["w0", "other", "a long reply"]

    async def story(process):
        train, held_out = await process.prompts("train"), await process.prompts("validation")
        prompt = next(p for p in [*train, *held_out] if p.answer == "w0")
        replies = [*said, "<think>is it w1?</think>w0", "<think>w0", "raise"]
        return train, held_out, prompt, await process.evaluate([episode(prompt, each) for each in replies])

    train, held_out, prompt, feedback = run("words_of_verifiers", story)
    assert (len(train), len(held_out)) == (11, 1)
    assert prompt.messages == (
        {"role": "system", "content": "Echo."},
        {"role": "user", "content": "Say w0."},
    )
    *scored, thought, cut, failed = feedback
    expected = subprocess.run(
        [sys.executable, "-c", SCORED_BY_VERIFIERS, *said],
        capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": PATH},
    )  # fmt: skip
    assert [each.reward for each in scored] == [float(line) for line in expected.stdout.split()] == [3, 1, 0]
    assert scored[0].metrics == {"same": 1.0, "short": 1.0, "length": 2.0, "thought": 0.0}
    assert (thought.reward, thought.metrics["thought"]) == (3.0, 9.0), "thinking is not a part of the reply"
    assert (cut.reward, cut.metrics["thought"]) == (1.0, 2.0), "it was cut off before it said anything"
    assert failed.reward is None
    assert "the judge is away" in failed.error


@with_verifiers
@pytest.mark.long
def test_a_taskset_that_another_process_loads_in_another_order_is_unscored():
    async def prompts(process):
        return await process.prompts("train")

    made = run("words_of_verifiers", prompts)
    right = [episode(prompt, prompt.answer) for prompt in made]

    async def judged(process):
        return await process.evaluate(right)

    assert {each.reward for each in run("words_of_verifiers", judged)} == {3.0}
    for config in ({"first": 1}, {"number": 2, "first": 1}):
        feedback = run("words_of_verifiers", judged, config=config)
        assert {each.reward for each in feedback} == {None}
        assert all("words_of_verifiers has another task in place" in each.error for each in feedback)


BASH = {"environment": {"agent": {"harness": {"id": "bash"}}}}
DOCKER = {"environment": {"agent": {"runtime": {"type": "docker"}}}}
OTHERS = {"environment": {"agent": {"model": "somebody/else"}}}
RENDERS = {"environment": {"agent": {"client": {"type": "train"}}}}
TOOLS_IN_DOCKER = {"config": {"tools": {"runtime": {"type": "docker"}}}}


@with_verifiers
@pytest.mark.long
@pytest.mark.parametrize(
    ("taskset", "options", "why"),
    [
        ("boxed_of_verifiers", {"config": {"image": "debian"}}, "its tasks need a container"),
        ("shop_of_verifiers", TOOLS_IN_DOCKER, "its tools Prices run in docker"),
        (
            "shop_of_verifiers",
            BASH,
            "its agent 'agent' is played by 'bash', which runs what the model writes",
        ),
        ("shop_of_verifiers", DOCKER, "its agent 'agent' runs in docker"),
        ("shop_of_verifiers", OTHERS, "names the model 'somebody/else' and no client"),
        ("shop_of_verifiers", RENDERS, "has a client that does not use OpenAI's API"),
        ("shop_of_verifiers", {"environment": {"agnet": {}}}, "agnet"),
        ("words_of_verifiers", {"environment": {"id": "user-sim"}}, "2 of its agents (assistant, user)"),
        ("boxed_of_verifiers", {"mode": "score"}, "the rewards file look into its runtime"),
        ("shop_of_verifiers", {"mode": "score"}, "it has tools, which needs a rollout"),
        ("words_of_verifiers", {"mode": "scores"}, "expected 'auto' or 'score' or 'rollout'"),
        ("missing_of_verifiers", {}, "not found"),
        ("words_of_verifiers", {"config": {"number": 1}}, "has 1 tasks, expected at least 2"),
        ("words_of_verifiers", {"config": {"numbr": 1}}, "numbr"),
    ],
)
def test_tasksets_that_cannot_be_trained_on_are_refused_at_the_start(taskset, options, why):
    async def story(process):
        await process.start()

    with pytest.raises(grpo.GrpoError) as raised:
        run(taskset, story, **options)
    assert why in str(raised.value)
    assert "Traceback" not in str(raised.value)


@pytest.mark.long
@pytest.mark.skipif(
    not OTHER, reason="needs GRPO_VERIFIERS_PYTHON: a virtual environment with verifiers and without torch"
)
def test_tasksets_run_in_a_separate_virtual_environment(tmp_path):
    command = [sys.executable, "-m", "grpo_core", "check", "verifiers:words_of_verifiers"]
    told = subprocess.run(
        [*command, "--set", f"environment.python={OTHER}", "--set", "solution=answer"],
        capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": PATH},
    )  # fmt: skip
    assert told.returncode == 0, told.stdout + told.stderr
    assert "a solution gets full marks: 11 of 11" in told.stdout


@pytest.mark.skipif(INSTALLED, reason="verifiers is installed")
def test_without_verifiers_the_message_says_what_to_install():
    with pytest.raises(grpo.PluginError, match=r"pip install 'verifiers>=0.4,<0.5'"):
        make_offer("environment", "verifiers:words", plugins=["verifiers"])
