"""Tests of a program: inputs and expected results."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen

import grpo_core as grpo
from grpo_core.kit import read_json

SHAPES = '{"input": "2", "output": "4"}, {"call": "double(2)", "expected": 4}, or "assert double(2) == 4"'


@frozen(kw_only=True)
class Printed:
    """A test that compares standard output for a given standard input."""

    input: str
    output: str

    def passes(self, printed: str) -> bool:
        """Whether the output is right, ignoring white space at the ends of lines and of the text."""
        return stripped(printed) == stripped(self.output)


@frozen(kw_only=True)
class Called:
    """A test that compares an expression with ``expected``, an expression or a value."""

    call: str
    expected: Any
    computed: bool = False
    """Whether ``expected`` is an expression, which is evaluated without the model's code."""


class Tested(grpo.Environment):
    """Base class of environments whose prompts are the rows of a task's data, with tests in each."""

    success = 1.0

    def prompts(self, split: str) -> Sequence[grpo.Prompt]:
        raise grpo.ConfigError(
            "code: there are no prompts; give them with tasks.NAME.data (and validation_data, or "
            "validation.every = 0), with a list of tests in each row"
        )


def cases_of(given: Any, where: str) -> list[Printed | Called]:
    """Parse the tests of a row, which may be JSON.  Raises PluginError for invalid tests."""
    given = parsed(given)
    if isinstance(given, str | Mapping) or not isinstance(given, Sequence) or not given:
        raise grpo.PluginError(f"code: {where}: tests are {given!r:.100}; expected a list of {SHAPES}")
    return [_case(each, f"{where}: test {number}") for number, each in enumerate(given, 1)]


def _case(given: Any, where: str) -> Printed | Called:
    if isinstance(given, str):
        return _asserted(given, where)
    if isinstance(given, Mapping):
        if set(given) == {"input", "output"} and all(isinstance(text, str) for text in given.values()):
            return Printed(input=given["input"], output=given["output"])
        if set(given) == {"call", "expected"} and isinstance(given["call"], str):
            try:
                ast.parse(given["call"], mode="eval")
            except (SyntaxError, ValueError) as error:
                raise grpo.PluginError(
                    f"code: {where}: {given['call']!r:.100} is not an expression"
                ) from error
            return Called(call=given["call"], expected=given["expected"])
    raise grpo.PluginError(f"code: {where} is {given!r:.100}; expected {SHAPES}")


def _asserted(text: str, where: str) -> Called:
    """Parse ``assert CALL == VALUE``.

    Other assertions are refused: they would be judged inside the sandbox, where the model's code can make
    them true.
    """
    try:
        (statement,) = ast.parse(text.strip()).body
    except (SyntaxError, ValueError) as error:
        raise grpo.PluginError(f"code: {where} is {text!r:.100}, which is not a single assertion") from error
    test = statement.test if isinstance(statement, ast.Assert) else None
    if not isinstance(test, ast.Compare) or len(test.ops) != 1 or not isinstance(test.ops[0], ast.Eq):
        raise grpo.PluginError(
            f"code: {where} is {text!r:.100}; expected assert CALL == VALUE, whose sides are compared "
            "outside of the sandbox"
        )
    right = test.comparators[0]
    try:
        return Called(call=ast.unparse(test.left), expected=ast.literal_eval(right))
    except ValueError:
        return Called(call=ast.unparse(test.left), expected=ast.unparse(right), computed=True)


def parsed(given: Any) -> Any:
    """Return the value of a row's field, which may be JSON."""
    if isinstance(given, str):
        with contextlib.suppress(ValueError):
            return read_json(given, object)
    return given


def stripped(text: str) -> list[str]:
    """Return a text without white space at the ends of its lines and at its end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
