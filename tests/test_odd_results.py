"""Results that JSON, text or another process cannot take: they cost no more than an error."""

from __future__ import annotations

import asyncio
import re

import numpy as np
import pytest

from grpo_core.contracts.errors import PluginError, Unavailable, describe
from grpo_core.contracts.protocols import Environment
from grpo_core.contracts.records import Episode, Feedback, Prompt
from grpo_core.environments.feedback import as_feedback
from grpo_core.environments.host import EnvironmentHost
from grpo_core.environments.process import EnvironmentProcess, EnvironmentSpec
from grpo_core.environments.tools import LONGEST_RESULT
from grpo_core.testing import HostedEnvironment, finished
from grpo_core.text.credentials import Mask


class Mute:
    """Has no text."""

    def __str__(self):
        raise LookupError("no text")

    __repr__ = __str__


class MuteError(Exception):
    def __str__(self):
        raise LookupError("no text")


def circle():
    found = []
    found.append(found)
    return found


def nested(depth):
    found = []
    for _ in range(depth):
        found = [found]
    return found


RESULTS = {
    "a pair as a key": ({(1, 2): 1.0}, "error: look: the result .*keys must be str, .* not tuple"),
    "a number of numpy as a key": ({np.int64(3): 1.0}, "error: look: the result .*not numpy.int64"),
    "a circle": (circle(), "error: look: the result .*Circular reference"),
    "too deep": (nested(100_000), "error: look: the result .*Recursion"),
    "no text": ({"a": Mute()}, "error: look: the result .*no text"),
    "too long": ("a" * (LONGEST_RESULT + 1), "error: look: the result has 1,000,001 characters"),
    "an exception without text": (MuteError(), "error: MuteError"),
    "an exception that is too long": (ValueError("a" * 10**7), "error: ValueError: a"),
}


class Looks(Environment):
    max_turns = 2

    def __init__(self, result):
        self.result, self.tools = result, [self.look]

    def look(self) -> str:
        """Looks up."""
        if isinstance(self.result, Exception):
            raise self.result
        return self.result

    def prompts(self, split):
        return [Prompt(messages="x")]

    def evaluate(self, episodes):
        return [1.0] * len(episodes)


def calling(name):
    call = {"id": "1", "type": "function", "function": {"name": name, "arguments": {}}}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    return Episode(prompt=Prompt(messages="x"), messages=[{"role": "user", "content": "x"}, said])


@pytest.mark.parametrize("kind", RESULTS)
def test_a_result_of_a_tool_that_cannot_be_written_is_an_error_for_the_model(kind):
    result, told = RESULTS[kind]
    (feedback,) = EnvironmentHost(Looks(result)).call("evaluate", [calling("look")])
    said = feedback.messages[0]["content"]
    assert re.match(told, said)
    assert len(said) < 3000


def test_an_exception_whose_text_raises_is_described_by_its_type():
    assert "MuteError" in describe(MuteError())
    assert "MuteError" in describe(Mask({"KEY": "secret"}).error(MuteError()))


ODD = {
    "an answer without text": Feedback(reward=1.0, answer=Mute()),
    "a state without text": Feedback(reward=1.0, state=Mute()),
    "an error without text": Feedback(error=Mute()),
    "a reward without text": Mute(),
    "a message in a circle": Feedback(
        reward=0.0, done=False, messages=[{"role": "user", "content": "x", "parts": circle()}]
    ),
    "a message that is too deep": Feedback(
        reward=0.0, done=False, messages=[{"role": "user", "content": "x", "parts": nested(200)}]
    ),
    "a key of a message without text": Feedback(
        reward=0.0, done=False, messages=[{"role": "user", "content": "x", Mute(): 1}]
    ),
    "a message without text": Feedback(reward=0.0, done=False, messages=[Mute()]),
}


@pytest.mark.parametrize("kind", ODD)
def test_feedback_that_cannot_be_converted_says_whose_it_is(kind):
    with pytest.raises(PluginError, match=r"^mine: evaluate returned "):
        as_feedback([ODD[kind]], 1, "mine")


def test_a_metric_without_text_is_left_out():
    (feedback,) = as_feedback([Feedback(reward=1.0, metrics={"n": Mute(), Mute(): 1.0, "m": 2})], 1, "mine")
    assert (feedback.reward, feedback.metrics) == (1.0, {"m": 2.0})
    assert len(feedback.left_out) == 2


def test_a_prompt_whose_messages_have_no_end_is_refused():
    made = Looks("")
    made.prompts = lambda split: [Prompt(messages=[{"role": "user", "content": "x", "parts": circle()}])]
    with pytest.raises(
        PluginError, match=r"prompts\('train'\)\[0\]: prompt '0': a message is nested more than 100 deep"
    ):
        EnvironmentHost(made).prompts("train")


def test_a_solution_that_is_not_text_is_refused():
    made = Looks("")
    made.solve = lambda prompt: 7
    with pytest.raises(PluginError, match=r"solve returned 7 \(int\), expected text or None"):
        EnvironmentHost(made).solve([Prompt(messages="x", id="0")])


def test_a_session_whose_tools_cannot_be_read_does_not_begin_and_the_others_do():
    class Shed:
        def __init__(self, broken):
            self.broken = broken

        @property
        def tools(self):
            if self.broken:
                raise OSError("the key is lost")
            return ()

    closed = []
    made = Looks("")
    made.open = lambda prompt: Shed(prompt.id == "1")
    made.close = closed.append
    host = EnvironmentHost(made)
    first, second = host.call("open", [(id, Prompt(messages="x", id=id)) for id in "01"])
    assert first.error is None
    assert second.error == "the tools of the session cannot be read: OSError: the key is lost"
    assert len(closed) == 1


PLAIN = """
import enum
import grpo_core as grpo

class Role(str, enum.Enum):
    USER = "user"

class Words(str):
    pass

class Number(int):
    pass

class Env(grpo.Environment):
    max_turns = 2
    def prompts(self, split):
        return [grpo.Prompt(messages="x")]
    def evaluate(self, episodes):
        said = [{"role": Role.USER, "content": Words("again"), "n": Number(3)}]
        return [grpo.Feedback(done=False, messages=said, answer=Words("a"), state=Words("s"))] * len(episodes)
"""


@pytest.mark.long
def test_texts_of_the_environments_own_classes_reach_the_run_as_text(tmp_path):
    (tmp_path / "env.py").write_text(PLAIN)

    async def story():
        process = EnvironmentProcess(EnvironmentSpec(task="task", env=f"{tmp_path}/env.py:Env"))
        try:
            (prompt,) = await process.prompts("train")
            said = {"role": "assistant", "content": "x"}
            episode = Episode(prompt=prompt, messages=[*prompt.messages, said])
            (feedback,) = await process.evaluate([episode])
            return feedback, process.starts
        finally:
            await process.aclose()

    feedback, starts = asyncio.run(story())
    assert (starts, feedback.error) == (1, None)
    assert feedback.messages == ({"role": "user", "content": "again", "n": 3},)
    assert [type(value) for value in feedback.messages[0].values()] == [str, str, int]
    assert (feedback.answer, feedback.state) == ("a", "s")


@pytest.mark.parametrize(("error", "said"), [(None, "the judge is away"), ("no score", "no score")])
def test_a_judge_that_is_away_gives_no_reward_and_says_why(error, said):
    away = Unavailable("the judge is away")

    class Judged(Environment):
        def evaluate(self, episodes):
            return [Feedback(reward=1.0, error=error, unavailable=away) for _ in episodes]

    episode = Episode(prompt=Prompt(messages="a", id="0"), messages=({"role": "user", "content": "a"},))
    (feedback,) = finished(HostedEnvironment(Judged()).evaluate([episode]))
    assert (feedback.reward, feedback.error, feedback.unavailable) == (None, said, away)
