"""Data planes: what a run holds of tokens that are somewhere else, and that nothing of them is left."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from any_records import any_rows
from file_plane import FilePlane
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_core import Run
from grpo_core.app.make import make
from grpo_core.config import Config, build
from grpo_core.contracts.errors import DataPlaneError, PluginError, TrainerError
from grpo_core.contracts.events import GroupFiltered, GroupsReady, Saved, Saving, StepEnded
from grpo_core.contracts.records import Group, Prompt, Rollout, SampleRequest, Segment
from grpo_core.contracts.tokens import (
    PlacedIds,
    PlacedTokens,
    Tokens,
    as_ids,
    contents_of,
    digest_of,
    fetched,
)
from grpo_core.loop.buffer import Buffer
from grpo_core.loop.dynamic import DynamicSampling
from grpo_core.loop.pipeline import Learning, Pipeline, Playing, Schedule
from grpo_core.loop.rollout import SamplingParams
from grpo_core.loop.rows import group as advantages
from grpo_core.loop.rows import make_batch
from grpo_core.plugins.host import PluginHost
from grpo_core.processes import secrets
from grpo_core.processes.served import Call
from grpo_core.reporting import stored
from grpo_core.reporting.files import FilesTracker
from grpo_core.reporting.trackers import call
from grpo_core.storage.planes import MemoryPlane
from grpo_core.storage.run_directory import RunDirectory
from grpo_core.testing import FakeEngine, FakeEnvironment, FakeRenderer, FakeTrainer, prompts, run
from grpo_core.testing.fakes import FakePrompts
from grpo_core.training.batching import length
from grpo_core.training.plan import Layout, shares, with_tokens

GROUPS, STEPS = 4, 6


# ---------------------------------------------------------------------------------- handles

TOKENS = st.lists(st.tuples(st.booleans(), st.integers(0, 3)), max_size=40).map(
    lambda made: Tokens(
        range(len(made)),
        [sampled for sampled, _ in made],
        [-0.5 * i for i in range(len(made))],
        [version if sampled else -1 for sampled, version in made],
    )
)


class Kept:
    """A plane of one process, which counts what is asked of it."""

    def __init__(self, *tokens: Tokens) -> None:
        self.contents, self.asked = [contents_of(each) for each in tokens], 0

    def fetch(self, places):
        self.asked += 1
        return [self.contents[part] for _, part in places]


def handles(*tokens: Tokens) -> tuple[Kept, list[PlacedTokens]]:
    kept = Kept(*tokens)
    return kept, [PlacedTokens.of(each, kept, ("key", part), None) for part, each in enumerate(tokens)]


@settings(max_examples=60)
@given(TOKENS)
def test_a_handle_knows_all_but_ids_and_logprobs_without_asking(tokens):
    kept, (handle,) = handles(tokens)
    assert len(handle) == len(tokens)
    assert handle.n_sampled == tokens.n_sampled
    assert np.array_equal(handle.sampled, tokens.sampled)
    assert np.array_equal(handle.versions, tokens.versions)
    assert np.array_equal(handle.sampled_versions, tokens.sampled_versions)
    assert kept.asked == 0
    assert handle == tokens


def test_what_is_fetched_together_is_asked_for_once():
    there = [Tokens.generated([i, i + 1], [-1.0, -2.0], [0, 1]) for i in range(5)]
    kept, placed = handles(*there)
    here = Tokens.generated([9], [-0.1], [1])
    found = fetched([placed[3], here, placed[1]])
    assert found == [there[3], here, there[1]]
    assert found[1] is here
    assert kept.asked == 1


def test_a_plane_that_returns_other_bytes_is_not_believed():
    kept, (handle,) = handles(Tokens.generated([1, 2], [-1.0, -1.0], [0, 0]))
    kept.contents[0] = kept.contents[0][:-1]
    with pytest.raises(DataPlaneError, match="returned 15 bytes of 2 tokens; expected 16"):
        fetched([handle])


def test_a_handle_of_a_prompt_is_an_array_that_is_fetched_when_it_is_read():
    ids = as_ids([7, 8, 9])
    kept = Kept()
    kept.contents = [ids.tobytes()]
    handle = PlacedIds(kept, ("key", 0), 3, digest_of(ids))
    assert (len(handle), digest_of(handle), kept.asked) == (3, digest_of(ids), 0)
    assert digest_of(as_ids([7, 8])) != digest_of(ids)
    segment = Segment(prompt_ids=handle)
    assert segment.prompt_ids is handle
    assert segment == Segment(prompt_ids=ids)
    assert np.concatenate([handle, ids]).tolist() == [7, 8, 9, 7, 8, 9]
    assert (handle[-1], list(handle), handle.tolist(), handle.tobytes()) == (
        9,
        [7, 8, 9],
        [7, 8, 9],
        bytes(ids),
    )
    assert fetched([handle, handle])[0].tolist() == [7, 8, 9]
    numpy = np.array([7, 8, 9], np.int32)
    for read in (
        lambda ids: (ids.shape, ids.dtype, ids.size, ids.max(), ids.copy().tolist(), bytes(ids)),
        lambda ids: ((ids + 1).tolist(), (ids < 9).tolist(), (ids == ids).all(), (3 * ids).sum()),
        lambda ids: (np.flatnonzero(ids), np.where(ids == 8, 1, 0).tolist(), ids.astype(float)[1:].tolist()),
    ):
        assert str(read(handle)) == str(read(numpy))
    assert torch.from_numpy(handle.copy()).tolist() == [7, 8, 9]
    for wrong in (lambda: hash(handle), lambda: handle.nothing):
        with pytest.raises((TypeError, AttributeError)):
            wrong()
    assert copy.deepcopy([handle])[0] is copy.copy(handle) is handle, "a copy without the lease would be lost"
    kept.contents = [b"12345678"]
    with pytest.raises(DataPlaneError, match="returned 8 bytes of 3 ids; expected 12"):
        fetched([handle])


# ---------------------------------------------------------------------------------- bytes


def group(tokens: int, rollouts: int = 8, *, segments: int = 1, prompt: int = 3) -> Group:
    """Return a finished group; a later segment begins with all that was said before it."""
    ids = np.random.default_rng(0).integers(0, 1000, tokens)
    asked = as_ids(range(prompt))

    def rollout(i: int) -> Rollout:
        parts = np.array_split(ids + i, segments)
        befores = [asked, *(as_ids([*asked, *np.concatenate(parts[:n])]) for n in range(1, segments))]
        return Rollout(
            segments=[
                Segment(
                    prompt_ids=before,
                    tokens=Tokens.generated(part, np.full(len(part), -1.0), np.zeros(len(part), int)),
                )
                for before, part in zip(befores, parts, strict=True)
            ],
            reward=float(i),
            advantage=1.0,
            trained=True,
        )

    return Group(
        prompt=Prompt(messages="1+1=", id="0", environment="task"),
        rollouts=tuple(map(rollout, range(rollouts))),
        generation_version=0,
        target_version=0,
    )


def sent(made: Group) -> float:
    """Bytes for each rollout of the call that gives a step to the trainer's process."""
    batch = make_batch([made], step=0, temperature=1.0)
    return len(pickle.dumps(Call(1, "step", (batch,)), protocol=5)) / len(made.rollouts)


KINDS = {
    "one segment": ({}, 400),
    "four segments": ({"segments": 4}, 1600),
}


@pytest.mark.parametrize(("kind", "limit"), KINDS.values(), ids=KINDS)
def test_the_bytes_of_a_rollout_on_the_way_to_the_trainer_do_not_grow_with_its_tokens(tmp_path, kind, limit):
    plane = FilePlane(None, directory=str(tmp_path / "plane"))

    async def placed(tokens: int) -> float:
        await plane.started()
        return sent(await plane.put(group(tokens, **kind, prompt=tokens)))

    sizes = {tokens: asyncio.run(placed(tokens)) for tokens in (1024, 4096, 16384)}
    assert max(sizes.values()) - min(sizes.values()) <= 8 * kind.get("segments", 1), sizes
    assert max(sizes.values()) < limit, sizes
    assert sent(group(16384, **kind)) > 13 * 16384, "in memory all of it is sent"


@given(any_rows())
def test_every_field_of_a_row_arrives_as_it_was_sent(row):
    assert pickle.loads(pickle.dumps(row)) == row


def test_a_step_is_divided_in_the_same_way_with_every_plane(tmp_path):
    """Which rows share a prompt is known by its digest, before anybody fetches it."""
    plane = FilePlane(None, directory=str(tmp_path / "plane"))
    here = [group(40, segments=2), group(20, rollouts=5), group(30, prompt=9)]

    async def placed() -> list[Group]:
        await plane.started()
        return [await plane.put(each) for each in here]

    layout = Layout(packed=True)
    divided = [
        shares(make_batch(groups, step=0, temperature=1.0), updates=1, ranks=3, layout=layout)
        for groups in (here, asyncio.run(placed()))
    ]
    assert not (tmp_path / "plane" / "fetched").exists()
    assert [with_tokens(share) for share in divided[1]] == divided[0]


def test_files_of_rollouts_are_the_same_with_every_plane(tmp_path):
    plane = FilePlane(None, directory=str(tmp_path / "plane"))
    here = group(50)

    async def placed() -> Group:
        await plane.started()
        return await plane.put(here)

    there = asyncio.run(placed())
    assert isinstance(there.rollouts[0].segments[0].tokens, PlacedTokens)
    assert stored.tokens([there]) == stored.tokens([here])
    assert len(plane.fetches) == 1


def test_each_rank_fetches_the_tokens_of_its_rows_and_of_no_others(tmp_path):
    plane = FilePlane(None, directory=str(tmp_path / "plane"))

    async def placed() -> Group:
        await plane.started()
        return await plane.put(group(30, rollouts=6))

    batch = make_batch([asyncio.run(placed())], step=0, temperature=1.0)
    assert [length(row) for row in batch.rows] == [3 + 29] * 6
    parts = [with_tokens(pickle.loads(pickle.dumps(part))) for part in shares(batch, updates=1, ranks=3)]
    asked = [places for _, places in plane.fetches]
    assert [len(places) for places in asked] == [3, 3, 3], "two rows, and their prompt once"
    assert {place for places in asked for place in places} == {("0", i) for i in range(7)}
    assert all(type(row.tokens) is Tokens for part in parts for row in part.rows.values())


# ---------------------------------------------------------------------------------- the pipeline


class Story:
    """A pipeline of fakes with a data plane."""

    def __init__(self, plane: Any, **changes: Any) -> None:
        self.plane, self.events = plane, []
        self.prompts, self.position = prompts(200), 0
        self.trainer = changes.pop("trainer", None) or FakeTrainer()
        self.held: list[int] = []
        self.pipeline = Pipeline(
            buffer=Buffer(prompts_per_step=GROUPS, max_staleness=1, num_steps=STEPS, policy="in_order"),
            prompts=FakePrompts(self.draw),
            engine=FakeEngine(),
            playing=Playing(
                environments={"task": FakeEnvironment()},
                renderer=FakeRenderer(),
                sampling=SamplingParams(temperature=1.0, max_tokens=4),
                group_size=4,
            ),
            plane=plane,
            learning=Learning(advantages=advantages, dynamic=changes.pop("dynamic", None)),
            trainer=self.trainer,
            emit=self.note,
            schedule=Schedule(rollout_deadline=60.0, stall=3600.0),
            **changes,
        )

    def draw(self, request: SampleRequest) -> list[Prompt]:
        self.position += request.expected_prompts
        return list(self.prompts[self.position - request.expected_prompts : self.position])

    def note(self, event: Any) -> None:
        """Keep what a tracker has written of an event: no groups."""
        if isinstance(event, StepEnded) and isinstance(self.plane, FilePlane):
            self.held.append(self.plane.held[0])
        self.events.append(type(event) if isinstance(event, GroupsReady) else event)

    def __call__(self) -> Story:
        async def story() -> None:
            await self.plane.started()
            try:
                self.result = await self.pipeline.run()
            finally:
                self.trainer.batches.clear()
                del self.pipeline
                gc.collect()
                await asyncio.sleep(1)

        run(story())
        return self


@pytest.fixture
def plane(tmp_path: Path) -> FilePlane:
    return FilePlane(None, directory=str(tmp_path / "plane"))


class Forgetful(FakeTrainer):
    """Keeps no batch, like a trainer in a separate process."""

    async def step(self, batch):
        result = await super().step(batch)
        self.batches.clear()
        return result


@pytest.mark.long
def test_a_run_in_order_is_the_same_with_every_plane_and_nothing_of_it_is_left(plane):
    here, there = Story(MemoryPlane(None))(), Story(plane, trainer=Forgetful())()
    assert here.result == there.result == "finished"
    assert here.trainer.state == there.trainer.state != 0
    most = 2 * GROUPS * 4
    assert plane.taken == STEPS * GROUPS
    assert max(there.held) <= most + GROUPS * 4, "what is trained, and what max_staleness allows to wait"
    assert plane.held == (0, 0)


@pytest.mark.long
def test_a_group_that_is_filtered_never_enters_the_plane(plane):
    story = Story(plane, trainer=Forgetful(), dynamic=DynamicSampling(max_extra_groups=1000))()
    filtered = sum(isinstance(event, GroupFiltered) for event in story.events)
    assert filtered > 0
    assert plane.taken <= STEPS * GROUPS + 2 * GROUPS
    assert plane.held == (0, 0)


class Failing(FakeTrainer):
    async def step(self, batch):
        if batch.step == 2:
            raise TrainerError("out of memory")
        return await super().step(batch)


@pytest.mark.long
def test_after_an_error_nothing_is_left(plane):
    with pytest.raises(TrainerError) as error:
        Story(plane, trainer=Failing())()
    del error
    gc.collect()
    assert plane.taken > 0
    plane._discard_released()
    assert plane.held == (0, 0)


@pytest.mark.long
def test_groups_of_a_checkpoint_are_given_to_the_plane_when_a_run_is_resumed(plane):
    story = Story(plane, trainer=Forgetful())
    before, ready = Story(MemoryPlane(None)).pipeline.buffer, group(10, rollouts=4)
    slots = before.reserve()
    slot, *_ = before.assign(slots, [ready.prompt] * len(slots))
    before.complete(slot, attrs.evolve(ready, slot=slot.id, target_version=slot.target_version))
    story.pipeline.buffer.load_state_dict(before.state_dict())
    story()
    assert story.result == "finished"
    assert plane.taken == STEPS * GROUPS, "the group that was ready, too"
    assert plane.held == (0, 0)


@pytest.mark.long
def test_a_plane_that_fails_ends_the_run(tmp_path):
    full = FilePlane(None, directory=str(tmp_path / "plane"), room=7)
    with pytest.raises(DataPlaneError, match="it is full"):
        Story(full)()


def test_a_handle_that_is_gone_takes_the_whole_groups_tokens_only_when_it_was_the_last(plane):
    async def story() -> None:
        await plane.started()
        first = (await plane.put(group(10, rollouts=2))).rollouts[0]
        await asyncio.sleep(0)
        assert plane.held == (3, 172)
        assert fetched([first.segments[0].tokens])[0] == group(10).rollouts[0].segments[0].tokens
        kept = attrs.evolve(first, reward=2.0)
        del first
        await asyncio.sleep(0)
        assert plane.held == (3, 172)
        del kept
        await asyncio.sleep(0)
        assert plane.held == (0, 0)

    asyncio.run(story())


def test_a_plane_that_is_closed_is_asked_for_nothing_any_more(plane):
    """Its process may be gone: a call could wait for it, or find another one."""

    async def story() -> None:
        await plane.started()
        early, late = await plane.put(group(10)), await plane.put(group(10))
        del early
        await plane.aclose()
        del late
        await asyncio.sleep(0)
        assert plane.held[0] == 18

    asyncio.run(story())


def whose_tokens_are_lost(plane) -> Group:
    """Return a group of the plane, which has lost its tokens."""

    async def put() -> Group:
        await plane.started()
        return await plane.put(group(10))

    there = asyncio.run(put())
    for path in plane.reader.directory.iterdir():
        path.unlink()
    return there


def test_the_files_of_a_run_whose_tokens_are_lost_still_say_how_it_ended(tmp_path, plane):
    """A resumed run and ``verify`` read the last events: which groups were returned, and what was saved."""
    there = whose_tokens_are_lost(plane)
    run = RunDirectory.create(tmp_path / "run", Config())
    tracker = FilesTracker(run.info(Config(), None))
    for event in (GroupsReady(step=0, groups=(there,)), Saving(step=0), Saved(step=0, directory="c")):
        call(tracker, event)
    tracker.close()
    assert [event["event"] for event in Run(run.path).events()][-2:] == ["Saving", "Saved"]


def test_secrets_are_searched_in_texts_without_the_tokens_of_a_plane(tmp_path, plane, monkeypatch):
    monkeypatch.setattr(secrets, "_values", {"HF_TOKEN": "hf_abcdefgh"})
    there = whose_tokens_are_lost(plane)
    assert secrets.masked(there) is there


# ---------------------------------------------------------------------------------- of a single file


def test_a_plane_whose_reader_no_other_process_can_import_is_refused_at_the_check(tmp_path):
    """It was found at the first row of the first step."""
    (tmp_path / "alone.py").write_text(Path(__file__).with_name("file_plane.py").read_text())
    (tmp_path / "beside.py").write_text("from file_plane import FilePlane")
    tables = [
        {
            "tasks": {"sort": {"env": "math:sort"}},
            "data_plane": {"name": f"{tmp_path}/{name}.py:FilePlane", "options": {"directory": "d"}},
        }
        for name in ("alone", "beside")
    ]
    with pytest.raises(PluginError, match="its reader FileReader is defined in a single file"):
        make(build([tables[0]]), PluginHost.discover())
    make(build([tables[1]]), PluginHost.discover())
