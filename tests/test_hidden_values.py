"""Values of variables that ``env_vars`` takes from the run's process reach environments, and no file."""

from __future__ import annotations

import asyncio
import json
import textwrap

import pytest
from attrs import evolve

from grpo_core.config import EnvironmentConfig
from grpo_core.contracts.errors import ConfigError, PluginError, Unavailable
from grpo_core.contracts.incidents import reported_to
from grpo_core.contracts.records import Episode, Prompt
from grpo_core.environments.process import EnvironmentProcess, EnvironmentSpec
from grpo_core.processes.interpreters import from_here
from grpo_core.text.credentials import SHORTEST, Mask

pytestmark = pytest.mark.long

SECRET = "hunter2/hunter2"
LEAKY = '''
    import os, subprocess
    import grpo_core as grpo

    KEY = os.environ["JUDGE_KEY"]

    def ask(question: str) -> str:
        """Asks the judge.

        Args:
            question: what it is asked
        """
        raise ValueError(f"401 for key={KEY}")

    class Leaky(grpo.Environment):
        max_turns = 2
        tools = (ask,)

        def __init__(self, fails: bool = False):
            if fails:
                raise ValueError(f"no server for {KEY}")

        def prompts(self, split):
            return [grpo.Prompt(messages="?", answer="x")]

        def open(self, prompt):
            if prompt.id == "closed":
                raise ValueError(f"closed for {KEY}")

        def evaluate(self, episodes):
            return [getattr(self, episode.reply)() for episode in episodes]

        def raises(self):
            raise ValueError(f"401 for https://judge.example/v1?key={KEY}")

        def unavailable(self):
            raise grpo.Unavailable(f"no server for {os.environ['JUDGE_HEADER']}")

        def says(self):
            return grpo.Feedback(error=f"the judge refused {KEY}")

        def prints(self):
            print("my key is", KEY)
            return 1.0

        def answers(self):
            return grpo.Feedback(done=False, messages=f"your key is {KEY}")

        def dies(self):
            subprocess.run(["sh", "-c", "echo child: $JUDGE_KEY"])
            os._exit(3)
'''


@pytest.fixture
def leaky(tmp_path, monkeypatch):
    monkeypatch.setenv("KEY_OF_TODAY", SECRET)
    file = tmp_path / "leaky.py"
    file.write_text(textwrap.dedent(LEAKY))
    return f"{file}:Leaky"


def feedback_on(leaky, reply, tmp_path, tool=False):
    """Return the feedback, the incidents and the log."""
    given = {"JUDGE_KEY": "$KEY_OF_TODAY", "JUDGE_HEADER": "Bearer ${KEY_OF_TODAY}"}
    message = {"role": "assistant", "content": reply}
    if tool:
        call = {"name": "ask", "arguments": {"question": "?"}}
        message["tool_calls"] = [{"id": "1", "type": "function", "function": call}]

    async def story():
        log = tmp_path / "log"
        config = EnvironmentConfig(env_vars=given)
        process = EnvironmentProcess(EnvironmentSpec(task="play", env=leaky, config=config, log=log))
        prompt, incidents = Prompt(messages="?", id="0"), []
        try:
            with reported_to(incidents.append):
                await process.open({"s": prompt})
                (feedback,) = await process.evaluate(
                    [Episode(prompt=prompt, messages=(message,), session="s")]
                )
            return feedback, incidents, log.read_text()
        finally:
            await process.aclose()

    return asyncio.run(story())


@pytest.mark.parametrize(
    ("reply", "told"),
    [
        ("raises", "ValueError: 401 for https://judge.example/v1?key=$KEY_OF_TODAY"),
        ("unavailable", "no server for Bearer $KEY_OF_TODAY"),
        ("says", "the judge refused $KEY_OF_TODAY"),
        ("dies", "child: $KEY_OF_TODAY"),
    ],
)
def test_an_error_of_an_environment_does_not_show_the_values_of_its_variables(leaky, reply, told, tmp_path):
    feedback, incidents, _ = feedback_on(leaky, reply, tmp_path)
    assert told in feedback.error
    assert SECRET not in f"{feedback}{feedback.fault}{incidents}"


def test_what_an_environment_prints_is_logged_without_the_values_of_its_variables(leaky, tmp_path):
    feedback, _, log = feedback_on(leaky, "prints", tmp_path)
    assert feedback.reward == 1.0
    assert "my key is $KEY_OF_TODAY" in log
    assert SECRET not in log


def test_the_error_of_a_tool_that_the_model_reads_has_no_value(leaky, tmp_path):
    feedback, *_ = feedback_on(leaky, "", tmp_path, tool=True)
    (answer,) = feedback.messages
    assert answer["content"] == "error: ValueError: 401 for key=$KEY_OF_TODAY"


def test_what_an_environment_says_to_the_model_is_not_changed(leaky, tmp_path):
    feedback, *_ = feedback_on(leaky, "answers", tmp_path)
    assert feedback.messages[0]["content"] == f"your key is {SECRET}"


def test_an_environment_that_cannot_be_made_or_opened_does_not_show_a_value(leaky, tmp_path):
    config = EnvironmentConfig(env_vars={"JUDGE_KEY": "$KEY_OF_TODAY"})

    async def story():
        spec = EnvironmentSpec(task="play", env=leaky, config=config, log=tmp_path / "log")
        process = EnvironmentProcess(spec)
        try:
            (start,) = await process.open({"s": Prompt(messages="?", id="closed")})
        finally:
            await process.aclose()
        failing = EnvironmentProcess(evolve(spec, options={"fails": True}))
        try:
            with pytest.raises(PluginError) as refused:
                await failing.start()
        finally:
            await failing.aclose()
        return start.error, refused.value

    error, refused = asyncio.run(story())
    assert "closed for $KEY_OF_TODAY" in error
    assert "no server for $KEY_OF_TODAY" in str(refused)
    assert SECRET not in f"{error}{refused}{refused.__cause__}"


def test_a_value_is_found_as_urls_json_and_python_write_it():
    mask = Mask({"KEY": 'a/b"c\\d é', "LONGER": 'a/b"c\\d é and more', "FLAG": "true"})
    shown = ["key=a/b%22c%5Cd%20%C3%A9", "key=a%2Fb%22c%5Cd%20%C3%A9", "key=" + 'a/b"c\\d é']
    shown += ["key=" + text[1:-1] for text in (repr('a/b"c\\d é'), json.dumps('a/b"c\\d é'))]
    for text in shown:
        assert mask(text) == "key=$KEY"
    assert mask('a/b"c\\d é and more') == "$LONGER"
    assert mask("it is true") == "it is true", f"a value of fewer than {SHORTEST} characters is no secret"
    assert "a/b" not in repr(mask)


def test_a_hidden_error_is_of_the_same_kind_and_another_one_stays_itself():
    mask, other = Mask({"KEY": SECRET}), ValueError("nothing")
    assert mask.error(other) is other
    hidden = mask.error(Unavailable(f"no {SECRET}"))
    assert isinstance(hidden, Unavailable)
    assert str(hidden) == "no $KEY"


def test_a_value_may_have_variables_inside(monkeypatch):
    monkeypatch.setenv("TOKEN", "t1")
    given = {
        "AUTH": "Bearer $TOKEN",
        "STORE": "postgresql://me:${TOKEN}x@localhost",
        "PRICE": "5$ or $5",
        "NAME": "a $$TOKEN",
    }
    assert from_here(given, "environment.env_vars") == {
        "AUTH": "Bearer t1",
        "STORE": "postgresql://me:t1x@localhost",
        "PRICE": "5$ or $5",
        "NAME": "a $TOKEN",
    }
    told = (
        r"environment\.env_vars\.AUTH: the environment variable NOWHERE is not set; write \$\$ for a dollar"
    )
    with pytest.raises(ConfigError, match=told):
        from_here({"AUTH": "Bearer $NOWHERE"}, "environment.env_vars")
