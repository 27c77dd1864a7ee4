"""A checkpoint that several ranks wrote is whole or not there, wherever one dies or the power fails."""

from __future__ import annotations

import asyncio
import copy
import os
import random
import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from cuts import pipeline_at
from simulation.disk import Dead, FaultyDisk
from test_ranks import FULL, configured, run
from test_ranks import model as model  # a fixture
from test_trainer import batch, ragged

from grpo_core.contracts.errors import TrainerError
from grpo_core.loop import checkpoint
from grpo_core.training.state_files import read_about, read_state
from grpo_core.weights.layout import load_tensors
from grpo_plugin_scale.training.process import ScaledProcess

Files = Mapping[str, bytes]
"""Contents by name."""

LIFE = ((1, 2), (2, 2), (2, 1), (3, 2))
"""Steps that are saved, and the ranks that save each: a run that is stopped may go on with fewer."""


@pytest.fixture(scope="module")
def written(model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], Files]:
    """The files that real ranks write, by step and number of ranks."""
    parent = tmp_path_factory.mktemp("written")

    async def story(ranks: int) -> None:
        trainer = ScaledProcess(configured(model, FULL, ranks=ranks))
        try:
            await trainer.started()
            for step in range(3):
                await trainer.step(batch(ragged(groups=3, size=2, seed=step), step=step))
                await (await trainer.save(parent / f"{step + 1} of {ranks}"))()
        finally:
            await trainer.aclose()

    for ranks in (1, 2):
        run(story(ranks))
    found = {}
    for step, ranks in LIFE:
        directory = parent / f"{step} of {ranks}"
        paths = [path for path in checkpoint.files(directory) if "tokenizer" not in path.name]
        found[step, ranks] = {str(path.relative_to(directory)): path.read_bytes() for path in paths}
    assert sum("-00002-of-00002." in name for name in found[3, 2]) == 2
    return found


class Direct(FaultyDisk):
    """Without threads."""

    async def run(self, work: Callable[[], Any]) -> Any:
        return work()


async def save(disk: FaultyDisk, parent: Path, step: int, files: Files, chance: random.Random) -> None:
    """Save a step; the ranks write their files at the same time, in an order of chance."""

    async def save_trainer(directory: Path) -> Any:
        async def write() -> None:
            for name in chance.sample(sorted(files), len(files)):
                disk.write(directory / name, files[name])

        return write

    cut: dict[str, Any] = {"pipeline": pipeline_at(1), "loaders": {}}
    finish = await checkpoint.begin(parent, step=step, **cut, save_trainer=save_trainer, keep=1, disk=disk)
    await finish()


def check(root: Path, whole: Mapping[int, Sequence[Any]], saved: Sequence[int]) -> None:
    """The newest has all parts of one version, as those who read it see them."""
    found = checkpoint.newest(root / "checkpoints")
    if found is None:
        assert not saved
        return
    assert found.step >= max(saved, default=0)
    weights, state = whole[found.step]
    same(dict(load_tensors(found.directory / "trainer")), weights)
    read, about = dict(read_state(found.directory / "optimizer")), read_about(found.directory / "optimizer")
    assert ("rng/1" in read) == (about.files == 2), "a second rank has random numbers of its own"
    same({name: t for name, t in read.items() if name != "rng/1"}, state)
    assert about.version == found.step


def same(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.allclose(tensor.float(), right[name].float(), atol=1e-5), name


@pytest.mark.long
def test_parts_of_ranks_are_never_mixed_by_a_kill_or_a_power_cut_at_any_operation(
    tmp_path: Path, written: dict[tuple[int, int], Files]
) -> None:
    """Each save is begun on copies of the disk that the saves before it have left."""
    disk, saved, whole = Direct(tmp_path / "whole"), [], {}
    for step, ranks in LIFE:
        files, before = written[step, ranks], copy.deepcopy(disk)
        copied = shutil.copytree(disk.root, tmp_path / f"before {step} of {ranks}")
        asyncio.run(save(disk, disk.root / "checkpoints", step, files, random.Random(step)))
        directory = disk.root / "checkpoints" / f"step-{step:06d}"
        state = {name: t for name, t in read_state(directory / "optimizer") if name != "rng/1"}
        whole[step] = dict(load_tensors(directory / "trainer")), state
        for at in range(1, disk.operations - before.operations + 1):
            root = shutil.copytree(copied, tmp_path / f"{step} of {ranks} until {at}")
            dying = Direct(root, before=copy.deepcopy(before), dies_at=at)
            with pytest.raises(Dead):
                asyncio.run(save(dying, root / "checkpoints", step, files, random.Random(step)))
            check(root, whole, saved)
            dying.cut_power(random.Random(at))
            check(root, whole, saved)
        saved.append(step)
    assert disk.operations > 100


@pytest.mark.nightly
def test_a_rank_that_is_killed_while_it_writes_costs_only_the_current_save(
    model: str, tmp_path: Path
) -> None:
    """It is killed when its file has been begun; the pipe in that file's place lets nobody finish it."""

    async def story() -> str:
        trainer = ScaledProcess(configured(model, FULL, ranks=2))

        async def cut(step: int, hold: bool) -> Path:
            async def save_trainer(directory: Path) -> Any:
                if hold:
                    (directory / "optimizer").mkdir(parents=True)
                    os.mkfifo(directory / "optimizer" / "state.json")
                return await trainer.save(directory)

            about: dict[str, Any] = {"pipeline": pipeline_at(1), "loaders": {}}
            finish = await checkpoint.begin(tmp_path, step=step, **about, save_trainer=save_trainer, keep=1)
            return await finish()

        try:
            await trainer.started()
            await trainer.step(batch(ragged(groups=3, size=2), step=0))
            await cut(1, hold=False)
            await trainer.step(batch(ragged(groups=3, size=2), step=1))
            saving = asyncio.create_task(cut(2, hold=True))
            partly = tmp_path / "step-000002.partial" / "optimizer" / "state-00001-of-00002.safetensors"
            while not partly.exists():
                assert not saving.done()
                await asyncio.sleep(0.01)
            os.kill(trainer.process.ranks[0].pid, signal.SIGKILL)
            with pytest.raises(TrainerError, match=r"trainer rank 0 died \(killed by SIGKILL\)"):
                await saving
        finally:
            await trainer.aclose()
        found = checkpoint.newest(tmp_path)
        assert found is not None
        assert found.passed_over == ("step-000002.partial: was never finished",)
        return found.directory.name

    assert run(story()) == "step-000001"
