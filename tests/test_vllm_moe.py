"""Models with experts on real vLLM, on this machine's CPU: it takes and uses what the trainer publishes."""

from __future__ import annotations

import asyncio
import importlib.util

import pytest
from moe import make_moe_model
from test_trainer import batch, ragged, setup

from grpo_core.loop import canary
from grpo_core.loop.agreement import Tolerance
from grpo_core.training.trainer import TorchTrainer
from grpo_plugin_devkit.decoding import ENGINE_LAWS, EngineUnderTest, start_engine
from grpo_plugin_vllm.engine import VllmEngine
from grpo_plugin_vllm.transfer import LAYERWISE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make install-vllm"
    ),
]

PROMPTS = ((5, 6, 7), tuple(range(20, 60)))


@pytest.mark.nightly
@pytest.mark.parametrize(
    "layerwise",
    [
        pytest.param("0", id="in place", marks=pytest.mark.nightly),  # as grpo-plugin-vllm's tests in CI
        pytest.param("1", id="layer by layer, as on a GPU"),
    ],
)
@pytest.mark.parametrize(
    "family",
    [
        "mixtral",
        pytest.param("qwen3_moe", marks=pytest.mark.nightly),
        pytest.param("glm4_moe", marks=pytest.mark.nightly),
    ],
)
def test_vllm_computes_the_trainers_logprobs_after_each_update(family, layerwise, tmp_path, monkeypatch):
    monkeypatch.setenv(LAYERWISE, layerwise)
    model = make_moe_model(tmp_path / "m", family)

    async def story():
        trainer = TorchTrainer(setup(str(model), lr=1e-2))
        engine = await start_engine(VllmEngine, model, max_rows=64, cache_mib=64)
        said = []
        for step in range(3):
            weights = trainer.publish(PROMPTS)
            await engine.update_weights(weights)
            await canary.verify(engine, weights, tolerance=Tolerance(1e-4), deadline=60)
            said.append(weights.canary[0].logprobs[0])
            trainer.step(batch(ragged(), step))
        assert min(abs(said[0] - said[1]), abs(said[1] - said[2])) > 0.01, "updates change the logprobs"
        tried = EngineUnderTest(engine=engine, model=model, version=5, recomputes=True)
        await ENGINE_LAWS["logprobs are those of the model"](tried)
        await ENGINE_LAWS["weights of another model are refused and change nothing"](tried)
        await engine.aclose()

    asyncio.run(story())
