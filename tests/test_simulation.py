"""The real pipeline in a simulated world: nothing lost, nothing doubled, nothing stuck."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from attrs import asdict, evolve
from simulation.faults import DEATHS, ENDS, NONE, SURVIVED, UNSEEN, Faults
from simulation.runs import simulate

SHORT = 6
"""Steps of a run that shows what becomes of a fault which happens at most of them."""
CASES = [(policy, staleness) for policy in ("deadline", "in_order") for staleness in range(5)]


def holds(seed, policy, max_staleness, **changes):
    outcome = simulate(seed, policy=policy, max_staleness=max_staleness, **changes)
    again = f"PYTHONPATH=tests python -m simulation.runs --seed {seed} --policy {policy}"
    assert not outcome.violations, f"{again} --max-staleness {max_staleness}\n" + "\n".join(
        outcome.violations
    )
    return outcome


@pytest.mark.long
@pytest.mark.parametrize(("policy", "max_staleness"), CASES)
def test_whatever_fails_and_dies_every_prompt_is_trained_once_or_recorded_as_skipped(policy, max_staleness):
    ends = {life.split(":")[0] for seed in range(3) for life in holds(seed, policy, max_staleness).lives}
    assert {"finished", "killed"} <= ends


@pytest.mark.long
def test_what_an_engine_samples_before_its_canary_is_confirmed_is_not_trained_until_then():
    """In this story an engine with old weights samples the end of a rollout while its canary is asked."""
    holds(1035, "deadline", 2, ranks=1)


@pytest.mark.long
def test_what_an_engine_samples_is_not_trained_if_it_dies_before_its_canary_is_asked():
    """In this story an engine of a pool with old weights samples the end of a rollout and dies."""
    holds(1058, "deadline", 4, ranks=1)


@pytest.mark.nightly
@pytest.mark.parametrize(("policy", "max_staleness"), CASES)
def test_all_laws_hold_over_many_more_seeds(policy, max_staleness):
    for seed in range(1000, 1050):
        holds(seed, policy, max_staleness)


@pytest.mark.long
@pytest.mark.parametrize(("policy", "max_staleness"), CASES)
def test_without_faults_nothing_is_repeated(policy, max_staleness):
    outcome = holds(0, policy, max_staleness, faults=NONE, steps=SHORT)
    assert outcome.lives == ("finished",)
    assert not any("'attempt': 1" in line for line in outcome.story)


ENGINE_FAULTS = [
    "engine_garbage", "sync_unanswered", "tensor_corrupted", "tensor_dropped", "old_weights",
    "canary_unanswered",
]  # fmt: skip
"""The faults of one engine that end a run without a pool."""


def failures(outcome):
    return [life.split(": ")[1] for life in outcome.lives if life.startswith("failed")]


def test_the_model_says_of_each_fault_what_becomes_of_it():
    assert sorted([*SURVIVED, *ENDS, *UNSEEN, *DEATHS]) == sorted(asdict(NONE))


@pytest.mark.long
@pytest.mark.parametrize(("fault", "error"), ENDS.items())
def test_a_fatal_fault_ends_a_run_with_its_name_and_the_next_life_continues(fault, error):
    faults, ranks = evolve(NONE, **{fault: 0.5}), 3 if fault.startswith("rank_") else None
    steps = 12 if fault == "canary_unanswered" else SHORT  # an engine is asked a second time
    outcome = holds(1, "deadline", 2, faults=faults, members=0, ranks=ranks, steps=steps)
    assert set(failures(outcome)) == {error}
    assert outcome.lives[-1] == "finished"


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 3])
def test_whatever_fails_and_dies_several_ranks_train_every_prompt_once(ranks):
    ends = {
        life.split(":")[0] for seed in range(30, 35) for life in holds(seed, "deadline", 2, ranks=ranks).lives
    }
    assert {"finished", "killed", "failed"} <= ends


@pytest.mark.long
def test_a_rank_that_dies_at_any_moment_ends_the_run_at_once_with_its_name():
    """Also when nobody waits for it, and before the first step; see the laws of ``simulation.ranks``."""
    faults = evolve(NONE, rank_death=0.1)
    outcomes = [holds(seed, "deadline", 2, faults=faults, members=0, ranks=3) for seed in range(4)]
    told = [line for outcome in outcomes for line in outcome.story]
    for moment in ("is killed in a call", "is killed between calls"):
        assert any(moment in line for line in told)
    named = {life.split(": ")[2][:14] for outcome in outcomes for life in outcome.lives if "died" in life}
    assert named == {"trainer rank 0", "trainer rank 1", "trainer rank 2"}


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1])
def test_ranks_train_the_weights_that_one_process_trains(seed):
    """In this order, nothing that the number of ranks decides has a part in what is trained."""
    outcomes = [holds(seed, "in_order", 2, faults=NONE, ranks=ranks, steps=SHORT) for ranks in (1, 2, 3)]
    assert len({outcome.weights for outcome in outcomes}) == 1


@pytest.mark.long
@pytest.mark.parametrize("fault", ENGINE_FAULTS)
def test_in_a_pool_a_fault_of_one_engine_is_survived_or_ends_the_run_with_its_name(fault):
    faults = evolve(NONE, **{fault: 0.1})
    outcomes = [holds(seed, "deadline", 2, faults=faults, members=3, steps=SHORT) for seed in (0, 1)]
    assert any(outcome.happened for outcome in outcomes)
    found = {failure for outcome in outcomes for failure in failures(outcome)}
    assert found <= {ENDS[fault]}
    assert {outcome.lives[-1] for outcome in outcomes} == {"finished"}


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "members"),
    [(fault, members) for fault in SURVIVED for members in (0, 3) if members or fault != "node_loss"],
)
def test_survivable_faults_are_survived_in_one_life(fault, members):
    rate = {"engine_death": 0.02, "environment_death": 0.05, "node_loss": 0.01, "service_away": 0.08}.get(
        fault, 0.1
    )
    faults = evolve(NONE, **{fault: rate})
    outcome = holds(2, "deadline", 1, faults=faults, members=members, steps=SHORT)
    assert outcome.happened == {fault}
    assert outcome.lives == ("finished",)


@pytest.mark.long
def test_the_pauses_of_an_outage_are_those_of_the_seed():
    faults = evolve(NONE, service_away=0.08)
    first, again = (holds(2, "deadline", 1, faults=faults, members=0, steps=SHORT) for _ in range(2))
    assert any("its service answers again" in line for line in first.story)
    assert (again.seconds, again.weights) == (first.seconds, first.weights)


@pytest.mark.long
def test_whatever_fails_while_a_service_is_away_every_prompt_is_trained_once():
    faults = Faults(service_away=0.01, service_gone=0.003)
    outcomes = [holds(seed, "deadline", 2, faults=faults) for seed in (4, 5, 7)]
    told = [line for outcome in outcomes for line in outcome.story]
    assert any("service_away" in line for line in told)
    assert any("its service answers again" in line for line in told)
    assert "Unavailable" in [failure for outcome in outcomes for failure in failures(outcome)]


@pytest.mark.long
def test_engines_that_are_lost_with_their_machine_are_replaced_and_reported():
    outcome = holds(1, "deadline", 2, faults=evolve(NONE, node_loss=0.02), members=3)
    assert any("engines are lost" in line for line in outcome.story)
    assert any("is replaced: engine simulated: its machine is lost" in line for line in outcome.story)


@pytest.mark.long
@pytest.mark.parametrize("fault", UNSEEN)
def test_answers_that_are_doubled_or_change_places_are_known_to_the_model(fault):
    outcomes = [
        simulate(seed, policy="deadline", max_staleness=1, faults=evolve(NONE, **{fault: 0.2}), members=0)
        for seed in range(2, 6)
    ]
    broken = [str(violation) for outcome in outcomes for violation in outcome.violations]
    assert any("is the answer to another request" in law or "counts twice" in law for law in broken)


@pytest.mark.long
def test_a_second_signal_ends_a_run_at_once_and_the_next_life_continues():
    faults = evolve(NONE, stop=1.0, second_stop=1.0)
    outcomes = [holds(seed, "deadline", 1, faults=faults, steps=SHORT) for seed in (5, 6, 10, 12)]
    lives = [life for outcome in outcomes for life in outcome.lives]
    assert "stopped at once" in lives
    assert lives.count("finished") == 4


@pytest.mark.long
def test_prompts_that_never_get_a_reward_are_skipped():
    outcome = holds(3, "in_order", 2, faults=evolve(NONE, poisoned=0.1), steps=SHORT)
    assert outcome.lives == ("finished",)
    assert any("PromptSkipped" in line for line in outcome.story)


@pytest.mark.long
def test_a_checkpoint_that_has_rotted_is_passed_over_and_the_one_before_it_is_taken():
    faults = evolve(NONE, kill=1.0, rot=1.0)
    outcomes = [holds(seed, "deadline", 1, faults=faults) for seed in range(2)]
    assert {outcome.lives[-1] for outcome in outcomes} == {"finished"}
    rotted = [line for outcome in outcomes for line in outcome.story if "(its sha256 differs)" in line]
    assert rotted
    assert all("passed over" in line for line in rotted)


@pytest.mark.long
def test_an_engine_that_leaves_a_canary_unanswered_is_given_the_weights_again():
    faults = evolve(NONE, canary_unanswered=0.1, engine_death=0.02)
    outcomes = [holds(seed, "deadline", 2, faults=faults, members=0) for seed in (1, 2, 5)]
    survived = [outcome for outcome in outcomes if outcome.lives == ("finished",)]
    assert any("canary_unanswered" in line for outcome in survived for line in outcome.story)


STORIES = "from simulation import runs; import sys; sys.exit(runs.main({}) or runs.main({}))".format(
    ["--seed", "11", "--policy", "deadline", "--max-staleness", "2"],
    ["--seed", "1006", "--policy", "deadline", "--max-staleness", "3"],
)


@pytest.mark.long
def test_a_seed_gives_the_same_trace_in_every_process():
    """Whatever the hash seed: no order of a set has a part in it.  The second story loses engines."""

    def tell(hash_seed):
        told = subprocess.run(
            [sys.executable, "-c", STORIES],
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(Path(__file__).parent)},
            capture_output=True,
            text=True,
        )
        assert told.returncode == 0, told.stdout + told.stderr
        return told.stdout

    stories = tell("0")
    assert stories.count("all laws hold") == 2
    assert tell("4242") == stories


@pytest.mark.long
def test_other_faults_give_another_trace():
    traces = {
        holds(seed, "deadline", 1, faults=faults).trace for seed in range(2) for faults in (NONE, Faults())
    }
    assert len(traces) == 4
