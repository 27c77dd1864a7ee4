"""``grpo-core whatif``: what a run has recorded is enough to forecast it, and what is near to it."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from statistics import fmean

import numpy as np
import pytest
from attrs import evolve

from grpo_core.config import build, structured
from grpo_core.errors import ConfigError
from grpo_core.events import GroupsReady, StepEnded
from grpo_core.planning import commands
from grpo_core.planning.fitting import fit, least_squares
from grpo_core.planning.forecast import forecast
from grpo_core.planning.outcomes import DrawnOutcomes, Outcome, RecordedOutcomes
from grpo_core.planning.recorded import read
from grpo_core.planning.times import Times
from grpo_core.plugins.host import PluginHost
from grpo_core.reporting.files import FilesTracker
from grpo_core.run_directory import RunDirectory
from grpo_core.timeline import Timeline, taken_down

TIMES = structured(
    Times,
    {
        "engine": {"token": 0.02, "row": 0.001, "sync": 0.25},
        "rollout": {"tokens": 40, "spread": 0.6, "prompt_tokens": 12},
        "environment": {"turn": 0.5},
        "trainer": {"step": 1.0, "token": 0.002, "publish": 0.25},
    },
)


@pytest.fixture(scope="module")
def host():
    return PluginHost.discover(None, [])


@pytest.fixture(scope="module")
def recorded_run(tmp_path_factory, host):
    """A run on virtual time whose records the real tracker has written, with known service times."""
    return make_run(tmp_path_factory.mktemp("runs") / "run", host, config())


def config(**sections):
    base = {
        "tasks": {"guess": {"env": "math:sort"}},
        "trainer": {"steps": 30, "prompts_per_step": 4},
        "rollout": {"group_size": 4, "max_tokens": 400},
        "validation": {"every": 0, "at_start": False},
        "checkpoint": {"every": 0},
    }
    return build([{key: base.get(key, {}) | sections.get(key, {}) for key in base | sections}])


def make_run(path, host, its_config, times=TIMES):
    run = RunDirectory.create(path, its_config)
    tracker = FilesTracker(run.info(its_config, None))

    def emit(event):
        event = evolve(event, time=1000.0 + asyncio.get_running_loop().time())
        tracker.event(event)
        if isinstance(event, GroupsReady):
            tracker.rollouts(event.step + 1, event.groups)
        if isinstance(event, StepEnded):
            tracker.metrics(event.step, event.metrics)

    with taken_down(Timeline()):
        forecast(its_config, times, DrawnOutcomes(times.rollout), host, seed=7, emit=emit)
    tracker.close()
    run.unlock()
    return run.path


@pytest.fixture
def ask(capsys):
    """Returns a function that calls the command and returns its JSON."""

    def ask(path, *settings, sweep=("pipeline.max_staleness=1",), times=(), steps=None):
        commands.whatif(
            directory=path,
            settings=settings,
            time_settings=times,
            sweep=sweep,
            steps=steps,
            seed=0,
            as_json=True,
            block=[],
        )
        return json.loads(capsys.readouterr().out)

    return ask


# ---------------------------------------------------------------------------------- what is read and fitted


@pytest.mark.long
def test_the_times_of_a_run_are_found_in_its_records(recorded_run):
    found = fit(read(recorded_run))
    assert found.engine.token == pytest.approx(0.02, rel=0.1)
    assert found.engine.row == pytest.approx(0.001, rel=0.15)
    assert found.environment.turn == pytest.approx(0.5, abs=0.1)
    assert found.engine.sync == pytest.approx(0.25)
    assert found.trainer.step == pytest.approx(1.0, rel=0.01)
    assert found.trainer.token == pytest.approx(0.002, rel=0.01)
    assert found.trainer.publish == pytest.approx(0.25, rel=0.01)
    assert found.trainer.spread == pytest.approx(0.0, abs=0.001)


@pytest.mark.long
def test_the_times_without_the_other_side_are_found_if_the_slowdown_is_given(tmp_path, host, ask):
    shared = evolve(TIMES, machine=evolve(TIMES.machine, slowdown=1.8))
    run = make_run(tmp_path / "run", host, config(pipeline={"max_staleness": 1}), shared)
    apart = make_run(tmp_path / "apart", host, config(pipeline={"max_staleness": 0}), shared)
    (expected, *_) = ask(apart, sweep=("pipeline.max_staleness=0",))["rows"]
    found = ask(run, sweep=("pipeline.max_staleness=0",), times=("machine.slowdown=1.8",))
    assert found["times"]["trainer"]["token"] == pytest.approx(0.002, rel=0.2)
    assert found["rows"][-1]["seconds_per_step"] == pytest.approx(expected["seconds_per_step"], rel=0.1)
    without = ask(run, sweep=("pipeline.max_staleness=0",))["rows"][-1]["seconds_per_step"]
    assert without > 1.15 * expected["seconds_per_step"], "as if each side had been alone"


@pytest.mark.long
def test_what_the_fit_cannot_explain_is_drawn_at_random(tmp_path, host):
    uneven = evolve(
        TIMES,
        trainer=evolve(TIMES.trainer, token=0.0, spread=0.3),
        environment=evolve(TIMES.environment, turn=2.0, spread=0.5),
    )
    long = config(trainer={"steps": 60, "prompts_per_step": 4})
    found = fit(read(make_run(tmp_path / "run", host, long, uneven)))
    assert found.trainer.spread == pytest.approx(0.3, rel=0.25)
    assert found.environment.turn * found.environment.spread == pytest.approx(1.0, rel=0.25)


def test_lengths_follow_the_progress_of_the_run():
    groups = [(step, [Outcome((step,), 0.0)]) for step in range(1, 41)]
    recorded = RecordedOutcomes(groups, prompt_tokens=1)
    for progress, steps in ((0.0, range(1, 7)), (0.5, range(16, 26)), (1.0, range(35, 41))):
        (drawn,) = recorded.group(progress, 1, random.Random(0))
        assert drawn.turn_tokens[0] in steps


def test_a_validation_plays_the_same_rollouts_each_time():
    its = [Outcome((5,), 0.0), Outcome((9,), 1.0)]
    recorded = RecordedOutcomes([(1, its)], prompt_tokens=1, validated=its)
    assert [recorded.validation(place, random.Random(place)) for place in (0, 1)] == its


def test_lengths_and_prompts_are_those_of_the_run(recorded_run):
    recorded = read(recorded_run)
    lengths = [sum(each.turn_tokens) for group in recorded.groups for each in group.outcomes]
    assert np.mean(lengths) == pytest.approx(40, rel=0.1)
    assert recorded.prompt_tokens == 12
    assert len(recorded.groups) == 30 * 4


def test_turns_are_told_apart(tmp_path, host):
    turns = evolve(TIMES, rollout=evolve(TIMES.rollout, turns=3, spread=0.0))
    recorded = read(
        make_run(tmp_path / "run", host, config(trainer={"steps": 6, "prompts_per_step": 2}), turns)
    )
    assert {each.turn_tokens for group in recorded.groups for each in group.outcomes} == {(40, 40, 40)}


def test_no_factor_is_negative():
    x = np.array([1.0, 2.0, 3.0, 4.0])
    assert least_squares([x, np.ones(4)], 2 * x + 1) == pytest.approx([2.0, 1.0])
    steep = least_squares([x, np.ones(4)], 2 * x - 1)
    assert steep[1] == 0.0
    assert steep[0] > 1.5


# ---------------------------------------------------------------------------------- what is forecast


@pytest.mark.long
def test_the_present_configuration_is_forecast_first(recorded_run, ask):
    recorded, same, _ = ask(recorded_run)["rows"]
    assert (recorded["recorded"], same["recorded"]) == (True, False)
    assert same["seconds_per_step"] == pytest.approx(recorded["seconds_per_step"], rel=0.08)
    assert same["staleness_mean"] == pytest.approx(recorded["staleness_mean"], abs=0.1)


@pytest.mark.long
@pytest.mark.parametrize(
    ("setting", "sections"),
    [
        ("pipeline.max_staleness=0", {"pipeline": {"max_staleness": 0}}),
        ("pipeline.max_staleness=3", {"pipeline": {"max_staleness": 3}}),
        ("rollout.group_size=8", {"rollout": {"group_size": 8, "max_tokens": 400}}),
        ("trainer.prompts_per_step=8", {"trainer": {"steps": 30, "prompts_per_step": 8}}),
        ("engine.workers=2", {"engine": {"workers": 2}}),
    ],
)
def test_a_change_has_the_effect_that_the_run_with_it_shows(recorded_run, host, ask, setting, sections):
    told = ask(recorded_run, sweep=[setting])["rows"][-1]["seconds_per_step"]
    drawn = DrawnOutcomes(TIMES.rollout)
    runs = [forecast(config(**sections), TIMES, drawn, host, seed=seed) for seed in range(1, 4)]
    assert told == pytest.approx(fmean(run.seconds_per_step for run in runs), rel=0.1)


@pytest.mark.long
def test_the_table_says_how_far_the_forecast_is_from_the_run(recorded_run, tmp_path, capsys):
    commands.whatif(
        directory=recorded_run,
        settings=["trainer.lr=0.5"],
        time_settings=[],
        sweep=[],
        steps=12,
        seed=0,
        as_json=False,
        block=[],
        picture=tmp_path / "plan.svg",
    )
    drawn = (tmp_path / "plan.svg").read_text()
    assert drawn.count(">recorded<") == 1, "a bar, and no simulated steps"
    assert drawn.count(">the same, forecast<") == 2
    shown = capsys.readouterr()
    assert "the forecast of the run as it was differs from the run by" in shown.out
    assert [line.split("  ")[0] for line in shown.out.splitlines()[1:4]] == [
        "recorded",
        "the same, forecast",
        "with --set",
    ]
    assert "best: pipeline.max_staleness=" in shown.out
    assert "note: no time depends on trainer.lr" in shown.err


@pytest.mark.long
def test_a_service_time_can_be_given_instead_of_fitted(recorded_run, ask):
    found = ask(recorded_run, times=["trainer.step=50"])
    assert found["times"]["trainer"]["step"] == 50
    assert found["times"]["engine"]["sync"] == pytest.approx(0.25)
    assert found["rows"][1]["seconds_per_step"] > 50


@pytest.mark.long
@pytest.mark.parametrize(
    ("rows", "sections", "given"),
    [
        (6, {}, ["engine.rows=6"]),
        (0, {"engine": {"max_requests": 6}}, []),
        (0, {"rollout": {"group_size": 4, "max_tokens": 400, "max_in_flight": 8}}, []),
    ],
    ids=["rows", "max_requests", "max_in_flight"],
)
def test_the_speed_of_an_engine_is_found_where_rows_wait(tmp_path, host, ask, rows, sections, given):
    queue = evolve(TIMES, engine=evolve(TIMES.engine, row=0.0, rows=rows))
    found = ask(make_run(tmp_path / "run", host, config(**sections), queue), times=given)
    assert found["times"]["engine"]["token"] == pytest.approx(0.02, rel=0.1)
    recorded, same, _ = found["rows"]
    assert same["seconds_per_step"] == pytest.approx(recorded["seconds_per_step"], rel=0.08)


# ---------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("setting", ["model.path=other", "trainer.ranks=2", "loss.name=gspo"])
def test_keys_whose_effect_nobody_knows_are_refused(recorded_run, ask, setting):
    with pytest.raises(ConfigError, match=f"^{setting.split('=')[0]}: nobody knows from the records"):
        ask(recorded_run, setting)


def test_unknown_keys_of_a_sweep_are_refused_too(recorded_run, ask):
    with pytest.raises(ConfigError, match=r"^pipeline_max: nobody knows"):
        ask(recorded_run, sweep=["pipeline_max=1"])


def test_longer_completions_than_all_recorded_ones_are_refused(tmp_path, host, ask):
    cut = make_run(
        tmp_path / "run",
        host,
        config(trainer={"steps": 6, "prompts_per_step": 2}, rollout={"group_size": 2, "max_tokens": 30}),
    )
    with pytest.raises(
        ConfigError, match=r"rollout.max_tokens=60: \d+ of \d+ recorded completions were cut off"
    ):
        ask(cut, "rollout.max_tokens=60")
    assert ask(cut, "rollout.max_tokens=20", steps=6)["rows"]


def test_a_run_without_enough_records_is_refused(recorded_run, tmp_path, ask):
    with pytest.raises(ConfigError, match="holds no run"):
        ask(tmp_path)
    copy = tmp_path / "copy"
    shutil.copytree(recorded_run, copy)
    (copy / "timeline.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"30 steps with metrics, 30 with rollouts and 0 lines of timeline"):
        ask(copy)


def test_a_run_that_filtered_groups_is_refused(tmp_path, ask):
    run = RunDirectory.create(tmp_path / "run", config(dynamic_sampling={"enabled": True}))
    run.unlock()
    with pytest.raises(ConfigError, match="this run filters groups"):
        ask(run.path)


def test_a_run_without_tokens_is_refused(recorded_run, tmp_path, ask):
    copy = tmp_path / "copy"
    shutil.copytree(recorded_run, copy)
    for file in (copy / "rollouts").glob("*.safetensors"):
        file.unlink()
    with pytest.raises(ConfigError, match=r"are not stored \(tracking.files.tokens\)"):
        ask(copy)
