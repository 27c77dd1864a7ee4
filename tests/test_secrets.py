"""Keys that a run is given are on no screen and in no file, whoever repeats them."""

from __future__ import annotations

import gzip

import forks
import pytest
from attrs import evolve

import grpo_core as grpo
from grpo_core.config import build
from grpo_core.contracts import events
from grpo_core.contracts.errors import ConfigError
from grpo_core.processes import secrets

SECRET = "sesame-4711-open"
LEAKY = """
import os
import grpo_core as grpo

class Leaky(grpo.Environment):
    max_turns = 2

    def prompts(self, split):
        return [grpo.Prompt(messages=f"{split[0]}{i}=", answer=str(i % 10)) for i in range(40)]

    def evaluate(self, episodes):
        key = os.environ["MY_HIDDEN"]
        print("printed", key)
        if episodes[0].turn == 1:
            return [grpo.Feedback(reward=0.0, done=False, messages=f"said {key}") for e in episodes]
        if episodes[0].prompt.id.endswith("7"):
            raise ValueError(f"raised {key}")
        return [grpo.Feedback(reward=float(e.reply[:1] == e.prompt.answer), answer=key) for e in episodes]
"""


@pytest.fixture(autouse=True)
def nothing_learnt(monkeypatch):
    monkeypatch.setattr(secrets, "_values", {})


def learnt(config=None, **environ):
    secrets.learn(config, environ)
    return secrets.mask().values


def test_variables_that_are_named_as_secrets_or_in_the_configuration_are_hidden():
    environ = {"OPENAI_API_KEY": SECRET, "HF_TOKEN": "hf_abcdef", "MY": "named-1", "OTHER": "not-named"}
    environ |= {"HTTPS_PROXY": "http://me:proxy-password@proxy:80", "HOME": "/root", "USED": "value-of-used"}
    config = {"engine": {"options": {"key": "MY"}}, "environment": {"env_vars": {"A": "Bearer ${USED}"}}}
    assert learnt(config, **environ) == {
        "OPENAI_API_KEY": SECRET,
        "HF_TOKEN": "hf_abcdef",
        "MY": "named-1",
        "HTTPS_PROXY": "proxy-password",
        "USED": "value-of-used",
    }


def test_a_record_without_a_secret_stays_itself_and_one_with_it_is_changed_there_alone():
    learnt(MY_TOKEN=SECRET)
    prompt = grpo.Prompt(messages="1+1=", answer="2", id="0", info={"row": [1, "a"]})
    assert secrets.masked(prompt) is prompt
    leaky = evolve(prompt, info={"row": [1, SECRET], SECRET: 2})
    assert secrets.masked(leaky) == evolve(prompt, info={"row": [1, "$MY_TOKEN"], "$MY_TOKEN": 2})
    event = events.WarningRaised(step=1, cause="x", message=f"no {SECRET}\x1b[2J")
    assert secrets.masked(event).message == "no $MY_TOKEN\x1b[2J"
    assert secrets.inert(event.message) == "no $MY_TOKEN\u241b[2J"


@pytest.mark.parametrize(
    "url",
    ["https://me:pass@host/v1", "https://host/v1?api_key=abcdef", "wss://h/?a=1&access_token=abc"],
)
def test_an_address_of_the_configuration_has_no_secret(url):
    with pytest.raises(ConfigError, match="looks like a secret") as refused:
        build([{"tasks": {"t": {"env": "a:b", "options": {"url": url}}}}])
    assert url not in str(refused.value)
    build([{"tasks": {"t": {"env": "a:b", "options": {"url": "https://host/v1?page=1&max_tokens=3"}}}}])


@pytest.mark.long
def test_no_file_and_no_line_of_a_run_has_a_key_that_its_environment_repeats(tmp_path):
    (tmp_path / "leaky.py").write_text(LEAKY)
    given = {"tasks.leaky.env": "./leaky.py:Leaky", "environment.env_vars.MY_HIDDEN": '"$SESAME"'}
    given |= {"trainer.steps": 2, "trainer.prompts_per_step": 4, "rollout.group_size": 2}
    given |= {"validation.prompts": 8, "model.options.warm_start_steps": 1}
    settings = [part for key, value in given.items() for part in ("--set", f"{key}={value}")]
    done = forks.grpo(tmp_path, "train", *settings, "--output", "run", timeout=240, SESAME=SECRET)
    assert done.returncode == 0, done.stderr
    assert SECRET not in done.stdout + done.stderr
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert any(path.suffix == ".gz" for path in files)
    for path in files:
        data = path.read_bytes()
        data = gzip.decompress(data) if path.suffix == ".gz" else data
        assert SECRET.encode() not in data, path
    assert b"$SESAME" in gzip.decompress(next((tmp_path / "run" / "rollouts").glob("*.gz")).read_bytes())
