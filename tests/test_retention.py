"""The best checkpoint and every Nth stay on disk, whatever happens to the process."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_core.contracts.errors import CheckpointError, GrpoError
from grpo_core.loop import checkpoint
from grpo_core.loop.retention import SCORES, Retention

BEST = "validation/sort/accuracy"


def validated(retention, step, value):
    retention.metrics(step, {BEST: value, "validation/sort/reward": 0.0})


def save(directory, step, retention, keep=1):
    async def story():
        async def trainer(path):
            path.mkdir(parents=True)

            async def written():
                (path / "weights").write_text(str(step))

            return written

        finish = await checkpoint.begin(
            directory, step=step, pipeline={}, loaders={}, save_trainer=trainer, keep=keep,
            spared=retention.spared,
        )  # fmt: skip
        await finish()

    asyncio.run(story())
    return [at for at, _ in checkpoint.complete_names(directory)]


def test_the_best_checkpoint_stays_while_newer_ones_come_and_go(tmp_path):
    retention = Retention(tmp_path, best=BEST)
    for step, value in ((1, 0.5), (2, 0.9), (3, 0.7), (4, 0.8)):
        validated(retention, step, value)
        kept = save(tmp_path, step, retention)
    assert kept == [2, 4]
    assert retention.best(kept)[0] == 2
    validated(retention, 5, 0.95)
    assert save(tmp_path, 5, retention) == [5]


def test_several_of_the_best_stay(tmp_path):
    retention = Retention(tmp_path, best=BEST, keep_best=2)
    for step, value in ((1, 0.5), (2, 0.9), (3, 0.7), (4, 0.8), (5, 0.1)):
        validated(retention, step, value)
        kept = save(tmp_path, step, retention)
    assert kept == [2, 4, 5]
    assert retention.best(kept) == [2, 4, 5]


def test_with_a_minus_the_smallest_value_is_the_best(tmp_path):
    retention = Retention(tmp_path, best=f"-{BEST}")
    for step, value in ((1, 0.5), (2, 0.9), (3, 0.7)):
        validated(retention, step, value)
        kept = save(tmp_path, step, retention)
    assert kept == [1, 3]


def test_every_nth_stays_for_ever(tmp_path):
    retention = Retention(tmp_path, every=3)
    assert [save(tmp_path, step, retention) for step in range(1, 8)][-1] == [3, 6, 7]


def test_a_checkpoint_that_is_still_being_validated_is_not_removed(tmp_path):
    retention = Retention(tmp_path, best=BEST)
    validated(retention, 1, 0.5)
    kept = [save(tmp_path, step, retention) for step in (1, 2, 3)][-1]
    assert kept == [1, 2, 3], "an own engine for validation may be behind"
    validated(retention, 2, 0.9)
    validated(retention, 3, 0.1)
    assert save(tmp_path, 4, retention) == [2, 4]


def test_checkpoints_that_are_never_validated_are_removed_like_all_others(tmp_path):
    """A checkpoint that is due by time comes between validations."""
    retention = Retention(tmp_path, best=BEST, due=lambda version: version % 10 == 0)
    validated(retention, 10, 0.5)
    for step in (10, 13, 17, 20, 24, 28):
        kept = save(tmp_path, step, retention)
    assert kept == [10, 20, 28], "version 20 is still being validated"


def test_the_best_one_is_known_again_after_a_kill(tmp_path):
    retention = Retention(tmp_path, best=BEST)
    for step, value in ((1, 0.5), (2, 0.9), (3, 0.7)):
        validated(retention, step, value)
        save(tmp_path, step, retention)
    again = Retention(tmp_path, best=BEST, step=3)
    validated(again, 4, 0.6)
    assert save(tmp_path, 4, again) == [2, 4]
    other = Retention(tmp_path, best="validation/sort/reward", step=4)
    assert other.best([2, 4]) == [], "values of another metric do not count"


def test_values_of_steps_that_are_trained_again_are_forgotten(tmp_path):
    retention = Retention(tmp_path, best=BEST)
    for step, value in ((1, 0.5), (2, 0.9)):
        validated(retention, step, value)
    assert Retention(tmp_path, best=BEST, step=1).scores == {1: 0.5}


def test_a_metric_that_validation_does_not_measure_is_named_at_the_first_validation(tmp_path):
    retention = Retention(tmp_path, best="validation/sort/acuracy")
    retention.metrics(1, {"reward/sort": 0.5})
    with pytest.raises(GrpoError, match=r"does not measure\. Did you mean 'validation/sort/accuracy'"):
        validated(retention, 0, 0.5)


def test_a_validation_without_a_score_makes_no_checkpoint_the_best_and_keeps_none(tmp_path):
    """It lacks scores, so that nobody knows how good the version is."""
    retention = Retention(tmp_path, best=BEST)
    lacking = {f"{BEST}_low": 0.2, f"{BEST}_high": 0.9, "validation/sort/unscored": 0.7}
    validated(retention, 1, 0.5)
    kept = save(tmp_path, 1, retention)
    for step in (2, 3):
        retention.metrics(step, lacking)
        kept = save(tmp_path, step, retention)
    assert kept == [1, 3]
    again = Retention(tmp_path, best=BEST, step=3)
    assert (again.scores, again.best([1, 3])) == ({1: 0.5, 2: None, 3: None}, [1])


@pytest.mark.parametrize("content", ["", "[]", '{"metric": 3}', '{"metric": "x", "scores": {"a": 1}}', "\0"])
def test_a_damaged_file_of_values_is_one_clear_error(tmp_path, content):
    (tmp_path / SCORES).write_text(content)
    with pytest.raises(CheckpointError, match="remove it to forget which checkpoint was the best"):
        Retention(tmp_path, best=BEST)


@pytest.mark.long
@given(
    values=st.lists(st.floats(0, 1), min_size=1, max_size=12),
    keep=st.integers(1, 3),
    keep_best=st.integers(1, 3),
    kills=st.sets(st.integers(0, 11)),
)
def test_whatever_is_measured_and_killed_the_best_of_all_saved_stays(values, keep, keep_best, kills):
    """Checkpoints are names here, and a kill forgets all that is not on disk."""
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        retention, there = Retention(directory, best=BEST, keep_best=keep_best), []
        for step, value in enumerate(values):
            validated(retention, step, value)
            if step in kills:
                retention = Retention(directory, best=BEST, keep_best=keep_best, step=step)
            there.append(step)
            spared = retention.spared(there)
            there = sorted(set(there[-keep:]) | (set(there) & set(spared)))
            best = sorted(range(step + 1), key=lambda at: (values[at], at), reverse=True)
            assert set(best[:keep_best]) <= set(there)
        assert set(json.loads((directory / SCORES).read_text())["scores"]) == set(
            map(str, range(len(values)))
        )
