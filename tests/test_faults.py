"""Errors of an author's code: one fault with the author's line, from where it was raised to the event."""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
import textwrap

import pytest
from hypothesis import given, settings

from grpo_core import Environment, Prompt, ValidationStrategy, testing
from grpo_core.api.arguments import arguments
from grpo_core.commands.complaints import hidden
from grpo_core.config import read_toml
from grpo_core.contracts.errors import CodeError, ConfigError, PluginError, fault_of, plugin_errors
from grpo_core.contracts.records import Episode, Feedback
from grpo_core.environments.host import EnvironmentHost, evaluate_of
from grpo_core.environments.process import EnvironmentProcess, EnvironmentSpec
from grpo_core.testing import FakeEngine, HostedEnvironment, prompts, results_of, strategies
from grpo_core.testing import run as on_virtual_time
from grpo_plugin_math.exercises import sort

FILE = """
import asyncio
import grpo_core as grpo

class Base(grpo.Environment):
    running = most = 0
    def prompts(self, split):
        return [grpo.Prompt(messages=str(i), answer=str(i)) for i in range(4)]

class Raises(Base):
    def evaluate(self, episodes):
        return [self.one(episode) for episode in episodes]
    def one(self, episode):
        return 1 / 0

class Scores(Base):
    async def score(self, episode):
        if episode.reply == "raise":
            raise KeyError("gold")
        self.running += 1
        self.most = max(self.most, self.running)
        for _ in range(3):
            await asyncio.sleep(0.01)
        self.running -= 1
        return float(self.most)

class Compares(Base):
    needs_group = True
    def __init__(self):
        self.groups = {}
    async def score(self, episode):
        barrier = self.groups.setdefault(episode.group, asyncio.Barrier(16))
        await barrier.wait()
        return 1.0
"""


def raised(error):
    try:
        error()
    except Exception as caught:
        return caught
    raise AssertionError("nothing was raised")


def saying(*replies, group=""):
    prompt = Prompt(messages="?", id="0")
    return [
        Episode(prompt=prompt, messages=[{"role": "assistant", "content": reply}], group=group)
        for reply in replies
    ]


def imported(path, code):
    """The function ``f`` of a file with this code."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(code))
    namespace = {}
    exec(compile(path.read_text(), str(path), "exec"), namespace)
    return namespace["f"]


# ---------------------------------------------------------------------------------- the fault


def test_a_fault_names_the_last_line_of_the_author_and_not_the_library_that_raised(tmp_path):
    fault = fault_of(raised(imported(tmp_path / "mine.py", "import json\ndef f(): return json.loads('[')")))
    assert (fault.kind, fault.where) == ("JSONDecodeError", "mine.py:2 in f")
    assert "decoder.py" in fault.traceback
    assert str(fault).startswith("mine.py:2 in f: JSONDecodeError: ")


def test_an_installed_plugin_is_the_author_if_nobody_else_is(tmp_path):
    code = "import json\ndef f(): return json.loads('[')"
    installed = imported(tmp_path / "lib" / "site-packages" / "plugin" / "judge.py", code)
    frames = raised(installed).__traceback__.tb_next  # without the frame of this test
    assert fault_of(raised(installed).with_traceback(frames)).where == "judge.py:2 in f"
    assert fault_of(raised(lambda: installed())).where.startswith("test_faults.py:")


def test_a_fault_crosses_processes_and_is_the_one_that_is_carried():
    with pytest.raises(PluginError) as caught, plugin_errors("sampler 'mine'"):
        raise ValueError("bad\nrow")
    error = pickle.loads(pickle.dumps(caught.value))
    assert (error.fault.kind, error.fault.message) == ("ValueError", "bad\nrow")
    assert fault_of(error) == error.fault
    assert str(error) == f"sampler 'mine' raised {error.fault}"
    assert "\n" not in str(error)
    assert CodeError.of(error).fault == error.fault


def in_its_process(tmp_path, name, story):
    file = tmp_path / "scenes.py"
    file.write_text(FILE)

    async def main():
        process = EnvironmentProcess(EnvironmentSpec(task="play", env=f"{file}:{name}"))
        try:
            return await story(process)
        finally:
            await process.aclose()

    return asyncio.run(main())


def test_an_exception_in_the_child_is_a_fault_of_the_feedback(tmp_path):
    (feedback,) = in_its_process(tmp_path, "Raises", lambda process: process.evaluate(saying("a")))
    assert feedback.reward is None
    assert feedback.fault.kind == "ZeroDivisionError"
    assert feedback.fault.where == "scenes.py:14 in one"
    assert feedback.error == "scenes.py:14 in one: ZeroDivisionError: division by zero"
    assert "in evaluate" in feedback.fault.traceback


# ---------------------------------------------------------------------------------- validation


class Broken(ValidationStrategy):
    async def validate(self, context):
        raise RuntimeError("no rubric")


class Silent(Environment):
    def __init__(self, result):
        self.result = result

    def prompts(self, split):
        return prompts(4)

    def evaluate(self, episodes):
        return [self.result] * len(episodes)


class Plays(ValidationStrategy):
    async def validate(self, context):
        await context.rollout(context.prompts["task"])
        return {"task": {"accuracy": 1.0}}


def measured(strategy, environment):
    held_out, engine = {"task": prompts(4)}, FakeEngine()
    engine.version = 0
    story = results_of(strategy, held_out, engine=engine, environments={"task": environment}, max_tokens=4)
    return on_virtual_time(story)


def test_a_strategy_that_raises_is_named_in_one_line():
    with pytest.raises(PluginError) as caught:
        measured(Broken(), testing.FakeEnvironment())
    assert str(caught.value).startswith("validation strategy 'Broken' raised test_faults.py:")
    assert (caught.value.fault.kind, caught.value.fault.message) == ("RuntimeError", "no rubric")


@pytest.mark.parametrize("result", [None, Feedback()])
def test_none_for_every_reply_asks_for_the_return(result):
    with pytest.raises(PluginError, match="for every reply; is a `return` missing") as caught:
        measured(Plays(), HostedEnvironment(Silent(result)))
    assert caught.value.fault.kind == "no reward"


# ---------------------------------------------------------------------------------- score


def test_eight_scores_run_at_once(tmp_path):
    feedback = in_its_process(tmp_path, "Scores", lambda process: process.evaluate(saying(*"a" * 20)))
    assert max(each.reward for each in feedback) == 8.0


def test_a_score_that_raises_costs_only_its_episode(tmp_path):
    good, bad, fine = in_its_process(
        tmp_path, "Scores", lambda process: process.evaluate(saying("a", "raise", "b"))
    )
    assert (bad.reward, bad.fault.kind, bad.fault.where) == (None, "KeyError", "scenes.py:19 in score")
    assert good.reward
    assert fine.reward


def test_the_scores_of_a_compared_group_run_together(tmp_path):
    episodes = saying(*"a" * 16, group="one") + saying(*"b" * 16, group="two")
    feedback = in_its_process(tmp_path, "Compares", lambda process: process.evaluate(episodes))
    assert [each.reward for each in feedback] == [1.0] * 32


class Base(Environment):
    def prompts(self, split):
        return prompts(4)


class Sync(Base):
    def score(self, episode):
        return float(len(episode.reply))


class Both(Sync):
    def evaluate(self, episodes):
        return [0.0] * len(episodes)


def test_a_score_may_be_a_plain_method():
    found = EnvironmentHost(Sync()).call("evaluate", saying("a", "bc"))
    assert [each.reward for each in found] == [1.0, 2.0]
    assert evaluate_of(Sync())(saying("abc")) == [3.0]
    assert evaluate_of(object()) is None


@pytest.mark.parametrize("kind", [Base, Both])
def test_an_environment_judges_in_exactly_one_way(kind):
    with pytest.raises(PluginError, match="score"):
        EnvironmentHost(kind())


# ---------------------------------------------------------------------------------- hypothesis


@settings(max_examples=50)
@given(strategies.episodes(sort().prompts("train")[:20]))
def test_a_reward_of_math_sort_is_0_or_1_for_any_reply(episode):
    (feedback,) = sort().evaluate([episode])
    assert feedback.reward in (0.0, 1.0)
    assert feedback.answer == episode.reply.strip()


@settings(max_examples=50)
@given(strategies.feedback(), strategies.episodes(turns=3))
def test_any_feedback_of_the_strategies_is_valid(feedback, episode):
    (found,) = EnvironmentHost(Silent(feedback)).call("evaluate", [episode])
    assert (found.reward, found.done) == (feedback.reward, feedback.done)


# ---------------------------------------------------------------------------------- said in the right place


@pytest.mark.parametrize("takes", ["prompts", "completions", "completion_ids", "trainer_state"])
def test_a_reward_function_of_trl_is_recognised_by_any_of_its_parameters(takes):
    function = eval(f"lambda {takes}, answer: 1.0")
    with pytest.raises(PluginError, match="as reward functions of TRL do"):
        arguments(function, [{"prompt": "1", "answer": "1"}], {})


def test_a_file_that_is_no_toml_is_not_offered_as_a_configuration(tmp_path):
    bad = tmp_path / "bad.toml"
    bad.write_text("[trainer")
    with pytest.raises(ConfigError) as caught:
        read_toml(bad)
    assert "grpo-core train" not in str(caught.value)
    with pytest.raises(ConfigError, match="is a directory"):
        read_toml(tmp_path)


def test_a_module_in_front_of_an_installed_one_is_named(tmp_path, monkeypatch):
    (tmp_path / "packaging.py").write_text("raise RuntimeError('mine')")
    shadow = imported(tmp_path / "packaging.py", "def f(): raise RuntimeError('mine')")
    shadow.__globals__["__name__"], shadow.__globals__["__file__"] = (
        "packaging",
        str(tmp_path / "packaging.py"),
    )
    line = hidden(raised(shadow))
    assert f"{tmp_path / 'packaging.py'} hides the installed module 'packaging'" in line
    assert "\n" not in line
    assert hidden(raised(lambda: 1 / 0)) == ""


SCRIPT = """
import grpo_core

def string(reply):
    return "1.0"

grpo_core.train(env=string, data=["1", "2"], steps=1, model={"options": {"warm_start_steps": 0}})
"""


@pytest.mark.slow
def test_an_error_of_train_has_the_frames_of_the_script_alone(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 1
    said = done.stderr[done.stderr.index("Traceback") :]
    assert [line for line in said.splitlines() if 'File "' in line and "script.py" not in line] == []
    assert said.splitlines()[-1].endswith(
        "task 'string': reward function string returned '1.0' (str), expected a float, a Feedback or None"
    )
