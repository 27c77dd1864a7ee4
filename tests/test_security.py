"""The claims of SECURITY.md that no other test shows."""

from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
import safetensors.numpy
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from recording import record
from rich.console import Console

from grpo_core import cli
from grpo_core.commands import complaints
from grpo_core.config import Config, TrackingConfig, as_table, parse_setting
from grpo_core.contracts.errors import ConfigError, Fault
from grpo_core.contracts.events import (
    ErrorRaised,
    GroupsReady,
    IncidentReported,
    PromptSkipped,
    StatusChanged,
    Validated,
    ValidationPlayed,
    WarningRaised,
)
from grpo_core.contracts.records import Group, Prompt, Rollout, RunInfo
from grpo_core.contracts.unicode import inert
from grpo_core.reporting.terminal import TerminalTracker
from grpo_core.text.credentials import secrets_in

CONTROLS = "\x1b]0;title\x07 \x1b[2J\x9b31m\x08 \u202e reply"
"""Sets a title, clears the screen, changes colours (with one byte, too), and turns the direction of text."""


def test_a_completion_cannot_control_the_terminal():
    said = {"role": "assistant", "content": CONTROLS}
    group = Group(
        prompt=Prompt(messages=CONTROLS, environment="sort"),
        rollouts=(Rollout(messages=(said,), reward=1.0),),
        generation_version=0,
        target_version=1,
    )
    shown = io.StringIO()

    class Terminal(TerminalTracker):
        @staticmethod
        def make_console():
            return Console(file=shown, force_terminal=True, color_system=None, width=200)

    terminal = Terminal(RunInfo(name="run", directory=Path("run"), config=as_table(Config())))
    terminal.event(StatusChanged(message="starting"))
    before = len(shown.getvalue())
    terminal.event(GroupsReady(groups=(group,)))
    terminal.close()
    text = shown.getvalue()[before:]
    assert "reply" in text
    for control in ("\x1b]0;", "\x1b[2J\x9b", "\x9b", "\x07", "\x08", "\u202e"):
        assert control not in text


def test_no_text_of_others_controls_the_terminal():
    """Whatever an event quotes: a prompt's id, an environment's error, a warning, a status."""
    shown = io.StringIO()

    class Terminal(TerminalTracker):
        @staticmethod
        def make_console():
            return Console(file=shown, force_terminal=False, color_system=None, width=200)

    terminal = Terminal(RunInfo(name="run", directory=Path("run"), config=as_table(Config())))
    for event in (
        StatusChanged(message=CONTROLS),
        PromptSkipped(task=CONTROLS, prompt=CONTROLS, error=CONTROLS),
        WarningRaised(cause=CONTROLS, message=CONTROLS),
        IncidentReported(kind="died", component=CONTROLS, message=CONTROLS),
        Validated(version=1, results={CONTROLS: {CONTROLS: 0.5}}),
    ):
        terminal.event(event)
    terminal.close()
    text = shown.getvalue()
    assert text.count("reply") >= 5
    assert not set(text) & set("\x07\x08\x1b\x9b\u202e")


@pytest.mark.parametrize("error", ["ConfigError", "OSError", "KeyError"])
def test_an_error_that_quotes_others_controls_no_terminal(error, monkeypatch, capsys):
    def fail(*arguments, **options):
        raise {"ConfigError": ConfigError, "OSError": OSError, "KeyError": KeyError}[error](
            CONTROLS * 100_000
        )

    monkeypatch.setattr(cli, "make_app", lambda chosen: fail)
    with pytest.raises(SystemExit):
        cli.main()
    said = capsys.readouterr().err
    assert "reply" in said
    assert not set(said) & set("\x07\x08\x1b\x9b\u202e")
    assert len(said) < 2 * complaints.LONGEST_ERROR


def test_a_warning_of_the_log_controls_no_terminal():
    program = "import sys; from grpo_core import cli; sys.argv = ['grpo-core', 'plugins']; import logging\n"
    program += "def app(*a, **o): logging.getLogger('x').warning('\\x1b[2J reply'); return 0\n"
    program += "cli.make_app = lambda *_: app; cli.main()"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert "␛[2J reply" in ended.stderr
    assert "\x1b" not in ended.stderr


def test_an_error_of_any_length_is_short_in_events_and_rollouts(tmp_path):
    """An environment put a batch of 50 million characters into its error."""
    long = "begin " + "E" * 1_000_000 + " end"
    rollout = Rollout(error=long)
    group = Group(prompt=Prompt(messages="1+1="), rollouts=(rollout,), generation_version=0, target_version=0)
    told = [
        PromptSkipped(task="a", prompt="p", error=long),
        IncidentReported(kind="died", component="environment", message=long, fault=Fault("E", long, long)),
        ErrorRaised(message=long, fault=Fault("E", long, long)),
        ValidationPlayed(version=0, groups=(group,)),
    ]
    run = record(tmp_path / "run", told, Config(tracking=TrackingConfig(trackers=["files", "report"])))
    for line in (run.path / "events.jsonl").read_text().splitlines():
        assert len(line) < 30_000
    assert (run.path / "report.html").stat().st_size < 200_000
    (rollouts,) = (run.path / "validation").glob("*.gz")
    (row,) = map(json.loads, gzip.decompress(rollouts.read_bytes()).splitlines())
    assert len(row["error"]) < 2_100
    assert row["error"].startswith("begin EEE")
    assert row["error"].endswith("EEE end")


SECRETS = {
    "tasks.words.options.api_key": "SECRET123",
    "tasks.words.options.apiKey": "SECRET123",
    "tasks.words.options.judge.openai_api_key": "SECRET123",
    "tasks.words.options.hf_token": "SECRET123",
    "tasks.words.options.password": "SECRET123",
    "engine.options.headers.Authorization": "Bearer SECRET123",
    "engine.env_vars.HF_TOKEN": "SECRET123",
    "sampler.options.client_secret": "SECRET123",
    "tracking.files.token": "SECRET123",
}
NO_SECRETS = {
    "tasks.words.options.max_tokens": "100",
    "tasks.words.options.eos_token": "</s>",
    "tasks.words.options.sort_key": "name",
    "tasks.words.options.key": "answer",
    "tasks.words.options.monkey": "x1",
    "tasks.token.options.length": "3",
    "engine.options.url": "http://127.0.0.1:8000/v1",
    "engine.env_vars.HF_TOKEN": "$HF_TOKEN",
    "tasks.words.env_vars.AUTHORIZATION": "Bearer $HF_TOKEN",
    "tasks.words.env_vars.STORE": "postgresql://me:${PASSWORD}@localhost/words",
    "tasks.words.env_vars.COMMAND": "server --api-key $KEY",
    "tasks.words.env": "openenv:http://127.0.0.1:8000/play?size=3&key=42&sort_key=name",
    "tasks.tools.env": "mcp:python server.py --token-limit 20 --key /etc/server.pem --verbose --port 80",
    "tasks.maps.env": "./models/sk-learn-models-v2-of-maps-3.py:Maps",
    "tasks.words.options.rubric": "Basic understanding of tokens? Say: user@example.com, at 10:30 @home.",
    "tasks.words.options.template": "{{ prompt }}?token={{ token }} and --password $PASSWORD",
    "tasks.words.data_options.template": "token: {{ token }}, key: {{ key }}",
    "model.path": "Qwen/Qwen3-0.6B",
}


@pytest.mark.parametrize("key", SECRETS)
def test_a_secret_in_the_configuration_is_refused_before_anything_is_written(
    key, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        sys, "argv", ["grpo-core", "train", "--env", "math:sort", "--set", f"{key}={SECRETS[key]}"]
    )
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr()
    assert ended.value.code == 2
    assert f"configuration key '{key}' looks like a secret" in said.err
    assert "environment variable" in said.err
    assert "SECRET123" not in said.err + said.out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("key", NO_SECRETS)
def test_an_ordinary_option_is_not_a_secret(key):
    assert not list(secrets_in(parse_setting(f"{key}={NO_SECRETS[key]}")))


@given(st.text())
def test_inert_text_has_only_characters_that_print(text):
    shown = inert(text)
    for character in shown.replace("\n", "").replace("\t", ""):
        assert unicodedata.category(character) not in ("Cc", "Cs")
    assert unicodedata.bidirectional("\u202e") not in {unicodedata.bidirectional(c) for c in shown}
    assert inert(shown) == shown


CODE = "from pathlib import Path\nPath({mark!r}).touch()\nclass Theirs: pass\n"


@pytest.mark.slow
@pytest.mark.parametrize("part", ["tokenizer", "model"])
def test_code_that_comes_with_a_model_is_not_run_by_default(tmp_path: Path, part: str):
    mark, model = tmp_path / "it-ran", tmp_path / "model"
    model.mkdir()
    (model / "theirs.py").write_text(CODE.format(mark=str(mark)))
    (model / "model.safetensors").write_bytes(safetensors.numpy.save({}))
    code = {"AutoConfig": "theirs.Theirs", "AutoModelForCausalLM": "theirs.Theirs"}
    (model / "config.json").write_text(json.dumps({"model_type": "theirs", "auto_map": code}))
    if part == "tokenizer":
        named = {"tokenizer_class": "Theirs", "auto_map": {"AutoTokenizer": ["theirs.Theirs", None]}}
    else:
        named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
        letters = dict.fromkeys(["<end>", *"0123456789="])
        words = tokenizers.models.WordLevel({letter: i for i, letter in enumerate(letters)}, "<end>")
        tokenizers.Tokenizer(words).save(str(model / "tokenizer.json"))
    (model / "tokenizer_config.json").write_text(json.dumps(named))
    program = [sys.executable, "-c", "from grpo_core.cli import main; main()", "train", "--env", "math:sort"]
    environ = os.environ | {"HF_HUB_OFFLINE": "1"}
    settings = ["--set", f"model.path={model}", "--output", "run"]
    ended = subprocess.run(
        [*program, *settings], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode not in (0, -9), ended.stdout
    assert "contains custom code" in ended.stderr
    assert not mark.exists()
