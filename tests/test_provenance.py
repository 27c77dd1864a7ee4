"""Provenance: each start of a run says with which versions and files it was made."""

from __future__ import annotations

import json

import pytest

import grpo_core
from grpo_core.app import provenance
from grpo_core.cli import make_app
from grpo_core.config import build
from grpo_core.plugins.host import PluginHost

FILE = "import grpo_core as grpo\n\nclass Game(grpo.Environment):\n    pass\n"


def config_with(path):
    return build([{"tasks": {"game": {"env": f"{path}:Game"}, "sort": {"env": "math:sort"}}}])


def test_a_line_names_the_core_the_plugins_the_libraries_and_the_files_of_environments(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["/usr/bin/grpo-core", "train", "--set", "name=a b"])
    path = tmp_path / "game.py"
    path.write_text(FILE)
    config, host = config_with(path), PluginHost.discover(["math"])
    provenance.write(tmp_path, config, host)
    (line,) = map(json.loads, (tmp_path / "provenance.jsonl").read_text().splitlines())
    assert line["grpo_core"] == grpo_core.__version__
    assert line["plugins"] == {"math": f"grpo-plugin-math {grpo_core.__version__}"}
    assert set(line["files"]) == {str(path)}
    assert {"torch", "transformers", "numpy"} <= set(line["libraries"])
    assert line["resumed_from"] is None
    assert line["command"] == "grpo-core train --set 'name=a b'"


def test_a_start_with_another_file_adds_a_line_with_another_hash(tmp_path):
    path = tmp_path / "game.py"
    path.write_text(FILE)
    config, host = config_with(path), PluginHost.discover(["math"])
    provenance.write(tmp_path, config, host)
    path.write_text(FILE + "# corrected\n")
    provenance.write(tmp_path, config, host, resumed_from=4)
    before, after = map(json.loads, (tmp_path / "provenance.jsonl").read_text().splitlines())
    assert before["files"] != after["files"]
    assert before["plugins"] == after["plugins"]
    assert after["resumed_from"] == 4


@pytest.mark.slow
def test_a_run_and_what_it_is_validated_by_have_their_provenance(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = {"trainer.steps": 1, "trainer.prompts_per_step": 2, "rollout.group_size": 2}
    settings |= {"validation.every": 0, "model.options.warm_start_steps": 1, "validation.prompts": 2}
    sets = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    assert (
        make_app()(["train", "--env", "math:sort", "--output", "run", *sets], result_action="return_value")
        == 0
    )
    assert make_app()(["validate", "run", "--output", "measured"], result_action="return_value") == 0
    lines = [json.loads((tmp_path / d / "provenance.jsonl").read_text()) for d in ("run", "measured")]
    assert lines[0]["grpo_core"] == lines[1]["grpo_core"]
