"""Configuration: every mistake is one clear message, and what is written can be read again."""

from __future__ import annotations

import os
import tomllib
from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_core.app import launch
from grpo_core.config import Config, as_table, as_toml, build, merge, parse_setting, parse_settings, read_toml
from grpo_core.contracts.errors import ConfigError
from grpo_core.models.files import chat_template

BAD = [
    ({"trainr": {}}, "unknown configuration key 'trainr'. Did you mean 'trainer'?"),
    (
        {"rollout": {"top_p": 0.9}},
        "unknown configuration key 'rollout.top_p'. Training samples from the whole distribution, because "
        "its logprobs are over all tokens; validation.top_p is for validation",
    ),
    ({"trainer": {"lrr": 1}}, "unknown configuration key 'trainer.lrr'. Did you mean 'lr'?"),
    (
        {"tasks": {"a": {"en": "x"}}},
        "unknown configuration key 'tasks.a.en'. Did you mean 'env'?\n"
        "configuration key 'tasks.a.env' is missing",
    ),
    ({"tasks": {"a": {}}}, "configuration key 'tasks.a.env' is missing"),
    ({"trainer": {"lr": "fast"}}, "configuration key 'trainer.lr': expected a number, got 'fast'"),
    ({"trainer": {"steps": 1.5}}, "configuration key 'trainer.steps': expected a whole number, got 1.5"),
    ({"trainer": {"steps": inf}}, "configuration key 'trainer.steps': expected a whole number, got inf"),
    ({"trainer": {"steps": nan}}, "configuration key 'trainer.steps': expected a whole number, got nan"),
    ({"trainer": {"steps": True}}, "configuration key 'trainer.steps': expected a whole number, got True"),
    (
        {"trainer": {"steps": 10**23}},
        "configuration key 'trainer': 'steps' must be <= 1000000000: 1" + "0" * 23,
    ),
    ({"trainer": {"steps": 0}}, "configuration key 'trainer': 'steps' must be >= 1: 0"),
    (
        {"trainer": {"learning_rate": 1}},
        "unknown configuration key 'trainer.learning_rate'. Did you mean 'trainer.lr'?",
    ),
    (
        {"trainer": {"beta": 0.1}},
        "unknown configuration key 'trainer.beta'. Did you mean 'loss.options.kl.coefficient'?",
    ),
    (
        {"trainer": {"num_train_epochs": 1}},
        "unknown configuration key 'trainer.num_train_epochs'. Did you mean 'trainer.epochs'?",
    ),
    ({"reward_funcs": 1}, "unknown configuration key 'reward_funcs'. Did you mean 'reward'?"),
    ({"train_dataset": 1}, "unknown configuration key 'train_dataset'. Did you mean 'data'?"),
    ({"quiet": True}, "unknown configuration key 'quiet'."),
    (
        {"engine": {"max_steps": 5}},
        "unknown configuration key 'engine.max_steps'. Did you mean 'trainer.steps'?",
    ),
    (
        {"engine": {"canary_tolerance": 1}},
        "unknown configuration key 'engine.canary_tolerance'. Did you mean 'health.canary_tolerance'?",
    ),
    (
        {"trainer": {"temperature": 1}},
        "unknown configuration key 'trainer.temperature'. Did you mean 'rollout.temperature'?",
    ),
    (
        {"engine": {"quantization": 1}},
        "unknown configuration key 'engine.quantization'. An option of a plugin is written "
        "'engine.options.quantization'.",
    ),
    (
        {"beta": 0.1},
        "unknown configuration key 'beta'. Did you mean 'loss.options.kl.coefficient'?",
    ),
    ({"rollout": {"stop": [""]}}, "configuration key 'rollout': Length of 'stop' must be >= 1: 0"),
    (
        {"health": {"logprob_diff": [2, 1]}},
        "configuration key 'health': 'logprob_diff' is [2.0, 1.0]: the run would end before it warns; "
        "expected [warn, abort]",
    ),
    (
        {"health": {"effective_sample_size": [0.01, 0.1]}},
        "configuration key 'health': 'effective_sample_size' is [0.01, 0.1]: the run would end before it "
        "warns; expected [warn, abort]",
    ),
    ({"rollout": {"stop": "x"}}, "configuration key 'rollout.stop': expected a list, got 'x'"),
    ({"rollout": {"stop": [3]}}, "configuration key 'rollout.stop[0]': expected a string, got 3"),
    ({"trainer": 3}, "configuration key 'trainer': expected a table, got 3"),
    ({"trainer": {"betas": [1]}}, "configuration key 'trainer.betas': expected a list of 2 values, got [1]"),
    (
        {"pipeline": {"policy": "lifo"}},
        "configuration key 'pipeline.policy': expected 'deadline' or 'in_order', got 'lifo'",
    ),
]


@pytest.mark.parametrize(("table", "message"), BAD, ids=[message for _, message in BAD])
def test_mistakes_are_named_with_their_key(table, message):
    with pytest.raises(ConfigError) as caught:
        build([table])
    assert str(caught.value) == message


def test_all_mistakes_are_reported_together():
    with pytest.raises(ConfigError) as caught:
        build([{"trainer": {"lr": "x", "steps": "y"}, "rollout": {"group_size": "z"}}])
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize(
    ("setting", "table"),
    [
        ("trainer.lr=1e-4", {"trainer": {"lr": 1e-4}}),
        ("tasks.a.options.path=/data/x.jsonl", {"tasks": {"a": {"options": {"path": "/data/x.jsonl"}}}}),
        ('rollout.stop=["\\n"]', {"rollout": {"stop": ["\n"]}}),
        ("a=none", {"a": "none"}),
        ("a=", {"a": ""}),
        ("a=b=c", {"a": "b=c"}),
    ],
)
def test_settings_of_the_command_line(setting, table):
    assert parse_setting(setting) == table


@pytest.mark.parametrize("setting", ["trainer.lr", "=3", ""])
def test_a_setting_without_a_value_is_refused(setting):
    with pytest.raises(ConfigError, match=r"expected section\.key=value"):
        parse_setting(setting)


def test_later_layers_win_key_by_key():
    assert merge({"a": {"b": 1, "c": 2}, "d": [1]}, {"a": {"c": 3}, "d": [2]}) == {
        "a": {"b": 1, "c": 3},
        "d": [2],
    }


def test_a_missing_or_invalid_file_is_one_clear_error(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere.toml: no such file"):
        read_toml(tmp_path / "nowhere.toml")
    (tmp_path / "bad.toml").write_text("steps = = 3")
    with pytest.raises(ConfigError, match=r"bad.toml: not readable as TOML: Invalid value"):
        read_toml(tmp_path / "bad.toml")


def test_a_text_that_no_file_in_utf8_can_have_is_refused_with_its_line():
    """Python has a lone surrogate for each byte of a directory's name that was written in Latin-1."""
    with pytest.raises(ConfigError, match=r"is not UTF-8: 'path = \"b\\udcfcro\"'"):
        build([{"model": {"path": os.fsdecode(b"b\xfcro")}}])


def test_a_text_of_any_length_is_read_once():
    """A search from each of its characters would take minutes."""
    assert "x" * 500_000 in as_toml(build([{"model": {"path": "x" * 500_000}}]))


def test_the_byte_order_mark_of_an_editor_is_no_text_of_a_file(tmp_path):
    (tmp_path / "run.toml").write_bytes(b"\xef\xbb\xbf[trainer]\r\nsteps = 3\r\n")
    assert read_toml(tmp_path / "run.toml") == {"trainer": {"steps": 3}}
    (tmp_path / "mine.jinja").write_bytes(b"\xef\xbb\xbf<user>\r\n{{ messages[0].content }}")
    assert chat_template(str(tmp_path / "mine.jinja")) == "<user>\n{{ messages[0].content }}"


values = st.recursive(
    st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("ab .\"'é", max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


def test_a_path_that_is_not_in_the_working_directory_is_looked_for_next_to_the_file(tmp_path, monkeypatch):
    own, here = tmp_path / "own", tmp_path / "here"
    for directory in (own, here):
        directory.mkdir()
        (directory / "both.py").touch()
    (own / "mine.py").touch()
    names = ["./mine.py:Class", "./both.py", "./none.py", "mine.py"]
    (own / "run.toml").write_text(f"plugins = {names}\n[tasks.a]\nenv = './mine.py'\n")
    monkeypatch.chdir(here)
    tables = read_toml(own / "run.toml")
    assert tables["plugins"] == [f"{own}/mine.py:Class", *names[1:]]
    assert tables["tasks"]["a"]["env"] == f"{own}/mine.py"


@pytest.mark.long
@given(
    options=st.dictionaries(st.text('ab-_. "\\é', max_size=4), values, max_size=4), seed=st.integers(0, 2**31)
)
def test_the_resolved_configuration_can_be_read_again(options, seed):
    config = build([{"seed": seed, "tasks": {"a.b": {"env": "x:y", "options": options}}}])
    assert build([tomllib.loads(as_toml(config))]) == config
    assert build([as_table(config)]) == config


def test_a_tiny_model_brings_defaults_that_the_user_may_change():
    def configured(*layers, **changes):
        return launch.configure(layers, changes)[0]

    tiny = configured()
    assert tiny.model.path == "tiny"
    assert tiny.trainer.lr > Config().trainer.lr
    assert configured({"trainer": {"lr": 0.5}}).trainer.lr == 0.5
    assert tiny.validation.name == "batched"
    assert configured(validation={"name": "other"}).validation.options == {}
    assert configured(model={"path": "some/model"}).trainer == Config().trainer


def test_a_validation_reads_every_option_of_a_task_whatever_its_name():
    from grpo_core.commands.running import MEASURED_BY
    from grpo_core.config import check_settings

    for key in ("weight", "parts.short.weight", "level"):
        settings = parse_settings([f"tasks.sort.options.{key}=1"])
        check_settings(settings, MEASURED_BY, "ignored", but=["tasks.*.weight"])
    with pytest.raises(ConfigError, match=r"tasks\.sort\.weight"):
        check_settings(
            parse_settings(["tasks.sort.weight=1"]), MEASURED_BY, "ignored", but=["tasks.*.weight"]
        )
