"""Tests of the placement `ray` that need no cluster."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("grpo_plugin_ray")

from grpo_core.config import EngineConfig, TrainerConfig
from grpo_core.contracts.errors import ConfigError, PluginError
from grpo_core.plugins.host import PluginHost
from grpo_plugin_ray.cluster import PluginRequirement, absolute, brief
from grpo_plugin_ray.placement import RayPlacement

GRPO = Path(sys.executable).with_name("grpo-core")
NO_RAY = """
import importlib.util as util
find = util.find_spec
util.find_spec = lambda name, *rest: None if name == "ray" else find(name, *rest)
"""


@pytest.mark.long
def test_the_placement_is_chosen_by_name_and_loads_no_ray():
    program = (
        "import sys\n"
        "from grpo_core.config import EngineConfig\n"
        "from grpo_core.plugins.host import PluginHost\n"
        "host = PluginHost.discover()\n"
        "made = host.make('placement', 'ray', host, address='auto')\n"
        "made.check(None, {'engine': EngineConfig(gpus_per_worker=1, env_vars={'A': '1'})})\n"
        "assert made.pooled and made.remote\n"
        "assert 'ray' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def check(engine, trainer=None, ranks=1):
    RayPlacement(plugins=None).check(trainer, {"engine": engine}, ranks)


@pytest.mark.parametrize(
    ("engine", "trainer", "message"),
    [
        (
            EngineConfig(gpus=[0, 1]),
            None,
            r"engine\.gpus = \[0, 1\]: .*; leave it out, and set engine\.gpus_per_",
        ),
        (
            EngineConfig(),
            TrainerConfig(gpus=[7]),
            r"trainer\.gpus = \[7\]: Ray reserves a GPU .* leave it out",
        ),
        (EngineConfig(), TrainerConfig(device="cuda:7"), r'trainer\.device = "cuda:7": Ray reserves a GPU'),
    ],
    ids=str,
)
def test_numbers_of_gpus_are_refused_since_ray_chooses_them(engine, trainer, message):
    with pytest.raises(ConfigError, match=message):
        check(engine, trainer)


def test_ranks_on_gpus_of_this_machine_are_refused():
    with pytest.raises(ConfigError, match=r"trainer\.ranks = 2: Ray reserves one GPU .*name = \"ray\""):
        check(EngineConfig(), TrainerConfig(), ranks=2)


def test_variables_of_workers_may_come_from_this_process(monkeypatch):
    monkeypatch.setenv("HERE", "a secret")
    check(EngineConfig(gpus_per_worker=1, env_vars={"A": "1", "B": "$HERE", "C": "Bearer ${HERE}"}))
    with pytest.raises(ConfigError, match="the environment variable NOT_HERE is not set"):
        check(EngineConfig(env_vars={"A": "$NOT_HERE"}))


@pytest.mark.long
def test_the_plugin_without_ray_names_the_command_that_installs_it_and_starts_nothing(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(NO_RAY)
    done = subprocess.run(
        [GRPO, "train", "--env", "math:sort", "--ray"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "ray is not installed: pip install 'grpo-core[ray]'" in done.stderr
    assert not (tmp_path / "runs").exists()


# ---------------------------------------------------------------------------------- what workers share


def test_versions_that_differ_are_named():
    ours = PluginRequirement.of(PluginHost.discover([]).find("engine", "local"))
    ours.check("here")
    assert ours.plugins.allow == (), "no plugin but the core is loaded"
    assert set(ours.versions) == {"python", "grpo-core"}
    other = PluginRequirement(name="x", versions={**ours.versions, "grpo-core": "9.9", "grpo-none": "1"})
    with pytest.raises(PluginError) as refused:
        other.check("engine 3 (elsewhere)")
    assert "engine 3 (elsewhere): " in str(refused.value)
    assert "(the driver has 9.9), grpo-none is not installed (the driver has 1)" in str(refused.value)


def test_an_engine_of_a_file_is_found_from_any_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert absolute("./mine.py:Engine") == f"{tmp_path}/mine.py:Engine"
    assert absolute("vllm") == "vllm"


def test_rays_words_without_its_identifiers():
    error = RuntimeError(
        "The actor died because of X.\n\tclass_name: EngineWorker\n\tactor_id: 01\nIt was killed."
    )
    assert brief(error) == "RuntimeError: The actor died because of X. It was killed."
