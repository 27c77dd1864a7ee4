"""``grpo-core try``: a person or a model plays against an environment, and every message is shown."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from attrs import evolve
from rich.console import Console

import grpo_core as grpo
from grpo_core import ConfigError, Weights
from grpo_core.engines.text import PlayingText, TextRenderer
from grpo_core.kit import Config, aio
from grpo_core.testing import FakeEngine, FakeEnvironment, FakeRenderer, HostedEnvironment, run
from grpo_plugin_devkit.person import InputEnded, Person
from grpo_plugin_devkit.transcript import ShownEnvironment, Transcript
from grpo_plugin_devkit.trying import BY_HAND, Choice, _chosen, _play, _stream, try_

GRPO = Path(sys.executable).with_name("grpo-core")


class Shop(grpo.Environment):
    """Two questions with a tool and reward parts."""

    max_turns = 4
    success = 1.0

    def __init__(self):
        self.tools = [self.price]

    def price(self, item: str) -> float:
        """Look up what an item costs.

        Args:
            item: its name
        """
        return {"tea": 2.5}[item]

    def prompts(self, split):
        return [grpo.Prompt(messages=f"What does {i} cost?", answer="2.5", id=i) for i in ("tea", "milk")]

    def evaluate(self, episodes):
        return [
            grpo.Feedback(reward=0.5, done=False, messages=({"role": "user", "content": "Sure?"},))
            if e.reply != "yes"
            else grpo.Feedback(reward=0.5, metrics={"polite": 0.25}, answer="2.5")
            for e in episodes
        ]

    def solve(self, prompt):
        return "yes" if prompt.messages[-1]["content"] == "Sure?" else "2.5"


def played(lines, *, choice=None, environment=None, width=80):
    """Return the text that a rollout with these replies shows."""
    hosted = HostedEnvironment(environment or Shop(), task="task")
    out = io.StringIO()
    transcript = Transcript(Console(file=out, width=width, highlight=False), echo=True)
    shown = ShownEnvironment(hosted, transcript)

    person = Person(io.StringIO("".join(f"{line}\n" for line in lines)), transcript.line)
    person.solve = shown.solve

    class Tasks:
        async def prompts(self, split, tasks):
            return {"task": await hosted.prompts(split)}

    renderer = TextRenderer()
    session = grpo.Session(
        config=Config(tasks={}, rollout=evolve(Config(tasks={}).rollout, **BY_HAND)),
        engine=PlayingText(person, renderer),
        renderer=renderer,
        environments={"task": hosted},
        tasks=Tasks(),
    )
    story = _play(session, "task", choice or Choice(split="train"), shown, transcript)
    try:
        run(story)
    except InputEnded as end:
        out.write(str(end))
    return out.getvalue()


def streamed(*parts, message):
    """Return the text of a reply that is printed while it grows, and then ends as this message."""
    out = io.StringIO()
    transcript = Transcript(Console(file=out, width=30, highlight=False), echo=True)
    for part in parts:
        transcript.grow(part)
    transcript.reply({"role": "assistant", **message})
    return out.getvalue()


def test_a_reply_grows_on_the_screen_and_is_not_printed_twice():
    text = "One two three, which is longer than a line.\nFour"
    whole = "assistant\n  One two three, which is longer than a line.\n  Four\n"
    assert streamed(text[:3], text[:20], message={"content": text}) == whole
    assert streamed(text, text, message={"content": text}) == whole
    assert streamed("a\x1b[2J", message={"content": "a\x1b[2Jb"}) == "assistant\n  a\u241b[2Jb\n"


def test_a_reply_that_thinks_or_calls_is_followed_by_what_was_read_in_it():
    call = {"type": "function", "function": {"name": "price", "arguments": {"item": "tea"}}}
    text = streamed("<tool_call>{", message={"content": "", "tool_calls": [call]})
    assert text == 'assistant\n  <tool_call>{\nassistant\n  calls price(item="tea")\n'
    text = streamed("<think>tea", message={"content": "2.5"})
    assert text == "assistant\n  <think>tea\nassistant\n  2.5\n"


def test_what_an_engine_samples_is_printed_until_it_replies():
    text, out, seen = "yes, of course", io.StringIO(), []

    class Slow(FakeEngine):
        """Samples a character each second."""

        async def sampled(self):
            now = int(asyncio.get_running_loop().time() - self.begin)
            return [[ord(character) for character in text[:now]]] * self.running

    async def story():
        engine = Slow(reply=lambda request, rng: text, latency=lambda rng: 12.5)
        await engine.update_weights(Weights(version=0, location="", nbytes=0, tensors=()))
        engine.begin = asyncio.get_running_loop().time()
        transcript = Transcript(Console(file=out, width=80, highlight=False), echo=True)
        session = grpo.Session(
            config=Config(tasks={}),
            engine=engine,
            renderer=FakeRenderer(),
            environments={"task": FakeEnvironment()},
            tasks=None,
        )
        printing = asyncio.create_task(_stream(session, transcript))
        playing = asyncio.create_task(session.play([grpo.Prompt(messages="?", id="0", environment="task")]))
        while not playing.done():
            seen.append(out.getvalue().removeprefix("assistant\n  "))
            await asyncio.sleep(1)
        await aio.cancel([printing])

    run(story())
    assert all(text.startswith(each) for each in seen)
    assert len(set(seen)) > 10, "it is printed as it grows"


def test_a_person_plays_turns_and_tools_and_sees_the_parts_of_the_reward():
    text = played(['/call price {"item": "tea"}', "2.5", "yes"])
    assert text.splitlines() == [
        "task: prompt tea of train",
        "user",
        "  What does tea cost?",
        "tools",
        "  price(item: string)  Look up what an item costs.",
        "assistant",
        '  calls price(item="tea")',
        "tool price",
        "  2.5",
        "assistant",
        "  2.5",
        "reward of this turn: 0.5",
        "user",
        "  Sure?",
        "assistant",
        "  yes",
        "reward 1, a success",
        "  polite: 0.25",
        "  by turn: 0, 0.5, 0.5",
        "  answer that was read: 2.5",
        "  3 turns, 1 tool call, ended by the environment",
        "  the answer of the prompt: 2.5",
    ]


def test_the_environment_can_be_asked_for_its_solution_in_each_turn():
    assert "reward 1, a success" in played(["/solve", "/solve"])


def test_a_tool_that_fails_answers_as_it_would_answer_a_model():
    text = played(["/call price item=milk", "/call cost", "yes"])
    assert "error: KeyError: 'milk'" in text
    assert "there is no tool 'cost'" in text


def test_input_that_ends_early_ends_the_rollout_and_says_so():
    assert played(["2.5"]).endswith("Sure?\nthe input has ended")
    assert played([]).endswith("the input has ended")
    assert played(["/quit", "2.5"]).endswith("/quit")


def test_an_environment_that_fails_shows_its_error_and_continues_to_the_next_prompt():
    class Broken(Shop):
        def evaluate(self, episodes):
            raise RuntimeError("\x1b[31mno judge\n")

    text = played(["a", "b"], environment=Broken(), choice=Choice(split="train", prompts=2))
    assert text.count("unscored") == 2
    assert "RuntimeError: ␛[31mno judge" in text
    assert "\x1b" not in text


def test_narrow_terminals_wrap_what_is_said():
    text = played(["2.5", "yes"], width=24)
    assert max(map(len, text.splitlines())) <= 24


@pytest.mark.parametrize(
    ("lines", "replies"),
    [
        (["one", "", "two"], ["one", "", "two"]),
        (["first \\", "second"], ["first \nsecond"]),
        (["//call me"], ["/call me"]),
        (["/help", "/nonsense", "/call", '/call add {"a": ', "/call add a", "then"], ["then"]),
        (['/call add {"a": 1}'], ['<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>']),
        (
            ["/call add a=1 b=x"],
            ['<tool_call>{"name": "add", "arguments": {"a": 1, "b": "x"}}</tool_call>'],
        ),
        (["/solve"], [None]),
    ],
)
def test_lines_are_replies_and_commands(lines, replies):
    said = []
    person = Person(io.StringIO("".join(f"{line}\n" for line in lines)), said.append)
    assert [person.reply(tools=True) for _ in replies] == replies
    with pytest.raises(InputEnded):
        person.reply(tools=True)


def test_a_call_without_tools_is_reported():
    said = []
    person = Person(io.StringIO("/call add a=1\nthen\n"), said.append)
    assert (person.reply(tools=False), said) == ("then", ["  this environment has no tools"])


def test_a_prompt_is_chosen_by_its_id():
    prompts = Shop().prompts("train")
    assert [p.id for p in _chosen(prompts, Choice(split="train", prompts=9), "shop")] == ["tea", "milk"]
    assert [p.id for p in _chosen(prompts, Choice(split="train", prompt="milk"), "shop")] == ["milk"]
    with pytest.raises(ConfigError, match=r"--prompt x: shop has .*the ids begin with tea, milk"):
        _chosen(prompts, Choice(split="train", prompt="x"), "shop")
    with pytest.raises(ConfigError, match="--prompts is 0; expected a number of at least 1"):
        try_("x", prompts=0)
    with pytest.raises(ConfigError, match="shop has no prompts of the split 'validation'"):
        _chosen([], Choice(split="validation"), "shop")


@pytest.mark.long
def test_lines_of_standard_input_are_played_by_the_command():
    ended = subprocess.run(
        [GRPO, "try", "math:calculator"],
        input="/call multiply a=2 b=3\n", capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert "tool multiply\n  6\nthe input has ended: this rollout has no reward\n" in ended.stdout


def test_a_directory_that_holds_no_run_is_not_a_model(tmp_path):
    with pytest.raises(ConfigError, match=r"nope is not a run \(there is no config.toml in it\)"):
        try_("math:sort", run=tmp_path / "nope")


@pytest.mark.slow
def test_ctrl_c_ends_the_waiting_for_a_line_in_a_terminal():
    ours, theirs = pty.openpty()
    child = subprocess.Popen(
        [GRPO, "try", "math:sort"], stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    )
    os.close(theirs)
    seen = b""
    while b"you> " not in seen:
        seen += os.read(ours, 1000)
    status = None
    while status is None:  # readline does not see a signal between its prompt and its waiting
        child.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = child.wait(5)
    assert status == 130
    os.close(ours)


@pytest.mark.nightly
def test_a_model_plays_a_task_of_its_run(tmp_path):
    def command(*arguments):
        ended = subprocess.run([GRPO, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=200)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    small = {
        "trainer.steps": 1,
        "trainer.prompts_per_step": 2,
        "rollout.group_size": 2,
        "validation.every": 0,
    }
    small |= {"model.options.warm_start_steps": 2, "tasks.sort.options.length": 3}
    sets = [word for key, value in small.items() for word in ("--set", f"{key}={value}")]
    command("train", "--env", "math:sort", *sets, "--output", "run")
    text = command(
        "try", "sort", "--run", "run", "--split", "validation", "--prompts", "2", "--temperature", "0"
    )
    assert text.count("assistant\n") == text.count("the answer of the prompt: ") == 2
    first = text.splitlines()[2].strip()
    assert len(first) == len("123="), "the task of the run has its options"
    assert text == command(
        "try", "sort", "--run", "run", "--split", "validation", "--prompts", "2", "--temperature", "0"
    )
