"""Refused tasks of reasoning-gym, and safe calls of its scorers.

The lists were measured with reasoning-gym 0.1.25; the tests of this plugin measure them again.
"""

from __future__ import annotations

import ast
import math
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

REFUSED = {
    "boxnet": "the number 0 as an answer makes its scorer raise, and it knows no solution to check itself by",
    "codeio": "it runs programs that write files, and draw at random: nobody can tell their output",
    "coin_flip": 'its scorer rewards a common beginning of the digits: "0" earns 0.94 on average',
    "composite": "it only mixes other tasks; name these as tasks of the run, each with its own weight",
    "game_of_life": "its scorer rewards each cell: an empty board earns more than 0.9 of the reward",
    "game_of_life_halting": "its scorer gives full marks to any answer that is not empty",
    "propositional_logic": "a quarter of its prompts have contradictory premises, which prove any answer",
    "puzzle24": "its scorer does not look at the numbers of the puzzle: 6*4*1*1 solves each of them",
    "syllogism": "a tenth of its own answers are wrong: it takes invalid syllogisms for valid ones",
}
"""Refused tasks, with the flaw of their reward."""

LONGEST = 1000
"""Largest length of an expression for sympy."""

_LETTERS = frozenset("abcdefghijklmnopqrstuvwxyz")
_CALCULUS = _LETTERS | set("CEX") | {"pi", "Abs", "sqrt", "exp", "log", "ln", "sinh", "cosh", "tanh"}
_CALCULUS |= {"sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan"}
_NAMES: Mapping[str, frozenset[str]] = {
    "countdown": frozenset(),
    "intermediate_integration": _CALCULUS,
    "polynomial_multiplication": _LETTERS,
    "simple_integration": _CALCULUS,
}
"""Names that an answer may use in tasks whose scorers let sympy evaluate it as Python."""

_EVALUATED = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
"""Tasks whose scorers call ``eval`` to read a list."""


def make_safe(task: str, dataset: Any) -> None:
    """Restrict a scorer that evaluates the model's answer as Python to literals."""
    if task in _EVALUATED:
        vars(sys.modules[type(dataset).__module__])["eval"] = ast.literal_eval


def is_answer(task: str, text: str) -> bool:
    """Whether an answer is safe for the scorer: no code, no huge numbers, no "nan"."""
    if task in _NAMES:
        return _is_expression(text, _NAMES[task])
    return task != "complex_arithmetic" or "nan" not in text.lower()  # comparisons with NaN are false


def _is_expression(text: str, names: frozenset[str]) -> bool:
    """Whether a text has only numbers, operators, known names and short exponents without nesting."""
    if len(text) > LONGEST or not re.fullmatch(r"[\w\s+\-*/^().]*", text, re.ASCII):
        return False
    if (
        re.search(r"\d\.?[a-zA-Z_]|\.\s*[a-zA-Z_]", text)
        or not set(re.findall(r"[A-Za-z_]\w*", text)) <= names
    ):
        return False
    try:
        return _digits_of_exponents(ast.parse(text.strip().replace("^", "**"), mode="eval")) <= 3
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def _digits_of_exponents(node: ast.AST) -> float:
    """Return the largest number of digits of an exponent in the tree; infinite for nested powers."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Pow):
        return max(map(_digits_of_exponents, ast.iter_child_nodes(node)), default=0)
    if _digits_of_exponents(node.right):
        return math.inf
    return _digits_of_exponents(node.left) + max(1, sum(map(str.isdigit, ast.unparse(node.right))))


Scorer = Callable[[str, Mapping[str, Any]], float]


def score(scorer: Scorer, answer: str, entry: Mapping[str, Any]) -> float:
    """Score an answer with the task's scorer.

    If the scorer raises, the answer is wrong, provided that the scorer accepts the task's solution; otherwise
    the exception is raised again.
    """
    try:
        return float(scorer(answer, entry))
    except Exception:
        if entry["answer"] is None:
            raise
        scorer(entry["answer"], entry)
        return 0.0
