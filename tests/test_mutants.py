"""Deliberate faults in our own code are found.  Here a few of them; all of them in bench_mutants."""

from __future__ import annotations

import ast
import functools
import importlib.util
from pathlib import Path

import pytest
from mutation import EditError, edited

_spec = importlib.util.spec_from_file_location(
    "bench_mutants", Path(__file__).parent / "benchmarks" / "bench_mutants.py"
)
mutants = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(mutants)

SOME = [
    "in-flight prompts are not saved",
    "permits are free before the engine holds the weights",
    "a lost wake-up",
    "kept rollouts count twice",
    "a reward that is not a number is accepted",
    "the loaders' states are not restored",
]

SOURCE = '''
class Shop:
    def sell(self, item):
        """Remove an item."""
        if item in self.stock:  # or else nothing happens
            self.stock.remove(item)
            self.sold += 1
        return self.sold

    def close(self):
        self.sold += 1

def outer():
    def inner(x): return f(x, key = [1,
                                     2])
    return inner
'''


def edit(function, old, new):
    return edited(SOURCE, [{"function": function, "old": old, "new": new}])


def same_code(one, other):
    return ast.dump(ast.parse(one)) == ast.dump(ast.parse(other))


def test_an_expression_is_replaced_whatever_its_layout():
    assert "f(x, key=[2, 1])" in edit("outer.inner", "[ 1, 2 ]", "[2, 1]")


def test_statements_are_replaced_in_one_function_only():
    result = edit("Shop.sell", "self.sold += 1", "self.sold += 2")
    assert same_code(result, SOURCE.replace("self.sold += 1", "self.sold += 2", 1))


def test_statements_can_be_deleted_and_an_empty_block_passes():
    assert "self.sold" not in edit("Shop.sell", "self.sold += 1", "").partition("return")[0]
    assert "def close(self):\n        pass" in edit("Shop.close", "self.sold += 1", "")


def test_dots_stand_for_an_expression_for_arguments_and_for_a_block():
    assert "g(f(x, key=[1, 2]))" in edit("outer.inner", "return ...", "return g(...)")
    assert "other(x, key=[1, 2])" in edit("outer.inner", "f(...)", "other(...)")
    result = edit("Shop.sell", "if item in self.stock: ...", "while True: ...")
    assert same_code(result, SOURCE.replace("if item in self.stock", "while True"))


def test_dots_that_are_not_used_again_are_dropped():
    assert "stock" not in edit("Shop.sell", "if item in self.stock: ...", "")


@pytest.mark.parametrize(
    ("function", "old", "message"),
    [
        ("Shop.sell", "self.bought += 1", "occurs 0 times in Shop.sell"),
        ("Shop", "self.sold += 1", "occurs 2 times in Shop"),
        ("Shop.buy", "self.sold", "0 functions 'Shop.buy'"),
    ],
)
def test_an_edit_that_does_not_apply_exactly_once_is_an_error(function, old, message):
    with pytest.raises(EditError, match=message):
        edit(function, old, "")


def test_a_mutant_whose_code_is_gone_says_so():
    mutant = {
        "name": "x",
        "file": "loop/buffer.py",
        "function": "Buffer.take",
        "old": "no_such_name",
        "new": "1",
    }
    with pytest.raises(SystemExit, match=r"mutant 'x' in loop/buffer\.py: it occurs 0 times"):
        mutants.mutated(mutant)


def test_mutants_have_different_names():
    names = [mutant["name"] for mutant in mutants.load()]
    assert len(names) == len(set(names))


@functools.cache
def unparsed(source):
    return edited(source, [])


@pytest.mark.long
@pytest.mark.parametrize("mutant", mutants.load(), ids=lambda mutant: mutant["name"])
def test_the_mutants_follow_the_source(mutant):
    assert mutants.mutated(mutant) != unparsed(mutants.source_of(mutant))


@pytest.mark.long
@pytest.mark.parametrize("mutant", [m for m in mutants.load() if m["name"] in SOME], ids=lambda m: m["name"])
def test_a_mutant_is_killed(mutant):
    assert mutants.killer(mutant, seeds=range(50))


@pytest.mark.nightly
def test_without_a_fault_nothing_is_found():
    """Or the mutants above would die of something else."""
    assert mutants.killer(mutants.NOTHING, seeds=range(50), tests=()) is None
