"""The parts of a run are made once, before any of them starts, and closed if one cannot be made."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest
from test_plugins import install  # noqa: F401

from grpo_core.app import making
from grpo_core.app.build import train
from grpo_core.app.launch import new_run
from grpo_core.app.make import make
from grpo_core.app.placement import Devices
from grpo_core.config import build
from grpo_core.contracts.errors import GrpoError
from grpo_core.engines.local.engine import LocalEngine
from grpo_core.plugins.host import PluginHost
from grpo_core.training.process import ProcessTrainer

PARTS = """
import grpo_core as grpo
from grpo_core.app.placement import LocalPlacement
from grpo_core.data.samplers import Mix
from grpo_core.demo.source import TinyModel
from grpo_core.engines.local.engine import LocalEngine
from grpo_core.storage.planes import MemoryPlane
from grpo_core.training.process import ProcessTrainer
from grpo_core.validation.strategies import Greedy

made, closed = [], []
refused = []

def counted(name, base):
    class Counted(base):
        def __init__(self, *args, **options):
            if name in refused:
                raise grpo.ConfigError(f"no {name} here")
            made.append(name)
            super().__init__(*args, **options)

        async def aclose(self):
            closed.append(name)
            if hasattr(super(), "aclose"):
                await super().aclose()

    return Counted

class Numbers(grpo.Environment):
    def prompts(self, split):
        return [grpo.Prompt(messages=f"{i}=", answer=str(i)) for i in range(20)]
    def evaluate(self, episodes):
        return [len(episode.reply) / 8 for episode in episodes]
    def solve(self, prompt):
        return prompt.answer

@grpo.hookimpl
def grpo_environments():
    return {"numbers": Numbers}
@grpo.hookimpl
def grpo_placements():
    return {"counted": counted("placement", LocalPlacement)}
@grpo.hookimpl
def grpo_samplers():
    return {"counted": counted("sampler", Mix)}
@grpo.hookimpl
def grpo_validation_strategies():
    return {"counted": counted("strategy", Greedy)}
@grpo.hookimpl
def grpo_data_planes():
    return {"counted": counted("plane", MemoryPlane)}
@grpo.hookimpl
def grpo_trainers():
    return {"counted": counted("trainer", ProcessTrainer)}
@grpo.hookimpl
def grpo_models():
    return {"counted": counted("model", TinyModel)}
@grpo.hookimpl
def grpo_engines():
    return {"counted": counted("engine", LocalEngine)}
"""
KINDS = ("placement", "sampler", "data_plane", "trainer", "engine")
TABLE = {
    "plugins": ["counted"],
    "tasks": {"numbers": {"env": "numbers"}},
    "model": {"path": "counted", "options": {"warm_start_steps": 1}},
    "trainer": {"steps": 1, "prompts_per_step": 2},
    "rollout": {"group_size": 2},
    "validation": {"name": "counted", "every": 1, "prompts": 2},
    "tracking": {"trackers": []},
}


@pytest.fixture
def counted(install):  # noqa: F811
    install("counted", PARTS)
    PluginHost.discover(["counted"])
    return sys.modules["counted_module"]


def table():
    return {**TABLE, **{kind: {**TABLE.get(kind, {}), "name": "counted"} for kind in KINDS}}


def made_of(tables):
    host = PluginHost.discover(["counted"])
    return make(build([tables], host.sections), host)


def test_a_part_is_made_once_and_passed_on(counted):
    setup = made_of(table())
    assert sorted(counted.made) == ["model", "placement", "plane", "sampler", "strategy"]
    asyncio.run(setup.aclose())
    assert sorted(counted.closed) == sorted(counted.made)
    assert counted.closed == counted.made[::-1], "the last one first"


@pytest.mark.slow
def test_a_run_calls_each_constructor_once(counted, tmp_path):
    start = new_run([table()], {}, output=tmp_path / "run")
    asyncio.run(train(start))
    start.directory.unlock()
    assert sorted(counted.made) == ["engine", "model", "placement", "plane", "sampler", "strategy", "trainer"]
    assert sorted(counted.closed) == sorted(counted.made)


def test_the_parts_made_before_one_that_cannot_be_made_are_closed(counted):
    setup = made_of(table())
    asyncio.run(setup.aclose())
    first, second, third, *_ = counted.made
    counted.made.clear(), counted.closed.clear()
    counted.refused.append(third)
    with pytest.raises(GrpoError, match=f"no {third} here"):
        made_of(table())
    assert counted.made == [first, second]
    assert counted.closed == [second, first]


def test_making_starts_no_process_thread_or_socket(tmp_path, monkeypatch):
    def never(*args, **named):
        raise AssertionError(f"started: {args} {named}")

    config = build([{"tasks": {"sort": {"env": "math:sort"}}}])
    host = PluginHost.discover()
    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "Popen", never)
        patched.setattr(threading.Thread, "start", never)
        patched.setattr("socket.socket.__init__", never)
        setup = make(config, host)
        (engine,) = making.engines(setup, Devices(), str(tmp_path)).values()
        trainer = setup.keep(host.make("trainer", "torch", making.trainer_setup(config, host, str(tmp_path))))
    assert isinstance(engine, LocalEngine)
    assert engine.pid is None
    assert isinstance(trainer, ProcessTrainer)
    asyncio.run(setup.aclose())
