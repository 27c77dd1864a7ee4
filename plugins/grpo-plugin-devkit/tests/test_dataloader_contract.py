"""The contract of dataloaders detects violations of each clause."""

from __future__ import annotations

import itertools
import runpy
from pathlib import Path

import pytest

from grpo_core import GrpoError
from grpo_plugin_devkit.dataloaders import DataloaderContract, check_dataloader

numbers = itertools.count()


class Numbers:
    """An endless stream of rows with its own state."""

    def __init__(self, split="train", at=0):
        self.at = at

    def __iter__(self):
        while True:
            self.at += 1
            yield {"prompt": f"{self.at - 1}=", "answer": "0"}

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Advances(Numbers):
    """Its state cannot be read without an effect."""

    def state_dict(self):
        self.at += 1
        return {"at": self.at - 1}


def other_rows_each_time(split):
    return Numbers(at=next(numbers) * 100)


def no_rows_held_out(split):
    return Numbers() if split == "train" else []


def rows_of_another_kind(split):
    return [3, 4]


def test_a_stream_with_its_own_state_keeps_the_contract():
    check_dataloader(Numbers)


def test_it_says_how_many_rows_were_read():
    with DataloaderContract(Numbers) as contract:
        *_, found = contract.findings()
    assert found.outcome == "noted"
    assert "rows were read for 24 prompts" in found.result


@pytest.mark.parametrize(
    ("factory", "told"),
    [
        (Advances, "resumed after 1, its prompt"),
        (other_rows_each_time, "made a second time, its prompt 1"),
        (no_rows_held_out, "is empty"),
        (rows_of_another_kind, "int"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_a_dataloader_that_breaks_a_clause_is_found(factory, told):
    with pytest.raises((AssertionError, GrpoError), match=told):
        check_dataloader(factory)


def test_the_example_that_streams_a_table_of_sqlite_keeps_the_contract(tmp_path):
    example = runpy.run_path(str(Path(__file__).parents[3] / "examples" / "sqlite_stream.py"))
    example["make_table"](tmp_path / "questions.db", 100)
    check_dataloader(example["questions"], rows={"prompt": "word"}, path=tmp_path / "questions.db")
