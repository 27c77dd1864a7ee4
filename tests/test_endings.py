"""A run ends before its last step when a goal is reached, and in time for its last checkpoint."""

from __future__ import annotations

import asyncio
import random

import pytest
from test_pipeline import Run

from grpo_core.app import making
from grpo_core.app.build import stop_at
from grpo_core.config import Config, TrainerConfig
from grpo_core.contracts.errors import ConfigError
from grpo_core.contracts.events import Saved, StepEnded, Validated
from grpo_core.loop.endings import Goal, TimeLimit
from grpo_core.loop.versions import Interval
from grpo_core.testing import FakeEngine, FakeTrainer


@pytest.mark.parametrize(
    ("goal", "value", "reached"),
    [
        ("reward/sort >= 0.5", 0.5, True),
        ("reward/sort >= 0.5", 0.49, False),
        ("reward/sort<=1e-3", 0.0, True),
        ("reward/sort <= -1", 0.0, False),
    ],
)
def test_a_goal_is_a_metric_and_a_bound(goal, value, reached):
    assert Goal.parse(goal).reached({"reward/sort": value}) is reached
    assert not Goal.parse(goal).reached({})


STEP = {"reward/sort": 0.5, "loss": 0.1, "tokens/trained": 90.0}
VALIDATION = {"validation/sort/accuracy": 0.5, "validation/sort/reward": 0.5}


@pytest.mark.parametrize(
    ("metric", "values", "meant"),
    [
        ("rewrad/sort", STEP, "reward/sort"),
        ("validation/sort/acuracy", VALIDATION, "validation/sort/accuracy"),
    ],
)
def test_a_goal_whose_metric_nothing_measures_ends_the_run_when_that_is_seen(metric, values, meant):
    with pytest.raises(ConfigError, match=f"'{metric}', which nothing measures. Did you mean '{meant}'"):
        Goal.parse(f"{metric} >= 0.9").check(values)


@pytest.mark.parametrize(
    ("metric", "values"),
    [
        ("reward/sort", STEP),
        ("masked/sort", STEP),  # absent if there is none
        ("my_loss_metric", {"tokens/trained": 0.0}),  # a step without rows
        ("reward/sort", VALIDATION),
        ("validation/other/accuracy", VALIDATION),  # a set that is measured at other steps
        ("validation/sort/outcome", VALIDATION),  # undecided
        ("validation/sort/unscored", VALIDATION),  # all have a score
        ("validation/sort/reward", {"validation/sort/errors": 9.0, "validation/sort/unscored": 0.9}),
    ],
)
def test_a_goal_waits_for_a_metric_that_is_not_always_there(metric, values):
    Goal.parse(f"{metric} >= 0.9").check(values)


@pytest.mark.parametrize("text", ["reward", "reward > 3", "reward >= high", "reward >= nan", ">= 3"])
def test_a_malformed_goal_is_refused_when_the_configuration_is_read(text):
    with pytest.raises(ValueError, match="'stop_when' must be NAME >= NUMBER"):
        TrainerConfig(stop_when=text)


def test_a_run_ends_with_a_checkpoint_when_its_goal_is_reached():
    saved = []
    run_ = Run(steps=12, schedule={"validations": [Interval(2)]})

    async def validate(version):
        return {"task": {"accuracy": version / 10}}

    async def save(version, failure=None):
        async def written():
            saved.append(version)
            return "there"

        return written

    run_.pipeline.validate, run_.pipeline.save = validate, save
    receive = stop_at(Goal.parse("validation/task/accuracy >= 0.6"), run_.pipeline, seen := {})
    run_.pipeline.emit = lambda event: (run_.events.append(event), receive(event))
    assert run_().result == "goal reached"
    assert run_.of(Validated)[-1].version == 6
    assert seen == {"validation/task/accuracy": 0.6}
    assert saved == [run_.of(StepEnded)[-1].step]
    assert 6 <= saved[0] <= 8, "a step that runs is ended"


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


@pytest.mark.parametrize(
    ("long", "first"),
    [(part, first) for part in ("step", "sync", "cut", "save") for first in range(0, 14, 2)],
)
def test_the_time_that_each_part_of_the_end_takes_is_left_for_it(long, first):
    """One part of a run takes an eighth of the time, which ends at any moment of a step."""
    seconds = {part: 12.5 if part == long else 0.1 for part in ("step", "sync", "cut", "save")}
    ends = []

    class Trainer(FakeTrainer):
        async def step(self, batch):
            await asyncio.sleep(seconds["step"])
            return await super().step(batch)

    class Engine(FakeEngine):
        async def update_weights(self, weights):
            await asyncio.sleep(seconds["sync"])
            await super().update_weights(weights)

    async def begin(version, failure=None):
        await asyncio.sleep(seconds["cut"])

        async def written():
            await asyncio.sleep(seconds["save"])
            ends.append(asyncio.get_running_loop().time())
            return "there"

        return written

    limit = TimeLimit(end=100.0 + first, seconds=100.0)
    run_ = Run(
        steps=1000,
        prompts_per_step=1,
        group_size=2,
        trainer=Trainer(),
        engine=Engine(),
        schedule={"save_every": 1, "time_limit": limit},
    )
    run_.pipeline.save = begin
    assert run_(seed=0).result == "out of time"
    assert run_.of(Saved)[-1].step == run_.of(StepEnded)[-1].step
    assert 30.0 < ends[-1] <= limit.end


@pytest.mark.parametrize(("epochs", "steps"), [(0.0, 7), (1.0, 4), (2.5, 9), (0.01, 1)])
def test_epochs_are_as_many_steps_as_it_takes_to_draw_all_prompts(epochs, steps):
    config = Config(trainer=TrainerConfig(steps=7, epochs=epochs, prompts_per_step=8))
    assert making.with_steps(config.trainer, {"a": 20, "b": 8}).steps == steps
