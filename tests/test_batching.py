"""From rows to updates and micro-batches: every row once, the budget held, as little padding as pays."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_core.contracts.records import Row
from grpo_core.contracts.tokens import Tokens
from grpo_core.training.batching import microbatches, packs, split_updates

lengths_ = st.lists(st.integers(1, 60), max_size=60)
budgets = st.integers(1, 400)
overheads = st.sampled_from([0, 1, 64, 10**6])


def row(group: int) -> Row:
    return Row(
        prompt_ids=(1,),
        tokens=Tokens.generated([2], [0.0], [0]),
        advantage=1.0,
        group=group,
    )


def cost(lengths: list[int], division: list[list[int]], overhead: int) -> int:
    return sum(len(part) * max(lengths[i] for i in part) + overhead for part in division)


@given(lengths_, budgets, overheads)
def test_every_row_is_in_exactly_one_microbatch(lengths: list[int], budget: int, overhead: int) -> None:
    division = microbatches(lengths, budget, overhead=overhead)
    assert sorted(itertools.chain(*division)) == list(range(len(lengths)))
    assert all(division)


@given(lengths_, budgets, overheads)
def test_no_microbatch_exceeds_the_budget_but_a_single_long_row(
    lengths: list[int], budget: int, overhead: int
) -> None:
    for part in microbatches(lengths, budget, overhead=overhead):
        assert len(part) == 1 or len(part) * max(lengths[i] for i in part) <= budget


def kept(part: list[int], lengths: list[int], prompts: list[tuple[int, int]]) -> int:
    """The tokens of a pack, in which each prompt is once."""
    own = sum(lengths[i] - prompts[i][1] for i in part)
    return own + sum(dict(prompts[i] for i in part).values())


@given(st.data(), lengths_, budgets)
def test_packs_hold_every_row_once_and_the_budget_unless_one_row_is_longer(
    data: st.DataObject, lengths: list[int], budget: int
) -> None:
    shared = data.draw(st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths)))
    shortest = min(lengths, default=0)
    prompts = [(number, shortest * number // 4) for number in shared]
    division = packs(lengths, prompts, budget)
    assert sorted(itertools.chain(*division)) == list(range(len(lengths)))
    assert all(len(part) == 1 or kept(part, lengths, prompts) <= budget for part in division)


@given(lengths_, budgets)
def test_no_two_packs_would_fit_into_one(lengths: list[int], budget: int) -> None:
    prompts = [(i, 0) for i in range(len(lengths))]
    sums = sorted(sum(lengths[i] for i in part) for part in packs(lengths, prompts, budget))
    assert len(sums) < 2 or sums[0] + sums[1] > budget


def test_rows_of_a_prompt_are_packed_together_also_where_others_would_fill_the_pack() -> None:
    assert packs([10, 10, 9, 9], [("a", 8), ("b", 8), ("a", 8), ("b", 8)], 15) == [[0, 2], [1, 3]]


@given(lengths_, budgets)
def test_where_a_microbatch_costs_nothing_no_row_is_padded(lengths: list[int], budget: int) -> None:
    for part in microbatches(lengths, budget, overhead=0):
        assert len({lengths[i] for i in part}) == 1


@given(lengths_, budgets)
def test_where_a_microbatch_costs_much_there_are_as_few_as_the_budget_allows(
    lengths: list[int], budget: int
) -> None:
    fewest, waiting = 0, sorted(lengths, reverse=True)
    while waiting:  # longest first, filled greedily: no division into sorted runs has fewer
        waiting = waiting[max(1, budget // waiting[0]) :]
        fewest += 1
    assert len(microbatches(lengths, budget, overhead=10**6)) == fewest


@given(lengths_, budgets, overheads)
def test_no_microbatch_has_more_padding_than_another_one_would_cost(
    lengths: list[int], budget: int, overhead: int
) -> None:
    for part in microbatches(lengths, budget, overhead=overhead):
        assert len(part) * max(lengths[i] for i in part) - sum(lengths[i] for i in part) <= overhead


@given(st.data(), lengths_, budgets)
def test_the_division_does_not_depend_on_the_order_of_the_rows(
    data: st.DataObject, lengths: list[int], budget: int
) -> None:
    shuffled = data.draw(st.permutations(lengths))
    as_lengths = [
        [sorted(given[i] for i in p) for p in microbatches(given, budget)] for given in (lengths, shuffled)
    ]
    assert as_lengths[0] == as_lengths[1]


@pytest.mark.parametrize("n", [64, 128, 512])
def test_ragged_rows_are_padded_by_less_than_two_percent(n: int) -> None:
    chance = random.Random(0)
    lengths = [min(1024, 64 + int(chance.expovariate(1 / 200))) for _ in range(n)]
    division = microbatches(lengths, 16384)
    assert sum(lengths) / cost(lengths, division, 0) >= 0.98
    assert len(division) < max(n // 2, 40)


@given(st.lists(st.integers(0, 9), max_size=40), st.integers(1, 8))
def test_updates_are_whole_groups_dealt_evenly(groups: list[int], n: int) -> None:
    rows = [row(g) for g in groups]
    updates = split_updates(rows, n)
    assert len(updates) == min(n, len(set(groups)))
    assert sorted(r.group for update in updates for r in update) == sorted(groups)
    dealt = [{r.group for r in update} for update in updates]
    assert sum(map(len, dealt)) == len(set(groups)), "a group is in two updates"
    assert not dealt or max(map(len, dealt)) - min(map(len, dealt)) <= 1


def test_groups_are_dealt_in_turn_so_that_what_comes_in_blocks_is_mixed() -> None:
    rows = [row(group) for group in range(7) for _ in range(2)]
    updates = split_updates(rows, 3)
    assert [sorted({r.group for r in update}) for update in updates] == [[0, 3, 6], [1, 4], [2, 5]]


@given(lengths_, budgets, overheads)
def test_the_longest_microbatch_comes_first(lengths: list[int], budget: int, overhead: int) -> None:
    longest = [max(lengths[i] for i in part) for part in microbatches(lengths, budget, overhead=overhead)]
    assert longest == sorted(longest, reverse=True)


def test_no_rows_make_no_updates_and_no_microbatches() -> None:
    assert split_updates([], 4) == []
    assert microbatches([], 100) == []
