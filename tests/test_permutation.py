"""An order is computed place by place; it is a permutation of any size, and looks like a random one."""

import time
from collections import Counter
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_core.data.order import Permutation


@pytest.mark.long
@given(n=st.integers(0, 3000), key=st.text(max_size=8))
def test_every_number_occurs_once(n, key):
    order = Permutation(n, key)
    assert len(order) == n
    assert sorted(order[place] for place in range(n)) == list(range(n))


@given(n=st.integers(1, 10**18), key=st.text(max_size=8), data=st.data())
def test_places_of_a_huge_range_have_different_numbers(n, key, data):
    places = data.draw(st.sets(st.integers(0, n - 1), max_size=50))
    order = Permutation(n, key)
    numbers = {order[place] for place in places}
    assert len(numbers) == len(places)
    assert all(0 <= number < n for number in numbers)


def test_a_billion_rows_cost_as_little_as_ten():
    begin = time.process_time()
    order = Permutation(10**9, "key")
    found = [order[place] for place in range(1000)]
    assert time.process_time() - begin < 1
    assert len(set(found)) == 1000
    assert 0.45e9 < sum(found) / 1000 < 0.55e9


@pytest.mark.parametrize("n", [2, 3, 4])
def test_small_orders_are_all_about_equally_frequent(n):
    keys = 3000
    counts = Counter(tuple(Permutation(n, str(key))) for key in range(keys))
    expected = keys / len(list(permutations(range(n))))
    assert set(counts) == set(permutations(range(n)))
    chi_squared = sum((count - expected) ** 2 / expected for count in counts.values())
    assert chi_squared < 3 * len(counts) + 12


def test_each_place_gets_each_number_about_equally_often():
    n, keys = 11, 4000
    for place in (0, 5, 10):
        counts = Counter(Permutation(n, str(key))[place] for key in range(keys))
        chi_squared = sum((counts[number] - keys / n) ** 2 / (keys / n) for number in range(n))
        assert chi_squared < 35, place  # 10 degrees of freedom; seldom above 30


def test_neighbours_are_not_kept_together():
    n, keys = 100, 500
    together = sum(
        abs(order[place] - order[place + 1]) == 1
        for order in (Permutation(n, str(key)) for key in range(keys))
        for place in (0, 7, 42, 98)
    )
    assert together < 2 * 4 * keys * 2 / n
