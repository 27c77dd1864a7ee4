"""A dataloader's state is kept as JSON, and comes back as it was."""

import datetime
import decimal
import enum
import json
import math
import random
import uuid

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from grpo_core.contracts.errors import PluginError
from grpo_core.data.states import packed, unpacked

KEYS = st.one_of(st.text(), st.integers(), st.booleans(), st.none(), st.tuples(st.integers(), st.text()))
ARRAYS = npst.arrays(
    st.one_of(
        npst.boolean_dtypes(), npst.integer_dtypes(), npst.floating_dtypes(), npst.complex_number_dtypes(),
        npst.datetime64_dtypes(), npst.unicode_string_dtypes(max_len=4), npst.byte_string_dtypes(max_len=4),
    ),
    npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
)  # fmt: skip
TENSORS = st.builds(
    lambda numbers, dtype: torch.tensor(numbers).to(dtype),
    st.lists(st.integers(0, 100), max_size=4),
    st.sampled_from([torch.uint8, torch.int64, torch.float32, torch.bfloat16, torch.bool, torch.float16]),
)
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(), ARRAYS, TENSORS,
    st.datetimes(), st.dates(), st.times(), st.uuids(), st.decimals(allow_nan=False),
    st.builds(np.int64, st.integers(-5, 5)), st.builds(np.float32, st.floats(width=32)),
)  # fmt: skip
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
        st.dictionaries(st.sampled_from(["$", "of", "a"]), inner),
        st.sets(st.integers()),
    ),
    max_leaves=12,
)


def there_and_back(value):
    return unpacked(json.loads(json.dumps(packed(value), allow_nan=False)))


def same(one, other):
    if type(one) is not type(other):
        return False
    match one:
        case np.ndarray() | np.generic():
            return (
                one.dtype == other.dtype and np.shape(one) == np.shape(other)
            ) and one.tobytes() == other.tobytes()
        case torch.Tensor():
            return one.dtype == other.dtype and torch.equal(one, other)
        case float():
            return (one == other and math.copysign(1, one) == math.copysign(1, other)) or one != one != other
        case list() | tuple():
            return len(one) == len(other) and all(map(same, one, other))
        case dict():
            return same(list(one.items()), list(other.items()))
    return one == other


@given(VALUES)
def test_a_state_comes_back_as_it_was(value):
    assert same(value, there_and_back(value))


def test_the_states_of_random_generators_come_back():
    python, numpy, torchs = random.Random(3), np.random.default_rng(4), torch.Generator().manual_seed(5)
    state = there_and_back([python.getstate(), numpy.bit_generator.state, torchs.get_state()])
    wanted = python.random(), numpy.random(), torch.rand(1, generator=torchs)
    python.setstate(state[0])
    numpy.bit_generator.state = state[1]
    torchs.set_state(state[2])
    assert (python.random(), numpy.random(), torch.rand(1, generator=torchs)) == wanted


def test_other_kinds_of_what_is_known_come_back_plain():
    class Colour(enum.IntEnum):
        RED = 3

    assert there_and_back({"a": Colour.RED, "b": frozenset({1}), "c": bytearray(b"x")}) == {
        "a": 3,
        "b": {1},
        "c": b"x",
    }
    table = np.array([(1, 2.5)], [("n", "<i4"), ("x", "<f8")])
    assert there_and_back(table) == table
    assert there_and_back([datetime.date(2026, 1, 2), decimal.Decimal("1.10"), uuid.UUID(int=5)]) == [
        datetime.date(2026, 1, 2),
        decimal.Decimal("1.10"),
        uuid.UUID(int=5),
    ]


def test_a_value_that_needs_a_pickle_is_refused_with_its_place():
    with pytest.raises(PluginError, match=r"state_dict\(\)\['at'\]\[1\] is <object .* of type object, which"):
        packed({"at": [1, object()]}, "state_dict()")
    with pytest.raises(PluginError, match=r"of type ndarray, which no checkpoint can hold"):
        packed(np.array([object()]))
    itself: list = []
    itself.append(itself)
    with pytest.raises(PluginError, match="contains itself"):
        packed(itself)


@pytest.mark.parametrize("damaged", [{"$": "tuple"}, {"$": "os.system", "of": "ls"}, {"$": 3}])
def test_what_no_state_holds_is_not_read(damaged):
    with pytest.raises(ValueError, match="cannot be part of a state"):
        unpacked(damaged)
