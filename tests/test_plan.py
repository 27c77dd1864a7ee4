"""A step is divided among ranks: every row once, rollouts whole, and about as much work for each."""

from __future__ import annotations

import itertools
import random

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_trainer import batch, row

from grpo_core.training.plan import balanced, shares

LIMIT = 1.1
"""Largest part, next to the largest part of the best division."""


@given(
    rollouts=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 3), st.integers(1, 30)), max_size=12),
    updates=st.integers(1, 4),
    ranks=st.integers(1, 5),
)
def test_every_row_is_computed_once_with_the_other_rows_of_its_rollout_and_of_its_group(
    rollouts: list[tuple[int, int, int]], updates: int, ranks: int
) -> None:
    rows = [
        attrs.evolve(row("ab", "c" * (length + segment), group=group), rollout=number)
        for number, (group, segments, length) in enumerate(rollouts)
        for segment in range(segments)
    ]
    divided = shares(batch(rows, step=3), updates=updates, ranks=ranks)
    assert len(divided) == ranks
    assert len({(share.step, share.facts, share.updates) for share in divided}) == 1, "all know the same"
    places = sorted(place for share in divided for place in share.rows)
    assert places == list(range(len(rows)))
    for share in divided:
        for place, its in share.rows.items():
            assert its is rows[place]
            assert (share.facts[place].group, share.facts[place].rollout) == (its.group, its.rollout)
            assert share.facts[place].sampled == its.tokens.n_sampled
    owners = {rows[place].rollout: set() for place in places}
    for rank, share in enumerate(divided):
        for its in share.rows.values():
            owners[its.rollout].add(rank)
    assert all(len(ranks_of_one) == 1 for ranks_of_one in owners.values())
    groups = [{rows[place].group for place in update} for update in divided[0].updates]
    assert sum(map(len, groups)) == len(set().union(*groups)), "a group is in one update"


def largest(costs: list[int], divided: list[list[int]]) -> int:
    return max(sum(costs[place] for place in part) for part in divided)


def best(costs: list[int], parts: int) -> int:
    """The smallest largest part of all divisions."""
    found = sum(costs)
    for chosen in itertools.product(range(parts), repeat=len(costs)):
        sums = [0] * parts
        for cost, part in zip(costs, chosen, strict=True):
            sums[part] += cost
        found = min(found, max(sums))
    return found


@pytest.mark.long
def test_few_rollouts_are_divided_nearly_as_well_as_possible() -> None:
    chance = random.Random(0)
    for _ in range(300):
        parts, n = chance.choice([2, 3]), chance.randint(1, 8)
        costs = [int(chance.lognormvariate(5, 1)) + 1 for _ in range(n)]
        assert largest(costs, balanced(costs, parts)) <= LIMIT * best(costs, parts), costs


@pytest.mark.long
def test_ten_thousand_batches_are_divided_nearly_evenly() -> None:
    """The best division is at least as large as the mean, and as the longest rollout."""
    chance = random.Random(1)
    for _ in range(10_000):
        parts = chance.choice([2, 4, 8])
        costs = [int(chance.lognormvariate(5, 1)) + 1 for _ in range(chance.randint(4 * parts, 64))]
        bound = max(max(costs), sum(costs) / parts)
        assert largest(costs, balanced(costs, parts)) <= LIMIT * bound, costs
