"""Text of models, tools and data sets that no tokenizer reads, no engine takes, or that has no end."""

from __future__ import annotations

import asyncio
import json
import re

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from test_cli import events, grpo, metrics, refused
from test_validation import FakeRenderer, echo, right, validated

from grpo_core.contracts.errors import EngineError, PluginError, describe
from grpo_core.contracts.protocols import Environment
from grpo_core.contracts.records import Episode, Feedback, Prompt
from grpo_core.contracts.unicode import DEEPEST, lone_surrogate, well_formed
from grpo_core.demo.demonstrations import LONGEST, demonstrations
from grpo_core.demo.tiny import write_tokenizer
from grpo_core.environments.feedback import as_feedback
from grpo_core.environments.host import EnvironmentHost
from grpo_core.testing import FakeEngine, FakeEnvironment
from grpo_core.text.rendering import Renderer
from grpo_core.text.response_formats import parse_calls
from grpo_core.validation.runner import Context
from grpo_core.validation.strategies import Batched, Greedy, Pipelined
from grpo_plugin_algorithms.strategies import Majority, PassAtK

HIGH, LOW = "\ud83d", "\ude00"
TEXTS = st.text(st.characters(exclude_categories=[]), max_size=8)  # with surrogates


# ---------------------------------------------------------------------------------- lone surrogates


@pytest.mark.long
@given(st.recursive(TEXTS | st.integers(), lambda parts: st.lists(parts) | st.dictionaries(TEXTS, parts)))
def test_whatever_is_made_well_formed_can_be_written_and_well_formed_text_stays_itself(value):
    made = well_formed(value)
    json.dumps(made, ensure_ascii=False).encode()
    assert well_formed(made) == made
    assert not lone_surrogate(made)
    if not lone_surrogate(value):
        assert made == value


def test_an_error_that_quotes_a_surrogate_is_described_with_its_replacement():
    assert describe(ValueError(f"read a{HIGH}b")) == "ValueError: read a\ufffdb"
    assert describe(PluginError(HIGH)) == "\ufffd"


def test_a_lone_surrogate_is_replaced_and_its_neighbours_stay():
    assert well_formed(f"a{HIGH}b{LOW}c{HIGH}") == "a\ufffdb\ufffdc\ufffd"
    assert well_formed(HIGH + LOW) == "\N{GRINNING FACE}", "two halves are one character"
    assert lone_surrogate({"a": ["b", {HIGH: "c"}]}) == HIGH


def test_data_that_is_nested_too_deep_is_refused():
    def nested(depth):
        return json.loads("[" * depth + "]" * depth)

    assert well_formed(nested(DEEPEST - 1)) == nested(DEEPEST - 1)
    with pytest.raises(ValueError, match="more than 100 deep"):
        well_formed(nested(DEEPEST + 1))


class Echo(Environment):
    """Has a tool that says what it is given."""

    max_turns = 2

    def __init__(self):
        self.tools = [self.echo]

    def echo(self, s: str) -> str:
        """Echo.

        Args:
            s: A text.
        """
        return s

    def prompts(self, split):
        return []

    def evaluate(self, episodes):
        return [1.0] * len(episodes)


def test_a_surrogate_that_a_model_spells_reaches_its_tool_and_the_tokenizer_as_a_replacement(tmp_path):
    _, calls = parse_calls('<tool_call>{"name": "echo", "arguments": {"s": "\\ud800!"}}</tool_call>')
    said = {"role": "assistant", "content": "", "tool_calls": [{**call, "id": "1"} for call in calls]}
    episode = Episode(prompt=Prompt(messages="x"), messages=[{"role": "user", "content": "x"}, said])
    (feedback,) = EnvironmentHost(Echo()).call("evaluate", [episode])
    assert feedback.messages[0]["content"] == "\ufffd!"
    write_tokenizer(tmp_path)
    assert Renderer.load(str(tmp_path)).continuation_ids(feedback.messages, before=(), said=said, end=None)


def test_a_call_whose_arguments_are_nested_too_deep_is_not_a_call():
    (_, (call,)) = parse_calls(f'<tool_call>{{"name": "f", "arguments": {"[" * 500}{"]" * 500}}}</tool_call>')
    assert call["function"]["name"] == ""


def test_feedback_has_only_texts_that_can_be_written():
    (given,) = as_feedback(
        [
            Feedback(
                reward=1.0,
                done=False,
                messages=[{"role": "user", "content": HIGH, "parts": [{"text": LOW}]}],
                metrics={f"m{HIGH}": 1.0},
                answer=LOW,
            )
        ],
        1,
        "e",
    )
    assert not lone_surrogate([given.messages, given.metrics, given.answer])
    (failed,) = as_feedback([Feedback(error=HIGH)], 1, "e")
    assert failed.error == "\ufffd"


@pytest.mark.long
def test_an_error_of_any_length_is_printed_in_a_few_lines():
    told = describe(ValueError("E" * 50_000_000 + "!"))
    assert len(told) < 2100
    assert told.startswith("ValueError: EEE")
    assert told.endswith("E!")
    assert "49,9" in told


LONG = """
import grpo_core as grpo

ROWS = "the first row, " + "x" * 20_000 + ", the last row"

class Raises(grpo.Environment):
    def prompts(self, split):
        return [grpo.Prompt(messages=f"{split[0]}{i}=", answer=str(i)) for i in range(24)]
    def evaluate(self, episodes):
        raise ValueError(ROWS)

class Own(Raises):
    def evaluate(self, episodes):
        raise grpo.PluginError(ROWS)

class Chained(Raises):
    def prompts(self, split):
        try:
            raise KeyError(ROWS)
        except KeyError as error:
            raise ValueError(ROWS) from error
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Raises", "Own", "Chained"])
def test_a_long_error_of_an_environment_is_cut_everywhere_but_in_its_log_file(tmp_path, kind):
    """It quotes all rows of a batch: the ends of it say which, and the log file has the rest."""
    (tmp_path / "long.py").write_text(LONG)
    done = grpo(tmp_path, "train", "--env", f"./long.py:{kind}", *SMALL, "--output", "run")
    assert done.returncode == 1
    assert "the first row" in done.stderr
    assert "the last row" in done.stderr
    assert len(done.stdout) + len(done.stderr) < 7_000
    rows = list(map(json.loads, (tmp_path / "run" / "events.jsonl").read_text().splitlines()))
    said = [row.get(key, "") for row in rows for key in ("message", "error")]
    faults = [row["fault"] for row in rows if row.get("fault")]
    assert {fault["kind"] for fault in faults} == {"PluginError" if kind == "Own" else "ValueError"}
    said += [fault[key] for fault in faults for key in ("message", "traceback")]
    assert any("the last row" in text for text in said)
    assert max(map(len, said)) < 20_000
    log = (tmp_path / "run" / "logs" / f"environment-{kind.lower()}.log").read_text()
    assert "the first row, " + "x" * 20_000 + ", the last row" in log
    assert len(log) < 1_000_000


ENVIRONMENTS = '''
import grpo_core as grpo

class Words(grpo.Environment):
    """Everything it says contains lone surrogates."""
    max_turns = 2
    def prompts(self, split):
        n = 24 if split == "train" else 6
        return [grpo.Prompt(messages=f"{split[0]}{i}=", answer=str(i % 10) + "\\ud800") for i in range(n)]
    def solve(self, prompt):
        return "7\\ud800"
    def evaluate(self, episodes):
        return [self.judge(e) for e in episodes]
    def judge(self, e):
        number = int(e.prompt.id) % 6
        if e.turn == 0 and number == 0:
            return grpo.Feedback(reward=0.0, done=False, messages=[{"role": "user", "content": "a\\udfffb"}])
        if e.turn == 0 and number == 1 and "7" in e.reply:
            return grpo.Feedback(error="\\ud800")
        if e.turn == 0 and number == 2 and "7" in e.reply:
            raise ValueError("\\udfff" * 5)
        reward = float(len(e.reply) % 3)
        return grpo.Feedback(reward=reward, metrics={"m\\ud800": 1.0}, answer="\\ud800")

class BadPrompt(Words):
    def prompts(self, split):
        prompts = super().prompts(split)
        prompts[3] = grpo.Prompt(messages="say \\ud800", id="p3")
        return prompts

class OddHeldOut(Words):
    """Held-out prompts: one that is too long, and one without a character."""
    def prompts(self, split):
        prompts = [grpo.Prompt(messages=f"{split[0]}{i}=", id=str(i)) for i in range(24)]
        if split == "validation":
            prompts[1] = grpo.Prompt(messages="9" * 5000, id="long")
            prompts[2] = grpo.Prompt(messages="", id="empty")
        return prompts
    def judge(self, e):
        return float(len(e.reply) % 3)

class NoPrompts(Words):
    def prompts(self, split):
        return []
'''
SMALL = [
    "--set", "trainer.steps=3", "--set", "trainer.prompts_per_step=4", "--set", "rollout.group_size=4",
    "--set", "validation.every=3", "--set", "model.options.warm_start_steps=3",
]  # fmt: skip


@pytest.fixture
def project(tmp_path):
    (tmp_path / "odd.py").write_text(ENVIRONMENTS)
    return tmp_path


@pytest.mark.slow
def test_a_run_whose_environment_says_nothing_but_surrogates_finishes(project):
    done = grpo(
        project, "train", "--env", "./odd.py:Words", *SMALL, "--set", "environment.max_error_rate=1",
        "--output", "run",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert len(metrics(project / "run")) >= 3
    assert (project / "run" / "report.html").exists()
    for file in (project / "run").rglob("*.jsonl"):
        for line in map(json.loads, file.read_text().splitlines()):
            line.pop("answer", None)  # the data set's own, which no model reads
            assert not lone_surrogate(line), file
    assert grpo(project, "verify", "run").returncode == 0


@pytest.mark.long
def test_a_prompt_with_a_surrogate_is_refused_with_its_task_and_id(project):
    message = refused(project, "train", "--env", "./odd.py:BadPrompt", *SMALL, "--output", "run")
    assert "task 'badprompt'" in message
    assert "prompt 'p3' has a text with the lone surrogate '\\ud800'" in message
    rows = [{"id": f"r{i}", "prompt": "\udfff" if i == 2 else str(i)} for i in range(4)]
    (project / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    message = refused(
        project, "train", "--env", "./odd.py:Words", *SMALL, "--output", "run2",
        "--set", "tasks.words.data=rows.jsonl",
    )  # fmt: skip
    path = str(project / "rows.jsonl")
    assert f"task 'words': dataloader {path!r}, row 3: prompt 'r2' has a text with the lone" in message


# ---------------------------------------------------------------------------------- repeated tags


def by_regex(text):
    tagged = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
    calls = [inner.strip() for inner in tagged.findall(text)]
    return (tagged.sub("", text).strip() if calls else text), calls


@given(st.lists(st.sampled_from(["<tool_call>", "</tool_call>", "x", " ", "\n", "<tool_", "call>"])))
def test_calls_are_read_as_by_the_simplest_expression(parts):
    text = "".join(parts)
    content, calls = parse_calls(text)
    assert (content, [call["function"]["arguments"] for call in calls]) == by_regex(text)


class Counted(str):
    """A text that counts the characters that its searches read."""

    read = 0

    def find(self, part, start=0):
        found = super().find(part, start)
        Counted.read += (len(self) if found < 0 else found + len(part)) - start
        return found


@pytest.mark.long
@pytest.mark.parametrize("piece", ["<tool_call>", "<tool_call></tool_call>", "</tool_call>", "<tool_call>{"])
def test_repeated_tags_are_read_in_linear_work(piece):
    for n in (1000, 200_000):
        Counted.read = 0
        parse_calls(Counted(piece * n))
        assert Counted.read <= 3 * len(piece) * n


# ---------------------------------------------------------------------------------- lengths


def odd_prompts(n):
    shown = {3: "7" * 500, 5: ""}
    return [
        Prompt(messages=shown.get(i, f"{i}="), answer=str(i), id=str(i), environment="task") for i in range(n)
    ]


class Bounded(FakeEngine):
    """Refuses a whole call for one request that does not fit, as engines do."""

    def __init__(self, positions, **options):
        super().__init__(**options)
        self.positions = positions

    async def generate(self, requests):
        for request in requests:
            n = len(request.prompt_ids)
            if not n or n + request.max_tokens > self.positions:
                raise EngineError(f"a prompt of {n} tokens")
        return await super().generate(requests)


STRATEGIES = [
    Greedy(),
    Greedy(mode="batched"),
    Batched(),
    Batched(n=3),
    Pipelined(n=2),
    PassAtK(k=2),
    Majority(n=2),
]


@pytest.mark.parametrize("needs_group", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: f"{type(s).__name__}-{s.mode}-{s.n}")
def test_a_held_out_prompt_that_fits_no_model_costs_only_its_own_rollouts(monkeypatch, strategy, needs_group):
    monkeypatch.setattr(FakeRenderer, "context", 100)
    monkeypatch.setattr("test_validation.prompts", odd_prompts)
    seen, rollout = [], Context.rollout

    async def seen_too(context, *prompts, **options):
        rollouts = await rollout(context, *prompts, **options)
        seen.extend(context.played)
        return rollouts

    monkeypatch.setattr(Context, "rollout", seen_too)
    environment = FakeEnvironment(lambda episode: evolve(right(episode), answer=episode.reply))
    environment.about = evolve(environment.about, needs_group=needs_group)
    results = validated(strategy, environment, engine=Bounded(100, reply=echo), retries=1)["task"]
    assert results["prompts"] == 8
    assert results["accuracy_low"] <= 0.8
    assert results["accuracy_high"] == 1.0
    errors = {prompt.id: played.error for prompt, played in seen if played.error is not None}
    assert errors == {
        "3": "prompt '3' of task 'task' has 500 tokens; with 16 tokens of a completion (max_tokens) they "
        "exceed the 100 positions of the model or the engine",
        "5": "prompt '5' of task 'task' has no tokens; a model needs one to begin with",
    }


def test_if_no_held_out_prompt_fits_the_error_names_the_first(monkeypatch):
    monkeypatch.setattr(FakeRenderer, "context", 10)
    with pytest.raises(
        PluginError, match=r"none of the 10 rollouts .* the first one: prompt '0' of task 'task' has"
    ):
        validated(Batched(), FakeEnvironment(right), engine=Bounded(10))


@pytest.mark.slow
def test_a_run_survives_held_out_prompts_that_are_too_long_or_empty(project):
    done = grpo(project, "train", "--env", "./odd.py:OddHeldOut", *SMALL, "--output", "run")
    assert done.returncode == 0, done.stderr
    last = events(project / "run", "Validated")[-1]["results"]["oddheldout"]
    assert (last["prompts"], last["errors"]) == (22, 2)


@pytest.mark.long
def test_completions_beyond_the_models_positions_are_refused_before_it_is_made(project):
    for key, most in (("max_tokens", 255), ("max_total_tokens", 256)):
        message = refused(
            project, "train", "--env", "./odd.py:Words", *SMALL, "--output", key,
            "--set", f"rollout.{key}={most + 1}",
        )  # fmt: skip
        assert f"rollout.{key} is {most + 1}; the model has 256 positions" in message
        assert f"choose at most {most}" in message
        assert not (project / key / "model").exists()


@pytest.mark.long
def test_a_task_without_prompts_is_named(project):
    message = refused(project, "train", "--env", "./odd.py:NoPrompts", *SMALL, "--output", "run")
    assert "task 'noprompts': prompts('train') of its environment is empty" in message


def test_a_solution_that_is_longer_than_the_tiny_model_is_not_a_demonstration():
    class Solved(FakeEnvironment):
        async def solve(self, prompts):
            return [prompt.answer for prompt in prompts]

    shown = [Prompt(messages="x" * n, answer="y", id=str(n)) for n in (LONGEST - 2, LONGEST - 1)]
    found = asyncio.run(demonstrations({"task": Solved()}, {"task": shown}))
    assert [text for text, _ in found] == ["x" * (LONGEST - 2)], "with the solution and its end it is LONGEST"
