"""A checkpoint is whole or not there, wherever the process dies or the power fails."""

from __future__ import annotations

import asyncio
import json
import random

import pytest
from cuts import loader_at, pipeline_at
from simulation.disk import Dead, FaultyDisk

from grpo_core.contracts.errors import CheckpointError
from grpo_core.loop import checkpoint
from grpo_core.loop.retention import Retention

STEPS = (1, 2, 3, 3, 4)
"""A run that is stopped twice within a step saves it twice."""


async def save(disk, parent, step, keep, spared=lambda steps: ()):
    async def save_trainer(directory):
        async def written():
            disk.write(directory / "trainer" / "model.safetensors", b"weights of step %d" % step)

        return written

    finish = await checkpoint.begin(
        parent,
        step=step,
        pipeline=pipeline_at(step),
        loaders={"task": loader_at(step)},
        save_trainer=save_trainer,
        keep=keep,
        spared=spared,
        disk=disk,
    )
    await finish()


class Direct(FaultyDisk):
    """Without threads."""

    async def run(self, work):
        return work()


def live(root, steps, keep, **faults):
    """Save these steps; returns the disk and the steps whose checkpoints were complete before its death."""
    disk, saved = Direct(root, **faults), []
    try:
        for step in steps:
            asyncio.run(save(disk, root / "checkpoints", step, keep))
            saved.append(step)
    except Dead:
        pass
    return disk, saved


def operations(tmp_path, keep):
    return live(tmp_path / "counted", STEPS, keep)[0].operations


def check(root, saved):
    """The newest is whole, and is no older than what was said to be saved."""
    found = checkpoint.newest(root / "checkpoints")
    if found is None:
        assert not any(saved)
        return 0
    assert found.step >= max(saved, default=0)
    step = found.step
    assert checkpoint.read_pipeline(found.directory).buffer.step == step
    assert checkpoint.read_loaders(found.directory)["task"] == loader_at(step)
    weights = found.directory / "trainer" / "model.safetensors"
    assert weights.read_bytes() == b"weights of step %d" % step
    return step


@pytest.mark.long
@pytest.mark.parametrize("keep", [1, 2])
def test_a_process_that_is_killed_at_any_operation_loses_nothing_that_was_saved(tmp_path, keep):
    for at in range(1, operations(tmp_path, keep) + 1):
        root = tmp_path / str(at)
        disk, saved = live(root, STEPS, keep, dies_at=at)
        assert disk.dead
        check(root, saved)


@pytest.mark.long
@pytest.mark.parametrize("keep", [1, 2])
def test_a_power_cut_at_any_operation_loses_nothing_that_was_saved(tmp_path, keep):
    for at in range(1, operations(tmp_path, keep) + 1):
        for seed in range(3):
            root = tmp_path / f"{at} {seed}"
            disk, saved = live(root, STEPS, keep, dies_at=at)
            disk.cut_power(random.Random(seed))
            check(root, saved)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20))
def test_leftovers_of_a_crash_do_not_hinder_later_lives(tmp_path, seed):
    chance, done, disk, keep = random.Random(seed), 0, None, 1 + seed % 2
    while done < 12:
        disk, saved = live(tmp_path, range(done + 1, 13), keep, before=disk, dies_at=chance.randrange(1, 60))
        if disk.dead and chance.random() < 0.7:
            disk.cut_power(chance)
        done = check(tmp_path, [done, *saved])
    live(tmp_path, [13], keep, before=disk)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names[-1] == "step-000013"
    assert len(names) == keep


@pytest.mark.long
def test_a_removed_checkpoint_does_not_return_after_a_power_cut(tmp_path):
    """Another life may have gone on from an older checkpoint since."""
    for seed in range(20):
        disk, _ = live(tmp_path / str(seed), STEPS, keep=2)
        disk.cut_power(random.Random(seed))
        names = sorted(path.name for path in (tmp_path / str(seed) / "checkpoints").iterdir())
        assert names == ["step-000003", "step-000004"]


@pytest.mark.long
def test_a_disk_that_is_full_at_any_byte_costs_only_the_current_save(tmp_path):
    live(tmp_path, [1], 2)
    size = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    for room in range(size):
        with pytest.raises(
            CheckpointError, match=r"No space left on device .* the checkpoints before it are"
        ):
            live(tmp_path, [2], 2, room=room)
        assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]
    check(tmp_path, [1])
    assert live(tmp_path, [2], 2, room=size)[1] == [2]


@pytest.mark.long
def test_without_syncs_the_model_loses_checkpoints(tmp_path):
    """Or the stories above would prove nothing."""

    class Careless(Direct):
        def sync(self, path):
            pass

    lost = 0
    for seed in range(20):
        root = tmp_path / str(seed)
        disk = Careless(root)
        asyncio.run(save(disk, root / "checkpoints", 1, 1))
        disk.cut_power(random.Random(seed))
        try:
            lost += checkpoint.newest(root / "checkpoints") is None
        except CheckpointError:
            lost += 1
    assert lost == 20


# ---------------------------------------------------------------------------------- the best one

BEST = "validation/sort/accuracy"
VALUES = {1: 0.5, 2: 0.9, 3: 0.2, 4: 0.9, 5: 0.95, 6: 0.3}
"""Accuracy by step; validation lags behind the checkpoints by one step."""


def live_with_the_best(root, before=None, **faults):
    """Save and validate each step after the newest checkpoint.

    Returns the disk, and the steps that were saved and whose values were on it before its death.
    """
    disk, parent = Direct(root, before=before, **faults), root / "checkpoints"
    found = checkpoint.newest(parent)
    step = found.step if found else 0
    retention, saved = Retention(parent, best=BEST, step=step, disk=disk), []
    try:
        for at in range(step + 1, max(VALUES) + 1):
            asyncio.run(save(disk, parent, at, 1, retention.spared))
            saved.append(at)
            if at > 1:
                retention.metrics(at - 1, {BEST: VALUES[at - 1]})
    except Dead:
        pass
    return disk, [at for at in saved if at in retention.scores]


def check_the_best(root, saved):
    """The best checkpoint that the run names is whole, and is no worse than any that it had."""
    check(root, saved)
    parent = root / "checkpoints"
    there = dict(checkpoint.complete_names(parent))
    best = next(iter(Retention(parent, best=BEST, step=max(there, default=0)).best(there)), None)
    assert best is not None or not saved
    if best is not None:
        assert checkpoint.fault(there[best]) is None
        assert VALUES[best] >= max((VALUES[at] for at in saved), default=0)
    return {} if best is None else {best}


@pytest.mark.long
@pytest.mark.parametrize("cut", [False, True])
def test_the_best_checkpoint_survives_a_kill_and_a_power_cut_at_any_operation(tmp_path, cut):
    for at in range(1, live_with_the_best(tmp_path / "counted")[0].operations + 1):
        root = tmp_path / str(at)
        disk, saved = live_with_the_best(root, dies_at=at)
        assert disk.dead
        if cut:
            disk.cut_power(random.Random(at))
        known = check_the_best(root, saved)
        if at % 4 == 0:  # another life goes on from there, and dies as well
            disk, saved = live_with_the_best(root, before=disk, dies_at=at % 60)
            if disk.dead and cut:
                disk.cut_power(random.Random(at))
            check_the_best(root, {*saved, *known})


def test_the_best_one_stays_until_the_value_of_a_better_one_is_on_disk(tmp_path):
    """A thread that tidies may run while another writes the value."""
    spared = []

    class Watched(Direct):
        def sync(self, path):
            spared.append(retention.spared({1, 2, 3}))
            super().sync(path)

    retention = Retention(tmp_path, best=BEST, disk=Watched(tmp_path))
    retention.metrics(1, {BEST: 0.5})
    spared.clear()
    retention.metrics(2, {BEST: 0.9})
    assert all(1 in each for each in spared)
    assert retention.spared({1, 2, 3}) == {2, 3}


def test_the_real_disk_keeps_the_same_contract(tmp_path):
    parent = tmp_path / "checkpoints"
    for step in STEPS:
        asyncio.run(save(checkpoint.Disk(), parent, step, keep=2))
    assert [step for step, _ in checkpoint.complete_names(parent)] == [3, 4]
    assert {path.name for path in parent.iterdir()} == {"step-000003", "step-000004"}
    assert json.loads((parent / "step-000004" / "manifest.json").read_text())["step"] == 4
    check(tmp_path, [4])
