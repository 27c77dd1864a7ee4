"""Tokens as arrays: shared, read-only, exact to the last bit, and made from whatever an engine has."""

from __future__ import annotations

import pickle
import subprocess
import sys

import attrs
import numpy as np
import pytest
from any_records import any_of
from hypothesis import given
from hypothesis import strategies as st

from grpo_core import Completion, GenerationRequest, PluginError, Rollout, Tokens
from grpo_core.contracts.records import Row, Segment
from grpo_core.contracts.tokens import as_ids, concatenated
from grpo_core.engines import wire

ids = st.integers(-(2**31), 2**31 - 1)
singles = st.floats(width=32, allow_nan=False)
rows = st.lists(st.tuples(ids, st.booleans(), singles, ids), max_size=20)


def tokens_of(row):
    return Tokens(*([token[i] for token in row] for i in range(4)))


def read(tokens):
    return list(zip(*(part.tolist() for part in tokens.arrays().values()), strict=True))


def bits(tokens):
    return [part.tobytes() for part in tokens.arrays().values()]


@given(rows)
def test_lists_come_back_as_they_were_given(row):
    assert read(tokens_of(row)) == row


@pytest.mark.long
@given(rows)
def test_a_pickle_keeps_every_bit_and_is_13_bytes_a_token(row):
    tokens = tokens_of(row)
    packed = pickle.dumps(tokens, pickle.HIGHEST_PROTOCOL)
    assert bits(pickle.loads(packed)) == bits(tokens)
    assert len(packed) <= 13 * len(row) + 100


@pytest.mark.long
@given(st.lists(rows, max_size=4))
def test_parts_follow_each_other(parts):
    joined = Tokens.concatenate([tokens_of(part) for part in parts])
    assert read(joined) == [token for part in parts for token in part]
    assert len(joined) == sum(map(len, parts))


def test_a_single_part_is_shared_and_not_copied():
    part = Tokens.generated([1, 2], [-0.5, -0.25], [3, 3])
    assert Tokens.concatenate([part]) is part
    segment = Segment(prompt_ids=(1,), tokens=part)
    row = Row(prompt_ids=segment.prompt_ids, tokens=segment.tokens, advantage=1.0, group=0)
    assert row.tokens is part
    assert row.prompt_ids is segment.prompt_ids


def test_arrays_cannot_be_changed_whoever_made_them():
    theirs = np.array([1, 2], np.int32)
    tokens = Tokens.generated(theirs, [-0.5, -0.25], [3, 3])
    theirs[0] = 9
    assert tokens.ids.tolist() == [1, 2]
    for part in [*tokens.arrays().values(), *pickle.loads(pickle.dumps(tokens)).arrays().values()]:
        with pytest.raises(ValueError, match="read-only"):
            part[0] = 0


@pytest.mark.parametrize("kind", [list, tuple, np.array, lambda values: np.repeat(values, 2)[::2]])
def test_an_engine_gives_its_tokens_in_any_sequence(kind):
    said = Completion(
        token_ids=kind([5, 8]), logprobs=kind([-0.5, -1.5]), versions=kind([3, 4]), finish_reason="stop"
    )
    assert read(said.tokens) == [(5, True, -0.5, 3), (8, True, -1.5, 4)]
    assert [part.dtype.name for part in (said.token_ids, said.logprobs, said.versions)] == [
        "int32",
        "float32",
        "int32",
    ]


def test_a_completion_without_tokens_is_one():
    assert len(Completion(token_ids=(), logprobs=(), versions=(), finish_reason="length").tokens) == 0


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1.0], "returned 1.0; expected a 32-bit integer"),
        (["5"], "returned '5'; expected a 32-bit integer"),
        ([2**31], "returned 2147483648; expected a 32-bit integer"),
        (np.array([2**40]), "returned an array of int64 from 1099511627776 to 1099511627776"),
        (np.array([1.0]), "returned an array of float64 from 1.0 to 1.0; expected 32-bit integers"),
        (np.array([[1]]), r"returned an array of shape \[1, 1\]; expected one dimension"),
        ([1, 2], "returned 2 token ids, 1 logprobs and 1 versions; expected as many of each"),
    ],
)
def test_what_cannot_be_tokens_is_refused_where_the_completion_is_made(ids, message):
    with pytest.raises(PluginError, match=f"engine: generate\\(\\) {message}"):
        Completion(token_ids=ids, logprobs=[-1.0], versions=[0], finish_reason="stop")


@pytest.mark.parametrize("logprobs", [np.array([False]), np.array(["-0.5"]), np.array([-1j])])
def test_arrays_of_anything_but_numbers_are_not_logprobs(logprobs):
    with pytest.raises(PluginError, match=r"returned an array of .*; expected numbers as logprobs"):
        Completion(token_ids=[1], logprobs=logprobs, versions=[0], finish_reason="stop")


def test_flags_of_another_length_are_named():
    with pytest.raises(ValueError, match="2 flags of what was sampled; expected as many of each"):
        Tokens([1], [True, False], [-1.0], [0])


def test_records_are_equal_if_their_tokens_are():
    def segment(*ids):
        return Segment(prompt_ids=(1, 2), tokens=Tokens.generated(ids, [-1.0] * len(ids), [0] * len(ids)))

    assert segment(3, 4) == segment(3, 4)
    assert segment(3, 4) != segment(3, 5)
    assert segment(3, 4) != segment(3)
    assert segment(3) != attrs.evolve(segment(3), prompt_ids=(1, 3))
    assert Rollout(segments=[segment(3)]) != Rollout(segments=[segment(3), segment(3)])
    request = GenerationRequest(prompt_ids=[1, 2], max_tokens=3)
    assert request == GenerationRequest(prompt_ids=(1, 2), max_tokens=3)
    assert request != GenerationRequest(prompt_ids=(1,), max_tokens=3)
    assert hash(request) == hash(GenerationRequest(prompt_ids=(1, 2), max_tokens=3))


def test_requests_and_completions_cross_between_processes_as_they_are():
    shared = as_ids(range(5))
    requests = [GenerationRequest(prompt_ids=shared, max_tokens=3, seed=i) for i in range(3)]
    there = wire.unpack_requests(
        pickle.loads(pickle.dumps(wire.pack_requests(requests), pickle.HIGHEST_PROTOCOL))
    )
    assert there == requests
    assert len({id(request.prompt_ids) for request in there}) == 1, "a group's prompt is sent once"
    said = [
        Completion(token_ids=[7, 8], logprobs=[-0.1, -0.2], versions=[1, 2], finish_reason="stop"),
        Completion(token_ids=[], logprobs=[], versions=[], finish_reason="length"),
    ]
    back = wire.unpack_completions(pickle.loads(pickle.dumps(wire.pack_completions(said))))
    assert back == said


@given(any_of(GenerationRequest, prompt_ids=st.lists(ids, max_size=3)))
def test_every_field_of_a_request_reaches_the_engine(request):
    assert wire.unpack_requests(wire.pack_requests([request])) == [request]


def test_short_commands_and_environments_load_no_numpy():
    code = "import sys, grpo_core.contracts.records, grpo_core.cli; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@given(st.lists(st.lists(ids, max_size=5), max_size=4))
def test_joined_ids_are_those_of_the_parts_in_order_and_cannot_be_written(parts):
    given_parts = [as_ids(part) for part in parts]
    joined = concatenated(given_parts)
    assert joined.tolist() == [token for part in parts for token in part]
    assert joined.dtype == np.int32
    assert not joined.flags.writeable
    assert len(parts) != 1 or joined is given_parts[0]


@pytest.mark.parametrize("kind", [list, np.array])
@pytest.mark.parametrize("beyond", [2**31, -(2**31) - 1, 2**40])
def test_an_id_beyond_32_bits_is_refused_and_does_not_wrap_around(kind, beyond):
    with pytest.raises(ValueError, match="32-bit integer"):
        as_ids(kind([1, beyond]))
    assert as_ids(kind([2**31 - 1, -(2**31)])).tolist() == [2**31 - 1, -(2**31)]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3)), max_size=4), st.integers(0, 3))
def test_a_run_of_sampled_tokens_is_a_completion_and_the_last_may_be_empty(parts, last):
    made = [Tokens.concatenate([generated(n), Tokens.context([7] * between)]) for n, between in parts]
    tokens = Tokens.concatenate([*made, generated(last)])
    assert tokens.completions == (*(n for n, _ in parts if n), last)


def generated(n):
    return Tokens.generated([5] * n, [-1.0] * n, [0] * n)
