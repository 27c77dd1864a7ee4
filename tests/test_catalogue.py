"""The catalogue of environments says what is offered, and the checks that it names pass."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest
from forks import grpo

from grpo_core.plugins.host import PluginHost

ROOT = Path(__file__).parent.parent
SPEC = importlib.util.spec_from_file_location("_catalogue", ROOT / "docs" / "_catalogue.py")
catalogue = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(catalogue)

ENTRIES = list(catalogue.entries())
COMMANDS = [
    match[1] for _, entry in ENTRIES if (match := re.fullmatch(r"`(grpo-core check .*)`", entry["check"]))
]


def test_each_entry_names_an_environment_that_its_distribution_offers():
    host = PluginHost.discover()
    for name, entry in ENTRIES:
        if not entry["env"].startswith("./"):
            assert host.find("environment", entry["env"]).plugin.distribution == name, entry["env"]


def test_each_distribution_of_environments_describes_itself():
    listed = {name for name, _ in ENTRIES}
    for path in sorted(ROOT.glob("plugins/*/pyproject.toml")):
        described = tomllib.loads(path.read_text())
        if catalogue.offers_environments(described, path.parent):
            assert described["project"]["name"] in listed, f"{path}: add [[tool.grpo-core.catalogue]]"


def test_an_entry_without_a_key_is_refused(tmp_path, monkeypatch):
    text = '[project]\nname = "p"\n[[tool.grpo-core.catalogue]]\nformat = "x"\n'
    (tmp_path / "pyproject.toml").write_text(text)
    monkeypatch.setattr(catalogue, "ROOT", tmp_path)
    with pytest.raises(ValueError, match="has the keys format, env"):
        catalogue.page()


def test_what_was_seen_of_an_environment_that_nobody_offers_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(catalogue, "TESTED", tmp_path / "tested.json")
    catalogue.TESTED.write_text('{"nowhere:URL": {}}')
    with pytest.raises(ValueError, match="nowhere:URL has to be offered"):
        catalogue.page()


@pytest.mark.long
@pytest.mark.parametrize("command", COMMANDS)
def test_the_checks_that_it_names_pass(command):
    if "gym:" in command and "reasoning" not in command:
        pytest.importorskip("gymnasium", reason="gymnasium is not installed")
    done = grpo(ROOT, *command.split()[1:])
    assert done.returncode == 0, done.stdout + done.stderr
