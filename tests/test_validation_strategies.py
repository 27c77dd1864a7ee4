"""The built-in strategies compute what they say, and keep the contract."""

from __future__ import annotations

import asyncio
import itertools
import random
from functools import partial
from statistics import fmean

import pytest
from attrs import evolve
from hypothesis import assume, given
from hypothesis import strategies as st

from grpo_core.contracts.errors import ConfigError, SelectionError
from grpo_core.contracts.records import Rollout, Segment
from grpo_core.contracts.tokens import Tokens
from grpo_core.loop.metrics import DESCRIPTIONS, headline
from grpo_core.testing import make_offer
from grpo_core.validation.estimates import interval
from grpo_core.validation.results import table
from grpo_core.validation.strategies import Batched, Greedy, Pipelined
from grpo_plugin_algorithms.paired import Paired
from grpo_plugin_algorithms.strategies import Majority, PassAtK, majority_score, pass_at_k
from grpo_plugin_devkit.strategies import check_validation_strategy

# ---------------------------------------------------------------------------------- estimates


@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_draws_of_k_with_a_correct_one(case):
    n, correct, k = case
    draws = list(itertools.combinations([True] * correct + [False] * (n - correct), k))
    assert pass_at_k(n, correct, k) == pytest.approx(fmean(map(any, draws)))


@pytest.mark.parametrize(("n", "k"), [(4, 2), (8, 8), (10, 3)])
def test_pass_at_k_is_unbiased(n, k):
    p = 0.3
    chances = [
        (correct, pass_at_k(n, correct, k) * p**correct * (1 - p) ** (n - correct))
        for correct in range(n + 1)
    ]
    expectation = sum(
        value * len(list(itertools.combinations(range(n), correct))) for correct, value in chances
    )
    assert expectation == pytest.approx(1 - (1 - p) ** k)


@pytest.mark.parametrize("case", [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0)])
def test_pass_at_k_of_something_else_is_an_error(case):
    with pytest.raises(ValueError, match="expected 0 <= correct <= n and 1 <= k <= n"):
        pass_at_k(*case)


@pytest.mark.parametrize(
    ("votes", "worth"),
    [
        ([("4", 1.0)], 1.0),
        ([("4", 1.0), ("4", 1.0), ("5", 0.0)], 1.0),
        ([("5", 0.0), ("5", 0.0), ("4", 1.0)], 0.0),
        ([("4", 1.0), ("5", 0.0)], 0.5),
        ([("4", 1.0), ("5", 0.0), ("6", 0.0)], 1 / 3),
        ([("4", 1.0), ("4", 1.0), ("5", 0.0), ("5", 0.0), ("6", 0.0)], 0.5),
        ([("4", 1.0), ("4", 0.0), ("5", 0.0)], 0.5),
    ],
)
def test_a_majority_and_its_ties_whatever_the_order(votes, worth):
    for order in itertools.permutations(votes):
        assert majority_score(order) == pytest.approx(worth)


values = st.lists(st.floats(-1, 1), min_size=1, max_size=30)


@pytest.mark.long
@given(values, st.integers(0, 9))
def test_an_interval_is_within_the_values_and_independent_of_their_order(given_values, seed):
    low, high = interval(given_values, seed=seed)
    assert min(given_values) - 1e-9 <= low <= high <= max(given_values) + 1e-9
    assert interval(sorted(given_values), seed=seed) == (low, high)


@pytest.mark.long
def test_intervals_hold_the_truth_as_often_as_they_say():
    rng = random.Random(0)
    held = {0.8: 0, 0.95: 0}
    for trial in range(400):
        sample = [float(rng.random() < 0.3) for _ in range(100)]
        for confidence in held:
            low, high = interval(sample, seed=trial, confidence=confidence)
            held[confidence] += low <= 0.3 <= high
    assert 0.74 <= held[0.8] / 400 <= 0.86
    assert 0.91 <= held[0.95] / 400 <= 0.98


def test_more_prompts_narrow_an_interval_and_more_rollouts_of_the_same_do_not_widen_it():
    few, many = [0.0, 1.0] * 10, [0.0, 1.0] * 1000
    wide, narrow = interval(few, seed=0), interval(many, seed=0)
    assert narrow[1] - narrow[0] < (wide[1] - wide[0]) / 5


# ---------------------------------------------------------------------------------- strategies


class Given:
    """A context whose rollouts are known: rewards, and answers, of each prompt."""

    version = 0

    def __init__(self, rewards, answers=None, replies=None, success=1.0):
        self.success = success
        self.prompts = {"task": list(range(len(rewards)))}
        self.rewards, self.answers, self.replies = rewards, answers, replies
        self.lost = ()

    async def rollout(self, prompts, *, n, temperature, max_tokens, mode):
        self.asked = n, temperature, max_tokens, mode
        assert all(len(rewards) == n for rewards in self.rewards)
        return [
            Rollout(
                segments=[Segment(prompt_ids=(1,), tokens=Tokens.generated((2, 3), (-1.0, -1.0), (0, 0)))],
                reward=reward,
                success=None if None in (reward, self.success) else reward >= self.success,
                answer=self.answers[p][i] if self.answers else None,
                messages=({"role": "assistant", "content": self.replies[p][i] if self.replies else ""},),
                metrics={"fluent": 0.5},
                finish_reason="stop" if i else "length",
                lost=p in self.lost,
            )
            for p in prompts
            for i, reward in enumerate(self.rewards[p])
        ]


def measured(strategy, *args, **options):
    return asyncio.run(strategy.validate(Given(*args, **options)))["task"]


def test_each_prompt_weighs_the_same_however_many_of_its_rollouts_have_a_reward():
    metrics = measured(Batched(n=4), [[1.0, None, 1.0, 1.0], *[[0.0, 0.0, 0.0, 0.0]] * 11])
    assert (metrics["accuracy"], metrics["prompts"], metrics["errors"]) == (1 / 12, 12, 1)
    assert (metrics["feedback_fluent"], metrics["completion_tokens"]) == (0.5, 2.0)
    assert metrics["truncated"] == pytest.approx(1 / 4)


# ---------------------------------------------------------------------------------- missing scores

SAID = st.sampled_from(["right", "a", "b", None])
LACKING = [Batched(n=4), PassAtK(k=2, n=4), Majority(n=4)]


@pytest.mark.parametrize("strategy", LACKING, ids=lambda each: type(each).__name__)
@given(st.lists(st.lists(SAID, min_size=4, max_size=4), min_size=1, max_size=3), st.data())
def test_bounds_hold_whatever_the_missing_scores_are(strategy, said, data):
    """Missing scores have reasons: judges that time out on long replies leave out the long ones."""

    def told(answers):
        rewards = [[None if a is None else float(a == "right") for a in each] for each in answers]
        return measured(strategy, rewards, answers)

    assume(any(answer for each in said for answer in each))
    bounds = told(said)
    full = [[a or data.draw(st.sampled_from(["right", "a", "b", "c"])) for a in each] for each in said]
    for name, value in told(full).items():
        if name in DESCRIPTIONS:
            continue
        if name.startswith(("accuracy", "pass@", "maj@")) and not name.endswith(("_low", "_high")):
            assert bounds[f"{name}_low"] - 1e-9 <= value <= bounds[f"{name}_high"] + 1e-9, name


def test_few_missing_scores_widen_the_interval_and_many_leave_nothing_else():
    few = [[1.0]] * 50 + [[0.0]] * 47 + [[None]] * 3
    complete = [[1.0]] * 50 + [[0.0]] * 50
    metrics, fine = measured(Greedy(), few), measured(Greedy(), complete)
    assert metrics["accuracy"] == metrics["reward"] == 50 / 97
    assert metrics["accuracy_low"] == fine["accuracy_low"]
    assert metrics["accuracy_high"] == pytest.approx(fine["accuracy_high"] + 0.03, abs=0.01)
    assert metrics["reward_low"] == fine["reward_low"]
    many = measured(Greedy(), [[0.0]] * 9 + [[None]] * 11)
    assert many.keys() == {
        *("accuracy_low", "accuracy_high", "completion_tokens", "truncated", "prompts", "errors")
    }
    assert (many["accuracy_low"], many["errors"]) == (0.0, 11.0)
    assert many["accuracy_high"] >= 0.55
    assert headline(many) == "accuracy", "it has bounds, and no value"


def test_a_reward_has_no_bounds_and_is_left_out_if_many_scores_are_missing():
    metrics = measured(Greedy(), [[7.0]] * 9 + [[None]] * 11, success=None)
    assert "reward" not in metrics
    assert "reward_low" not in metrics
    assert headline(metrics) is None


def test_lengths_are_those_of_all_replies_that_were_played_to_their_end():
    """A judge that times out on long replies leaves out the long ones."""

    class Lengths(Given):
        async def rollout(self, prompts, **asked):
            played = await super().rollout(prompts, **asked)
            return [
                evolve(
                    one,
                    segments=[
                        Segment(prompt_ids=(1,), tokens=Tokens.generated([2] * n, [-1.0] * n, [0] * n))
                    ],
                )
                for one, n in zip(played, (10, 10, 40, 5), strict=True)
            ]

    context = Lengths([[1.0], [0.0], [None], [None]])
    context.lost = {3}
    assert asyncio.run(Greedy().validate(context))["task"]["completion_tokens"] == 20.0


@pytest.mark.parametrize("k", [1, 2, 3])
def test_pass_at_k_is_the_share_of_choices_among_the_scored_rollouts_that_hold_a_success(k):
    """An unscored rollout is neither a failure nor a success; 1 of 400 is within the limit."""
    rewards = [[1.0, 0.0, 0.0, None], *[[float(p % 4 >= i) for i in range(1, 5)] for p in range(99)]]
    scored = [[each for each in own if each is not None] for own in rewards]
    chosen = [fmean(map(max, itertools.combinations(own, k))) for own in scored]
    metrics = measured(PassAtK(k=k, n=4), rewards)
    assert metrics[f"pass@{k}"] == pytest.approx(fmean(chosen))
    assert metrics["errors"] == 1


def test_a_prompt_with_less_than_k_rewards_is_in_the_bounds_of_pass_at_k():
    rewards = [[1.0, None, None, None], [0.0, None, None, None], *[[1.0, 0.0, 0.0, 0.0]] * 2]
    metrics = measured(PassAtK(k=2, n=4), rewards)
    assert "pass@2" not in metrics
    assert metrics["pass@2_low"] <= fmean([0.5, 0.0, 0.5, 0.5])
    assert metrics["pass@2_high"] >= fmean([1.0, 1.0, 0.5, 0.5])


# ---------------------------------------------------------------------------------- what each measures


def test_partial_rewards_are_not_full_rewards():
    metrics = measured(Greedy(), [[0.5], [1.0], [1.5], [-1.0]])
    assert (metrics["accuracy"], metrics["reward"]) == (0.5, 0.5)


def test_without_a_declared_success_there_is_no_accuracy_and_the_reward_is_the_headline():
    metrics = measured(Greedy(), [[0.5], [7.5]], success=None)
    assert "accuracy" not in metrics
    assert "accuracy_low" not in metrics
    assert (headline(metrics), metrics["reward"], metrics["prompts"]) == ("reward", 4.0, 2)
    assert measured(Greedy(), [[0.5], [7.5]], success=5.0)["accuracy"] == 0.5


@pytest.mark.parametrize("strategy", [PassAtK(k=2), Majority(n=2)])
def test_a_strategy_that_counts_successes_asks_for_their_threshold(strategy):
    with pytest.raises(ConfigError) as raised:
        measured(strategy, [[0.5, 1.0]], success=None)
    assert str(raised.value) == (
        f"task 'task': {type(strategy).__name__} has to know which reward is a success, and its environment "
        "declares none; set tasks.task.success, or `success` in the environment"
    )


def test_pass_at_k_per_prompt_then_over_prompts():
    metrics = measured(PassAtK(k=[1, 2, 4], n=4), [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0]])
    assert metrics["pass@1"] == metrics["accuracy"] == pytest.approx(0.5)
    assert metrics["pass@2"] == pytest.approx(fmean([0.5, 1.0]))
    assert metrics["pass@4"] == 1.0
    assert headline(metrics) == "accuracy"


def test_a_majority_votes_on_the_answers_that_the_environment_names():
    rewards = [[1.0, 1.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0, 0.0]]
    answers = [["4", "4", "5", "6", None], ["7", "8", "8", "6", None]]
    metrics = measured(Majority(n=5), rewards, answers, [["all", "the", "same", "", ""]] * 2)
    assert metrics["maj@5"] == pytest.approx(0.5)
    assert metrics["accuracy"] == pytest.approx(fmean([2 / 5, 1 / 5]))


def test_a_majority_needs_answers_and_says_how_many_replies_have_one():
    with pytest.raises(ConfigError, match="task 'task': majority compares the answers of replies"):
        measured(Majority(n=3), [[1.0, 1.0, 0.0]], None, [["four", "four", "five"]])
    metrics = measured(Majority(n=2), [[1.0, 0.0], [0.0, 0.0]], [["4", None], [None, None]])
    assert (metrics["answered"], metrics["maj@2"]) == (0.25, 0.5)


def test_intervals_are_the_same_every_time():
    rewards = [[float(i % 3 == 0)] for i in range(50)]
    assert measured(Greedy(), rewards) == measured(Greedy(), rewards)
    wide, narrow = (measured(Greedy(confidence=c), rewards) for c in (0.99, 0.5))
    assert wide["accuracy_low"] < narrow["accuracy_low"] < wide["accuracy"]
    assert wide["accuracy"] < narrow["accuracy_high"] < wide["accuracy_high"]


def test_strategies_request_rollouts_by_their_options():
    for strategy, asked in [
        (Greedy(max_tokens=7), (1, 0.0, 7, "batched")),
        (Batched(n=2, temperature=0.5), (2, 0.5, None, "batched")),
        (Pipelined(n=2), (2, 1.0, None, "pipelined")),
        (PassAtK(k=2), (2, 1.0, None, "batched")),
        (Majority(n=2, mode="pipelined"), (2, 1.0, None, "pipelined")),
    ]:
        context = Given([[1.0] * strategy.n], answers=[["7"] * strategy.n])
        asyncio.run(strategy.validate(context))
        assert context.asked == asked


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(Batched, n=0), "n is 0; expected at least 1"),
        (partial(Batched, temperature=-1), "temperature is -1; expected 0 or more"),
        (partial(Pipelined, max_tokens=0), "max_tokens is 0; expected at least 1"),
        (partial(Batched, confidence=95), "confidence is 95; expected within 0 and 1"),
        (partial(PassAtK, k=8, n=4), "n is 4; expected at least the largest k, 8"),
        (partial(PassAtK, k="8"), "k is '8'; expected whole numbers of at least 1"),
        (partial(PassAtK, k=[]), "k is \\[\\]; expected whole numbers"),
        (partial(PassAtK, k=8, temperature=0), "temperature is 0; expected more than 0: greedy rollouts are"),
    ],
)
def test_options_out_of_their_range_are_named(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("greedy", {"mode": "both"}, "option 'mode' is 'both'; expected 'batched' or 'pipelined'"),
        ("batched", {"max_tokens": 0.5}, r"option 'max_tokens' is 0\.5; expected int"),
        ("majority", {"n": True}, "option 'n' is True; expected int"),
    ],
)
def test_options_of_another_type_are_named(name, options, message):
    with pytest.raises(SelectionError, match=message):
        make_offer("validation_strategy", name, **options)


# ---------------------------------------------------------------------------------- the contract


@pytest.mark.long
@pytest.mark.parametrize(
    "make",
    [Greedy, Batched, Pipelined, partial(PassAtK, k=3), partial(Majority, n=3, mode="pipelined"), Paired],
    ids=["greedy", "batched", "pipelined", "pass_at_k", "majority", "paired"],
)
def test_the_built_in_strategies_keep_the_contract(make):
    check_validation_strategy(make)


class Mine:
    """A strategy as somebody might write it; subclasses get one thing wrong."""

    async def validate(self, context):
        return {task: self.score(await self.play(context, task)) for task in context.prompts}

    async def play(self, context, task):
        return await context.rollout(context.prompts[task])

    def score(self, rollouts):
        rewards = [r.reward for r in rollouts if r.reward is not None]
        return {"accuracy": fmean(rewards)}


class CountsAnErrorAsWrong(Mine):
    def score(self, rollouts):
        return {"accuracy": fmean(r.reward or 0.0 for r in rollouts)}


class OneAfterTheOther(Mine):
    async def play(self, context, task):
        return [(await context.rollout([prompt]))[0] for prompt in context.prompts[task]]


class ThrowsADice(Mine):
    def score(self, rollouts):
        rewards = [r.reward for r in rollouts if r.reward is not None]
        return {"accuracy": fmean(random.SystemRandom().choices(rewards, k=20))}


class DoesNotLetGo(Mine):
    async def play(self, context, task):
        try:
            return await super().play(context, task)
        except asyncio.CancelledError:
            return [Rollout(reward=1.0)]


class LeavesSomethingBehind(Mine):
    async def play(self, context, task):
        self.left = asyncio.create_task(asyncio.sleep(1e5))
        return await super().play(context, task)


class TakesPromptsAway(Mine):
    async def play(self, context, task):
        rollouts = await super().play(context, task)
        context.prompts[task].pop()
        return rollouts


class Meddles(Mine):
    async def play(self, context, task):
        rollouts = await super().play(context, task)
        if context.version:
            context.engine.reply = lambda request, rng: "?"
        return rollouts


class Forgets(Mine):
    """Says how much better a version is than the one before, and does not after a resume."""

    before = None

    def score(self, rollouts):
        now, before = super().score(rollouts)["accuracy"], self.before
        self.before = now
        return {"accuracy": now, **({} if before is None else {"gain": now - before})}

    def state_dict(self):
        return {}


class Optimist(Mine):
    def score(self, rollouts):
        return {"accuracy": 1.0}


@pytest.mark.long
def test_a_strategy_of_ones_own_keeps_the_contract():
    check_validation_strategy(Mine)
    check_validation_strategy(OneAfterTheOther, rounds=24)


@pytest.mark.long
@pytest.mark.parametrize(
    ("make", "fault"),
    [
        (Optimist, "a policy of garbage scores 1.0, expected 0.0"),
        (CountsAnErrorAsWrong, "a rollout whose reward is None must not count as wrong"),
        (ThrowsADice, "with batches of"),
        (OneAfterTheOther, "48 environment calls for 24 rollouts of 2 turns, expected at most 6"),
        (DoesNotLetGo, "cancelled at 0 s, it ran to its end"),
        (LeavesSomethingBehind, "and these still run"),
        (TakesPromptsAway, "the context's prompts were changed"),
        (Forgets, "resumed, it measures .*; uninterrupted, .*gain"),
        (Meddles, "validation changes the training"),
    ],
)
def test_the_contract_finds_faults(make, fault):
    with pytest.raises(AssertionError, match=fault):
        check_validation_strategy(make)


# ---------------------------------------------------------------------------------- the table


def test_results_are_shown_with_their_intervals():
    results = {
        "sort": {"pass@8": 0.9, "pass@8_low": 0.85, "pass@8_high": 0.955, "reward": 0.25, "prompts": 200.0},
        "gsm8k": {"accuracy": 1.0, "kl_low": 0.5},
        "essay": {"accuracy_low": 0.2, "accuracy_high": 0.75, "unscored": 0.55},
    }
    assert table(results).splitlines() == [
        "task   metric       value        interval",
        "sort   pass@8       90.0%  85.0% to 95.5%",
        "       reward        0.25",
        "       prompts        200",
        "gsm8k  accuracy    100.0%",
        "       kl_low         0.5",
        "essay  accuracy  no score  20.0% to 75.0%",
        "       unscored     55.0%",
    ]
