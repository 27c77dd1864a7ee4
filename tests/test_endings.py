"""A run ends in time for its last checkpoint."""

from __future__ import annotations

import asyncio
import random

import pytest
from test_pipeline import Run

from grpo_core.app.parts import with_steps
from grpo_core.config import Config, TrainerConfig
from grpo_core.events import Saved, StepEnded
from grpo_core.loop.endings import TimeLimit
from grpo_core.testing import FakeTrainer
from grpo_core.versions import Interval


class Slow(FakeTrainer):
    """Steps take any time between half and all of the longest."""

    def __init__(self, rng, longest):
        super().__init__()
        self.rng, self.longest = rng, longest

    async def step(self, batch):
        await asyncio.sleep(self.rng.uniform(0.5, 1.0) * self.longest)
        return await super().step(batch)


def ended(seed):
    """Play one schedule; return its limit, the time of its last checkpoint, its result and its steps."""
    rng = random.Random(seed)
    step, save, validation = (rng.uniform(1.0, 20.0) for _ in range(3))
    limit = rng.uniform(20, 40) * (step + save + validation)
    run_ = Run(
        steps=1000,
        prompts_per_step=1,
        group_size=2,
        trainer=Slow(rng, step),
        schedule={
            "validations": [Interval(rng.choice([0, 1, 3]))],
            "save_every": rng.choice([0, 2, 5]),
            "time_limit": TimeLimit(end=limit, seconds=limit),
        },
    )
    times = []

    async def validate(version):
        await asyncio.sleep(rng.uniform(0.5, 1.0) * validation)
        return {"task": {"accuracy": 0.0}}

    async def begin(version, failure=None):
        await asyncio.sleep(rng.uniform(0.0, 0.1) * save)

        async def written():
            await asyncio.sleep(rng.uniform(0.5, 1.0) * save)
            times.append(asyncio.get_running_loop().time())
            return "there"

        return written

    run_.pipeline.validate, run_.pipeline.save = validate, begin
    run_(seed=seed)
    return limit, times[-1], run_.result, run_.of(StepEnded)[-1].step, run_.of(Saved)[-1].step


@pytest.mark.parametrize(
    "seeds",
    [
        [269, 521],
        pytest.param(range(60), marks=[pytest.mark.long, pytest.mark.nightly]),
        pytest.param(range(10), marks=pytest.mark.long),
    ],
)
def test_the_last_checkpoint_is_complete_before_the_time_limit(seeds):
    used = []
    for seed in seeds:
        limit, at, result, step, saved = ended(seed)
        assert at <= limit, seed
        assert result == "out of time"
        assert saved == step
        used.append(at / limit)
    assert sum(used) / len(used) > 0.8, "not much of the time is left over"


@pytest.mark.parametrize(("epochs", "steps"), [(0.0, 7), (1.0, 4), (2.5, 9), (0.01, 1)])
def test_epochs_are_as_many_steps_as_it_takes_to_draw_all_prompts(epochs, steps):
    config = Config(trainer=TrainerConfig(steps=7, epochs=epochs, prompts_per_step=8))
    assert with_steps(config, {"a": 20, "b": 8}).trainer.steps == steps
