"""The files that a configuration names are found from any directory."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from grpo_core.app.paths import plugin_files, with_absolute_paths
from grpo_core.config import build
from grpo_core.contracts.errors import PluginError
from grpo_core.plugins.host import PluginHost


def test_every_plugin_in_a_file_has_an_absolute_path_in_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("")
    of_a_kind = {"name": "./mine.py:made"}
    given = {
        "tasks": {"one": {"env": "./mine.py:Env"}},
        "filters": {"./mine.py:odd": {"most": 3}},
        "tracking": {"trackers": ["./mine.py:Tracker"]},
        **dict.fromkeys(("sampler", "engine", "loss", "advantage", "optimizer", "trainer"), of_a_kind),
    }
    given["trainer"] = {**of_a_kind, "lr_schedule": "./mine.py:rate"}
    config = with_absolute_paths(build([given]), PluginHost.discover(()))
    assert dict(config.filters) == {f"{tmp_path}/mine.py:odd": {"most": 3}}
    assert config.tasks["one"].env == f"{tmp_path}/mine.py:Env"
    assert list(config.tracking.trackers) == [f"{tmp_path}/mine.py:Tracker"]
    assert {config.sampler.name, config.loss.name, config.optimizer.name} == {f"{tmp_path}/mine.py:made"}
    assert config.trainer.lr_schedule == f"{tmp_path}/mine.py:rate"
    assert plugin_files(config) == {tmp_path / "mine.py"}


def test_the_file_of_a_filter_is_watched_for_changes(tmp_path):
    config = build([{"filters": {f"{tmp_path}/mine.py:odd": {}}}])
    assert plugin_files(config) == {tmp_path / "mine.py"}


# ---------------------------------------------------------------------------------- options of plugins

MINE = """
from collections.abc import Sequence
from pathlib import Path

class Mine:
    def __init__(self, file: Path, *, spare: Path | None = None, more: Sequence[Path] = (), text: str = ""):
        self.given = (file, spare, list(more), text)
    def prompts(self, split): return []
    def evaluate(self, episodes): return []

def keep(group, *, file: "Path | None" = None): return None
"""
OPTIONS = {"file": "a.txt", "spare": "../b", "more": ["c", "/d"], "text": "e.txt"}


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "made").mkdir()
    monkeypatch.chdir(tmp_path / "made")
    (tmp_path / "made" / "mine.py").write_text(MINE)
    return tmp_path / "made"


def absolute(given):
    return with_absolute_paths(build([given]), PluginHost.discover())


def test_options_that_are_annotated_as_paths_count_from_where_the_run_was_made(here):
    expected = {
        "file": f"{here}/a.txt",
        "spare": f"{here.parent}/b",
        "more": [f"{here}/c", "/d"],
        "text": "e.txt",
    }
    own = {"env": "./mine.py:Mine", "python": sys.executable}  # a file that is not imported in this process
    config = absolute(
        {
            "tasks": {
                "one": {"env": "./mine.py:Mine", "options": OPTIONS},
                "other": {**own, "options": OPTIONS},
            },
            "validation": {"sets": {"held": {"env": "./mine.py:Mine", "env_options": OPTIONS}}},
            "filters": {"./mine.py:keep": {"file": "~/seen"}},
        }
    )
    assert [task.options for task in config.tasks.values()] == [expected, expected]
    assert config.validation.sets["held"].env_options == expected
    assert config.filters == {f"{here}/mine.py:keep": {"file": str(Path.home() / "seen")}}


def test_environments_that_are_not_imported_and_parts_of_others_have_absolute_paths(here):
    url = "nemo_gym:http://127.0.0.1:8000"
    rows = {"path": "train.jsonl", "answer": "train.jsonl"}
    parts = {
        "right": {"env": url, "options": rows},
        "mine": {"env": "./mine.py:Mine", "options": {"file": "a.txt"}, "requires": {"right": 1.0}},
    }
    program = {"env": "agent:./play.sh", "options": {"reward": "./mine.py:Mine"}}
    config = absolute(
        {
            "tasks": {
                "sums": {"env": url, "options": rows},
                "both": {"env": "compose", "options": {"parts": parts}},
                "agent": program,
            }
        }
    )
    expected = {"path": f"{here}/train.jsonl", "answer": "train.jsonl"}
    assert config.tasks["sums"].options == expected
    assert config.tasks["both"].options["parts"] == {
        "right": {"env": url, "options": expected},
        "mine": {
            "env": f"{here}/mine.py:Mine",
            "options": {"file": f"{here}/a.txt"},
            "requires": {"right": 1.0},
        },
    }
    assert config.tasks["agent"].options == {"reward": f"{here}/mine.py:Mine"}
    assert plugin_files(config) == {here / "mine.py"}, "a change of it is noticed"


def test_options_in_the_section_of_a_plugin_count_from_where_the_run_was_made(here):
    host = PluginHost.discover()
    audit = {"second_opinion": "./mine.py:Mine", "options": {"file": "a.txt", "text": "e.txt"}}
    config = with_absolute_paths(build([{"audit": audit}], host.sections), host)
    (values,) = (each.values for each in config.sections if each.name == "audit")
    assert values["second_opinion"] == f"{here}/mine.py:Mine"
    assert values["options"] == {"file": f"{here}/a.txt", "text": "e.txt"}


def test_a_path_at_the_end_of_a_name_is_absolute_if_the_factory_expects_one(here):
    names = {"one": "code:harbor:tasks/easy", "two": "math:sort", "three": "agent:play --at tasks"}
    config = absolute({"tasks": {name: {"env": env} for name, env in names.items()}})
    found = {name: task.env for name, task in config.tasks.items()}
    assert found == {**names, "one": f"code:harbor:{here}/tasks/easy"}


def test_options_of_what_is_not_here_stay_as_they_are(here):
    given = {"env": "nowhere:game", "python": sys.executable, "options": {"file": "a.txt"}}
    assert absolute({"tasks": {"one": given}}).tasks["one"].options == {"file": "a.txt"}


def test_a_factory_gets_a_path_where_it_expects_one_and_nothing_else_is_one(here):
    host = PluginHost.discover()
    made = host.make("environment", "./mine.py:Mine", **OPTIONS)
    assert made.given == (here / "a.txt", here.parent / "b", [here / "c", Path("/d")], "e.txt")
    assert host.make("environment", "./mine.py:Mine", file=Path("a")).given == (here / "a", None, [], "")
    for wrong in (3, ""):
        with pytest.raises(PluginError, match=rf"option 'file' is {wrong!r}; expected Path"):
            host.make("environment", "./mine.py:Mine", file=wrong)
