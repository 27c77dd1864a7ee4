"""Numbers that go wrong slowly are noticed: first a warning, then the end of the run."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_pipeline import Run

from grpo_core.contracts.errors import TrainerError
from grpo_core.contracts.events import WarningRaised
from grpo_core.contracts.records import StepResult
from grpo_core.loop.health import CAUSES, WINDOW, Thresholds, check_limits, lost_signal
from grpo_core.testing import FakeEngine, FakeTrainer

NAMES = sorted(CAUSES)
numbers = st.floats(0.0, 10.0)
names = st.sampled_from(NAMES)


def between(name):
    """Thresholds between which a number is worth a warning and no more: soft 2 and hard 4, or 4 and 2."""
    return Thresholds(4.0, 2.0) if CAUSES[name].small_is_bad else Thresholds(2.0, 4.0)


def fine(name):
    return 5.0 if CAUSES[name].small_is_bad else 1.0


def fatal(name):
    return 1.0 if CAUSES[name].small_is_bad else 5.0


@pytest.mark.parametrize("name", NAMES)
def test_a_soft_limit_warns_and_a_hard_one_is_fatal(name):
    limits = {name: between(name)}
    assert check_limits([{name: fine(name)}], limits) == []
    (warning,) = check_limits([{name: 3.0}], limits)
    assert (warning.metric, warning.value, warning.fatal) == (name, 3.0, False)
    (end,) = check_limits([{name: fatal(name)}], limits)
    assert end.fatal
    for finding in (warning, end):
        assert name in finding.message
        assert "Likely:" in finding.message


@given(names, st.lists(numbers, min_size=WINDOW, max_size=12), st.integers(0, (WINDOW - 1) // 2))
def test_a_minority_of_extreme_steps_is_ignored(name, before, extreme):
    steps = [{name: fine(name)} for _ in before] + [{name: fatal(name)}] * extreme
    assert check_limits(steps, {name: between(name)}) == []


@given(names, st.lists(numbers, max_size=12))
def test_a_lasting_fault_is_found_whatever_came_before(name, before):
    steps = [{name: value} for value in before] + [{name: fatal(name)}] * WINDOW
    (finding,) = check_limits(steps, {name: between(name)})
    assert finding.fatal


@given(names, st.lists(numbers, min_size=1, max_size=6), st.sampled_from([math.nan, math.inf, -math.inf]))
def test_a_non_finite_number_is_beyond_every_limit(name, before, bad):
    steps = [*({name: value} for value in before), {name: bad}]
    (finding,) = check_limits(steps, {name: between(name)})
    assert finding.fatal
    assert math.isnan(finding.value)


@given(names, st.lists(numbers, max_size=8))
def test_a_limit_of_zero_is_none(name, values):
    assert check_limits([{name: value} for value in values], {name: Thresholds()}) == []


@pytest.mark.long
@given(st.lists(st.dictionaries(names, numbers), max_size=8))
def test_fatal_findings_come_first_and_each_metric_has_one_at_most(steps):
    found = check_limits(steps, {name: between(name) for name in NAMES})
    assert [finding.fatal for finding in found] == sorted((f.fatal for f in found), reverse=True)
    assert len({finding.metric for finding in found}) == len(found)
    assert {finding.metric for finding in found} <= set(steps[-1] if steps else ())


# ---------------------------------------------------------------------------------- in a run


class Drifting(FakeTrainer):
    """A trainer whose engine disagrees with it a little more with each step."""

    async def step(self, batch):
        result = await super().step(batch)
        return StepResult(
            version=result.version, metrics={**result.metrics, "logprob_diff_mean": result.version / 10}
        )


def test_a_mismatch_that_grows_is_a_warning_first_and_then_the_end_of_the_run():
    drifting = Run(steps=40, trainer=Drifting(), limits={"logprob_diff_mean": Thresholds(soft=1.0, hard=2.0)})
    with pytest.raises(TrainerError, match=r"step 23: logprob_diff_mean is 2\.1, above its hard limit 2"):
        drifting()
    warnings = drifting.of(WarningRaised)
    assert [event.step for event in warnings] == list(range(13, 23)), "medians of five steps above 1"
    assert {event.cause for event in warnings} == {"logprob_diff_mean"}


class Comparing(FakeTrainer):
    """A trainer that disagrees with an engine whose completions have three tokens."""

    async def step(self, batch):
        result = await super().step(batch)
        wrong = any(row.tokens.n_sampled == 3 for row in batch.rows)
        return StepResult(
            version=result.version, metrics={**result.metrics, "logprob_diff_mean": 5.0 if wrong else 0.0}
        )


def wrong_engine():
    return FakeEngine(reply=lambda request, rng: rng.choice("ab") * 3)


def resumed_with(engine):
    """A run that continues from a checkpoint that holds groups of the wrong engine."""
    kept = []

    async def save(step, failure):
        kept.append((step, first.buffer.state_dict()))

        async def written():
            return Path()

        return written

    options = {"steps": 20, "max_staleness": 3}
    first = Run(engine=wrong_engine(), trainer=Comparing(), save=save, schedule={"save_every": 1}, **options)
    first()
    step, state = next((step, state) for step, state in kept if step > 1 and len(state["ready"]) > 2)
    limits = {"logprob_diff_mean": Thresholds(soft=1.0, hard=2.0)}
    second = Run(engine=engine, trainer=Comparing(), limits=limits, **options)
    second.buffer.load_state_dict(state)
    second.stream.take(state["dispatched"])
    second.trainer.version = step
    return second


@pytest.mark.long
def test_groups_of_an_engine_that_was_wrong_before_the_resume_end_no_run():
    resumed = resumed_with(FakeEngine())()
    assert resumed.result == "finished"
    warnings = resumed.of(WarningRaised)
    assert warnings
    assert all("finished before the run was resumed" in event.message for event in warnings)


def test_an_engine_that_is_still_wrong_after_the_resume_ends_the_run():
    resumed = resumed_with(wrong_engine())
    with pytest.raises(TrainerError, match=r"logprob_diff_mean is 5, above its hard limit 2"):
        resumed()
    assert resumed.of(WarningRaised), "the groups of the checkpoint are only warned of"


# ---------------------------------------------------------------------------------- what a loss drops

MASKED = "loss.options.correction = {'name': 'sequence_mask', 'cap': 2.0}"


def test_the_first_step_whose_weights_are_all_0_says_so_with_the_correction_and_the_drift():
    healthy = [{"rows": 8.0, "signal": 0.98, "importance_weight_mean": 0.97}] * 4
    lost = {"rows": 8.0, "signal": 0.0, "importance_weight_mean": 0.0, "logprob_diff_mean": 0.31}
    assert lost_signal(healthy, MASKED) == []
    (finding,) = lost_signal([*healthy, lost], MASKED)
    assert not finding.fatal
    for part in ("the step trained nearly nothing: 0.00%", MASKED, "logprob_diff_mean 0.31"):
        assert part in finding.message


def test_weights_of_0_are_seen_although_the_loss_has_another_term():
    (finding,) = lost_signal([{"signal": 0.3, "importance_weight_mean": 0.0}], MASKED)
    assert "trained nearly nothing" in finding.message


def test_a_gradient_that_sequence_weights_shrink_is_said_in_words():
    (finding,) = lost_signal([{"signal": 0.058}] * 3, MASKED)
    assert "about 17 times smaller than the advantages ask for" in finding.message
    assert lost_signal([{"signal": 0.9}, {"signal": 0.05}, {"signal": 0.8}], MASKED) == [], "one small step"


def test_a_loss_that_corrects_nothing_is_what_explains_a_mismatch():
    limits = {"mismatch_kl": Thresholds(0.5, 4.0), "clip_fraction_low": Thresholds(0.3, 0.9)}
    found = check_limits([{"mismatch_kl": 1.0, "clip_fraction_low": 0.5}], limits, "correction = 'off'")
    assert ["Likely: correction = 'off'" in finding.message for finding in found] == [True, False]
