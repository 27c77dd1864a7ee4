"""``grpo-core config`` prints a configuration that a run accepts, and that changes nothing."""

from __future__ import annotations

import re
import tomllib

import attrs
import pytest
from test_cli import grpo, refused

from grpo_core import config
from grpo_core.app.launch import configure
from grpo_core.commands.defaults import text
from grpo_core.config import Config, EngineConfig, PluginChoice, build, parse_setting
from grpo_core.config.meanings import meanings
from grpo_core.config.sections import keys_of
from grpo_core.contracts.errors import ConfigError
from grpo_core.plugins.host import PluginHost
from grpo_plugin_scale.lora import LoraConfig


def read(printed):
    return configure([tomllib.loads(printed)], {})[0]


@pytest.mark.long
@pytest.mark.parametrize(
    "setting",
    [
        "model.path=tiny",
        "model.path=somewhere/else",
        "tasks.sort={ env = 'math:sort', options = { length = 3, 'odd name' = 'x' } }",
        "tasks.sort={ env = 'math:sort', data = 'r.csv', data_options = { answer = 'a', delimiter = ';' } }",
        "optimizer.groups.heads={ parameters = ['*head*'], lr = 1e-6 }",
        "tracking.report.every=3",
        'validation.engine={ name = "vllm", env_vars = { A = "\\"quoted\\"" } }',
    ],
)
def test_what_is_printed_is_accepted_and_changes_nothing(setting):
    expected, _ = configure([], parse_setting(setting))
    assert read(text(settings=[setting])) == expected


@pytest.mark.long
def test_each_key_is_printed_with_its_meaning():
    printed = " ".join(re.sub(r"^# ", "", line) for line in text().splitlines())
    for kind in (each for each in vars(config).values() if isinstance(each, type) and attrs.has(each)):
        for key, meaning in meanings(kind).items():
            if (
                kind is not PluginChoice
                and key in keys_of(kind)
                and meaning
                and key not in ("filters", "tasks", "scores", "groups", "sets", "options")
            ):
                assert f"{meaning} " in printed, f"{key}: {meaning}"


@pytest.mark.long
def test_a_section_is_printed_alone_and_is_that_of_all():
    (table,) = (tomllib.loads(text([section])) for section in ["checkpoint"])
    assert list(table) == ["checkpoint"]
    assert table["checkpoint"] == tomllib.loads(text())["checkpoint"]
    assert set(table["checkpoint"]) == {field.name for field in attrs.fields(Config().checkpoint.__class__)}


def test_a_table_that_is_not_set_can_be_set_by_removing_the_marks():
    printed = text(["model", "validation"])
    set_now = re.sub(r"^#(?=\[(model\.lora|validation\.engine)\]|\w+ = )", "", printed, flags=re.MULTILINE)
    named = set_now.partition("#[validation.sets.NAME]")[0]
    config = build([tomllib.loads(named)], PluginHost.discover().sections)
    assert (config.section(LoraConfig, None), config.validation.engine) == (LoraConfig(), EngineConfig())


def test_an_unknown_section_names_the_nearest_and_all():
    with pytest.raises(
        ConfigError, match=r"no section 'trainr'\. Did you mean 'trainer'\? The sections: seed"
    ):
        text(["trainr"])


@pytest.mark.slow
def test_the_command_prints_what_train_takes(tmp_path):
    done = grpo(tmp_path, "config", "rollout", "--set", "rollout.max_tokens=7")
    assert (done.returncode, tomllib.loads(done.stdout)["rollout"]["max_tokens"]) == (0, 7)
    (tmp_path / "mine.toml").write_text(grpo(tmp_path, "config").stdout)
    assert "no task to train on" in refused(tmp_path, "train", "mine.toml")
    assert "there is no section 'x'" in refused(tmp_path, "config", "x")
