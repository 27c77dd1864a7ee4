"""Validation of held-out prompts: alone, and during training."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from decimal import Decimal

import numpy as np
import pytest
from attrs import evolve
from test_pipeline import CountingEngine

from grpo_core.config import EnvironmentConfig
from grpo_core.contracts.errors import DeadlineExceeded, EngineError, PluginError, WeightSyncError
from grpo_core.contracts.incidents import reported_to
from grpo_core.contracts.records import Feedback, Judgement, Prompt, Weights
from grpo_core.environments.pool import EnvironmentPool
from grpo_core.loop.rollout import SamplingParams
from grpo_core.processes.aio import FairSemaphore
from grpo_core.testing import FakeEngine, FakeEnvironment, FakeRenderer, run
from grpo_core.validation.runner import FEEDBACK_RETRIES, Context, run_strategy
from grpo_core.validation.strategies import Batched, Greedy, Pipelined

SAMPLING = SamplingParams(temperature=1.0, max_tokens=16)


def weights(version):
    return Weights(version=version, location="", nbytes=0, tensors=())


def prompts(n):
    return [Prompt(messages=f"{i}=", answer=str(i), id=str(i), environment="task") for i in range(n)]


def echo(request, rng):
    """Says the number of the prompt, which is its answer."""
    return "".join(map(chr, request.prompt_ids)).split("=")[0]


def right(episode):
    return Feedback(reward=float(episode.reply == episode.prompt.answer))


def two_turns(episode):
    return Feedback(done=False, messages=" go on") if episode.turn == 0 else right(episode)


def validated(strategy, environment, *, n=10, engine=None, version=0, max_batch=None, **changes):
    """Results of a strategy on ``n`` prompts of one task."""
    if max_batch is not None:
        environment = EnvironmentPool([environment], EnvironmentConfig(max_batch=max_batch, max_wait=0.005))

    async def story():
        the_engine = engine or FakeEngine(reply=echo)
        await the_engine.update_weights(weights(version))
        context = Context(
            version=version,
            prompts={"task": prompts(n)},
            engine=the_engine,
            environments={"task": environment},
            renderer=FakeRenderer(),
            **{"sampling": SAMPLING, **changes},
        )
        try:
            return await run_strategy("tested", strategy, context)
        finally:
            left = asyncio.all_tasks() - {asyncio.current_task()}
            assert not {task for task in left if task.get_name() != "batched call"}

    return run(story())


class Stuck:
    """Measures twice, and then waits for something that never comes."""

    async def validate(self, context):
        for _ in range(2):
            await context.rollout(context.prompts["task"])
        await asyncio.get_running_loop().create_future()


@pytest.mark.parametrize("mode", ["pipelined", "batched"])
def test_a_validation_plays_no_more_rollouts_at_the_same_time_than_there_are_places(mode):
    engine = CountingEngine(reply=echo)
    places = FairSemaphore(6)
    results = validated(Greedy(mode=mode), FakeEnvironment(right), n=20, engine=engine, places=places)
    assert results["task"]["reward"] == 1.0
    assert engine.most == 6


def test_a_strategy_that_never_returns_ends_the_run_with_its_name():
    with pytest.raises(DeadlineExceeded, match=r"'tested'.* for 120 s, twice validation.deadline"):
        validated(Stuck(), FakeEnvironment(right), deadline=60.0)


def test_a_strategy_may_take_any_number_of_sets_of_rollouts_that_each_keep_the_deadline():
    class Patient:
        async def validate(self, context):
            for _ in range(5):
                await context.rollout(context.prompts["task"])
            return {"task": {"accuracy": 1.0}}

    slow = FakeEngine(reply=echo, latency=lambda rng: 50.0)
    assert validated(Patient(), FakeEnvironment(right), engine=slow, deadline=60.0)["task"]["accuracy"] == 1.0


def test_a_strategy_may_play_its_own_prompts_which_are_read_like_all_others():
    class Asks:
        def __init__(self, content):
            said = [{"role": "user", "content": content}]
            self.prompt = Prompt(messages=said, answer="7", id="own", environment="task")

        async def validate(self, context):
            (rollout,) = await context.rollout([self.prompt])
            return {"task": {"accuracy": rollout.reward}}

    parts = [{"type": "text", "text": "7"}, {"type": "text", "text": "="}]
    assert validated(Asks(parts), FakeEnvironment(right))["task"]["accuracy"] == 1.0
    with pytest.raises(PluginError, match=r"prompt 'own': message 1 \(user\): its content is 7"):
        validated(Asks(7), FakeEnvironment(right))


# ---------------------------------------------------------------------------------- calls of the environment


@pytest.mark.parametrize(("n", "max_batch"), [(256, 256), (256, 100), (256, 1000), (1, 8), (257, 64)])
def test_batched_calls_the_environment_turns_times_n_over_max_batch_times(n, max_batch):
    environment = FakeEnvironment(two_turns, max_turns=2)
    metrics = validated(Batched(), environment, n=n, max_batch=max_batch)["task"]
    assert len(environment.calls) == 2 * math.ceil(n / max_batch)
    assert (metrics["accuracy"], metrics["prompts"], metrics["errors"]) == (1.0, n, 0)


def test_batched_only_asks_about_those_that_are_still_live():
    def odd_ones_go_on(episode):
        return two_turns(episode) if int(episode.prompt.id) % 2 else right(episode)

    environment = FakeEnvironment(odd_ones_go_on, max_turns=2)
    validated(Batched(), environment, n=100, max_batch=30)
    assert environment.calls == [30, 30, 30, 10, 30, 20]


@pytest.mark.parametrize("max_batch", [1, 7, 256])
def test_pipelined_lets_each_rollout_go_its_way_and_still_merges_calls(max_batch):
    environment = FakeEnvironment(two_turns, max_turns=2, seconds=0.05)
    metrics = validated(Pipelined(), environment, n=100, max_batch=max_batch)["task"]
    assert (metrics["accuracy"], metrics["prompts"]) == (1.0, 100)
    assert sum(environment.calls) == 200
    assert len(environment.calls) <= (200 if max_batch == 1 else 100)
    assert max(environment.calls) <= max_batch


@pytest.mark.long
def test_every_prompt_is_measured_once_whatever_the_mode_and_the_batch():
    for strategy in (Greedy(), Batched(), Pipelined(), Batched(n=3), Pipelined(n=3)):
        for max_batch in (1, 7, 64):
            seen = Counter()

            def environment(episode, seen=seen):
                seen[episode.prompt.id] += 1
                return right(episode)

            metrics = validated(strategy, FakeEnvironment(environment), n=50, max_batch=max_batch)["task"]
            assert seen == {str(i): strategy.n for i in range(50)}
            assert metrics["prompts"] == 50


def test_an_environment_that_compares_rollouts_sees_whole_groups_in_every_mode():
    for strategy in (Batched(n=4), Pipelined(n=4)):
        environment = FakeEnvironment(right, needs_group=True)
        validated(strategy, environment, n=6, max_batch=5)
        assert sum(environment.calls) == 24
        assert all(size % 4 == 0 for size in environment.calls)


# ---------------------------------------------------------------------------------- unscored


def test_unscored_rollouts_are_counted_and_are_not_wrong_answers():
    environment = FakeEnvironment(
        lambda e: Feedback() if e.prompt.id in "36" else Feedback(reward=float(e.prompt.id in "12"))
    )
    for strategy in (Greedy(), Greedy(mode="pipelined")):
        metrics = validated(strategy, environment)["task"]
        assert (metrics["prompts"], metrics["errors"], metrics["unscored"]) == (8.0, 2.0, 0.2)
        assert "accuracy" not in metrics, "it may be 0.2 as well as 0.4"
        assert metrics["accuracy_low"] <= 0.2
        assert metrics["accuracy_high"] >= 0.4


class FailingJudge(FakeEnvironment):
    """A judge that fails the first ``times`` times that it sees a prompt."""

    def __init__(self, times, **options):
        super().__init__(self.judge, **options)
        self.times, self.seen = times, Counter()

    def judge(self, episode):
        self.seen[episode.prompt.id, episode.group] += 1
        failed = self.seen[episode.prompt.id, episode.group] <= self.times and episode.prompt.id in "357"
        return Feedback(error="503 from the judge") if failed else right(episode)


@pytest.mark.parametrize("mode", ["batched", "pipelined"])
@pytest.mark.parametrize(
    ("times", "retries", "errors"), [(1, 3, 0), (2, 3, 0), (3, 3, 3), (1, 0, 3), (2, 1, 3)]
)
def test_a_failed_judgement_is_tried_again_at_most_twice(mode, times, retries, errors):
    metrics = validated(Greedy(mode=mode), FailingJudge(times), retries=retries)["task"]
    assert (metrics["errors"], metrics["prompts"]) == (errors, 10 - errors)
    assert (metrics.get("accuracy"), metrics["accuracy_high"]) == (None if errors else 1.0, 1.0)


class Best(FakeEnvironment):
    """Gives the longest reply of a group 1 and the others 0; a reply that is alone gets nothing."""

    def __init__(self):
        super().__init__(needs_group=True, success=1.0)
        self.sizes = Counter()

    async def evaluate(self, episodes):
        groups = {}
        for episode in episodes:
            groups.setdefault(episode.group, []).append(len(episode.reply))
        self.sizes.update(map(len, groups.values()))
        return [
            Judgement(reward=float(len(groups[e.group]) > 1 and len(e.reply) == max(groups[e.group])))
            for e in episodes
        ]


class Temperatures(FakeEngine):
    """Says the more the cooler it is, and remembers the temperatures."""

    def __init__(self):
        super().__init__(reply=lambda request, rng: "a" * (2 if request.temperature else 4))
        self.asked = Counter()

    async def generate(self, requests):
        self.asked.update(request.temperature for request in requests)
        return await super().generate(requests)


@pytest.mark.parametrize("mode", ["batched", "pipelined"])
def test_where_rollouts_are_compared_a_prompt_gets_companions_sampled_as_in_training(mode):
    environment, engine = Best(), Temperatures()
    metrics = validated(Greedy(mode=mode), environment, engine=engine, group_size=8)["task"]
    assert environment.sizes == {8: 10}
    assert engine.asked == {0.0: 10, SAMPLING.temperature: 70}
    assert (metrics["accuracy"], metrics["prompts"], metrics["errors"]) == (1.0, 10, 0)
    assert metrics["completion_tokens"] == 4, "companions are not measured"


def test_the_distribution_of_a_validation_is_cut_as_configured_or_asked_and_that_of_companions_is_whole():
    seen = []

    class Asking:
        async def validate(self, context):
            await context.rollout(context.prompts["task"], temperature=0.5)
            await context.rollout(context.prompts["task"], temperature=0.5, top_p=0.9, top_k=7, min_p=0.1)
            return {"task": {"accuracy": 1.0}}

    def noting(request, rng):
        seen.append((request.temperature, request.top_p, request.top_k, request.min_p))
        return echo(request, rng)

    environment = FakeEnvironment(right, needs_group=True)
    sampling = evolve(SAMPLING, top_k=3)
    validated(Asking(), environment, n=1, engine=FakeEngine(reply=noting), group_size=2, sampling=sampling)
    companion = (SAMPLING.temperature, 1.0, 0, 0.0)
    assert sorted(seen) == sorted([(0.5, 1.0, 3, 0.0), companion, (0.5, 0.9, 7, 0.1), companion])


def test_a_group_that_is_large_enough_or_not_compared_gets_no_companions():
    environment = Best()
    validated(Batched(n=8), environment, engine=Temperatures(), group_size=8)
    assert environment.sizes == {8: 10}
    engine = Temperatures()
    validated(Greedy(), FakeEnvironment(right), engine=engine, group_size=8)
    assert engine.asked == {0.0: 10}


def test_without_any_reward_there_is_an_error_and_no_accuracy_of_zero():
    with pytest.raises(PluginError, match=r"task 'task': none of the 10 rollouts .* first one: no judge"):
        validated(Greedy(), FakeEnvironment(lambda e: Feedback(error="no judge")))


class FailingEngine(FakeEngine):
    """Loses every request that is asked for one of the first ``times`` times."""

    def __init__(self, times):
        super().__init__(reply=echo)
        self.times, self.asked = times, Counter()

    async def generate(self, requests):
        for request in requests:
            self.asked[request.seed] += 1
        if any(self.asked[request.seed] <= self.times for request in requests):
            raise EngineError("its process died; ask again")
        return await super().generate(requests)


@pytest.mark.parametrize(("mode", "asks", "calls"), [("batched", 2, 1), ("pipelined", 1, 10)])
def test_rollouts_lost_by_the_engine_are_played_again(mode, asks, calls):
    """Where several are sampled together, each is asked for once more alone before it is lost."""
    fine = validated(Greedy(mode=mode), FakeEnvironment(right))
    incidents = []
    with reported_to(incidents.append):
        again = validated(
            Greedy(mode=mode), FakeEnvironment(right), engine=FailingEngine(2 * asks), retries=2
        )
    assert again == fine
    assert {(one.kind, one.component) for one in incidents} == {("rollouts_lost", "validation")}
    assert len(incidents) == 2 * calls, "one for each attempt that was lost"
    assert "of its rollouts are played again; the first, of task 'task': its process" in incidents[0].message
    with pytest.raises(PluginError, match="its process died"):
        validated(Greedy(mode=mode), FakeEnvironment(right), engine=FailingEngine(3 * asks), retries=2)
    often = FEEDBACK_RETRIES + 2
    engine = FailingEngine(often * asks)
    later = validated(Greedy(mode=mode), FakeEnvironment(right), engine=engine, retries=often)
    assert later == fine, "the engine's failures are not counted as the environment's"


def test_a_rollout_that_the_environment_always_fails_is_played_three_times():
    environment = FakeEnvironment(lambda e: Feedback(error="bad row") if e.prompt.id == "3" else right(e))
    assert validated(Greedy(), environment, retries=3)["task"]["errors"] == 1
    assert sum(environment.calls) == 9 + 3


def test_a_group_that_is_compared_is_played_again_whole():
    engine = FailingEngine(1)
    environment = FakeEnvironment(right, needs_group=True)
    validated(Pipelined(n=4), environment, n=3, engine=engine, retries=1)
    assert sorted(environment.calls) == [4, 4, 4]


def test_unfinished_rollouts_count_as_lost():
    slow_one = FakeEngine(reply=echo, latency=lambda rng: 1.0 if rng.random() < 0.9 else 1e4)
    metrics = validated(Pipelined(), FakeEnvironment(right), n=50, engine=slow_one, deadline=60.0, retries=3)[
        "task"
    ]
    assert 0 < metrics["errors"] < 20
    assert metrics["prompts"] == 50 - metrics["errors"]
    assert metrics["accuracy_high"] == 1.0


# ---------------------------------------------------------------------------------- versions and seeds


def test_tokens_of_another_version_are_an_error():
    class Moves:
        async def validate(self, context):
            moving = asyncio.create_task(context.engine.update_weights(weights(8)))
            await context.rollout(context.prompts["task"])
            await moving

    slow = FakeEngine(reply=echo, latency=lambda rng: 1.0)
    with pytest.raises(
        WeightSyncError, match=r"validation of version 7: .* with version 8; it must hold one"
    ):
        validated(Moves(), FakeEnvironment(right), n=20, engine=slow, version=7)


def test_seeds_are_the_same_for_every_version_and_new_for_every_call():
    class Remembers:
        async def validate(self, context):
            some = context.prompts["task"][:3]
            for n in (2, 2):
                self.said.append([r.messages[-1]["content"] for r in await context.rollout(some, n=n)])
            both = [r.messages[-1]["content"] for r in await context.rollout(some[:1], n=5)]
            self.said.append(both)
            return {"task": {"n": 4}}

    said = []
    for version in (0, 5):
        Remembers.said = []
        anything = FakeEngine(reply=lambda request, rng: str(rng.random())[2:10])
        validated(Remembers(), FakeEnvironment(), engine=anything, version=version)
        said.append(Remembers.said)
    assert said[0] == said[1]
    flat = [text for texts in said[0] for text in texts]
    assert len(set(flat)) == len(flat) == 17


# ---------------------------------------------------------------------------------- what strategies return


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([0.5], r"'tested': validate\(\) returned list, expected \{task: \{metric: number\}\}"),
        ({"task": 0.5}, "returned dict, expected"),
        ({"all": {"accuracy": 0.5}}, "returned nothing for task 'task'"),
        ({"task": {"accuracy": math.nan}}, "returned nan as 'accuracy' of task 'task'; expected a finite"),
        ({"task": {"accuracy": "high"}}, "returned 'high' as 'accuracy' of task 'task'"),
    ],
)
def test_a_strategy_that_returns_something_else_is_named(returned, message):
    class Wrong:
        async def validate(self, context):
            return returned

    with pytest.raises(PluginError, match=message):
        validated(Wrong(), FakeEnvironment())


def test_a_strategy_may_return_numbers_of_other_libraries():
    class Own:
        async def validate(self, context):
            await context.rollout(context.prompts["task"])
            return {"task": {"accuracy": np.float32(0.5), "said": Decimal(2)}}

    found = validated(Own(), FakeEnvironment(right))["task"]
    assert found == {"accuracy": 0.5, "said": 2.0, "errors": 0.0}
    assert {type(value) for value in found.values()} == {float}


def test_errors_are_counted_for_every_strategy():
    class Own:
        async def validate(self, context):
            rollouts = await context.rollout(context.prompts["task"])
            return {"task": {"said": sum(r.reward is not None for r in rollouts)}}

    environment = FakeEnvironment(lambda e: Feedback() if e.prompt.id in "123" else right(e))
    assert validated(Own(), environment) == {"task": {"said": 7.0, "errors": 3.0, "unscored": 0.3}}


def test_an_error_in_one_rollout_ends_the_validation_unchanged():
    class Broken(FakeEnvironment):
        async def evaluate(self, episodes):
            raise PluginError("environment 'task': wrong number of results")

    for strategy in (Batched(), Pipelined()):
        with pytest.raises(PluginError, match="wrong number of results"):
            validated(strategy, Broken())


def test_the_answer_that_feedback_names_reaches_the_strategy():
    class Votes:
        async def validate(self, context):
            return {"task": {r.answer: 1 for r in await context.rollout(context.prompts["task"])}}

    environment = FakeEnvironment(lambda e: Feedback(reward=1.0, answer=f"={e.reply}"))
    assert validated(Votes(), environment, n=2) == {"task": {"=0": 1, "=1": 1, "errors": 0}}
