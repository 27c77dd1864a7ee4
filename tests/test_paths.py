"""The files that a configuration names are found from any directory."""

from __future__ import annotations

from pathlib import Path

import pytest
from attrs import evolve
from forks import grpo

from grpo_core.app.launch import configure_target, continued, new_run
from grpo_core.app.model_sources import find_target
from grpo_core.app.provenance import file_hashes, plugin_files, with_absolute_paths
from grpo_core.config import as_table, as_toml, build, read_toml
from grpo_core.contracts.errors import PluginError
from grpo_core.plugins.configured import changed, configured
from grpo_core.plugins.host import PluginHost
from grpo_core.plugins.installed import PluginSelection


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


def expected(here):
    return (here / "a.txt", here.parent / "b", [here / "c", Path("/d")], "e.txt")


OPTIONS = {"file": "a.txt", "spare": "../b", "more": ["c", "/d"], "text": "e.txt"}


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "made").mkdir()
    monkeypatch.chdir(tmp_path / "made")
    (tmp_path / "made" / "mine.py").write_text(MINE)
    return tmp_path / "made"


def absolute(given):
    return with_absolute_paths(build([given]), PluginHost.discover())


def made(directory, options):
    """Return the options that a factory gets in a process whose run was started in a directory."""
    host = PluginHost.of(PluginSelection(directory=str(directory)))
    return host.make("environment", f"{directory}/mine.py:Mine", **options).given


def test_options_that_are_annotated_as_paths_count_from_where_the_run_was_started(here, monkeypatch):
    config, host = configured([{"tasks": {"one": {"env": "./mine.py:Mine", "options": OPTIONS}}}])
    config = evolve(with_absolute_paths(config, host), directory=host.selection.directory)
    stored = {
        "file": f"{here}/a.txt",
        "spare": f"{here.parent}/b",
        "more": [f"{here}/c", "/d"],
        "text": "e.txt",
    }
    assert (config.directory, config.tasks["one"].options) == (str(here), stored)
    monkeypatch.chdir("/")
    again, host = configured([as_table(config)])
    assert again == with_absolute_paths(again, host) == config, "what a resumed run compares"
    assert host.make("environment", again.tasks["one"].env, **OPTIONS).given == expected(here)
    assert made(here, OPTIONS) == expected(here)
    assert made(here, {"file": "~/seen"})[0] == Path.home() / "seen"


def test_an_option_whose_text_is_also_the_name_of_a_file_stays_that_text(here, monkeypatch):
    monkeypatch.chdir(here)
    (here / "train").mkdir()
    options = {"data": "train", "path": "train", "env": "train", "name": "train"}
    config = build(
        [{"tasks": {"one": {"env": "math:sort", "options": options}}, "engine": {"options": options}}]
    )
    made = with_absolute_paths(config, PluginHost.discover(()))
    assert made.tasks["one"].options == made.engine.options == options


def test_names_of_files_within_options_are_absolute(here):
    parts = {"mine": {"env": "./mine.py:Mine", "options": {"file": "a.txt"}, "requires": {"right": 1.0}}}
    config = absolute(
        {
            "tasks": {
                "both": {"env": "compose", "options": {"parts": parts}},
                "agent": {
                    "env": "agent:./play.sh",
                    "options": {"reward": "./mine.py:Mine", "data": "long" * 999},
                },
            },
            "filters": {"./mine.py:keep": {"file": "~/seen"}},
        }
    )
    mine = f"{here}/mine.py:Mine"
    own = {"env": mine, "options": {"file": f"{here}/a.txt"}}
    assert config.tasks["both"].options["parts"] == {"mine": {**parts["mine"], **own}}
    assert config.tasks["agent"].env == f"agent:{here}/play.sh"
    assert config.tasks["agent"].options == {"reward": mine, "data": "long" * 999}
    assert config.filters == {f"{here}/mine.py:keep": {"file": str(Path.home() / "seen")}}
    assert plugin_files(config) == {here / "mine.py"}, "a change of it is noticed"


def test_a_text_that_merely_looks_like_a_file_stays_that_text(here):
    options = {"text": "mine.py", "texts": ["mine.py", "x" * 300 + ".py"], "mine.py:Mine": 1}
    config = absolute({"tasks": {"mine.py": {"env": "math:sort", "options": options}}})
    assert config.tasks["mine.py"].options == options
    assert not file_hashes(build([{"tasks": {"a": {"env": "a:b", "options": {"a": f"/{'x' * 300}.py"}}}}]))


def test_a_command_within_options_is_absolute(here):
    parts = {"a": {"env": "mcp:sh ./play.sh"}, "b": {"env": "mine.py"}}
    config = absolute({"tasks": {"one": {"env": "compose", "options": {"parts": parts}}}})
    made = {"a": {"env": f"mcp:sh {here}/play.sh"}, "b": {"env": f"{here}/mine.py"}}
    assert config.tasks["one"].options == {"parts": made}


def test_given_paths_count_from_here_and_those_of_a_run_from_its_directory(here, monkeypatch):
    monkeypatch.setenv("HOME", str(here))
    task = {"env": f"{here}/mine.py:Mine", "options": {"file": "~/a.txt", "spare": "b"}}
    start = new_run([{"directory": "~", "tasks": {"one": task}}], {}, output=here / "run")
    start.directory.unlock()
    stored = read_toml(here / "run" / "config.toml")
    assert stored["directory"] == str(here)
    assert stored["tasks"]["one"]["options"] == {"file": f"{here}/a.txt", "spare": f"{here}/b"}
    monkeypatch.chdir("/")
    monkeypatch.setenv("HOME", "/other")
    resumed = continued(here / "run", {"tasks": {"one": {"options": {"file": "./c"}}}})
    resumed.directory.unlock()
    assert resumed.setup.config.tasks["one"].options == {"file": "/c", "spare": f"{here}/b"}

    own = {"directory": str(here), "filters": {f"{here}/mine.py:keep": {"file": "a"}}}
    (here / "run" / "config.toml").write_text(as_toml(build([own, {"tasks": {"one": task}}])))
    two = {"tasks": {"two": {**task, "options": {"file": "./c"}}}}
    parts = configure_target(find_target(str(here / "run")), two, tasks=True)
    assert list(parts.config.filters.values()) == [{"file": f"{here}/a"}]
    assert {name: each.options for name, each in parts.config.tasks.items()} == {"two": {"file": "/c"}}
    assert two["tasks"]["two"]["options"] == {"file": "./c"}


def nested(file, here=Path()):
    """Return tables with a path in options of parts that no section names directly."""
    options, name = {"file": file, "text": "e.txt"}, f"{here}/mine.py:Mine"
    mine = {"env": name, "options": options}
    return {
        "tasks": {"both": {"env": "compose", "options": {"parts": {"one": mine}, "file": f"./{file}"}}},
        "validation": {"sets": {"hard": {"task": "both", "name": "mine", "options": {"file": file}}}},
        "model": {"path": "mine", "options": {"file": file}},
        "tracking": {"spare": {"file": file}},
    }


def files_of(config):
    inner = config.tasks["both"].options["parts"]["one"]
    assert inner["options"]["text"] == "e.txt"
    chosen = [inner, config.tasks["both"], config.validation.sets["hard"], config.model]
    options = [each["options"] if isinstance(each, dict) else each.options for each in chosen]
    return {each["file"] for each in (*options, config.tracking.options["spare"])}


def test_paths_in_tables_within_options_of_sets_and_models_count_from_where_they_are_given(here, monkeypatch):
    def made(*, file: Path) -> None: ...

    host = PluginHost.discover()
    host.add({"tracker": {"spare": made}, "validation_strategy": {"mine": made}, "model": {"mine": made}})
    there = with_absolute_paths(build([nested("a.txt")], host.sections), host)
    assert files_of(there) == {f"{here}/a.txt"}
    monkeypatch.chdir("/")
    again = evolve(there, directory=str(here))
    assert with_absolute_paths(again, host) == again, "what a resumed run compares"
    assert files_of(with_absolute_paths(changed(again, nested("b", here), host), host)) == {"/b"}


def test_a_path_at_the_end_of_a_name_counts_from_there_as_well(here, monkeypatch):
    (here / "easy").mkdir()
    monkeypatch.chdir("/")
    host = PluginHost.of(PluginSelection(directory=str(here)))
    with pytest.raises(PluginError, match=f"{here}/easy"):
        host.make("environment", "code:harbor:easy")


def test_a_factory_gets_a_path_where_it_expects_one_and_nothing_else_is_one(here):
    host = PluginHost.discover()
    made = host.make("environment", "./mine.py:Mine", **OPTIONS)
    assert made.given == expected(here)
    assert host.make("environment", "./mine.py:Mine", file=Path("a")).given == (here / "a", None, [], "")
    for wrong in (3, ""):
        with pytest.raises(PluginError, match=rf"option 'file' is {wrong!r}; expected Path"):
            host.make("environment", "./mine.py:Mine", file=wrong)
    with pytest.raises(PluginError, match=r"option 'more' is \['a', 3\]; expected"):
        host.make("environment", "./mine.py:Mine", file="a", more=["a", 3])


@pytest.mark.long
@pytest.mark.parametrize(
    "chosen",
    [
        ["--env", "~nobody-here/x.py"],
        ["--env", "math:sort", "--model", "~nobody-here/m"],
        ["--env", "math:sort", "--set", "tasks.sort.data=~nobody-here/d.jsonl"],
        ["--env", "math:sort", "--set", "environment.python=~nobody-here/python"],
    ],
    ids=lambda chosen: chosen[-1],
)
def test_the_home_of_a_user_who_is_not_there_is_a_file_that_is_not_there(chosen, tmp_path):
    done = grpo(tmp_path, "train", *chosen)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "~nobody-here/" in done.stderr
