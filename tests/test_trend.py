"""A validation that falls while training does not is noticed, and noise is not."""

from __future__ import annotations

import gc
import random
import sys

import pytest

from grpo_core.loop.health import Trend
from grpo_core.validation.estimates import mean_with_interval


def validation(step, values):
    """Return the metrics of a validation, as in a run: a value for each prompt."""
    measured = mean_with_interval("reward", values, seed=step)
    named = {f"validation/words/{name}": value for name, value in measured.items()}
    return step, {**named, "validation/words/prompts": float(len(values))}


def drawn(rng, share, prompts):
    return [float(rng.random() < share) for _ in range(prompts)]


def seen(trained, measured, *, prompts=100, seed=0):
    """The first fall of a run, with a reward and a share of right replies for each validation."""
    trend, rng = Trend(), random.Random(seed)
    for place, (reward, share) in enumerate(zip(trained, measured, strict=True)):
        fall = trend.observe(*validation(20 * place, drawn(rng, share, prompts)))["words"]
        if fall is not None:
            return fall
        for step in range(20 * place + 1, 20 * place + 21):
            trend.observe(step, {"reward/words": reward + rng.gauss(0, 0.02)})
    return None


@pytest.mark.parametrize("start", [0.1, 0.5, 0.9, 1.0])
def test_a_fall_is_noticed_whatever_training_begins_with(start):
    """As the first words of README did: 25.5% at first, 3% at the end, with a reward of 0.998 in training."""
    rewards = [start, *[max(start, 0.99)] * 7]
    fall = seen(rewards, [0.3, 0.26, 0.2, 0.12, 0.06, 0.03, 0.03, 0.03], prompts=200)
    assert (fall.task, fall.metric) == ("words", "reward")
    assert fall.last < fall.best
    assert "'words'" in fall.message


def test_two_validations_are_enough_if_the_fall_is_large():
    assert seen([0.5, 0.9], [0.9, 0.3]) is not None
    assert seen([0.5, 0.9], [0.9, 0.8]) is None


def test_a_slow_fall_is_noticed_in_time():
    falling = [0.6 - 0.01 * place for place in range(30)]
    assert seen([0.6 + 0.01 * place for place in range(30)], falling, prompts=200) is not None


@pytest.mark.parametrize("prompts", [4, 8, 32, 200])
@pytest.mark.parametrize("share", [0.03, 0.5, 0.95])
def test_noise_is_no_fall(prompts, share):
    runs = [seen([0.5 + place / 40 for place in range(16)], [share] * 16, prompts=prompts, seed=seed)
            for seed in range(60)]  # fmt: skip
    assert sum(fall is not None for fall in runs) <= 1


def test_a_policy_that_gets_worse_in_training_as_well_is_another_cause():
    assert (
        seen([0.9 - 0.05 * place for place in range(12)], [0.9 - 0.07 * place for place in range(12)]) is None
    )


def test_a_few_prompts_that_all_agree_prove_little():
    trend = Trend()
    trend.observe(*validation(0, [1.0, 1.0]))
    trend.observe(1, {"reward/words": 0.5})
    assert trend.observe(*validation(20, [0.0, 0.0]))["words"] is None
    assert Trend().observe(*validation(0, [1.0] * 50))["words"] is None


def test_a_recovery_takes_the_fall_back():
    trend = Trend()
    for step, values in ((0, [1.0] * 90 + [0.0] * 10), (20, [0.0] * 90 + [1.0] * 10)):
        found = trend.observe(*validation(step, values))
        trend.observe(step + 1, {"reward/words": 0.5})
    assert found["words"] is not None
    assert trend.observe(*validation(40, [1.0] * 90 + [0.0] * 10))["words"] is None


def test_a_step_leaves_no_object_behind():
    trend = Trend()
    trend.observe(0, {"reward/words": 0.0})
    gc.collect()
    before = sys.getallocatedblocks()
    for step in range(1, 10_000):
        trend.observe(step, {"reward/words": step / 10_000, "loss": 0.1})
    assert sys.getallocatedblocks() - before < 100
