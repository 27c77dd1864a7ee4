"""Tasks with several turns: their feedback, their solutions, and that models learn them."""

from __future__ import annotations

import asyncio
import gzip
import json
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest

import grpo_core as grpo
from grpo_core.testing import HostedEnvironment, demonstrations
from grpo_plugin_math.arrivals import Arrivals
from grpo_plugin_math.calculator import Calculator

EXAMPLES = Path(__file__).parents[3] / "examples"
SHORT = (
    "model.options.warm_start_steps=60",
    "trainer.steps=2",
    "trainer.prompts_per_step=4",
    "rollout.group_size=4",
)
GRPO = Path(sys.executable).with_name("grpo-core")


class Solved(HostedEnvironment):
    """Remembers the feedback that end an episode."""

    def __init__(self, environment):
        super().__init__(environment)
        self.train, self.ends, self.turns = environment.prompts("train"), [], []

    async def evaluate(self, episodes):
        feedback = await super().evaluate(episodes)
        self.turns += [each.reward for each in feedback]
        self.ends += [each.reward for each in feedback if each.done]
        return feedback


def transcripts(environment):
    solved = Solved(environment)
    return solved, asyncio.run(demonstrations({"task": solved}, {"task": solved.train[:300]}))


def said(prompt, *replies):
    messages = [{"role": "assistant", "content": reply} for reply in replies]
    return grpo.Episode(prompt=prompt, messages=(*prompt.messages, *messages), turn=len(replies) - 1)


def test_digits_arrive_while_they_are_put_in_order():
    solved, told = transcripts(Arrivals(train=300, validation=50))
    assert len(told) == 300
    for prompt, texts in zip(solved.train, told, strict=False):
        digits = prompt.answer
        assert list(texts[::2]) == [f"{digit}:" for digit in digits]
        assert list(texts[1::2]) == ["".join(sorted(digits[: n + 1])) for n in range(4)]
    assert set(solved.turns) == {0.25}
    assert len(solved.ends) == 300, "the fourth turn ends it, without another digit"


def test_a_mistake_ends_the_rollout():
    environment = Arrivals()
    prompt = grpo.Prompt(messages="7:", answer="7315")
    right, wrong = environment.evaluate([said(prompt, "7", "37"), said(prompt, "7", "73")])
    assert (right.reward, right.done, right.messages[0]["content"]) == (0.25, False, "1:")
    assert (wrong.reward, wrong.done) == (0.0, True)


def test_a_calculator_is_asked_and_its_answer_is_said():
    solved, told = transcripts(Calculator(train=300, validation=50))
    for prompt, texts in zip(solved.train, told, strict=False):
        question, call, product, answer = texts
        assert question == prompt.messages[0]["content"]
        assert json.loads(call.removeprefix("<tool_call>").removesuffix("</tool_call>"))["name"] == "multiply"
        assert (
            product == answer == prompt.answer == str(eval(question.rstrip("=")))
        )  # a product of two numbers
    assert solved.ends == [1.0] * 300


def test_an_answer_is_judged_however_it_was_found():
    environment = Calculator()
    prompt = grpo.Prompt(messages="12*12=", answer="144")
    right, wrong = environment.evaluate([said(prompt, " 144\n"), said(prompt, "145")])
    assert (right.reward, right.metrics) == (1.0, {"calculated": 0.0})
    assert wrong.reward == 0.0


@pytest.mark.parametrize("make", [Arrivals, Calculator])
def test_no_prompt_is_in_both_splits(make):
    splits = [
        {p.messages[0]["content"] + p.answer for p in make().prompts(s)} for s in ("train", "validation")
    ]
    assert [len(split) for split in splits] == [5000, 500]
    assert not splits[0] & splits[1]


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (Arrivals, {"count": 3}),
        (Arrivals, {"count": 2}),
        (Calculator, {"digits": 1}),
        (Calculator, {"digits": 0}),
    ],
)
def test_impossible_options_are_reported(make, options):
    with pytest.raises(grpo.ConfigError, match="expected"):
        make(**options)


def trained(tmp_path, example, *settings):
    """Mean rewards of the steps of a short run."""
    run = tmp_path / "run"
    changes = [
        part
        for setting in ("checkpoint.every=0", "validation.every=0", *settings)
        for part in ("--set", setting)
    ]
    subprocess.run(
        [GRPO, "train", EXAMPLES / f"{example}.toml", "--output", run, *changes],
        check=True,
        capture_output=True,
        timeout=280,
    )
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    packed = [path.read_bytes() for path in (run / "rollouts").glob("*.gz")]
    rollouts = [json.loads(line) for data in packed for line in gzip.decompress(data).splitlines()]
    return [row for row in rows if f"reward/{example}" in row], rollouts


@pytest.mark.nightly
def test_putting_in_order_is_learnt_over_turns(tmp_path):
    rows, rollouts = trained(tmp_path, "arrivals", "trainer.steps=20")
    rewards = [row["reward/arrivals"] for row in rows]
    assert fmean(rewards[-5:]) > fmean(rewards[:3]) + 0.08, rewards
    assert {r["turns"] for r in rollouts} == {1, 2, 3, 4}
    assert all(r["reward"] <= r["turns"] / 4 for r in rollouts)


@pytest.mark.nightly  # test_new.py trains with a tool in CI
def test_a_calculator_is_used_in_training(tmp_path):
    rows, rollouts = trained(tmp_path, "calculator", *SHORT)
    assert fmean(row["feedback_calculated/calculator"] for row in rows) > 0.1
    talks = [[m["role"] for m in r["messages"]] for r in rollouts]
    assert ["user", "assistant", "tool", "assistant"] in talks
    assert all(r["reward"] is not None for r in rollouts)
