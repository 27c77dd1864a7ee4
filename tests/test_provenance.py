"""Provenance: each start of a run says with which versions and files it was made."""

from __future__ import annotations

import functools
import hashlib
import json
import linecache
import sys
from pathlib import Path

import pytest

import grpo_core
from grpo_core.api.given import given
from grpo_core.app import provenance
from grpo_core.cli import make_app
from grpo_core.config import build
from grpo_core.plugins.host import PluginHost

FILE = "import grpo_core as grpo\n\nclass Game(grpo.Environment):\n    pass\n"


def config_with(path):
    return build([{"tasks": {"game": {"env": f"{path}:Game"}, "sort": {"env": "math:sort"}}}])


def test_a_line_names_the_core_the_plugins_the_libraries_and_the_files_of_environments(tmp_path):
    path = tmp_path / "game.py"
    path.write_text(FILE)
    config, host = config_with(path), PluginHost.discover(["math"])
    provenance.write(tmp_path, config, host)
    (line,) = map(json.loads, (tmp_path / "provenance.jsonl").read_text().splitlines())
    assert line["grpo_core"]["version"] == grpo_core.__version__
    assert set(line["plugins"]) == {"math"}
    assert len(line["plugins"]["math"]["sha256"]) == 64
    assert line["environments"]["sort"]["distribution"] == "grpo-plugin-math"
    assert set(line["files"]) == {str(path)}
    assert {"torch", "transformers", "numpy"} <= set(line["libraries"])
    assert line["resumed_from"] is None


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


def test_the_hash_of_a_package_changes_with_a_name_or_a_content_and_not_with_caches(tmp_path, monkeypatch):
    package = tmp_path / "some_package"
    package.mkdir()
    (package / "__init__.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    first = provenance.package_hash("some_package")
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "a.pyc").write_bytes(b"compiled")
    assert provenance.package_hash("some_package") == first
    (package / "data.txt").write_text("")
    second = provenance.package_hash("some_package")
    (package / "__init__.py").write_text("x = 2\n")
    assert len({first, second, provenance.package_hash("some_package")}) == 3
    assert "some_package" not in sys.modules, "a package is not imported for its hash"
    assert provenance.package_hash("no_such_package") is None


def test_an_object_of_the_program_is_known_by_the_file_that_defines_it():
    def reward(reply, answer):
        return float(reply == answer)

    class Game(grpo_core.Environment):
        pass

    for env in (reward, Game, Game(), functools.partial(Game)):
        made = given({"game": env}, {"train": [{"prompt": "1+1="}]} if env is reward else None, {})
        host = PluginHost.discover([])
        host.add(made.offers)
        known = provenance.of_environment("program:game", host)
        assert known["file"] == __file__
        assert known["sha256"] == hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


def test_what_was_typed_has_the_hash_of_its_text_or_none():
    namespace = {}
    exec("class Typed: ...", namespace)
    assert provenance.code_of(namespace["Typed"]) == {}
    source = "def typed(reply):\n    return 1.0\n"
    linecache.cache["<cell 1>"] = (len(source), None, source.splitlines(keepends=True), "<cell 1>")
    exec(compile(source, "<cell 1>", "exec"), namespace)
    assert provenance.code_of(namespace["typed"]) == {"sha256": hashlib.sha256(source.encode()).hexdigest()}


@pytest.mark.long
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
