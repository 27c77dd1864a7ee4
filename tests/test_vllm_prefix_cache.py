"""The core's rollouts find the tokens of earlier turns in vLLM's prefix cache, on this machine's CPU."""

from __future__ import annotations

import asyncio
import importlib.util

import pytest

from grpo_core.contracts.records import Feedback, Prompt
from grpo_core.loop.rollout import RolloutRequest, SamplingParams, play
from grpo_core.testing import FakeEnvironment
from grpo_core.text.rendering import Renderer
from grpo_plugin_devkit.decoding import EngineUnderTest, make_test_model, start_engine
from grpo_plugin_scale.engines.pool import EnginePool

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make install-vllm"
    ),
]

BLOCK = 32
"""Number of tokens in a block of the cache on a CPU; only full blocks are found again."""


class TwoTurns(FakeEnvironment):
    """Asks for a second turn once all first turns are over, and reads the caches in between."""

    def __init__(self, engines, rollouts):
        super().__init__(max_turns=2)
        self.engines, self.first_turns = engines, asyncio.Barrier(rollouts)
        self.before = None

    async def evaluate(self, episodes):
        (episode,) = episodes
        if episode.turn == 0:
            if await self.first_turns.wait() == 0:
                self.before = await self.found()
            await self.first_turns.wait()
        return [Feedback(reward=0.0, done=False, messages="and then?")]

    async def found(self):
        """Return the number of prompt tokens so far, and how many of them the caches had."""
        told = [await engine.ask("statistics") for engine in self.engines]
        return [sum(each[name] for each in told) for name in ("prompt_tokens", "cached_tokens")]


@pytest.mark.nightly
def test_the_second_turn_of_a_rollout_finds_its_first_in_the_prefix_cache(tmp_path):
    """The test uses ``play`` and a pool of two engines, each of which serves the turns of one group."""
    from grpo_plugin_vllm.engine import VllmEngine  # needs vLLM

    model = make_test_model(tmp_path)
    renderer = Renderer.load(str(model))
    renderer.stop_token_ids = tuple(range(1, 99, 24))  # a random model would hardly ever say its own
    groups, size, told = 2, 4, {}

    async def story():
        engines = [await start_engine(VllmEngine, model, max_rows=64, cache_mib=64) for _ in range(2)]
        pool = EnginePool(engines.__getitem__, len(engines))
        await pool.update_weights(EngineUnderTest(engine=pool, model=model).publish(0))
        environment = TwoTurns(engines, groups * size)
        prompts = [
            Prompt(messages=f"{n}: " + "tell me more. " * 8, id=str(n), environment="task")
            for n in range(groups)
        ]
        rollouts = await play(
            [
                RolloutRequest(prompt=prompt, seed=10 * n + i, group=prompt.id)
                for n, prompt in enumerate(prompts)
                for i in range(size)
            ],
            engine=pool,
            environments={"task": environment},
            renderer=renderer,
            sampling=SamplingParams(temperature=1.0, max_tokens=100),
        )
        after = await environment.found()
        for engine in engines:
            engine.metrics()  # asks, as soon as this waits
            for _ in range(2):
                await engine.ask("statistics")  # the second of these is answered after it
        told.update(pool.metrics())
        await pool.aclose()
        return rollouts, [b - a for a, b in zip(environment.before, after, strict=True)]

    rollouts, (prompt_tokens, cached_tokens) = asyncio.run(story())
    second = [rollout for rollout in rollouts if rollout.turns == 2]
    assert len(second) >= len(rollouts) // 2
    first = [
        len(r.segments[0].prompt_ids) + r.segments[0].tokens.sampled.tolist().index(False) for r in second
    ]  # tokens of the first turn
    assert prompt_tokens == sum(first) + len("and then?") * len(second)
    # the last token of a completion was sampled, and never computed
    full_blocks = sum((tokens - 1) // BLOCK * BLOCK for tokens in first)
    print(
        f"turn 2: {cached_tokens} cached of {prompt_tokens} tokens, of {full_blocks} in full blocks of turn 1"
    )
    assert cached_tokens >= 0.9 * full_blocks
    shares = [told[f"cached_prompt_tokens/engine_{number}"] for number in range(2)]
    assert all(0.3 < share < 1.0 for share in shares), "the run's metrics tell it for each engine"
    assert all(told[f"preemptions/engine_{number}"] == 0 for number in range(2))
