"""Checkpoints: complete or not there; a changed byte, a full disk or a crash between writes lose nothing."""

from __future__ import annotations

import asyncio
import errno
import json
from pathlib import Path

import pytest

from grpo_core import checkpoint
from grpo_core.buffer import Buffer
from grpo_core.errors import CheckpointError
from grpo_core.loaders import TaskLoader
from grpo_core.records import Group, Rollout
from grpo_core.samplers import RoundRobin
from grpo_core.testing import prompts


async def save_trainer(directory: Path) -> None:
    (directory / "trainer").mkdir()
    (directory / "trainer" / "model.safetensors").write_bytes(b"weights" * 100)


def write(parent, step=1, keep=2, save=save_trainer, storage=None, **loaders):
    return asyncio.run(
        checkpoint.write(
            parent,
            step=step,
            pipeline={"buffer": {"step": step}},
            loaders=loaders,
            save_trainer=save,
            keep=keep,
            storage=storage,
        )
    )


def test_what_was_written_is_found_and_read(tmp_path):
    path = write(tmp_path, step=20, **{"a/b c": {"position": 3}})
    found = checkpoint.newest(tmp_path)
    assert (found.directory, found.step, found.passed_over) == (path, 20, ())
    assert checkpoint.read_pipeline(path)["buffer"] == {"step": 20}
    assert checkpoint.read_loader(path, "a/b c") == {"position": 3}
    assert checkpoint.read_loader(path, "other") is None
    assert {p.name for p in path.iterdir()} == {
        "manifest.json",
        "pipeline.json",
        "trainer",
        "train_dataloader_a%2Fb%20c.json",
    }


def test_the_newest_are_kept(tmp_path):
    for step in (1, 2, 10, 20):
        write(tmp_path, step)
    assert [step for step, _ in checkpoint.complete_names(tmp_path)] == [10, 20]


def test_a_death_while_one_checkpoint_replaces_another_of_its_step_loses_neither(tmp_path, monkeypatch):
    """A run that is stopped twice within a step saves that step twice; there may be no other checkpoint."""

    class Crash(BaseException):
        pass

    def dies(self, target):
        if self.name.endswith(".partial"):
            raise Crash
        rename(self, target)

    write(tmp_path, 1, keep=1)
    rename = Path.rename
    monkeypatch.setattr(Path, "rename", dies)
    monkeypatch.setattr(checkpoint.shutil, "rmtree", lambda *args, **kwargs: None)  # dead men tidy nothing
    with pytest.raises(Crash):
        write(tmp_path, 1, keep=1)
    monkeypatch.undo()
    assert checkpoint.newest(tmp_path).step == 1
    write(tmp_path, 1, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


def test_there_is_none_yet(tmp_path):
    assert checkpoint.newest(tmp_path / "nowhere") is None


def test_a_checkpoint_with_one_byte_changed_is_passed_over_with_the_reason(tmp_path):
    good, bad = write(tmp_path, 1), write(tmp_path, 2)
    weights = bad / "trainer" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[123] ^= 1
    weights.write_bytes(data)
    found = checkpoint.newest(tmp_path)
    assert found.directory == good
    assert found.passed_over == (
        "step-000002: trainer/model.safetensors is not what was written (its sha256 differs)",
    )


def test_if_none_holds_all_are_named(tmp_path):
    write(tmp_path, 1).joinpath("pipeline.json").unlink()
    write(tmp_path, 2).joinpath("manifest.json").write_text("{")
    (tmp_path / "step-000003.partial").mkdir()
    with pytest.raises(CheckpointError) as caught:
        checkpoint.newest(tmp_path)
    text = str(caught.value)
    assert "no checkpoint can be used" in text
    assert "step-000001: pipeline.json is missing" in text
    assert "step-000002: manifest.json cannot be read" in text
    assert "step-000003.partial: was never finished" in text


def test_a_full_disk_leaves_the_checkpoints_before_untouched(tmp_path):
    good = write(tmp_path, 1)

    async def full(directory):
        await save_trainer(directory)
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(CheckpointError, match=r"step-000002: cannot be written: No space left on device \("):
        write(tmp_path, 2, save=full)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
    assert checkpoint.newest(tmp_path).directory == good


@pytest.mark.parametrize("moment", range(5))
def test_a_crash_between_two_writes_never_leaves_half_a_checkpoint(tmp_path, monkeypatch, moment):
    """The process is gone at the n-th write: what is found then is whole, and is the old or the new one."""

    class Crash(BaseException):
        pass

    class Mortal(checkpoint.Disk):
        left = moment

        def __getattribute__(self, name):
            if Mortal.left == 0:
                raise Crash
            Mortal.left -= 1
            return super().__getattribute__(name)

    write(tmp_path, 1)
    monkeypatch.setattr(checkpoint.shutil, "rmtree", lambda *args, **kwargs: None)  # dead men tidy nothing
    with pytest.raises(Crash):
        write(tmp_path, 2, storage=Mortal(), task={"position": 2})
    monkeypatch.undo()
    assert checkpoint.newest(tmp_path).step == 1


def test_the_buffer_survives_json(tmp_path):
    source = prompts(10)
    buffer = Buffer(prompts_per_step=2, max_staleness=1, num_steps=5)
    flying = buffer.fill(buffer.reserve(), source[:4])
    rollout = Rollout(
        prompt_ids=(1, 2),
        token_ids=(3, 4),
        sampled=(True, False),
        logprobs=(-0.1234567890123, 0.0),
        versions=(0, -1),
        messages=({"role": "user", "content": "é"},),
        reward=0.5,
        metrics={"format": 1.0},
        turns=2,
        finish_reason="stop",
    )
    group = Group(
        prompt=source[1], rollouts=(rollout, rollout), generation_version=0, target_version=1, slot=1
    )
    buffer.complete(flying[1], group)
    buffer.fail(flying[2])
    state = json.loads(json.dumps(checkpoint.dump_buffer(buffer)))

    again = Buffer(prompts_per_step=2, max_staleness=1, num_steps=5)
    checkpoint.load_buffer(again, state, lambda task, id: source[int(id)])
    assert again.state_dict() == buffer.state_dict()
    offered = [again.reserve()[0] for _ in range(3)]
    assert sorted(slot.prompt.id for slot in offered) == ["0", "2", "3"]
    assert {slot.prompt.id: slot.attempts for slot in offered} == {"0": 0, "2": 1, "3": 0}


# ---------------------------------------------------------------------------------- tasks that come and go


def tasks(*names):
    return {task: TaskLoader(task, prompts(20, task), seed=0) for task in names}


def a_cut(tmp_path, *names, unfinished=()):
    """A checkpoint of a run with these tasks, and what was in flight."""
    loaders, sampler = tasks(*names), RoundRobin()
    buffer = Buffer(prompts_per_step=2, max_staleness=1, num_steps=5)
    buffer.fill(buffer.reserve(), [loaders[task].take(1)[0] for task in unfinished])
    save = checkpoint.write(
        tmp_path,
        step=0,
        pipeline=checkpoint.cut(buffer, sampler),
        loaders={task: loader.state_dict() for task, loader in loaders.items()},
        save_trainer=save_trainer,
        keep=1,
    )
    return asyncio.run(save), loaders


def restore(directory, loaders):
    buffer = Buffer(prompts_per_step=2, max_staleness=1, num_steps=5)
    return checkpoint.restore(directory, buffer, loaders, RoundRobin())


def test_a_task_that_is_new_starts_at_its_beginning_and_that_is_said(tmp_path):
    directory, before = a_cut(tmp_path, "old", unfinished=["old"] * 4)
    loaders = tasks("old", "n/e w")
    assert restore(directory, loaders) == [
        "task 'n/e w' is new since the checkpoint; it starts at its beginning"
    ]
    assert loaders["old"].take(3) == before["old"].take(3)
    assert loaders["n/e w"].take(3) == tasks("n/e w")["n/e w"].take(3)


def test_a_task_that_is_gone_is_mentioned_if_it_left_nothing_unfinished(tmp_path):
    directory, _ = a_cut(tmp_path, "old", "n/e w", unfinished=["old"] * 4)
    assert restore(directory, tasks("old")) == ["task 'n/e w' of the checkpoint is no longer part of the run"]


def test_a_task_that_is_gone_and_left_prompts_unfinished_is_an_error_that_names_them(tmp_path):
    directory, _ = a_cut(tmp_path, "old", "gone", unfinished=["old", "gone", "old", "gone"])
    first, second = tasks("gone")["gone"].take(2)
    with pytest.raises(CheckpointError) as caught:
        restore(directory, tasks("old"))
    assert "task 'gone' is no longer part of the run, but 2 of its prompts are in flight or wait to be " in (
        str(caught.value)
    )
    assert f": {first.id!r}, {second.id!r}; keep the task with weight = 0" in str(caught.value)


def test_the_same_tasks_are_not_mentioned(tmp_path):
    directory, _ = a_cut(tmp_path, "a", "b", unfinished=["a", "b", "a", "b"])
    assert restore(directory, tasks("b", "a")) == []
