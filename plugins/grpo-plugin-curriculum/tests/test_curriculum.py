"""Samplers whose weights follow the step, or what was learnt."""

import collections
import itertools

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_core import ConfigError, Group, Prompt, Rollout, SampleRequest
from grpo_core.testing import MemoryLoader
from grpo_plugin_curriculum.curriculum import Curriculum, Schedule, TaskOrder

SLOTS = itertools.count()


def request(n, target=0):
    return SampleRequest(generation_version=0, target_version=target, current_version=0, expected_prompts=n)


def shares(sampler, target=0, n=2000):
    """The shares of the tasks in a large draw."""
    loaders = {task: MemoryLoader(task, 5) for task in ("easy", "hard", "new")}
    drawn = collections.Counter(p.environment for p in sampler.sample(loaders, request(n, target)))
    return {task: round(drawn[task] / n, 1) for task in loaders}


def group(task, *rewards, slot=None):
    return Group(
        prompt=Prompt(messages="x", environment=task),
        rollouts=tuple(Rollout(reward=reward) for reward in rewards),
        generation_version=0,
        target_version=0,
        slot=next(SLOTS) if slot is None else slot,
    )


# ---------------------------------------------------------------------------------- schedule


def test_weights_go_in_straight_lines_between_the_steps():
    sampler = Schedule({"easy": [[0, 1], [10, 0]], "hard": [[0, 0], [10, 1]], "new": [[0, 0]]})
    assert shares(sampler, 0) == {"easy": 1.0, "hard": 0.0, "new": 0.0}
    assert shares(sampler, 3) == {"easy": 0.7, "hard": 0.3, "new": 0.0}
    assert shares(sampler, 99) == {"easy": 0.0, "hard": 1.0, "new": 0.0}


def test_a_task_without_points_keeps_its_weight():
    sampler = Schedule({"easy": [[5, 1]], "new": [[0, 0]]}, weights={"hard": 4, "easy": 100})
    assert shares(sampler) == {"easy": 0.2, "hard": 0.8, "new": 0.0}


@given(st.lists(st.tuples(st.integers(-5, 5), st.floats(0, 9)), min_size=1, unique_by=lambda p: p[0]))
def test_a_schedule_goes_through_its_points_and_stays_between_them(points):
    points = sorted(points)
    schedule = Schedule({"easy": points})

    def weight(step):
        return schedule.weights(["easy"], request(1, step))[0]

    assert [weight(x) for x, _ in points] == pytest.approx([y for _, y in points])
    lowest, highest = min(y for _, y in points), max(y for _, y in points)
    assert all(lowest - 1e-9 <= weight(x / 4) <= highest + 1e-9 for x in range(-30, 30))


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([], "expected [[step, weight], ...] with rising steps"),
        ([[0, 1], [0, 2]], "expected [[step, weight], ...] with rising steps"),
        ([[5, 1], [0, 2]], "expected [[step, weight], ...] with rising steps"),
        ([0, 1], "expected [[step, weight], ...] with rising steps"),
        ([["0", 1]], "expected [[step, weight], ...] with rising steps"),
        ([[0, -1]], "the weight of task 'easy' is -1, expected a finite number >= 0"),
    ],
)
def test_invalid_points_are_refused(points, message):
    with pytest.raises(ConfigError) as caught:
        Schedule({"easy": points})
    assert message in str(caught.value)


def test_a_step_at_which_all_weights_are_zero_is_named():
    with pytest.raises(
        ConfigError, match=r"sampler schedule: every task has weight 0 at step 7 \(easy, hard"
    ):
        shares(Schedule({task: [[0, 1], [7, 0]] for task in ("easy", "hard", "new")}), 7)


def test_points_of_an_unknown_task_name_the_nearest():
    with pytest.raises(ConfigError, match=r"there is no task 'esay' to schedule\. Did you mean 'easy'\?"):
        shares(Schedule({"esay": [[0, 1]]}))


# ---------------------------------------------------------------------------------- curriculum


def test_tasks_outside_of_the_band_rest():
    sampler = Curriculum(low=0.2, high=0.8, known_after=2, rest=0.125)
    sampler.observe([group("easy", 1, 1), group("easy", 1, 1), group("hard", 0, 0), group("hard", 0, 0)])
    assert (sampler.rate("easy"), sampler.rate("hard"), sampler.rate("new")) == (1.0, 0.0, None)
    assert shares(sampler) == {"easy": 0.1, "hard": 0.1, "new": 0.8}


def test_when_no_task_is_in_the_band_the_hard_ones_are_worked_on():
    """A task that is solved teaches nothing; one that is not yet may begin to."""
    sampler = Curriculum(low=0.2, high=0.8, known_after=2, rest=0.125)
    for task, reward in (("easy", 1), ("hard", 0), ("new", 0)):
        sampler.observe([group(task, reward, reward) for _ in range(2)])
    assert shares(sampler) == {"easy": 0.1, "hard": 0.5, "new": 0.5}
    sampler.observe([group(task, 1, 1) for task in ("hard", "new") for _ in range(99)])
    assert shares(sampler) == {"easy": 0.3, "hard": 0.3, "new": 0.3}, "all are solved"


def test_a_rate_is_not_known_before_enough_groups_were_seen():
    sampler = Curriculum(known_after=3)
    sampler.observe([group("hard", 0, 0)] * 5)
    assert sampler.rate("hard") is None, "one group, observed five times"
    sampler.observe([group("hard", 0, 0), group("hard", 0, 1)])
    assert sampler.rate("hard") == pytest.approx(1 / 6)


def test_a_task_returns_when_its_newest_groups_are_in_the_band():
    sampler = Curriculum(window=4, known_after=2)
    sampler.observe([group("hard", 0, 0) for _ in range(9)])
    assert sampler.rate("hard") == 0.0
    sampler.observe([group("hard", 0, 1) for _ in range(4)])
    assert sampler.rate("hard") == 0.5


@pytest.mark.long
@given(st.data())
def test_the_order_in_which_groups_are_observed_makes_no_difference(data):
    rewards = st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=4)
    groups = [group("hard", *data.draw(rewards), slot=slot) for slot in range(12)]
    one, other = Curriculum(window=5, known_after=1), Curriculum(window=5, known_after=1)
    one.observe(groups)
    for late in data.draw(st.permutations(groups)):
        other.observe([late])
    assert one.state_dict() == other.state_dict()


def test_success_is_a_reward_of_full_marks_unless_said_otherwise():
    groups = [group("hard", 0.4, 0.6, 1.0, 0.0)]
    for success, rate in [(1.0, 0.25), (0.5, 0.5)]:
        sampler = Curriculum(known_after=1, success=success)
        sampler.observe(groups)
        assert sampler.rate("hard") == rate


def test_success_is_what_a_task_declares_unless_the_sampler_says_otherwise():
    declared = group("hard", 4.0, 6.0, 9.0, 10.0)
    rollouts = tuple(attrs.evolve(one, success=one.reward >= 10) for one in declared.rollouts)
    declared = attrs.evolve(declared, rollouts=rollouts)
    for success, rate in [(None, 0.25), (5.0, 0.75)]:
        sampler = Curriculum(known_after=1, success=success)
        sampler.observe([declared])
        assert sampler.rate("hard") == rate
    undeclared = Curriculum(known_after=1)
    undeclared.observe([group("hard", 0.4, 1.0)])
    assert undeclared.rate("hard") == 0.5


@pytest.mark.parametrize(
    "options", [{"low": 0.9, "high": 0.1}, {"rest": 0}, {"known_after": 0}, {"window": 1}]
)
def test_numbers_out_of_range_are_refused(options):
    with pytest.raises(ConfigError, match="sampler curriculum: expected 0 <= low < high <= 1"):
        Curriculum(**options)


# ---------------------------------------------------------------------------------- chosen


def loaders(**sizes):
    return {task: MemoryLoader(task, n) for task, n in sizes.items()}


def tasks(prompts):
    return [prompt.environment for prompt in prompts]


def test_the_chosen_tasks_of_a_step_take_turns_and_the_list_starts_over():
    sampler, there = TaskOrder([["a", "b"], "c", ["b"]]), loaders(a=3, b=7, c=50)
    drawn = [tasks(sampler.sample(there, request(4, step))) for step in range(4)]
    assert drawn == [["a", "b", "a", "b"], ["c"] * 4, ["b"] * 4, ["a", "b", "a", "b"]]


def test_the_step_is_the_one_that_may_train_the_prompt_last():
    assert tasks(TaskOrder(["a", "b"]).sample(loaders(a=3, b=7), request(2, target=1))) == ["b", "b"]


def test_prompts_that_are_asked_for_one_by_one_take_turns_too():
    sampler, there = TaskOrder([["a", "b"]]), loaders(a=3, b=7, c=50)
    assert [tasks(sampler.sample(there, request(1))) for _ in range(4)] == [["a"], ["b"], ["a"], ["b"]]


def test_an_unknown_task_in_the_order_is_named_before_its_turn():
    with pytest.raises(ConfigError, match=r"sampler chosen: there is no task 'sorted' to choose\. Did you"):
        TaskOrder(["a", "sorted"]).sample(loaders(a=3, sort=3), request(1))


@pytest.mark.parametrize("order", [[], [[]], ""])
def test_an_order_of_nothing_is_an_error(order):
    with pytest.raises(ConfigError, match="expected for each step a task, or a list of tasks"):
        TaskOrder(order)
