"""Probes close to right replies: near misses, and numbers and moves from the prompt.  Pure."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from attrs import evolve, frozen

from grpo_core import Prompt
from grpo_core.kit import read_json
from grpo_plugin_audit.records import Check, Finding, Reply, Solution, Trial, text_of
from grpo_plugin_audit.rewards import Scale, panel

NUMBERS = 8
"""Largest number of a prompt's numbers that are tried as its answer."""
MOVES = 6
"""Number of bracketed moves that are tried: the most frequent ones in the prompts."""
LONGEST_ANSWER = 2000
"""Largest length of an answer that near misses are derived from."""
FEWEST_ITEMS = 3
"""Smallest number of items of a list: two words may be a name."""
FEWEST_TRIALS = 4
"""Smallest number of near misses of a kind that is judged: a few may be right by chance."""
SHIFT = 0.9
"""Shift of each number; less than one, so that a tolerance of one is detected."""

_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?!\w|\.\d)")
_WHOLE_NUMBER = re.compile(r"(?<!\w)-?\d+(?:\.\d+)?")
_MOVE = re.compile(r"\[[^\[\]\n]{1,30}\]")


@frozen
class Miss:
    """A transformation of a right answer into a wrong one."""

    kind: str
    make: Callable[[str], str | None]
    """Returns the wrong answer, or None if the transformation does not apply."""
    sure: bool
    """Whether the result is wrong for every question; a reordered list, for example, may be right."""


def _one_larger(answer: str) -> str | None:
    found = list(_NUMBER.finditer(answer))
    return _with(answer, found[-1], _shifted(found[-1][0], 1)) if found else None


def _all_shifted(answer: str) -> str:
    return _NUMBER.sub(lambda found: _shifted(found[0], SHIFT), answer)


def _other_sign(answer: str) -> str | None:
    found = next((one for one in _NUMBER.finditer(answer) if float(one[0])), None)
    if found is None:
        return None
    return _with(answer, found, found[0].removeprefix("-") if found[0].startswith("-") else f"-{found[0]}")


def _shifted(number: str, by: float) -> str:
    return f"{float(number) + by:.10g}" if "." in number or by != int(by) else str(int(number) + int(by))


def _with(answer: str, found: re.Match[str], new: str) -> str:
    return answer[: found.start()] + new + answer[found.end() :]


def _items(answer: str) -> tuple[str, list[str], str, str] | None:
    """Split a list into opening bracket, items, separator and closing bracket; None for another answer."""
    inner, before, after = answer.strip(), "", ""
    if len(inner) > 1 and inner[0] + inner[-1] in ("[]", "()", "{}"):
        before, inner, after = inner[0], inner[1:-1], inner[-1]
    for separator in ("\n", ",", ";", " "):
        items = [item.strip() for item in inner.split(separator)]
        numbers = all(_NUMBER.fullmatch(item) for item in items)
        if len(items) >= FEWEST_ITEMS and all(items) and (separator != " " or numbers):
            return before, items, f"{separator} " if separator in ",;" else separator, after
    return None


def _listed(change: Callable[[list[str]], list[str]]) -> Callable[[str], str | None]:
    def make(answer: str) -> str | None:
        if (found := _items(answer)) is None or '"' in answer or ":" in answer:  # JSON has separate kinds
            return None
        before, items, separator, after = found
        new = change(items)
        return None if new == items else before + separator.join(new) + after

    return make


def _letter(answer: str) -> str | None:
    """Return a word with another letter in the middle."""
    if not re.fullmatch(r"[A-Za-z]{4,40}", answer):
        return None
    index = len(answer) // 2
    return answer[:index] + ("o" if answer[index].lower() != "o" else "i") + answer[index + 1 :]


def _object(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[str], str | None]:
    def make(answer: str) -> str | None:
        try:
            held = read_json(answer, dict)
        except ValueError:
            return None
        if not held:
            return None
        new = change(held)
        return None if new == held else json.dumps(new)

    return make


MISSES = (
    Miss("a number one larger", _one_larger, True),
    Miss(f"each number {SHIFT} larger", _all_shifted, True),
    Miss("the other sign", _other_sign, True),
    Miss("an item dropped", _listed(lambda items: items[:-1]), True),
    Miss("an item twice", _listed(lambda items: [*items, items[-1]]), False),
    Miss("items backwards", _listed(lambda items: items[::-1]), False),
    Miss("another letter", _letter, False),
    Miss(
        "the last character dropped",
        lambda answer: answer[:-1] if re.fullmatch(r"\w{4,}", answer) else None,
        False,
    ),
    Miss("each value null", _object(lambda held: dict.fromkeys(held)), True),
    Miss("an invented key", _object(lambda held: held | {"invented": True}), False),
    Miss("the answer denied", "anything but {}".format, False),
)
SURELY_WRONG = frozenset(miss.kind for miss in MISSES if miss.sure)


def near_misses(solutions: Sequence[Solution]) -> Iterator[Reply]:
    """Yield replies that differ slightly from right ones, in the same form."""
    for own in solutions:
        answer = own.answer
        if own.text is None or answer is None or own.turns > 1 or len(answer) > LONGEST_ANSWER:
            continue
        before, found, after = own.text.rpartition(answer)
        if not found:
            continue
        for miss in MISSES:
            wrong = miss.make(answer)
            if wrong is not None and wrong != answer and not own.deserves(said := before + wrong + after):
                yield Reply(own.prompt, said, miss.kind)


def near(trials: Sequence[Trial], scale: Scale) -> Finding:
    """Judge near misses: full marks are a fault, partial credit is not."""
    check = Check("reward.near_misses", "near misses of its solutions")
    if not scale.rewards:
        return check.not_applicable("no solution is known")
    often = Counter(trial.kind for trial in trials)
    trials = [trial for trial in trials if often[trial.kind] >= FEWEST_TRIALS]
    advice = "compare the whole answer, without a tolerance that the prompt does not grant"
    sure, may = (
        panel(check, some, scale, lambda trial: trial.kind, advice, partial=False)
        for some in (
            [trial for trial in trials if trial.kind in SURELY_WRONG],
            [trial for trial in trials if trial.kind not in SURELY_WRONG],
        )
    )
    if may.severity == "failed":
        may = evolve(may, severity="warned", advice=f"{advice}; if such an answer is right, ignore this")
    ranks = {"failed": 0, "warned": 1, "noted": 2, "passed": 2, "not applicable": 3}
    return min(sure, may, key=lambda one: ranks[one.severity])


# ---------------------------------------------------------------------------------- what the prompt names


def prompt_numbers(prompts: Sequence[Prompt], form: tuple[str, str]) -> Iterator[Reply]:
    """Yield replies with a number of the prompt as the answer: the largest, and each one from the end."""
    before, after = form
    for prompt in prompts:
        numbers = list(dict.fromkeys(_WHOLE_NUMBER.findall(text_of(prompt))))
        if not numbers:
            continue
        yield Reply(prompt, f"{before}{max(numbers, key=float)}{after}", "the prompt's largest number")
        some = numbers[:: max(1, len(numbers) // NUMBERS)][:NUMBERS]
        for index, number in enumerate(some, 1):
            yield Reply(prompt, f"{before}{number}{after}", f"number {index} of the prompt")


def numbers(trials: Sequence[Trial], scale: Scale) -> Finding:
    """Judge replies with a number of the prompt that is not the answer."""
    check = Check("reward.prompt_numbers", "numbers of the prompt as answers")
    if not scale.rewards:
        return check.not_applicable("no solution is known, and one of them may be right")
    advice = "do not reward a number that the prompt contains"
    return panel(check, trials, scale, lambda trial: trial.kind, advice)


def named_moves(prompts: Sequence[Prompt], turns: int) -> Iterator[Reply]:
    """Yield replies that repeat a bracketed move of the prompts in all turns, also with all numbers equal.

    Rules against repetition are often missing: ``[1, 5, 9]`` is also played as ``[1, 1, 1]``.
    """
    named: dict[str, int] = {}
    for prompt in prompts:
        for move in set(_MOVE.findall(text_of(prompt))):
            named[move] = named.get(move, 0) + 1
    often = sorted(named, key=lambda move: (-named[move], move))[:MOVES]
    moves = list(dict.fromkeys([*often, *(same for move in often if (same := _same(move)) != move)]))
    for prompt in prompts:
        text = text_of(prompt)
        for move in moves:
            if move in text or move not in named:
                yield Reply(prompt, move, "a move that the prompt names")
        if turns > 1 and len(often) > 1:
            yield Reply(prompt, often[0], "the named moves in turn", then=tuple(often[1:]))


def _same(move: str) -> str:
    """Return a move with all numbers replaced by its first one."""
    first = _WHOLE_NUMBER.search(move)
    return move if first is None else _WHOLE_NUMBER.sub(first[0], move)


def moves(trials: Sequence[Trial], scale: Scale) -> Finding:
    """Judge replies that always make the same move."""
    check = Check("reward.named_moves", "moves that the prompt names")
    if not trials:
        return check.not_applicable("no prompt names a move in brackets")
    advice = "enforce the rules of the game, and reward progress beyond its beginning"
    return panel(check, trials, scale, lambda trial: f"{trial.kind} {trial.said}", advice)
