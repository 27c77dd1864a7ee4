"""Checkpoints: complete or not there; a changed byte, a full disk or a crash between writes lose nothing."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
from pathlib import Path

import pytest
from any_records import any_groups
from attrs import evolve
from cuts import loader_at, pipeline_at
from hypothesis import given, settings

from grpo_core.contracts.errors import CheckpointError
from grpo_core.contracts.incidents import reported_to
from grpo_core.contracts.records import Group, Rollout, Segment
from grpo_core.contracts.tokens import Tokens
from grpo_core.contracts.typed import checked
from grpo_core.data.loaders import IndexedLoader
from grpo_core.data.samplers import PromptStream, RoundRobin
from grpo_core.loop import checkpoint
from grpo_core.loop.buffer import Buffer
from grpo_core.storage.disk import Disk
from grpo_core.testing import prompts

NOBODY = 65534
"""The number of a user without rights."""


async def save_trainer(directory: Path):
    async def written():
        (directory / "trainer").mkdir(parents=True)
        (directory / "trainer" / "model.safetensors").write_bytes(b"weights" * 100)

    return written


def write(parent, step=1, keep=2, save=save_trainer, disk=None, **loaders):
    async def story():
        finish = await checkpoint.begin(
            parent,
            step=step,
            pipeline=pipeline_at(step),
            loaders=loaders,
            save_trainer=save,
            keep=keep,
            disk=disk,
        )
        return await finish()

    return asyncio.run(story())


def test_a_written_checkpoint_is_found_and_read(tmp_path):
    path = write(tmp_path, step=20, **{"a/b c": loader_at(3)})
    found = checkpoint.newest(tmp_path)
    assert (found.directory, found.step, found.passed_over) == (path, 20, ())
    assert checkpoint.read_pipeline(path).buffer.step == 20
    assert checkpoint.read_loaders(path) == {"a/b c": loader_at(3)}
    assert {p.name for p in path.iterdir()} == {
        "manifest.json",
        "pipeline.json",
        "trainer",
        "train_dataloader_a%2Fb%20c.json",
    }


def test_a_state_that_is_not_json_is_one_clear_error_and_older_checkpoints_stay(tmp_path):
    async def story():
        finish = await checkpoint.begin(
            tmp_path, step=2, pipeline={"buffer": {1j}}, loaders={}, save_trainer=save_trainer, keep=1
        )
        await finish()

    write(tmp_path, step=1)
    with pytest.raises(
        CheckpointError, match=r"step-000002: cannot be written: TypeError: set cannot be saved"
    ):
        asyncio.run(story())
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


def test_the_newest_are_kept(tmp_path):
    for step in (1, 2, 10, 20):
        write(tmp_path, step)
    assert [step for step, _ in checkpoint.complete_names(tmp_path)] == [10, 20]


def test_one_of_the_format_before_is_not_used(tmp_path):
    """Its pipeline.json has another name for the newest validated version."""
    manifest = write(tmp_path, step=1) / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 9}))
    assert checkpoint.fault(manifest.parent) == "written in format 9, this version reads format 10"


def test_one_that_was_passed_over_does_not_outlive_the_next(tmp_path):
    """It is newer by its name: it may not be kept in place of one that holds."""
    for step in (3, 6):
        write(tmp_path, step)
    (tmp_path / "step-000006" / "pipeline.json").write_text("{}")
    assert checkpoint.newest(tmp_path).step == 3
    assert write(tmp_path, 4, keep=1).is_dir()
    assert [step for step, _ in checkpoint.complete_names(tmp_path)] == [4]


def test_changes_of_a_sampler_after_the_cut_are_not_saved(tmp_path):
    class Sampler:
        state = {"drawn": [1]}  # noqa: RUF012

        def state_dict(self):
            return self.state

    sampler = Sampler()
    stream = PromptStream(sampler=sampler, loaders={}, name="mine")
    pipeline = checkpoint.snapshot(Buffer(prompts_per_step=2, max_staleness=1, num_steps=5), stream)

    async def story():
        finish = await checkpoint.begin(
            tmp_path, step=0, pipeline=pipeline, loaders={}, save_trainer=save_trainer, keep=1
        )
        sampler.state["drawn"].append(2)
        return await finish()

    assert checkpoint.read_pipeline(asyncio.run(story())).sampler == {"drawn": [1]}


def test_a_new_run_has_no_checkpoint(tmp_path):
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
        "step-000002: trainer/model.safetensors has changed since it was written (its sha256 differs)",
    )


def moved_away(path, outside):
    """Put a link to a file or directory outside of the run in its place."""
    outside.mkdir()
    path.rename(outside / path.name)
    path.symlink_to(outside / path.name)


@pytest.mark.parametrize("name", ["", "manifest.json", "trainer", "trainer/model.safetensors"])
def test_a_checkpoint_with_a_link_is_passed_over_and_removed_without_what_it_leads_to(tmp_path, name):
    parent, outside = tmp_path / "checkpoints", tmp_path / "outside"
    good, bad = write(parent, 1), write(parent, 2)
    before = {path.relative_to(bad): path.read_bytes() for path in bad.rglob("*") if path.is_file()}
    moved_away(bad / name, outside)
    found = checkpoint.newest(parent)
    assert found.directory == good
    said = f"step-000002: {name or 'step-000002'} is a symbolic link; put the original in its place"
    assert found.passed_over == (said,)
    write(parent, 1, keep=1)
    assert [path.name for path in parent.iterdir()] == ["step-000001"]
    kept = {path.name: path.read_bytes() for path in outside.rglob("*") if path.is_file()}
    assert kept.items() <= {path.name: data for path, data in before.items()}.items()
    assert kept


def test_a_link_in_the_place_of_a_new_checkpoint_is_replaced_and_not_followed(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    for name in ("step-000002", "step-000002.partial", "step-000003.partial"):
        (tmp_path / name).symlink_to(outside if name != "step-000003.partial" else tmp_path / "nowhere")
    for step in (2, 3):
        write(tmp_path, step)
    assert list(outside.iterdir()) == []
    assert checkpoint.newest(tmp_path).step == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["outside", "step-000002", "step-000003"]


def test_a_manifest_that_names_a_file_elsewhere_is_refused(tmp_path):
    (tmp_path / "secret").write_text("x")
    bad = write(tmp_path / "checkpoints", 1)
    manifest = json.loads((bad / "manifest.json").read_text())
    manifest["files"]["../../secret"] = {"sha256": "0", "size": 1}
    (bad / "manifest.json").write_text(json.dumps(manifest))
    assert checkpoint.fault(bad) == "../../secret is missing"


def test_if_all_checkpoints_are_damaged_all_are_named(tmp_path):
    write(tmp_path, 1).joinpath("pipeline.json").unlink()
    write(tmp_path, 2).joinpath("manifest.json").write_text("{")
    (tmp_path / "step-000003.partial").mkdir()
    with pytest.raises(CheckpointError) as caught:
        checkpoint.newest(tmp_path)
    text = str(caught.value)
    assert "no checkpoint can be used" in text
    assert "step-000001: pipeline.json is missing" in text
    assert re.search(r"step-000002: .*manifest\.json: Expecting property name", text)
    assert "step-000003.partial: was never finished" in text


def test_a_full_disk_leaves_the_checkpoints_before_untouched(tmp_path):
    good = write(tmp_path, 1)

    async def full(directory):
        async def written():
            await (await save_trainer(directory))()
            raise OSError(errno.ENOSPC, "No space left on device")

        return written

    with pytest.raises(CheckpointError, match=r"step-000002: cannot be written: No space left on device \("):
        write(tmp_path, 2, save=full)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
    assert checkpoint.newest(tmp_path).directory == good


class ForgetfulDisk(Disk):
    """Fails to sync the directory of the checkpoints after it has synced it once, for the new name."""

    def __init__(self, parent):
        self.parent, self.synced = parent, 0

    def sync(self, path):
        self.synced += path == self.parent
        if self.synced > 1:
            raise OSError(errno.EIO, "Input/output error", str(path))
        super().sync(path)


def test_a_disk_that_fails_after_the_new_checkpoint_is_complete_ends_with_one_message(tmp_path):
    with pytest.raises(CheckpointError, match=r"step-000001: .* Input/output error"):
        write(tmp_path, 1, disk=ForgetfulDisk(tmp_path))
    assert checkpoint.newest(tmp_path).step == 1


@pytest.fixture
def user(tmp_path, monkeypatch):
    """Work in the directory of a test without root's right to remove everything."""
    monkeypatch.chdir(tmp_path)  # its parents belong to root alone
    if os.geteuid():
        yield
        return
    os.chown(tmp_path, NOBODY, NOBODY)
    os.seteuid(NOBODY)
    yield
    os.seteuid(0)


@pytest.mark.usefixtures("user")
def test_old_checkpoints_that_cannot_be_removed_are_reported_and_newer_ones_are_an_error():
    parent, incidents = Path("checkpoints"), []
    for step in (1, 2):
        write(parent, step)
    (parent / "step-000001" / "trainer").chmod(0o500)
    with reported_to(incidents.append):
        write(parent, 3)
    (incident,) = incidents
    assert "old ones cannot be removed, and use disk space: " in incident.message
    assert "denied" in incident.message
    assert checkpoint.newest(parent).step == 3
    (parent / "step-000003" / "trainer").chmod(0o500)
    with pytest.raises(CheckpointError, match=r"newer ones, .* cannot be removed: .*denied"):
        write(parent, 2)
    (parent / "step-000003" / "trainer").chmod(0o700)
    (parent / "step-000001" / "trainer").chmod(0o700)
    write(parent, 4)
    assert [step for step, _ in checkpoint.complete_names(parent)] == [3, 4]


@pytest.mark.usefixtures("user")
def test_what_an_unfinished_checkpoint_left_does_not_get_into_the_next_one():
    parent = Path("checkpoints")
    left = parent / "step-000001.partial" / "old"
    left.mkdir(parents=True)
    (left / "weights").write_bytes(b"of another life")
    left.chmod(0o500)
    with pytest.raises(CheckpointError, match="step-000001: cannot be written: Permission denied"):
        write(parent, 1)
    left.chmod(0o700)
    assert not (write(parent, 1) / "old").exists()


def test_the_buffer_survives_its_files(tmp_path):
    source = prompts(10)
    buffer = Buffer(prompts_per_step=2, max_staleness=1, num_steps=5)
    flying = buffer.assign(buffer.reserve(), source[:4])
    rollout = Rollout(
        segments=[
            Segment(
                prompt_ids=(1, 2), tokens=Tokens([3, 4], [True, False], [-0.1234567890123, 0.0], [0, -1])
            ),
            Segment(prompt_ids=(1, 2, 3), tokens=Tokens([5], [True], [-0.5], [1])),
        ],
        messages=({"role": "user", "content": "é"},),
        reward=0.5,
        metrics={"format": 1.0},
        turn_rewards=(0.0, 0.5),
        turn_tokens=(1, 1),
        turn_states=("", "hall"),
        turns=2,
        finish_reason="stop",
    )
    group = Group(
        prompt=source[1], rollouts=(rollout, rollout), generation_version=0, target_version=1, slot=1
    )
    buffer.complete(flying[1], group)
    buffer.fail(flying[2])
    state = checked(json.loads(checkpoint.as_json(buffer.state_dict())), checkpoint.SavedBuffer)
    (tmp_path / "arrays").write_bytes(checkpoint.segments_as_bytes(buffer.state_dict()["ready"]))

    again = Buffer(prompts_per_step=2, max_staleness=1, num_steps=5)
    segments = checkpoint.read_segments(tmp_path / "arrays", state)
    checkpoint.load_buffer(again, state, segments, lambda task, id, slot: source[int(id)])
    assert again.state_dict() == buffer.state_dict()
    offered = [again.reserve()[0] for _ in range(3)]
    assert sorted(slot.prompt.id for slot in offered) == ["0", "2", "3"]
    assert {slot.prompt.id: slot.attempts for slot in offered} == {"0": 0, "2": 1, "3": 0}


@pytest.mark.long
@settings(deadline=None)
@given(any_groups())
def test_every_field_of_a_ready_group_survives_its_checkpoint(tmp_path_factory, group):
    path = tmp_path_factory.mktemp("any") / "arrays"
    buffer = Buffer(prompts_per_step=1, max_staleness=0, num_steps=5)
    (slot,) = buffer.assign(buffer.reserve(), [group.prompt])
    stamps = {"generation_version": slot.generation_version, "target_version": slot.target_version}
    untrained = [evolve(each, token_advantages=None) for each in group.rollouts]  # it was not trained yet
    group = evolve(group, slot=slot.id, rollouts=tuple(untrained), **stamps)
    buffer.complete(slot, group)
    state = checked(json.loads(checkpoint.as_json(buffer.state_dict())), checkpoint.SavedBuffer)
    path.write_bytes(checkpoint.segments_as_bytes(buffer.state_dict()["ready"]))

    again = Buffer(prompts_per_step=1, max_staleness=0, num_steps=5)
    segments = checkpoint.read_segments(path, state)
    checkpoint.load_buffer(again, state, segments, lambda task, id, slot: group.prompt)
    assert again.take() == buffer.take() == [group]


# ---------------------------------------------------------------------------------- tasks that come and go


def tasks(*names):
    return {task: IndexedLoader(task, prompts(20, task), seed=0) for task in names}


def a_cut(tmp_path, *names, unfinished=()):
    """A checkpoint of a run with these tasks, and what was in flight."""
    loaders = tasks(*names)
    stream = PromptStream(sampler=RoundRobin(), loaders=loaders, name="round_robin")
    buffer = Buffer(prompts_per_step=2, max_staleness=1, num_steps=5)
    buffer.assign(buffer.reserve(), [loaders[task].take(1)[0] for task in unfinished])

    async def story():
        finish = await checkpoint.begin(
            tmp_path,
            step=0,
            pipeline=checkpoint.snapshot(buffer, stream),
            loaders={task: loader.state_dict() for task, loader in loaders.items()},
            save_trainer=save_trainer,
            keep=1,
        )
        return await finish()

    return asyncio.run(story()), loaders


def restore(directory, loaders):
    buffer = Buffer(prompts_per_step=2, max_staleness=1, num_steps=5)
    stream = PromptStream(sampler=RoundRobin(), loaders=loaders, name="round_robin")
    return checkpoint.restore(directory, buffer, loaders, stream)


def test_a_task_that_is_new_starts_at_its_beginning_and_that_is_said(tmp_path):
    directory, before = a_cut(tmp_path, "old", unfinished=["old"] * 4)
    loaders = tasks("old", "n/e w")
    assert restore(directory, loaders) == [
        "task 'n/e w' is new since the checkpoint; it starts with its first prompt"
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
