"""The files that a configuration names are found from any directory."""

from __future__ import annotations

from grpo_core.app.paths import plugin_files, with_absolute_paths
from grpo_core.config import build
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
    config = with_absolute_paths(build([given]), PluginHost.discover(()))
    assert dict(config.filters) == {f"{tmp_path}/mine.py:odd": {"most": 3}}
    assert config.tasks["one"].env == f"{tmp_path}/mine.py:Env"
    assert list(config.tracking.trackers) == [f"{tmp_path}/mine.py:Tracker"]
    assert {config.sampler.name, config.loss.name, config.optimizer.name} == {f"{tmp_path}/mine.py:made"}
    assert plugin_files(config) == {tmp_path / "mine.py"}


def test_the_file_of_a_filter_is_watched_for_changes(tmp_path):
    config = build([{"filters": {f"{tmp_path}/mine.py:odd": {}}}])
    assert plugin_files(config) == {tmp_path / "mine.py"}
