"""Forecasts: the real pipeline in virtual time takes the service times of its parts."""

from __future__ import annotations

import json

import pytest
from forks import grpo

from grpo_core import ConfigError
from grpo_core.config import structured
from grpo_core.kit import PluginHost
from grpo_core.plugins.configured import configured
from grpo_plugin_replay import simulate as commands
from grpo_plugin_replay.forecast import forecast
from grpo_plugin_replay.simulate import best, table
from grpo_plugin_replay.times import Times, read_times

ROWS = 8
"""Rollouts of a step, all of which the engine decodes at once."""


def times(**parts):
    """Service times: 10 tokens of 0.1 s are a completion of 1 s; a step takes 3 s."""
    given = {
        "engine": {"token": 0.1, "rows": ROWS},
        "rollout": {"tokens": 10, "spread": 0.0},
        "trainer": {"step": 3.0},
    }
    return structured(Times, {key: given.get(key, {}) | parts.get(key, {}) for key in given | parts})


def config(max_staleness=0, steps=12, **sections):
    base = {
        "trainer": {"steps": steps, "prompts_per_step": 4},
        "rollout": {"group_size": 2},
        "validation": {"every": 0, "at_start": False},
        "checkpoint": {"every": 0},
        "pipeline": {"max_staleness": max_staleness},
    }
    return configured([{key: base.get(key, {}) | sections.get(key, {}) for key in base | sections}])[0]


@pytest.fixture(scope="module")
def host():
    return PluginHost.discover(None, [])


@pytest.fixture
def seconds(host):
    """Returns a function that returns the seconds of a step."""

    def seconds(of_config, of_times, **options):
        return forecast(of_config, of_times, host, **options).seconds_per_step

    return seconds


# ---------------------------------------------------------------------------------- one engine, one trainer


def test_without_staleness_a_step_takes_generation_and_then_training(seconds):
    assert seconds(config(0), times()) == pytest.approx(1.0 + 3.0)


@pytest.mark.parametrize("training", [0.25, 3.0])
def test_with_staleness_a_step_takes_the_longer_of_both(seconds, training):
    found = seconds(config(1), times(trainer={"step": training}))
    assert found == pytest.approx(max(1.0, training), rel=0.01)


def test_the_shares_say_which_side_waits(host):
    found = forecast(config(0), times(), host)
    assert found.generating == pytest.approx(0.25)
    assert found.training == pytest.approx(0.75)
    assert found.staleness_max == 0


def test_staleness_is_what_the_real_buffer_allows(host):
    found = forecast(config(2), times(), host)
    assert found.staleness_max == 2


def test_a_row_is_slower_while_others_run(seconds):
    eight_rows = 10 * (0.1 + 7 * 0.01)
    assert seconds(config(0), times(engine={"row": 0.01})) == pytest.approx(eight_rows + 3.0)


def test_rows_that_do_not_fit_wait(seconds):
    assert seconds(config(0), times(engine={"rows": ROWS // 2})) == pytest.approx(2.0 + 3.0)


def test_requests_that_the_configuration_holds_back_wait(seconds):
    assert seconds(config(0, engine={"max_requests": 2}), times()) == pytest.approx(4.0 + 3.0)


def test_a_second_engine_takes_half_of_the_rows(seconds):
    one = seconds(config(0), times(engine={"rows": 4}))
    two = seconds(config(0, engine={"workers": 2}), times(engine={"rows": 4}))
    assert (one, two) == (pytest.approx(2.0 + 3.0), pytest.approx(1.0 + 3.0))


def test_every_turn_takes_a_completion_and_the_environment(seconds):
    two_turns = times(rollout={"turns": 2}, environment={"turn": 0.5})
    assert seconds(config(0), two_turns) == pytest.approx(2 * (1.0 + 0.5) + 3.0)


def test_weight_sync_publication_and_reading_of_prompts_take_their_time(seconds):
    engine = {"sync": 0.5, "canary": 0.25, "prompt_token": 0.001}
    found = seconds(
        config(0), times(engine=engine, rollout={"prompt_tokens": 100}, trainer={"publish": 0.125})
    )
    assert found == pytest.approx(1.0 + 3.0 + 0.5 + 0.25 + ROWS * 100 * 0.001 + 0.125)


def test_decoding_stands_still_during_a_weight_sync(seconds):
    """Generation is the bottleneck, so its time and the pause for new weights add up."""
    found = seconds(config(1, steps=40), times(engine={"sync": 0.5}, trainer={"step": 0.125}))
    assert found == pytest.approx(1.0 + 0.5, rel=0.05)


def test_a_step_takes_longer_with_more_tokens(seconds):
    priced = times(trainer={"step": 1.0, "token": 0.01}, rollout={"prompt_tokens": 15, "pass_rate": 0.5})
    every_row = config(0, loss={"all_rows": True})
    assert seconds(every_row, priced) == pytest.approx(1.0 + 1.0 + ROWS * (15 + 10) * 0.01)


@pytest.mark.long
def test_steps_that_differ_in_their_seconds_have_the_same_mean(seconds):
    found = seconds(config(0, steps=200), times(trainer={"spread": 0.3}))
    assert found != 4.0
    assert found == pytest.approx(4.0, rel=0.05)


def test_groups_that_have_equal_rewards_are_not_trained(seconds):
    priced = times(trainer={"step": 1.0, "token": 0.01}, rollout={"pass_rate": 1.0})
    assert seconds(config(0), priced) == pytest.approx(1.0 + 1.0)


def test_a_checkpoint_holds_up_training_for_its_cut_while_rollouts_are_played(seconds):
    saved = times(checkpoint={"cut": 2.0, "write": 1.0})
    assert seconds(config(0, checkpoint={"every": 1}), saved) == pytest.approx(max(1.0, 2.0) + 3.0)


def test_a_validation_needs_the_engine(seconds):
    validated = config(0, validation={"every": 1, "at_start": False})
    assert seconds(validated, times(), held_out=ROWS) > seconds(config(0), times()) + 0.9


def test_completions_end_at_the_limit_of_the_configuration(seconds):
    assert seconds(config(0, rollout={"group_size": 2, "max_tokens": 5}), times()) == pytest.approx(0.5 + 3.0)


def test_equal_seeds_give_equal_forecasts(seconds):
    spread = times(rollout={"spread": 0.8}, environment={"turn": 1.0, "spread": 0.5})
    found = [seconds(config(1), spread, seed=seed) for seed in (1, 1, 2)]
    assert found[0] == found[1] != found[2]


def test_a_run_that_fails_says_why(seconds):
    with pytest.raises(ConfigError, match=r"the simulated run fails after 0 steps: .*deadline"):
        seconds(config(0, rollout={"group_size": 2, "deadline": 0.5}), times())


# ---------------------------------------------------------------------------------- the command


@pytest.mark.long
def test_the_best_choice_is_the_first_of_those_that_are_about_as_fast(host):
    planner = commands.Planner(config(1), times(), host, seed=0)
    rows = [planner.row(*variant) for variant in commands.variants_of([])]
    assert best(rows).name == "pipeline.max_staleness=1"
    assert [row.settings for row in rows][:2] == [
        {"pipeline.max_staleness": 0},
        {"pipeline.max_staleness": 1},
    ]
    assert table(rows).splitlines()[1].split()[:2] == ["pipeline.max_staleness=0", "4"]


@pytest.mark.long
def test_the_command_prints_a_table_and_json(tmp_path, capsys):
    file = tmp_path / "times.toml"
    file.write_text("[engine]\ntoken = 0.1\n[rollout]\ntokens = 10\nspread = 0\n")
    given = {
        "settings": ["trainer.prompts_per_step=2", "rollout.group_size=2", "rollout.max_tokens=16"],
        "times": file,
        "time": ["trainer.step=3"],
        "sweep": ["pipeline.max_staleness=0,1"],
        "steps": 8,
        "seed": 0,
    }
    assert commands.simulate(**given, as_json=False) == 0
    shown = capsys.readouterr().out
    assert "best: pipeline.max_staleness=1, 3 s/step" in shown
    assert commands.simulate(**given, as_json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["best"] == "pipeline.max_staleness=1"
    assert [row["seconds_per_step"] for row in found["rows"]] == [
        pytest.approx(3.0, rel=0.01),
        pytest.approx(4.0, rel=0.01),
        pytest.approx(3.0, rel=0.01),
    ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["engine.tokn=1"], "unknown configuration key 'engine.tokn'. Did you mean 'token'?"),
        (["engine.token=0"], "'token' must be > 0: 0.0"),
        (["engine.token=soon"], "expected a number"),
        (["engine"], "expected part.key=seconds"),
    ],
)
def test_wrong_service_times_are_named(settings, message):
    with pytest.raises(ConfigError, match="service times: ") as caught:
        read_times(None, settings)
    assert message in str(caught.value)


def test_parts_that_nobody_can_simulate_are_refused():
    with pytest.raises(ConfigError, match=r"^validation.engine and filters: a simulation does not know"):
        commands.refuse_unknown_parts(
            config(0, validation={"every": 1, "engine": {}}, filters={"pass_rate": {"high": 0.5}})
        )


@pytest.mark.parametrize("text", ["max_staleness", "=1,2", "pipeline.max_staleness=1,,2"])
def test_a_sweep_names_a_key_and_values(text):
    with pytest.raises(ConfigError, match=r"^--sweep .*: expected section.key=value,value"):
        commands.variants_of([text])


@pytest.fixture
def simulate(capsys):
    """Runs the command with four rollouts a step; returns what it printed on both streams."""

    def simulate(*settings, sweep=(), steps=None, **options):
        commands.simulate(
            settings=["trainer.prompts_per_step=2", "rollout.group_size=2", *settings],
            time=["engine.token=0.1", "trainer.step=3"],
            sweep=sweep,
            steps=steps,
            seed=0,
            as_json=False,
            **options,
        )
        return capsys.readouterr()

    return simulate


@pytest.mark.parametrize("setting", ["trainer.ranks=1,4", "trainer.lr=1e-6,1e-5", "pipeline_max=1"])
def test_a_sweep_of_a_key_that_no_service_time_knows_is_refused(simulate, setting):
    with pytest.raises(ConfigError, match=rf"^{setting.split('=')[0]}: .*service times.*--time"):
        simulate(sweep=[setting])


@pytest.mark.long
def test_a_setting_that_the_simulation_does_not_obey_is_noted(simulate):
    told = simulate("trainer.ranks=4", sweep=["pipeline.max_staleness=0,1"])
    assert "note: the simulation does not know what trainer.ranks changes" in told.err
    assert "best: pipeline.max_staleness=1" in told.out


@pytest.mark.parametrize(("staleness", "least"), [(0, 4), (1, 6), (4, 12)])
def test_steps_that_are_mostly_filled_in_the_warm_up_are_refused(simulate, staleness, least):
    with pytest.raises(
        ConfigError,
        match=rf"^--steps {least - 1}: .*pipeline.max_staleness={staleness}\b.* at least {least}$",
    ):
        simulate(f"pipeline.max_staleness={staleness}", sweep=["rollout.group_size=2"], steps=least - 1)


def test_the_least_number_of_steps_measures_what_many_steps_measure(host):
    """Generation alone takes time, so groups of several steps are finished at the same moment."""
    bursts = times(engine={"rows": 0}, trainer={"step": 0.0})
    few, many = (
        commands.Planner(config(4), bursts, host, seed=0, steps=steps).row("", {}).forecast.seconds_per_step
        for steps in (12, 102)
    )
    assert few == pytest.approx(many, rel=0.02)


@pytest.mark.long
def test_more_steps_are_simulated_if_the_bound_of_staleness_needs_them(simulate):
    large = ("trainer.prompts_per_step=64", "rollout.group_size=16")
    assert "pipeline.max_staleness=12" in simulate(*large, sweep=["pipeline.max_staleness=12"]).out


@pytest.mark.long
@pytest.mark.parametrize("settings", [[], ["rollout.max_tokens=8"], ["rollout.max_tokens=4096"]])
def test_the_defaults_of_the_lengths_fit_the_limit_of_the_configuration(simulate, settings):
    assert "note" not in simulate(*settings, sweep=["pipeline.max_staleness=0"]).err


@pytest.mark.long
def test_steps_that_train_more_rollouts_are_compared_by_their_rollouts(simulate):
    """Doubled groups take a little longer in a step, and train twice the rollouts."""
    told = simulate("loss.all_rows=true", sweep=["rollout.group_size=2,4"]).out
    assert "best: rollout.group_size=4, " in told


@pytest.mark.long
def test_sweeps_of_two_keys_are_crossed_on_request(simulate):
    keys = ["pipeline.max_staleness=0,1", "engine.workers=1,2"]
    apart, crossed = (simulate(sweep=keys, cross=cross).out for cross in (False, True))
    assert [line.split("  ")[0] for line in apart.splitlines()[2:6]] == [
        *("pipeline.max_staleness=0", "pipeline.max_staleness=1", "engine.workers=1", "engine.workers=2")
    ]
    assert [line.split("  ")[0] for line in crossed.splitlines()[2:6]] == [
        f"pipeline.max_staleness={staleness} engine.workers={workers}"
        for staleness in (0, 1)
        for workers in (1, 2)
    ]


@pytest.mark.long
def test_a_wrong_option_is_a_message_and_not_a_traceback():
    done = grpo(".", "simulate", "--steps", "0")
    assert (done.returncode, done.stderr) == (2, "grpo-core: --steps is 0; expected 1 or more\n")
