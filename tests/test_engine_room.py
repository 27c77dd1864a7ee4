"""Rollouts end where their engine has no more room: on this machine's CPU, by vLLM and by `local`."""

from __future__ import annotations

import asyncio
import importlib.util

import pytest

from grpo_core.contracts.records import Feedback
from grpo_core.engines.local.engine import LocalEngine
from grpo_core.loop.rollout import RolloutRequest, SamplingParams, play
from grpo_core.testing import FakeEnvironment, FakeRenderer, prompts
from grpo_plugin_devkit.decoding import EngineUnderTest, make_test_model, start_engine

pytestmark = pytest.mark.slow

WITH_VLLM = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make install-vllm"
)


def vllm_engine(setup, **options):
    from grpo_plugin_vllm.engine import VllmEngine

    return VllmEngine(setup, cache_mib=64, **options)


class Numbers(FakeRenderer):
    """Writes each character as a token of the test model, half of which end a completion."""

    stop_token_ids = tuple(range(45))

    def prompt_ids(self, messages, tools=()):
        return tuple(ord(letter) % 90 for message in messages for letter in message["content"])


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("factory", "options", "room"),
    [
        pytest.param(vllm_engine, {"max_model_len": 40}, 40, marks=[WITH_VLLM, pytest.mark.nightly]),
        pytest.param(vllm_engine, {"vllm": {"max_model_len": 50}}, 50, marks=WITH_VLLM),
        (LocalEngine, {}, 256),
    ],
    ids=["max_model_len", "an argument of vLLM", "local"],
)
def test_rollouts_of_several_turns_end_where_the_engine_has_no_more_room(factory, options, room, tmp_path):
    def goes_on(episode):
        return Feedback(reward=1.0, done=False, messages="go on")

    async def story():
        engine = await start_engine(factory, make_test_model(tmp_path), device="cpu", **options)
        await engine.update_weights(EngineUnderTest(engine=engine, model=tmp_path / "m").publish(0))
        assert engine.positions == room
        try:
            return await play(
                [RolloutRequest(prompt=prompts(1)[0], seed=seed, group="g") for seed in range(16)],
                engine=engine,
                environments={"task": FakeEnvironment(goes_on, max_turns=200)},
                renderer=Numbers(),
                sampling=SamplingParams(temperature=1.0, max_tokens=20),
            )
        finally:
            await engine.aclose()

    rows = []
    for rollout in asyncio.run(story()):
        assert rollout.error is None
        (segment,) = rollout.segments
        rows.append(len(segment.prompt_ids) + len(segment.tokens))
        assert rollout.finish_reason == "tokens"
        assert rollout.turns > 1
    assert room - len("go on") <= max(rows) <= room
