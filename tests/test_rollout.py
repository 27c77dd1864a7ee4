"""One ``play`` for everything: turns, batches, masks, and what ends unscored."""

from __future__ import annotations

import asyncio
from typing import ClassVar

import numpy as np
import pytest
from attrs import NOTHING, evolve, fields
from hypothesis import given
from hypothesis import strategies as st
from test_pipeline import Run

from grpo_core.contracts.errors import EngineError, PluginError
from grpo_core.contracts.events import Dispatched
from grpo_core.contracts.records import (
    Completion,
    Feedback,
    GenerationRequest,
    Group,
    Prompt,
    Rollout,
    Segment,
    Weights,
)
from grpo_core.contracts.tokens import Tokens
from grpo_core.engines import wire
from grpo_core.loop.rollout import LostBudget, RolloutRequest, SamplingParams, derive_seed, play
from grpo_core.loop.rows import check_staleness, make_batch, with_advantages
from grpo_core.loop.rows import group as group_advantages
from grpo_core.testing import FakeEngine, FakeEnvironment, FakeRenderer, prompts, run
from grpo_core.validation.runner import Context
from grpo_plugin_scale.engines.pool import EnginePool

SAMPLING = SamplingParams(temperature=1.0, max_tokens=8)
VERSION_0 = Weights(version=0, location="", nbytes=0, tensors=())


def played(requests, environments, engine=None, deadline=None):
    async def story():
        used = engine or FakeEngine()
        await used.update_weights(VERSION_0)
        return await play(
            requests,
            engine=used,
            environments=environments,
            renderer=FakeRenderer(),
            sampling=SAMPLING,
            deadline=deadline,
        )

    return run(story())


def requests(n, task="task"):
    return [
        RolloutRequest(prompt=prompt, seed=i, group=prompt.id) for i, prompt in enumerate(prompts(n, task))
    ]


def test_one_engine_call_and_one_environment_call_a_turn():
    environment = FakeEnvironment()
    rollouts = played(requests(100), {"task": environment})
    assert environment.calls == [100]
    assert [rollout.messages[0]["content"] for rollout in rollouts] == [f"prompt {i}" for i in range(100)]


def test_all_rendering_and_reading_goes_through_the_renderer_s_own_run():
    """It decides what leaves the event loop, by the number of characters."""

    class Rendering(FakeRenderer):
        inside = False
        sizes: ClassVar[list[int]] = []

        async def run(self, work, size):
            Rendering.sizes.append(size)
            Rendering.inside = True
            try:
                return work()
            finally:
                Rendering.inside = False

        def __getattribute__(self, name):
            if name in ("prompt_ids", "continuation_ids", "message", "texts"):
                assert Rendering.inside, name
            return super().__getattribute__(name)

    async def story():
        engine = FakeEngine(reply=lambda request, rng: "yes")
        await engine.update_weights(VERSION_0)
        environment = FakeEnvironment(
            lambda episode: Feedback(reward=1.0, done=episode.turn == 1, messages="and now?"), max_turns=2
        )
        return await play(
            requests(2),
            engine=engine,
            environments={"task": environment},
            renderer=Rendering(),
            sampling=SAMPLING,
        )

    assert [rollout.turns for rollout in run(story())] == [2, 2]
    read, conversation = len("yes"), len("prompt 0yesand now?")
    assert sorted(Rendering.sizes) == sorted(
        [2 * len("prompt 0"), read, read, conversation, conversation, read, read]
    )


def test_rewards_belong_to_their_rollouts_whatever_finishes_first():
    def feedback(episode):
        return Feedback(reward=float(episode.prompt.answer) + (episode.reply == "a") / 2)

    environments = {"even": FakeEnvironment(feedback), "odd": FakeEnvironment(feedback)}
    mixed = [
        RolloutRequest(prompt=prompts(20, "odd" if i % 2 else "even")[i], seed=i, group=str(i))
        for i in range(20)
    ]
    for i, rollout in enumerate(played(mixed, environments)):
        assert rollout.reward == i + (rollout.messages[-1]["content"] == "a") / 2
    assert environments["even"].calls == environments["odd"].calls == [10]


def guess(episode):
    """Right after as many tries as the prompt's number says."""
    if episode.turn == int(episode.prompt.id):
        return Feedback(reward=1.0, metrics={"tries": episode.turn + 1.0})
    return Feedback(reward=-0.25, done=False, messages="no")


def test_turns_continue_while_the_environment_says_so_and_rewards_are_summed():
    environment = FakeEnvironment(guess, max_turns=3)
    first, second, third, fourth = played(requests(4), {"task": environment})
    assert [r.turns for r in (first, second, third, fourth)] == [1, 2, 3, 3]
    assert [r.reward for r in (first, second, third, fourth)] == [1.0, 0.75, 0.5, -0.75]
    assert environment.calls == [1] * 9, "each rollout is evaluated when its own completion is finished"
    assert second.metrics == {"tries": 2.0}
    assert [m["role"] for m in second.messages] == ["user", "assistant", "user", "assistant"]


def test_only_sampled_tokens_are_marked_and_each_keeps_its_logprob_and_version():
    (rollout,) = played(requests(2)[1:], {"task": FakeEnvironment(guess, max_turns=2)})
    tokens = rollout.segments[0].tokens
    text = FakeRenderer().text(tokens.ids)
    assert text[1:3] == "no"
    assert tokens.sampled.tolist() == [True, False, False, True]
    assert tokens.logprobs.tolist() == [-1.0, 0.0, 0.0, -1.0]
    assert tokens.versions.tolist() == [0, -1, -1, 0]


@pytest.mark.parametrize(
    ("feedback", "error"),
    [
        (Feedback(), "the environment returned no feedback"),
        (Feedback(error="KeyError: 'gold'"), "KeyError: 'gold'"),
        (Feedback(reward=1.0, error="half"), "half"),
    ],
)
def test_no_feedback_is_not_a_reward_of_zero(feedback, error):
    (rollout,) = played(requests(1), {"task": FakeEnvironment(lambda episode: feedback)})
    assert (rollout.reward, rollout.error) == (None, error)


def test_unfinished_rollouts_are_unscored_at_the_deadline():
    engine = FakeEngine(latency=lambda rng: 100.0)
    (rollout,) = played(requests(1), {"task": FakeEnvironment()}, engine, deadline=5.0)
    assert (rollout.reward, rollout.error) == (
        None,
        "not finished within its deadline of 5 s; it waited for the engine in turn 1, or in its queue, "
        "which counts as well",
    )
    assert engine.running == 0, "the request was given up"


def test_rollouts_lost_by_the_engine_do_not_count_against_the_environment():
    lose = FakeEngine(fault=lambda request: EngineError("died"))
    (lost,) = played(requests(1), {"task": FakeEnvironment()}, lose)
    (late,) = played(requests(1), {"task": FakeEnvironment()}, FakeEngine(latency=lambda rng: 99), deadline=9)
    (failed,) = played(requests(1), {"task": FakeEnvironment(lambda e: Feedback(error="KeyError"))})
    (fine,) = played(requests(1), {"task": FakeEnvironment()})
    assert [r.lost for r in (lost, late, failed, fine)] == [True, True, False, False]


def test_an_engine_that_loses_everything_in_flight_with_all_retries_ends_the_run():
    lost = Rollout(error="engine: died", lost=True)
    fine = Rollout(reward=0.0)
    budget = LostBudget(8)
    for _ in range(3):
        for rollout in (*[lost] * 7, fine):
            budget.observe(rollout)
    for _ in range(7):
        budget.observe(lost)
    with pytest.raises(EngineError, match=r"the last 8 rollouts were lost.*engine: died"):
        budget.observe(lost)


def test_rollouts_lost_by_the_engine_are_unscored_and_bugs_are_not_hidden():
    (rollout,) = played(
        requests(1), {"task": FakeEnvironment()}, FakeEngine(fault=lambda request: EngineError("died"))
    )
    assert (rollout.reward, rollout.error) == (None, "died")
    with pytest.raises(ZeroDivisionError):
        played(
            requests(1), {"task": FakeEnvironment()}, FakeEngine(fault=lambda request: ZeroDivisionError())
        )


@pytest.mark.parametrize("deadline", [None, 60.0])
def test_a_timeout_inside_an_engine_is_not_reported_as_the_deadline_of_the_rollouts(deadline):
    engine = FakeEngine(fault=lambda request: TimeoutError("the socket timed out"))
    with pytest.raises(TimeoutError, match="the socket timed out"):
        played(requests(2), {"task": FakeEnvironment()}, engine, deadline)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logprobs": ()}, "returned 1 token ids, 0 logprobs and 1 versions"),
        (
            {"versions": (0, 0)},
            "1 logprobs and 2 versions; expected as many of each",
        ),
        ({"token_ids": (1.5,)}, "returned 1.5; expected a 32-bit integer as token id"),
        ({"token_ids": (2**31,)}, "returned 2147483648; expected a 32-bit integer as token id"),
        ({"token_ids": np.array([2**31])}, "returned an array of int64 from 2147483648 to 2147483648"),
        ({"token_ids": [[1]]}, r"returned \[1\]; expected a 32-bit integer"),
        ({"token_ids": np.array([[1]])}, r"returned an array of shape \[1, 1\]; expected one dimension"),
        ({"token_ids": (-1,)}, "returned the token id -1; expected 0 or more"),
        (
            {"token_ids": (1000,)},
            "returned the token id 1000; expected 0 or more, and less than the 1000 of",
        ),
        ({"logprobs": ("x",)}, "returned 'x'; expected a number as logprob"),
        ({"logprobs": (-1e300,)}, "returned the logprob -inf for a sampled token"),
        ({"logprobs": (float("nan"),)}, "returned the logprob nan for a sampled token"),
        ({"logprobs": (0.5,)}, "returned the logprob 0.5 for a sampled token"),
        (None, "returned 0 completions for 1 requests"),
    ],
)
def test_an_engine_that_breaks_its_contract_is_one_clear_error(changes, message, monkeypatch):
    class Broken(FakeEngine):
        async def generate(self, requests):
            completions = await super().generate(requests)
            return [self.changed(completion.tokens) for completion in completions if changes]

        @staticmethod
        def changed(tokens):
            said = {"token_ids": tokens.ids, "logprobs": tokens.logprobs, "versions": tokens.versions}
            return Completion(**{**said, **changes}, finish_reason="stop")

    monkeypatch.setattr(FakeRenderer, "vocabulary", 1000)
    with pytest.raises(PluginError, match=message):
        played(requests(1), {"task": FakeEnvironment()}, Broken())


def test_seeds_depend_on_all_their_parts_and_fit_63_bits():
    seeds = {derive_seed(0, slot, attempt, i) for slot in range(50) for attempt in range(3) for i in range(8)}
    assert len(seeds) == 1200
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed(1, "a") == derive_seed(1, "a")


# ---------------------------------------------------------------------------------- one engine for a group


class SeenEngine(FakeEngine):
    """An engine that keeps the requests that it is asked for."""

    def __init__(self):
        super().__init__(update_seconds=0.0)
        self.seen = []

    async def generate(self, requests):
        self.seen += requests
        return await super().generate(requests)


def go_on(episode):
    return Feedback(reward=0.0, done=False, messages="more")


def engines_of_prompts(engines, among):
    """Numbers of the engines that each prompt's requests went to, over all turns."""
    return {
        prompt.messages[0]["content"]: {
            number
            for number, engine in enumerate(engines)
            for request in engine.seen
            if FakeRenderer().text(request.prompt_ids).startswith(prompt.messages[0]["content"])
        }
        for prompt in among
    }


@pytest.mark.parametrize("needs_group", [False, True])
@pytest.mark.parametrize("size", [2, 8])
def test_all_turns_of_a_group_are_generated_by_one_engine_of_a_pool(size, needs_group):
    engines = [SeenEngine() for _ in range(4)]
    environment = FakeEnvironment(go_on, max_turns=4, needs_group=needs_group)

    async def story():
        pool = EnginePool(engines.__getitem__, len(engines))
        await pool.update_weights(VERSION_0)
        groups = [
            play(
                [RolloutRequest(prompt=prompt, seed=i, group=prompt.id) for i in range(size)],
                engine=pool,
                environments={"task": environment},
                renderer=FakeRenderer(),
                sampling=SAMPLING,
            )
            for prompt in prompts(4)
        ]
        played = await asyncio.gather(*groups)
        await pool.aclose()
        return played

    assert {rollout.turns for group in run(story()) for rollout in group} == {4}
    assert sum(len(engine.seen) for engine in engines) == 4 * 4 * size
    where = engines_of_prompts(engines, prompts(4))
    assert sorted(number for found in where.values() for number in found) == [0, 1, 2, 3]


@pytest.mark.parametrize("mode", ["batched", "pipelined"])
def test_all_turns_of_validation_rollouts_of_a_prompt_are_generated_by_one_engine(mode):
    """Also where prompts of two tasks have the same id."""
    engines = [SeenEngine() for _ in range(4)]
    environment = FakeEnvironment(go_on, max_turns=3)
    held_out = [
        Prompt(messages=f"{task} {i}", id=str(i), environment=task) for task in ("x", "y") for i in range(2)
    ]

    async def story():
        pool = EnginePool(engines.__getitem__, len(engines))
        await pool.update_weights(VERSION_0)
        context = Context(
            version=0,
            prompts={task: [p for p in held_out if p.environment == task] for task in ("x", "y")},
            engine=pool,
            environments={"x": environment, "y": environment},
            renderer=FakeRenderer(),
            sampling=SAMPLING,
        )
        await context.rollout(held_out, n=3, temperature=1.0, mode=mode)
        await pool.aclose()

    run(story())
    assert sum(len(engine.seen) for engine in engines) == 3 * 3 * len(held_out)
    where = engines_of_prompts(engines, held_out)
    assert sorted(number for found in where.values() for number in found) == [0, 1, 2, 3]


def test_requests_in_training_carry_the_slot_of_their_group():
    engine = SeenEngine()
    steps = Run(engine=engine, steps=2, environment=FakeEnvironment(max_turns=2))()
    slots = {str(slot.id) for event in steps.of(Dispatched) for slot in event.slots}
    assert {request.group for request in engine.seen} == slots


def test_a_request_reaches_an_engines_process_with_all_its_fields():
    request = GenerationRequest(
        prompt_ids=(1, 2), max_tokens=3, temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, stop_token_ids=(4,),
        stop=("x",), seed=5, group="g",
    )  # fmt: skip
    given = [field for field in fields(GenerationRequest) if field.default is not NOTHING]
    assert all(getattr(request, field.name) != field.default for field in given)
    assert wire.unpack_requests(wire.pack_requests([request])) == [request]


# ---------------------------------------------------------------------------------- rows


def a_group(rewards, versions=(3,)):
    rollouts = tuple(
        Rollout(
            segments=[
                Segment(
                    prompt_ids=(1,),
                    tokens=Tokens.generated((2,) * len(versions), (-1.0,) * len(versions), versions),
                )
            ],
            reward=reward,
        )
        for reward in rewards
    )
    return Group(
        prompt=Prompt(messages="x", id="p"), rollouts=rollouts, generation_version=3, target_version=4
    )


def batch_of(groups, advantages=group_advantages, **options):
    return make_batch(with_advantages(groups, advantages, **options), step=3, temperature=1.0)


def test_groups_without_a_difference_teach_nothing_and_are_left_out():
    batch = batch_of([a_group([1.0, 1.0]), a_group([0.0, 1.0, 1.0])])
    assert [row.group for row in batch.rows] == [1, 1, 1]
    assert batch.rows[0].advantage < 0 < batch.rows[1].advantage


@pytest.mark.long
@given(st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=6), min_size=1, max_size=5))
def test_every_row_has_its_own_rollouts_advantage(rewards):
    groups = [a_group(row) for row in rewards]
    batch = batch_of(groups)
    expected = [(i, a) for i, row in enumerate(group_advantages(groups)) for a in row if a]
    assert [(row.group, row.advantage) for row in batch.rows] == expected


def test_advantages_of_another_shape_name_the_function():
    def broken(groups):
        return [[0.0]]

    with pytest.raises(PluginError, match=r"broken.* returned groups of sizes \[1\]; expected .* \[2\]"):
        batch_of([a_group([0.0, 1.0])], broken)


def test_an_empty_list_is_not_an_advantage_of_a_rollout_with_tokens():
    with pytest.raises(
        PluginError, match=r"rollout 1: the advantages have shape \[0\]; expected one for each"
    ):
        batch_of([a_group([0.0, 1.0])], lambda groups: [[0.0, []]])


def test_a_rollout_that_is_masked_has_no_row_and_is_counted():
    groups = [a_group([0.0, 1.0, 1.0]), a_group([1.0, 0.0])]

    def masks(groups):
        return [[None, 0.5, -0.5], [1, -1]]

    batch = batch_of(groups, masks)
    assert [(row.group, row.advantage) for row in batch.rows] == [(0, 0.5), (0, -0.5), (1, 1.0), (1, -1.0)]
    assert batch.masked == {"": 1}


def test_a_rollout_that_may_not_be_trained_has_no_row_and_its_reward_counts_for_its_group():
    group = a_group([0.0, 1.0, 1.0])
    first, *others = group.rollouts
    group = evolve(group, rollouts=(evolve(first, train=False), *others))
    batch = batch_of([group])
    assert [row.advantage > 0 for row in batch.rows] == [True, True], "they were better than the first"
    assert batch.masked == {"": 1}


def test_with_all_rows_those_without_an_advantage_stay_unless_nothing_was_sampled():
    groups = [a_group([1.0, 1.0]), a_group([1.0, 1.0], versions=())]
    batch = batch_of(groups, all_rows=True)
    assert [(row.group, row.advantage) for row in batch.rows] == [(0, 0.0), (0, 0.0)]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), "high", {}])
def test_an_advantage_that_is_not_a_finite_number_names_the_prompt_and_the_rollout(bad):
    with pytest.raises(PluginError, match=r"prompt 'p', rollout 1: the advantage is .*; expected a finite"):
        batch_of([a_group([0.0, 1.0])], lambda groups: [[0.0, bad]])


@pytest.mark.parametrize(("versions", "fine"), [((3, 4), True), ((3, 5), False), ((2, 4), False)])
def test_tokens_of_impossible_versions_stop_the_run(versions, fine):
    groups = [a_group([0.0], versions)]
    if fine:
        check_staleness(groups, step=4, max_staleness=1)
    else:
        with pytest.raises(EngineError, match=r"prompt 'p' .* expected versions 3 to 4"):
            check_staleness(groups, step=4, max_staleness=1)
