"""The error budget: counts calls, and ends only runs whose environment keeps failing."""

from __future__ import annotations

import asyncio
import random

import pytest
from test_pipeline import Run

from grpo_core import Environment
from grpo_core.app import making
from grpo_core.config import Config, EnvironmentConfig, PipelineConfig, TrainerConfig
from grpo_core.config.run import RolloutConfig
from grpo_core.contracts.errors import EngineError, Fault, PluginError
from grpo_core.contracts.records import Rollout
from grpo_core.environments.budget import ErrorBudget, failures_of_calls
from grpo_core.testing import FakeEngine, HostedEnvironment, prompts

GOOD, BAD = None, "judge away"


class Judge(Environment):
    """A judge over a network, of episodes or of groups, whose calls fail when ``fails(number)`` says so."""

    def __init__(self, fails, *, needs_group):
        self.fails, self.needs_group, self.calls = fails, needs_group, 0

    def prompts(self, split):
        return prompts(4)

    def evaluate(self, episodes):
        number, self.calls = self.calls, self.calls + 1
        if self.fails(number):
            raise ConnectionError(f"503 from the judge\nat call {number}")
        return [float(episode.reply == "a") for episode in episodes]


def judged_run(fails, *, needs_group=True, max_error_rate=0.2, max_retries=3, **options):
    """A run of the real pipeline whose environment is ``Judge``, with the budget of a run."""
    environment = HostedEnvironment(Judge(fails, needs_group=needs_group))
    config = Config(
        environment=EnvironmentConfig(max_error_rate=max_error_rate),
        rollout=RolloutConfig(max_retries=max_retries),
        trainer=TrainerConfig(prompts_per_step=1000),
    )
    observe = making.budgets(config, {"task": environment})
    return Run(environment=environment, observe_attempt=observe, max_retries=max_retries, **options)


# ---------------------------------------------------------------------------------- runs


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("group_size", [8, 32])
@pytest.mark.parametrize("needs_group", [True, False])
def test_a_judge_that_fails_a_tenth_of_its_calls_trains_to_the_end(needs_group, group_size, seed):
    dice = random.Random(seed)
    done = judged_run(
        lambda number: dice.random() < 0.1,
        needs_group=needs_group, group_size=group_size, steps=20, prompts_per_step=8,
    )(seed)  # fmt: skip
    assert done.result == "finished"
    assert done.environment.host._environment.calls > 160


@pytest.mark.long
@pytest.mark.parametrize("needs_group", [True, False])
def test_one_outage_never_ends_a_run_however_many_calls_it_hits(needs_group):
    """The first attempt at each prompt in flight fails, in some hundred calls; the second is judged."""
    done = judged_run(
        lambda number: asyncio.get_running_loop().time() < 1.5,
        engine=FakeEngine(latency=lambda rng: 1.0),
        needs_group=needs_group, group_size=8, steps=2, prompts_per_step=50,
    )()  # fmt: skip
    assert done.result == "finished"
    assert done.buffer.statistics().attempts == 200, "each prompt was played twice"
    assert len(set(done.trained)) == 100


@pytest.mark.long
@pytest.mark.parametrize(("needs_group", "group_size"), [(True, 8), (True, 32), (False, 8)])
def test_a_judge_that_always_fails_ends_the_run_at_the_second_attempts(needs_group, group_size):
    story = judged_run(
        lambda number: True, needs_group=needs_group, group_size=group_size, prompts_per_step=24
    )
    with pytest.raises(PluginError) as raised:
        story()
    assert str(raised.value).startswith(
        "task 'task': 20 calls of its environment in a row failed, which ends a run at any max_error_rate "
        "below 1 (environment.max_error_rate is 0.2). The first of them: ConnectionError: 503 from the judge"
    )
    assert not story.trained


def test_a_judge_that_fails_most_of_its_calls_ends_the_run_by_the_share():
    dice = random.Random(1)
    with pytest.raises(PluginError, match=r"41 of the last \d+ calls of its environment failed; environment"):
        judged_run(lambda number: dice.random() < 0.7, group_size=8, steps=400)(1)


@pytest.mark.long
def test_without_retries_the_first_failures_count():
    with pytest.raises(PluginError, match="20 calls of its environment in a row failed"):
        judged_run(lambda number: number < 100, max_retries=0, group_size=4, prompts_per_step=24)()


@pytest.mark.long
def test_a_rate_of_one_lets_a_run_continue_whatever_fails():
    done = judged_run(lambda number: number < 500, max_error_rate=1.0, steps=3)()
    assert done.result == "finished"


# ---------------------------------------------------------------------------------- calls


def rollout(**fields):
    return Rollout(**fields)


def test_a_group_that_is_compared_is_one_call_and_other_rollouts_are_one_each_if_they_were_judged():
    truncated = rollout(finish_reason="length")
    rollouts = [rollout(reward=0.0), rollout(error="a"), rollout(error="b"), truncated]
    assert failures_of_calls(rollouts, needs_group=False) == [None, *rollouts[1:3]]
    assert failures_of_calls(rollouts, needs_group=True) == [rollouts[1]]
    assert failures_of_calls(rollouts[:1] * 3, needs_group=True) == [None]


@pytest.mark.parametrize("needs_group", [True, False])
def test_a_lost_rollout_is_not_a_failure_of_its_environment(needs_group):
    assert failures_of_calls([rollout(error="engine died", lost=True)] * 2, needs_group=needs_group) == []


@pytest.mark.parametrize("found", [None, 3])
def test_an_engine_may_lose_all_attempts_at_all_rollouts_that_are_out_but_one(found):
    """2 steps of 3 prompts with 4 rollouts each, each tried 6 times; one that is found ends the row."""
    config = Config(
        rollout=RolloutConfig(max_retries=5, group_size=4),
        trainer=TrainerConfig(prompts_per_step=3),
        pipeline=PipelineConfig(max_staleness=1),
    )
    observe = making.budgets(config, {"task": HostedEnvironment(Judge(None, needs_group=False))})
    lost = rollout(error="engine died", lost=True)
    for number in range(2 * 3 * 4 * 6 - 1):
        observe("task", [rollout(reward=1.0) if number == found else lost], 0)
    if found is None:
        with pytest.raises(EngineError, match="the last 144 rollouts were lost"):
            observe("task", [lost], 0)
    else:
        observe("task", [lost], 0)


# ---------------------------------------------------------------------------------- the rules


def failed(error):
    return None if error is None else Rollout(error=error)


def observed(budget, calls):
    """Count the calls before the budget was spent, and return it with the error."""
    for count, error in enumerate(calls):
        try:
            budget.observe(failed(error))
        except PluginError as stopped:
            return count + 1, str(stopped)
    return None


def test_too_many_errors_stop_the_run_with_the_first_of_them():
    budget = ErrorBudget("play", 0.2)
    count, message = observed(budget, ["first", *[GOOD] * 99, *[BAD, GOOD] * 60])
    assert count == 100 + 2 * 40 - 1, "at the 41st failure"
    assert message == (
        "task 'play': 41 of the last 179 calls of its environment failed; environment.max_error_rate is 0.2, "
        "which allows 40 of 200. The first of them: first"
    )


def test_the_share_is_one_of_the_whole_window_from_the_start():
    assert observed(ErrorBudget("play", 0.2), [BAD] * 4 + [GOOD] * 200) is None
    assert observed(ErrorBudget("play", 0.2), [GOOD, BAD] * 40) is None
    assert observed(ErrorBudget("play", 0.2), [GOOD, BAD] * 41)[0] == 82
    assert observed(ErrorBudget("play", 0.29), [GOOD, BAD] * 58) is None, "exactly 0.29 of 200"


def test_only_the_last_calls_count():
    story = [*[GOOD] * 200, *[BAD] * 10, *[GOOD] * 190, *[BAD] * 10]
    assert observed(ErrorBudget("play", 0.05), story * 3) is None


def test_many_in_a_row_stop_the_run_at_any_rate_below_one():
    assert observed(ErrorBudget("play", 0.9), [BAD] * 19 + [GOOD] + [BAD] * 19) is None
    assert observed(ErrorBudget("play", 0.9), [GOOD] * 1000 + [BAD] * 20)[0] == 1020
    assert observed(ErrorBudget("play", 1.0), [BAD] * 3000) is None


def test_a_rate_of_zero_allows_no_failure_that_counts():
    budget = ErrorBudget("play", 0.0)
    budget.observe(failed(BAD), last=False)
    assert observed(budget, [GOOD, BAD])[0] == 2


def test_the_first_error_is_shown_in_a_line_and_its_traceback_comes_with_it():
    fault = Fault("ValueError", "no rubric", "Traceback: line 3", "judge.py:3 in evaluate")
    budget = ErrorBudget("play", 0.0)
    budget.observe(Rollout(error=str(fault), fault=fault), last=False)
    with pytest.raises(PluginError) as caught:
        budget.observe(failed(BAD))
    assert str(caught.value).endswith("The first of them: judge.py:3 in evaluate: ValueError: no rubric")
    assert caught.value.fault == fault
