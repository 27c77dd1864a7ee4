"""One ``play`` for everything: turns, batches, masks, and what ends unscored."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_core.advantages import group as group_advantages
from grpo_core.errors import EngineError, PluginError
from grpo_core.records import Completion, Feedback, Group, Prompt, Rollout, Weights
from grpo_core.rollout import LostBudget, SamplingParams, Start, derive_seed, play
from grpo_core.rows import check_staleness, make_batch
from grpo_core.testing import FakeEngine, FakeEnvironment, FakeRenderer, prompts, run
from grpo_core.tokens import Tokens

SAMPLING = SamplingParams(temperature=1.0, max_tokens=8)
VERSION_0 = Weights(version=0, location="", nbytes=0, tensors=())


def played(starts, environments, engine=None, deadline=None):
    async def story():
        used = engine or FakeEngine()
        await used.update_weights(VERSION_0)
        return await play(
            starts,
            engine=used,
            environments=environments,
            renderer=FakeRenderer(),
            sampling=SAMPLING,
            deadline=deadline,
        )

    return run(story())


def starts(n, task="task"):
    return [Start(prompt=prompt, seed=i, group=prompt.id) for i, prompt in enumerate(prompts(n, task))]


def test_one_engine_call_and_one_environment_call_a_turn():
    environment = FakeEnvironment()
    rollouts = played(starts(100), {"task": environment})
    assert environment.calls == [100]
    assert [rollout.messages[0]["content"] for rollout in rollouts] == [f"prompt {i}" for i in range(100)]


def test_rewards_belong_to_their_rollouts_whatever_finishes_first():
    def feedback(episode):
        return Feedback(reward=float(episode.prompt.answer) + (episode.reply == "a") / 2)

    environments = {"even": FakeEnvironment(feedback), "odd": FakeEnvironment(feedback)}
    mixed = [
        Start(prompt=prompts(20, "odd" if i % 2 else "even")[i], seed=i, group=str(i)) for i in range(20)
    ]
    for i, rollout in enumerate(played(mixed, environments)):
        assert rollout.reward == i + (rollout.messages[-1]["content"] == "a") / 2
    assert environments["even"].calls == environments["odd"].calls == [10]


def guess(episode):
    """Right after as many tries as the prompt's number says."""
    if episode.turn == int(episode.prompt.id):
        return Feedback(reward=1.0, metrics={"tries": episode.turn + 1.0})
    return Feedback(reward=-0.25, done=False, messages="no")


def test_turns_go_on_while_the_environment_says_so_and_rewards_are_summed():
    environment = FakeEnvironment(guess, max_turns=3)
    first, second, third, fourth = played(starts(4), {"task": environment})
    assert [r.turns for r in (first, second, third, fourth)] == [1, 2, 3, 3]
    assert [r.reward for r in (first, second, third, fourth)] == [1.0, 0.75, 0.5, -0.75]
    assert environment.calls == [4, 3, 2], "what is live is judged together"
    assert second.metrics == {"tries": 2.0}
    assert [m["role"] for m in second.messages] == ["user", "assistant", "user", "assistant"]


def test_only_sampled_tokens_are_marked_and_each_keeps_its_logprob_and_version():
    (rollout,) = played(starts(2)[1:], {"task": FakeEnvironment(guess, max_turns=2)})
    text = FakeRenderer().text(rollout.tokens.ids)
    assert text[1:3] == "no"
    assert rollout.tokens.sampled.tolist() == [True, False, False, True]
    assert rollout.tokens.logprobs.tolist() == [-1.0, 0.0, 0.0, -1.0]
    assert rollout.tokens.versions.tolist() == [0, -1, -1, 0]


@pytest.mark.parametrize(
    ("feedback", "error"),
    [
        (Feedback(), "the environment returned no feedback"),
        (Feedback(error="KeyError: 'gold'"), "KeyError: 'gold'"),
        (Feedback(reward=1.0, error="half"), "half"),
    ],
)
def test_no_verdict_is_not_a_reward_of_zero(feedback, error):
    (rollout,) = played(starts(1), {"task": FakeEnvironment(lambda episode: feedback)})
    assert (rollout.reward, rollout.error) == (None, error)


def test_what_is_not_finished_at_the_deadline_is_unscored():
    engine = FakeEngine(latency=lambda rng: 100.0)
    (rollout,) = played(starts(1), {"task": FakeEnvironment()}, engine, deadline=5.0)
    assert (rollout.reward, rollout.error) == (None, "not finished within its deadline of 5 s")
    assert engine.running == 0, "the request was given up"


def test_what_the_engine_loses_is_no_fault_of_the_environment():
    lose = FakeEngine(fault=lambda request: EngineError("died"))
    (lost,) = played(starts(1), {"task": FakeEnvironment()}, lose)
    (late,) = played(starts(1), {"task": FakeEnvironment()}, FakeEngine(latency=lambda rng: 99), deadline=9)
    (failed,) = played(starts(1), {"task": FakeEnvironment(lambda e: Feedback(error="KeyError"))})
    (fine,) = played(starts(1), {"task": FakeEnvironment()})
    assert [r.lost for r in (lost, late, failed, fine)] == [True, True, False, False]


def test_an_engine_that_loses_everything_in_flight_with_all_retries_ends_the_run():
    lost = Rollout(prompt_ids=(1,), error="engine: died", lost=True)
    fine = Rollout(prompt_ids=(1,), reward=0.0)
    budget = LostBudget(8)
    for _ in range(3):
        for rollout in (*[lost] * 7, fine):
            budget.observe(rollout)
    for _ in range(7):
        budget.observe(lost)
    with pytest.raises(EngineError, match=r"the last 8 rollouts were lost.*engine: died"):
        budget.observe(lost)


def test_what_the_engine_gives_up_is_unscored_and_bugs_are_not_hidden():
    (rollout,) = played(
        starts(1), {"task": FakeEnvironment()}, FakeEngine(fault=lambda request: EngineError("died"))
    )
    assert (rollout.reward, rollout.error) == (None, "died")
    with pytest.raises(ZeroDivisionError):
        played(starts(1), {"task": FakeEnvironment()}, FakeEngine(fault=lambda request: ZeroDivisionError()))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logprobs": ()}, "returned 1 token ids, 0 logprobs and 1 versions"),
        (
            {"versions": (0, 0)},
            "1 logprobs and 2 versions; expected as many of each",
        ),
        ({"token_ids": (1.5,)}, "returned 1.5; expected a whole number of 32 bits as token id"),
        ({"token_ids": (2**31,)}, "returned 2147483648; expected a whole number of 32 bits as token id"),
        ({"token_ids": np.array([2**31])}, "returned an array of int64 from 2147483648 to 2147483648"),
        ({"token_ids": [[1]]}, r"returned \[1\]; expected a whole number"),
        ({"token_ids": np.array([[1]])}, r"returned an array of shape \[1, 1\]; expected one dimension"),
        ({"token_ids": (-1,)}, "returned the token id -1; expected 0 or more"),
        ({"logprobs": ("x",)}, "returned 'x'; expected a number as logprob"),
        ({"logprobs": (-1e300,)}, "returned the logprob -inf for a sampled token"),
        ({"logprobs": (float("nan"),)}, "returned the logprob nan for a sampled token"),
        ({"logprobs": (0.5,)}, "returned the logprob 0.5 for a sampled token"),
        (None, "returned 0 completions for 1 requests"),
    ],
)
def test_an_engine_that_breaks_its_contract_is_told_how(changes, message):
    class Broken(FakeEngine):
        async def generate(self, requests):
            completions = await super().generate(requests)
            return [self.changed(completion.tokens) for completion in completions if changes]

        @staticmethod
        def changed(tokens):
            said = {"token_ids": tokens.ids, "logprobs": tokens.logprobs, "versions": tokens.versions}
            return Completion(**{**said, **changes}, finish_reason="stop")

    with pytest.raises(PluginError, match=message):
        played(starts(1), {"task": FakeEnvironment()}, Broken())


def test_seeds_depend_on_all_their_parts_and_fit_63_bits():
    seeds = {derive_seed(0, slot, attempt, i) for slot in range(50) for attempt in range(3) for i in range(8)}
    assert len(seeds) == 1200
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed(1, "a") == derive_seed(1, "a")


# ---------------------------------------------------------------------------------- rows


def a_group(rewards, versions=(3,)):
    rollouts = tuple(
        Rollout(
            prompt_ids=(1,),
            tokens=Tokens.generated((2,) * len(versions), (-1.0,) * len(versions), versions),
            reward=reward,
        )
        for reward in rewards
    )
    return Group(
        prompt=Prompt(messages="x", id="p"), rollouts=rollouts, generation_version=3, target_version=4
    )


def test_groups_without_a_difference_teach_nothing_and_are_left_out():
    batch = make_batch(
        [a_group([1.0, 1.0]), a_group([0.0, 1.0, 1.0])], step=3, temperature=1.0, advantages=group_advantages
    )
    assert [row.group for row in batch.rows] == [1, 1, 1]
    assert batch.rows[0].advantage < 0 < batch.rows[1].advantage


@given(st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=6), min_size=1, max_size=5))
def test_every_row_has_its_own_rollouts_advantage(rewards):
    groups = [a_group(row) for row in rewards]
    batch = make_batch(groups, step=3, temperature=1.0, advantages=group_advantages)
    expected = [(i, a) for i, row in enumerate(group_advantages(rewards)) for a in row if a]
    assert [(row.group, row.advantage) for row in batch.rows] == expected


def test_advantages_of_another_shape_name_the_function():
    def broken(rewards):
        return [[0.0]]

    with pytest.raises(PluginError, match=r"'broken': returned groups of sizes \[1\], expected \[2\]"):
        make_batch([a_group([0.0, 1.0])], step=0, temperature=1.0, advantages=broken)


@pytest.mark.parametrize(("versions", "fine"), [((3, 4), True), ((3, 5), False), ((2, 4), False)])
def test_tokens_of_impossible_versions_stop_the_run(versions, fine):
    groups = [a_group([0.0], versions)]
    if fine:
        check_staleness(groups, step=4, max_staleness=1)
    else:
        with pytest.raises(EngineError, match=r"prompt 'p' .* expected versions 3 to 4"):
            check_staleness(groups, step=4, max_staleness=1)
