"""Stored rollouts: what a run writes about the groups of a step is what it trained, and can be read back."""

from __future__ import annotations

import os

import numpy as np
import pytest
from any_records import any_groups
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from recording import record
from safetensors.numpy import load_file

import grpo_core as grpo
from grpo_core.config import Config, TrackingConfig
from grpo_core.contracts.events import GroupsReady, ValidationPlayed
from grpo_core.contracts.records import Group, Prompt, Rollout, Segment
from grpo_core.contracts.tokens import Tokens
from grpo_core.loop.rows import group as group_advantages
from grpo_core.loop.rows import make_batch, with_advantages
from grpo_core.reporting import stored

BYTES = 14
"""Largest number of bytes of a stored token."""


def config(**options):
    return Config(tracking=TrackingConfig(trackers=["files"], options={"files": options}))


def tokens(n, *, context=0):
    seen = np.random.default_rng(n)
    ids, logprobs = seen.integers(0, 151_000, n), -seen.random(n).astype(np.float32)
    parts = [Tokens.generated(ids, logprobs, np.full(n, 7))]
    return Tokens.concatenate([*parts, Tokens.context(range(context)), *parts] if context else parts)


def rollout(reward, *segments, **more):
    said = {"role": "assistant", "content": "4"}
    return Rollout(
        segments=segments or [Segment(prompt_ids=(1, 2, 3), tokens=tokens(5, context=2))],
        messages=({"role": "user", "content": "2+2="}, said),
        reward=reward,
        turns=1,
        finish_reason="stop",
        seed=11,
        **more,
    )


def group(*rollouts, slot=0):
    return Group(
        prompt=Prompt(messages="2+2=", id=f"p{slot}", environment="sum", answer="4"),
        rollouts=rollouts,
        generation_version=6,
        target_version=8,
        slot=slot,
    )


def groups():
    """A group with a masked rollout, one of two segments, and one whose rewards are equal."""
    split = [Segment(prompt_ids=(1, 2, 3), tokens=tokens(4)), Segment(prompt_ids=(1, 9), tokens=tokens(2))]
    given = [
        group(
            rollout(1.0, success=True, metrics={"form": 0.5}), rollout(0.0, train=False), rollout(0.5, *split)
        ),
        group(rollout(1.0, answer="four"), rollout(1.0), slot=1),
    ]
    return tuple(with_advantages(given, group_advantages))


def test_what_a_step_trained_is_read_back_and_makes_the_same_batch(tmp_path):
    trained = groups()
    run = record(tmp_path / "run", [GroupsReady(step=7, groups=trained)], config())
    read = grpo.stored_rollouts(run.path, 8)
    assert read == list(trained)
    batches = [make_batch(each, step=7, temperature=1.0) for each in (read, trained)]
    assert batches[0] == batches[1]
    assert [row.advantage for row in batches[0].rows] == [
        each.advantage for each in trained[0].rollouts if each.trained for _ in each.segments
    ]
    assert [[each.trained for each in some.rollouts] for some in read] == [
        [True, False, False],
        [False, False],
    ]


def test_validation_rollouts_are_stored_with_seed_success_and_tokens(tmp_path):
    played = (group(rollout(1.0, success=True), rollout(0.0, success=False)),)
    run = record(tmp_path / "run", [ValidationPlayed(version=4, groups=played)], config())
    assert sorted(path.name for path in (run.path / "validation").iterdir()) == [
        "step-000004.jsonl.gz",
        "step-000004.safetensors",
    ]
    read = grpo.stored_rollouts(run.path, 4, validation=True)
    assert read == list(played)
    assert [(each.seed, each.success) for each in read[0].rollouts] == [(11, True), (11, False)]


def test_a_prompt_that_rollouts_share_is_stored_once(tmp_path):
    run = record(tmp_path / "run", [GroupsReady(step=0, groups=groups())], config())
    arrays = load_file(run.path / "rollouts" / "step-000001.safetensors")
    assert arrays["prompt_ids"].tolist() == [1, 2, 3, 1, 9]
    assert arrays["segment_prompts"].tolist() == [0, 0, 0, 1, 0, 0]
    assert arrays["segment_rollouts"].tolist() == [0, 1, 2, 2, 3, 4]


@pytest.mark.parametrize(
    "versions", [(-1, 7, 7), (-1, -1, 7)], ids=["told by versions", "not told by versions"]
)
def test_which_tokens_were_sampled_is_read_back(versions, tmp_path):
    of = Tokens(ids=(4, 5, 6), sampled=(False, True, True), logprobs=(0.0, -1.0, -2.0), versions=versions)
    given = with_advantages([group(rollout(1.0, Segment(prompt_ids=(1,), tokens=of)))], group_advantages)
    run = record(tmp_path / "run", [GroupsReady(step=0, groups=tuple(given))], config())
    assert ("sampled" in load_file(run.path / "rollouts" / "step-000001.safetensors")) == (versions[1] == -1)
    assert grpo.stored_rollouts(run.path, 1) == list(given)


def test_tokens_are_not_written_where_they_are_switched_off_and_the_texts_are_read_alone(tmp_path):
    run = record(
        tmp_path / "run", [GroupsReady(step=0, groups=groups())], config(tokens=False, compress=False)
    )
    assert [path.name for path in (run.path / "rollouts").iterdir()] == ["step-000001.jsonl"]
    (first, *_), _ = (each.rollouts for each in grpo.stored_rollouts(run.path, 1))
    assert (first.segments, first.reward, first.trained) == ((), 1.0, True)


def test_a_step_that_is_not_stored_and_a_file_that_is_damaged_are_named(tmp_path):
    run = record(tmp_path / "run", [GroupsReady(step=0, groups=groups())], config())
    with pytest.raises(
        grpo.ConfigError, match=r"step-000002\.jsonl\.gz: does not exist; the run has stored no"
    ):
        grpo.stored_rollouts(run.path, 2)
    path = run.path / "rollouts" / "step-000001.safetensors"
    os.truncate(path, path.stat().st_size - 9)
    with pytest.raises(grpo.ConfigError, match=r"step-000001\.jsonl\.gz: cannot be read: .*safetensors"):
        grpo.stored_rollouts(run.path, 1)


@pytest.mark.parametrize("length", [500, 4000])
def test_a_token_takes_at_most_14_bytes(length):
    """64 rollouts of 8 prompts, each with a prompt of 200 tokens."""
    given = [
        group(
            *(
                rollout(
                    float(i % 2), Segment(prompt_ids=np.arange(slot, slot + 200), tokens=tokens(length + i))
                )
                for i in range(8)
            ),
            slot=slot,
        )
        for slot in range(8)
    ]
    count = sum(len(each.segments[0].tokens) for some in given for each in some.rollouts)
    assert len(stored.tokens(with_advantages(given, group_advantages))) <= BYTES * count


def test_advantages_of_single_tokens_are_read_back_and_make_the_same_batch(tmp_path):
    by_turn = [np.repeat([0.75, -0.25, 0.1], [5, 4, 1]), -0.5]
    given = [group(rollout(1.0), rollout(0.0))]
    trained = with_advantages(given, lambda groups: [by_turn])
    run = record(tmp_path / "run", [GroupsReady(step=7, groups=tuple(trained))], config())
    read = grpo.stored_rollouts(run.path, 8)
    (row, other), (mine, its) = (make_batch(each, step=7, temperature=1.0).rows for each in (trained, read))
    assert mine.token_advantages.tobytes() == row.token_advantages.tobytes()
    assert (mine.tokens, its) == (row.tokens, other)
    arrays = load_file(run.path / "rollouts" / "step-000008.safetensors")
    assert arrays["token_rollouts"].tolist() == [0] * 10


# ---------------------------------------------------------------------------------- no field is lost


def read_back(groups, folder):
    """Write the groups of a step, as the tracker does, and read them."""
    path = folder / "rollouts"
    path.mkdir(exist_ok=True)
    (path / "step-000001.jsonl").write_bytes(stored.texts(groups))
    (path / "step-000001.safetensors").write_bytes(stored.tokens(groups))
    return grpo.stored_rollouts(folder, 1)


@pytest.mark.long
@settings(deadline=None)
@given(st.lists(any_groups(), max_size=3))
def test_every_field_of_a_group_survives_its_file(tmp_path_factory, groups):
    found = read_back(groups, tmp_path_factory.mktemp("any"))
    assert found == groups
    assert {each.fault for group in found for each in group.rollouts} <= {None}, "error says what it does"


def test_the_rewards_tokens_and_states_of_turns_are_read_back(tmp_path):
    turns = {"turn_rewards": (0.0, 1.0), "turn_tokens": (2, 3), "turn_states": ("", "hall")}
    given = group(rollout(1.0, **turns))
    assert read_back([given], tmp_path) == [given]
    assert read_back([given], tmp_path)[0].rollouts[0].turn_rewards == (0.0, 1.0)


class Solver:
    """It is its own answer."""


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ((3, 4), "is of the type tuple, which JSON does not restore"),
        ({3: "three"}, "is of the type dict, which JSON does not restore"),
        ({3, 4}, "is of the type set"),
        (float("nan"), "is of the type float"),
        (Solver(), "is of the type Solver"),
        ("7" * stored.LARGEST, "has 100,002 characters, so it is not stored"),
    ],
    ids=["tuple", "number as key", "set", "nan", "object", "large"],
)
def test_what_computes_with_an_answer_that_is_not_stored_is_refused(answer, why, tmp_path):
    given = evolve(group(rollout(1.0)), prompt=Prompt(messages="2+2=", answer=answer, info={"of": answer}))
    ((read, *_),) = (read_back([given], tmp_path),)
    assert why in repr(read.prompt.answer)
    for use in (lambda held: held == answer, str, bool, lambda held: answer == held, lambda held: held[0]):
        with pytest.raises(grpo.ConfigError, match=f"Prompt.answer of a stored rollout {why}.* nothing can"):
            use(read.prompt.answer)
    with pytest.raises(grpo.ConfigError, match=r"Prompt\.info\['of'\] of a stored rollout"):
        float(read.prompt.info["of"])


def test_the_info_of_a_prompt_is_stored_once(tmp_path):
    given = evolve(group(rollout(1.0), rollout(0.0)), prompt=Prompt(messages="2+2=", info={"level": "hard"}))
    assert read_back([given], tmp_path) == [given]
    assert stored.texts([given]).count(b"hard") == 1


def test_a_file_without_a_field_is_refused(tmp_path):
    read_back([group(rollout(1.0))], tmp_path)
    path = tmp_path / "rollouts" / "step-000001.jsonl"
    path.write_text(path.read_text().replace('"turn_rewards"', '"other"'))
    with pytest.raises(grpo.ConfigError, match="cannot be read: KeyError: 'turn_rewards'"):
        grpo.stored_rollouts(tmp_path, 1)
