"""Sums over arrays find a number that has changed, and files of tensors are compared without torch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from grpo_core import checks

KINDS = [np.int32, np.float32, np.float64, np.float16, np.bool_, np.uint8]


@pytest.mark.long
@settings(max_examples=200)
@given(st.sampled_from(KINDS), st.integers(1, 9000), st.integers(0, 2**32), st.data())
def test_one_changed_number_is_found_whichever_bit_it_is(kind, size, seed, data):
    array = np.random.default_rng(seed).integers(0, 2, size * np.dtype(kind).itemsize, np.uint8).view(kind)
    recorded = checks.sums(array)
    at, bit = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, array.itemsize * 8 - 1))
    array.view(np.uint8)[at * array.itemsize + bit // 8] ^= 1 << bit % 8
    assert checks.sums(array) != recorded
    assert checks.changed(array, recorded, array.itemsize) == at


def test_two_numbers_that_change_places_are_noticed_and_not_named():
    array = np.array([5, 7, 9], np.int32)
    recorded = checks.sums(array)
    array[:] = 9, 7, 5
    assert checks.sums(array) != recorded
    assert checks.changed(array, recorded, 4) is None


def test_an_empty_array_has_sums():
    assert checks.sums(np.zeros(0, np.float32)) == (0, 0)


@pytest.mark.parametrize(("name", "at"), [("a", [2, 1]), ("b", [6]), ("c", [])])
def test_the_changed_number_of_a_file_of_tensors_is_named(name, at, tmp_path):
    path, before = tmp_path / "some.safetensors", tmp_path / "before.safetensors"
    tensors = {
        "a": np.arange(12, dtype=np.float32).reshape(4, 3),
        "b": np.arange(7, dtype=np.uint8),
        "c": np.array(3.0),
    }
    save_file(tensors, path)
    save_file(tensors, before)
    recorded = checks.tensor_sums(path)
    assert checks.changed_tensor(path, recorded) == ""
    assert checks.differing_element(before, path) == ""
    was = tensors[name][tuple(at)].item()
    tensors[name][tuple(at)] += 1
    save_file(tensors, path)
    assert checks.changed_tensor(path, recorded) == f"tensor {name}, element {at}"
    assert checks.differing_element(before, path) == f"{name}{at}: {was!r} -> {was + 1!r}"


def test_a_damaged_header_is_said_to_be_one_and_another_file_has_no_sums(tmp_path):
    path = tmp_path / "some.safetensors"
    save_file({"a": np.zeros(3)}, path)
    recorded = checks.tensor_sums(path)
    data = bytearray(path.read_bytes())
    data[9] ^= 8
    path.write_bytes(data)
    assert checks.changed_tensor(path, recorded) == "its header is damaged"
    path.write_bytes(b"no tensors")
    assert checks.tensor_sums(path) == {}
