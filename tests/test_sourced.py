"""``check``, ``audit`` and ``try`` play environments without prompts with those of a file."""

from __future__ import annotations

import json

import pytest

import grpo_core as grpo
from grpo_core.cli import make_app
from grpo_core.contracts.errors import ConfigError
from grpo_plugin_devkit.environments import EnvironmentContract

SPELL = """
import grpo_core as grpo

class Spell(grpo.Environment):
    success = 1.0

    def __init__(self, source="words"):
        self.source = source

    def prompts(self, split):
        raise grpo.ConfigError("give the words with tasks.NAME.data")

    def prompt(self, row):
        if "word" not in row:
            raise grpo.ConfigError(f"prompt {row['id']} has no word")
        word = row["word"]
        return grpo.Prompt(messages=f"Spell {word} of my {self.source}.", answer="-".join(word))

    def evaluate(self, episodes):
        return [float(e.reply == e.prompt.answer) for e in episodes]
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Return a directory with an environment and files of words."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "spell.py").write_text(SPELL)
    for name, words in {
        "train": ["apple", "bread", "cheese", "dates", "eggs", "figs", "grapes", "honey", "ice", "jam"],
        "test": ["kale", "lemon", "mango", "nuts", "apple"],
    }.items():
        rows = [json.dumps({"prompt": "Spell it.", "word": word}) for word in words]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    return tmp_path


DATA = ("--set", "data=train.jsonl")


def ran(capsys, *arguments):
    status = make_app()([*map(str, arguments)], result_action="return_value")
    return status, capsys.readouterr().out


def test_an_environment_is_checked_with_the_prompts_of_its_source(here, capsys):
    status, told = ran(capsys, "check", "./spell.py:Spell", "--set", "data=train.jsonl")
    assert status == 0, told
    assert "prompts to train on: 10" in told
    assert "Spell apple of my words." in told
    assert "nothing will be measured" in told, "there is no source of held-out prompts"


def test_an_option_that_is_called_source_stays_one_of_the_environment(here, capsys):
    status, told = ran(capsys, "check", "./spell.py:Spell", "--set", "source=list")
    assert status == 1
    assert "give the words with tasks.NAME.data" in told


@pytest.mark.parametrize("command", ["check", "audit"])
def test_a_source_that_is_wrong_ends_the_command_before_a_finding(here, capsys, command):
    with pytest.raises(ConfigError, match=r"has no key 'deduplicat'. Did you mean 'deduplicate'"):
        ran(
            capsys,
            command,
            "./spell.py:Spell",
            "--set",
            "data=train.jsonl",
            "--set",
            "data_options.deduplicat=1",
        )
    with pytest.raises(ConfigError, match=r"'none\.jsonl': there is no such file"):
        ran(capsys, command, "./spell.py:Spell", "--set", "data=none.jsonl")
    assert "FAILED" not in capsys.readouterr().out


def test_rows_that_the_environment_refuses_are_a_finding(here, capsys):
    (here / "train.jsonl").write_text('{"prompt": "Spell it."}')
    status, told = ran(capsys, "check", "./spell.py:Spell", "--set", "data=train.jsonl")
    assert status == 1
    assert "prompt 0 has no word" in told


@pytest.mark.long
def test_an_audit_finds_rows_of_the_held_out_file_that_are_trained_on(here, capsys):
    sources = ["--set", "data=train.jsonl", "--set", "validation_data=test.jsonl"]
    _, told = ran(capsys, "audit", "./spell.py:Spell", *sources, "--prompts", 6, "--seconds", 20)
    assert "held-out prompts that are trained on: 1 of 5" in told
    assert "its own solutions: 6 of 6" in told


def test_rows_of_a_file_are_played_by_hand(here, capsys, monkeypatch):
    (here / "replies").write_text("a-p-p-l-e\n")
    with open(here / "replies") as replies:
        monkeypatch.setattr("sys.stdin", replies)
        status, told = ran(capsys, "try", "./spell.py:Spell", "--set", "data=train.jsonl")
    assert status == 0
    assert "Spell apple of my words." in told
    assert "reward 1, a success" in told


@pytest.mark.long
def test_a_class_of_a_test_may_have_a_source(here):
    class Contract(EnvironmentContract):
        environment = "./spell.py:Spell"
        data = {"data": "train.jsonl"}  # noqa: RUF012 - as a user writes it

    Contract().test_the_environment_keeps_its_contract()

    class Listed(Contract):
        environment = Refusing

    with pytest.raises(AssertionError, match="has no vowel"):
        Listed().test_the_environment_keeps_its_contract()


class Refusing(grpo.Environment):
    """An environment of a module, which another process finds by its file."""

    def prompt(self, row):
        raise grpo.ConfigError("it has no vowel")

    def evaluate(self, episodes):
        return [0.0 for _ in episodes]
