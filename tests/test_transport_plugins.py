"""A transport of a plugin carries the weights of whole runs."""

from __future__ import annotations

import os
import re
import sys

import pytest
from forks import grpo
from parts_kept import check_transport

from grpo_core.app import making
from grpo_core.app.placement import LocalPlacement
from grpo_core.config import Config, EngineConfig
from grpo_core.contracts.errors import GrpoError, PluginError
from grpo_core.plugins import transports
from grpo_core.plugins.host import PluginHost

PLUGIN = """
import json, os
import grpo_core as grpo

@grpo.hookimpl
def grpo_transports():
    return {"spool": grpo.Transport(writer="spool_weights:writer", reader="spool_weights:reader")}
"""
UNLISTED = """
import os, sys
with open(os.path.join(os.path.dirname(os.environ["SPOOL"]), "imported"), "a") as file:
    file.write(f"{sys.argv}\\n")
"""
WEIGHTS = '''
import mmap, os, tempfile
import torch
from attrs import evolve
from grpo_core.kit import SharedMemoryWriter

SPOOL = os.environ["SPOOL"]

class Writer:
    """Writes each version into a file of a directory that is shared."""
    def __init__(self, ranks):
        self.memory = SharedMemoryWriter(ranks)
    def write(self, version, tensors, *, dtype=None):
        weights = self.memory.write(version, tensors, dtype=dtype)
        path = os.path.join(SPOOL, f"version-{version}")
        with open(weights.location, "rb") as source, open(path, "wb") as file:
            file.write(source.read(weights.nbytes))
        return evolve(weights, location=f"spool:{path}")

def writer(setup, device, ranks):
    return Writer(ranks)

def reader(weights, device):
    with open(weights.location.removeprefix("spool:"), "rb") as file:
        return torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)
'''


@pytest.fixture
def installed(tmp_path, monkeypatch):
    info = tmp_path / "site" / "spool-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: spool\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[grpo_core]\nspool = spool_plugin\n")
    (info.parent / "spool_plugin.py").write_text(PLUGIN)
    (info.parent / "spool_weights.py").write_text(WEIGHTS)
    unlisted = tmp_path / "site" / "unlisted-1.0.dist-info"
    unlisted.mkdir()
    (unlisted / "METADATA").write_text("Metadata-Version: 2.1\nName: unlisted\nVersion: 1.0\n")
    (unlisted / "entry_points.txt").write_text("[grpo_core]\nunlisted = unlisted_plugin\n")
    (info.parent / "unlisted_plugin.py").write_text(UNLISTED)
    (tmp_path / "spool").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(info.parent))
    monkeypatch.setenv("SPOOL", str(tmp_path / "spool"))
    monkeypatch.syspath_prepend(str(info.parent))
    monkeypatch.setattr(transports, "_found", {})
    for module in ("spool_plugin", "spool_weights"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    return tmp_path


SMALL = [
    "trainer.steps=2", "trainer.prompts_per_step=2", "rollout.group_size=2", "validation.prompts=2",
    "model.options.warm_start_steps=0",
]  # fmt: skip


def train(directory, *settings):
    words = [word for setting in (*SMALL, *settings) for word in ("--set", setting)]
    return grpo(directory, "train", "--env", "math:sort", "--output", "run", *words, timeout=300)


@pytest.mark.slow
def test_a_transport_of_a_plugin_carries_the_weights_of_a_run(installed):
    done = train(installed, "engine.transport=spool")
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(os.listdir(installed / "spool")) == ["version-0", "version-1", "version-2"]


@pytest.mark.nightly
def test_no_process_of_a_run_looks_for_a_transport_among_plugins_that_are_not_allowed(installed):
    done = train(installed, "engine.transport=spool", 'plugins=["math", "spool"]')
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(os.listdir(installed / "spool")) == 3
    assert not (installed / "imported").exists(), (installed / "imported").read_text()


@pytest.mark.long
def test_an_unknown_transport_is_refused_before_anything_starts(tmp_path):
    done = train(tmp_path, "engine.transport=shn")
    assert done.returncode == 2
    assert "there is no transport 'shn'. Did you mean 'shm'" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_transport_that_is_not_installed_is_refused_with_the_command_that_installs_it():
    config = Config(engine=EngineConfig(transport="collective"))
    host = PluginHost.discover(allow=[])
    with pytest.raises(
        PluginError, match="there is no transport 'collective': pip install grpo-plugin-scale"
    ):
        assert making.transport_of(config.engine, None, host, LocalPlacement(host), "")
    config = Config(engine=EngineConfig(transport_options={"ports": [1, 2]}))
    with pytest.raises(PluginError, match=r"transport 'shm' .* has no option 'ports'"):
        assert making.transport_of(config.engine, None, host, LocalPlacement(host), "")


@pytest.mark.parametrize("name", ["shm", "cuda_ipc", "collective"])
def test_the_transports_of_the_project_keep_their_contract(name):
    check_transport(name)


@pytest.mark.long
def test_a_transport_of_a_plugin_is_checked(installed):
    check_transport("spool")


@pytest.mark.parametrize(
    ("right", "wrong", "told"),
    [
        ('f"spool:{path}"', 'f"spoon:{path}"', "there is no transport 'spoon'. Did you mean 'spool'"),
        ("bytearray(file.read())", "bytearray(b'!' + file.read()[1:])", "checksum"),
    ],
)
def test_a_transport_that_is_not_read_as_written_is_refused(installed, right, wrong, told):
    assert right in WEIGHTS
    (installed / "site" / "spool_weights.py").write_text(WEIGHTS.replace(right, wrong))
    with pytest.raises((AssertionError, GrpoError), match=re.escape(told)):
        check_transport("spool")
