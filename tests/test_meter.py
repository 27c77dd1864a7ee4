"""The meter counts busy time, tokens and errors between two steps, on virtual time."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from grpo_core.contracts.records import Rollout, Segment
from grpo_core.contracts.tokens import Tokens
from grpo_core.loop.buffer import Buffer
from grpo_core.loop.metrics import Meter
from grpo_core.testing import run


def read(meter, *, waited=0.0, train=0.0):
    buffer = Buffer(prompts_per_step=1, max_staleness=0, num_steps=1)
    return meter.read(
        buffer.statistics(), trained={"time/train": train, "tokens/trained": 40.0}, waited=waited
    )


def test_time_counts_as_busy_once_however_many_generate():
    async def generate(meter, begin, seconds):
        await asyncio.sleep(begin)
        with meter.generating:
            await asyncio.sleep(seconds)

    async def story():
        meter = Meter()
        await asyncio.sleep(1.0)
        meter.begin()
        running = asyncio.gather(*(generate(meter, b, s) for b, s in ((0.0, 4.0), (2.0, 3.0), (6.0, 5.0))))
        await asyncio.sleep(8.0)
        first = read(meter, waited=8.0)
        await running
        await asyncio.sleep(1.0)
        return first, read(meter), read(meter)

    first, second, third = run(story())
    assert first["time/generate"] == 5.0 + 2.0, "from 0 to 5 and from 6 to 8"
    assert (first["time/step"], first["overlap"]) == (8.0, 0.0)
    assert (second["time/generate"], second["time/step"]) == (3.0, 4.0)
    assert (third["time/generate"], third["time/step"]) == (0.0, pytest.approx(0.0, abs=1e-6))


@pytest.mark.parametrize(
    ("train", "overlap"), [(3.0, 0.0), (3.5, 1 / 8), (4.0, 1 / 4), (6.0, 3 / 4), (9.0, 1.0)]
)
def test_sides_overlap_while_both_work_and_a_failed_generation_counts(train, overlap):
    async def story():
        meter = Meter()
        meter.begin()
        with contextlib.suppress(ValueError), meter.generating:
            await asyncio.sleep(1.0)
            raise ValueError("lost")
        await asyncio.sleep(3.0)
        return read(meter, waited=2.5, train=train)

    found = run(story())
    assert (found["time/generate"], found["time/wait_for_groups"]) == (1.0, 2.5)
    assert found["overlap"] == pytest.approx(overlap)


def test_sampled_tokens_and_errors_are_counted_from_one_step_to_the_next():
    def rollout(n, error=None):
        tokens = Tokens.generated([2] * n, [0.0] * n, [0] * n)
        return Rollout(segments=[Segment(prompt_ids=(1,), tokens=tokens)], error=error)

    async def story():
        meter = Meter()
        meter.begin()
        for task, each in (("a", rollout(3)), ("a", rollout(4, "lost")), ("b", rollout(1, "lost"))):
            meter.count(task, each)
        with meter.generating:
            await asyncio.sleep(2.0)
        await asyncio.sleep(8.0)  # the trainer computes, and the engine has nothing to do
        found = read(meter, train=8.0)
        await asyncio.sleep(2.0)
        return found, read(meter)

    found, later = run(story())
    assert found["tokens_per_second/generation"] == 8 / 2.0, "not the 8 s of training"
    assert found["tokens_per_second/training"] == 40 / 8.0, "not the 2 s of generation"
    assert (found["errors/a"], found["errors/b"]) == (1.0, 1.0)
    assert later["tokens_per_second/generation"] == 0.0
    assert "errors/a" not in later
