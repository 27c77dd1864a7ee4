"""The five tasks whose lines docs/new-user.md counts: they run, in each library that is there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import grpo_core as grpo
from grpo_core.app import launch
from grpo_core.config import read_toml
from grpo_core.plugins.host import PluginHost
from grpo_core.testing import HostedEnvironment, finished, make_offer

HERE = Path(__file__).parent / "benchmarks" / "five_tasks"
OURS = HERE / "ours"
REWARDS = {"exact": [1.0, 0.0], "game": [1.0, 0.0], "tool": [1.0, 0.0], "judge": [0.8, 0.2]}
"""Rewards of a right and of a wrong reply, in every library."""
MIXED = {
    "trl": [["capitals", "guess"], [1.0, 0.0, None], [1.0, None]],
    "verifiers": None,
    "skyrl_gym": ["capitals", "guess"],
    "nemo_gym": ["capitals_agent", "guess_agent"],
}
"""Output of ``play_LIBRARY.py`` for the mixed tasks.  Tasksets of verifiers are mixed by a trainer."""


def episodes(prompt, replies):
    return [
        grpo.Episode(prompt=prompt, messages=[*prompt.messages, {"role": "assistant", "content": reply}])
        for reply in replies
    ]


def rewards(environment, prompt, *replies):
    hosted = HostedEnvironment(environment)
    try:
        return [feedback.reward for feedback in finished(hosted.evaluate(episodes(prompt, replies)))]
    finally:
        hosted.host.end()


@pytest.mark.parametrize(
    ("name", "wrong"), [("exact.py:Capitals", "abc"), ("game.py:Guess", "9"), ("tool.py:Shop", "1")]
)
def test_our_environments_pay_for_right_replies_alone(name, wrong):
    environment = make_offer("environment", f"{OURS}/{name}")
    train, held_out = environment.prompts("train"), environment.prompts("validation")
    assert not {str(prompt.messages) for prompt in train} & {str(prompt.messages) for prompt in held_out}
    assert rewards(environment, train[0], train[0].answer, wrong) == [1.0, 0.0]


def test_our_game_continues_after_a_wrong_guess():
    environment = make_offer("environment", f"{OURS}/game.py:Guess")
    prompt = grpo.Prompt(messages="game 0:", answer="6")
    (feedback,) = environment.evaluate(episodes(prompt, ["4"]))
    assert (feedback.done, feedback.messages[0]["content"], feedback.reward) == (False, "+", 0.0)


@pytest.mark.long
def test_our_judge_is_a_configuration(monkeypatch):
    pytest.importorskip("openai", reason="the judge of grpo-plugin-judge asks by openai's package")
    monkeypatch.setenv("OPENAI_API_KEY", "unused")
    monkeypatch.syspath_prepend(str(HERE))
    from judging import judge

    task = launch.configure([read_toml(OURS / "judge.toml")], {})[0].tasks["letters"]
    prompt = grpo.Prompt(messages="Write a letter.")
    with judge() as url:
        environment = make_offer("environment", task.env, **{**task.options, "url": url})
        assert rewards(environment, prompt, "please", "now") == REWARDS["judge"]


def test_our_mixed_tasks_are_a_configuration(monkeypatch):
    monkeypatch.chdir(OURS)
    config = launch.configure([read_toml(OURS / "mixed.toml")], {})[0]
    assert {name: task.weight for name, task in config.tasks.items()} == {"capitals": 2.0, "guess": 1.0}
    for task in config.tasks.values():
        assert PluginHost.discover().find("environment", task.env)


@pytest.mark.long
@pytest.mark.nightly
def test_our_mixed_tasks_train(tmp_path):
    settings = {"trainer.steps": 1, "trainer.prompts_per_step": 4, "validation.prompts": 2}
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "grpo_core", "train", OURS / "mixed.toml", "--output", tmp_path / "run"]
    ended = subprocess.run([*command, *words], cwd=OURS, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.long
@pytest.mark.parametrize("library", MIXED)
def test_the_files_for_another_library_run_there(library):
    variable = f"GRPO_{library.upper()}_PYTHON"
    python = os.environ.get(variable)
    if not python:
        pytest.skip(f"needs {variable}: the Python of a virtual environment with {library}")
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run(
        [python, HERE / f"play_{library}.py"], env=environ, capture_output=True, text=True, timeout=240
    )
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout.splitlines()[-1])
    assert told.pop("mixed", None) == MIXED[library]
    assert told == REWARDS
