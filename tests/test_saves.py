"""Checkpoints by steps and by minutes: a slow step costs a kill no more than some minutes of work."""

from __future__ import annotations

import asyncio
import random
from itertools import pairwise

import pytest
from test_pipeline import Run

from grpo_core.contracts.events import Saved, Saving, StepEnded
from grpo_core.loop.endings import SPARED, Saves
from grpo_core.testing import FakeTrainer


def test_checkpoints_by_steps_are_due_whatever_the_time():
    saves = Saves(every=3)
    assert [step for step in range(1, 10) if saves.due(step, now=1e9 * step)] == [3, 6, 9]
    assert not any(Saves().due(step, now=1e9) for step in range(1, 10))


def test_checkpoints_by_time_are_due_after_the_first_step_that_ends_then():
    saves = Saves(every=100, seconds=600.0, begun=1000.0)
    assert not saves.due(1, 1599.0)
    assert saves.due(2, 1600.0)
    saves.saving(1601.0)
    assert not saves.due(3, 9999.0), "it is still being written"
    saves.saved(1602.0)
    assert not saves.due(4, 2200.0)
    assert saves.due(5, 2201.0)


def test_a_checkpoint_by_steps_restarts_the_minutes():
    saves = Saves(every=4, seconds=600.0)
    assert saves.due(4, 500.0)
    saves.saving(500.0)
    saves.saved(501.0)
    assert not saves.due(5, 700.0)
    assert saves.due(6, 1100.0)


@pytest.mark.parametrize("took", [1.0, 30.0, 31.0, 500.0])
def test_checkpoints_that_take_long_come_by_time_twenty_times_less_often(took):
    saves = Saves(seconds=600.0)
    saves.saving(0.0)
    saves.saved(took)
    first = max(600.0, SPARED * took)
    assert not saves.due(1, first - 1.0)
    assert saves.due(2, first)
    saves.saving(first)
    saves.saved(first + 2.0)
    assert saves.due(3, first + 600.0), "what counts is the last one"


def saved(seconds, took=1.0, **schedule):
    """Play a run whose steps take a minute or more; return the times of its cuts and of its steps."""
    rng = random.Random(0)
    cuts, ends = [], []

    class Slow(FakeTrainer):
        async def step(self, batch):
            await asyncio.sleep(rng.uniform(60.0, 100.0))
            return await super().step(batch)

    async def save(version, failure=None):
        async def written():
            await asyncio.sleep(took)
            return "there"

        return written

    run_ = Run(trainer=Slow(), steps=60, save=save, schedule={"save_seconds": seconds, **schedule})
    emit = run_.pipeline.emit

    def heard(event):
        now = asyncio.get_running_loop().time()
        if isinstance(event, Saving):
            cuts.append(now)
        if isinstance(event, StepEnded):
            ends.append(now)
        emit(event)

    run_.pipeline.emit = heard
    run_()
    assert run_.of(Saved)[-1].step == 60
    return cuts, ends


def test_a_run_with_slow_steps_is_never_more_than_some_minutes_ahead_of_its_checkpoint():
    cuts, ends = saved(600.0)
    between = [later - earlier for earlier, later in pairwise([0.0, *cuts[:-1]])]
    assert len(cuts) > 5
    assert all(600.0 <= seconds <= 600.0 + 110.0 for seconds in between)
    assert ends[-1] - cuts[-2] <= 710.0


def test_a_slow_disk_gets_fewer_checkpoints_by_time():
    cuts, _ = saved(600.0, took=60.0)
    between = [later - earlier for earlier, later in pairwise(cuts[:-1])]
    assert between
    assert all(seconds >= SPARED * 60.0 for seconds in between)


def test_without_minutes_steps_alone_count():
    cuts, _ = saved(0.0)
    assert len(cuts) == 1, "the end"
    assert len(saved(0.0, save_every=20)[0]) == 3
    assert len(saved(1e6, save_every=20)[0]) == 3
