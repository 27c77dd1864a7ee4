"""The engine `local` computes what every engine has to."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
from adapted import AdaptedEngine

from grpo_core.engines.local.engine import LocalEngine
from grpo_plugin_devkit.decoding import ENGINE_LAWS, EngineUnderTest, make_test_model, start_engine

pytestmark = pytest.mark.long


@pytest.fixture(scope="module", params=[EngineUnderTest, AdaptedEngine], ids=["weights", "adapters"])
def tried(tmp_path_factory, request):
    model = make_test_model(tmp_path_factory.mktemp("model"))
    with asyncio.Runner() as runner:
        engine = runner.run(start_engine(LocalEngine, model, max_rows=64))
        tried = request.param(engine=engine, model=model, kill=lambda: os.kill(engine.pid, signal.SIGKILL))
        runner.run(engine.update_weights(tried.publish(0)))
        yield runner, tried
        runner.run(engine.aclose())


@pytest.mark.parametrize("law", ENGINE_LAWS)
def test_local_keeps_the_laws_of_decoding(tried, law):
    runner, engine = tried
    runner.run(ENGINE_LAWS[law](engine))
