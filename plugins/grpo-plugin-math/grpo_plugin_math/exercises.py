"""Exercises with a short prompt and one exact answer.

Exercises are numbered from 0 to ``size`` - 1.  A split is a set of numbers, so training and validation share
no prompt, and prompts are generated when they are read.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import overload

import grpo_core as grpo

DIGITS = "0123456789"
LARGEST = 2**62
"""Largest number of exercises of one kind; numbers are drawn as machine integers."""


class Exercises(grpo.Environment):
    """An environment whose reward is 1 for the exact answer, ignoring outer white space, and otherwise 0.

    Args:
        size: number of exercises.
        exercise: returns prompt and answer of a number below ``size``.
        train: number of training prompts.
        validation: number of held-out prompts; if there are too few exercises for both splits, a tenth of
            them is held out.
        seed: decides which exercises belong to which split.
    """

    success = 1.0

    def __init__(
        self,
        size: int,
        exercise: Callable[[int], tuple[str, str]],
        *,
        train: int,
        validation: int,
        seed: int,
    ) -> None:
        _at_least(1, train=train, validation=validation)
        if not 2 <= size <= LARGEST:
            raise grpo.ConfigError(
                f"these options make {size:.3g} different exercises, expected 2 to {LARGEST:.3g}; "
                "choose a smaller length or fewer digits"
            )
        held_out = min(validation, size // 10 or 1) if train + validation > size else validation
        drawn = random.Random(seed).sample(range(size), min(size, train + validation))
        self._exercise = exercise
        self._numbers = {"validation": drawn[:held_out], "train": drawn[held_out:]}

    def prompts(self, split: str) -> Sequence[grpo.Prompt]:
        return _Prompts(self._exercise, self._numbers[split])

    def evaluate(self, episodes: Sequence[grpo.Episode]) -> list[grpo.Feedback]:
        given = [(episode.reply.strip(), episode.prompt.answer) for episode in episodes]
        return [grpo.Feedback(reward=float(reply == right), answer=reply) for reply, right in given]


class _Prompts(Sequence[grpo.Prompt]):
    """A sequence of prompts that are generated on access."""

    def __init__(self, exercise: Callable[[int], tuple[str, str]], numbers: list[int]) -> None:
        self._exercise = exercise
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> grpo.Prompt: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[grpo.Prompt]: ...

    def __getitem__(self, index: int | slice) -> grpo.Prompt | Sequence[grpo.Prompt]:
        if isinstance(index, slice):
            return _Prompts(self._exercise, self._numbers[index])
        number = self._numbers[index]
        question, answer = self._exercise(number)
        return grpo.Prompt(messages=question, answer=answer, id=str(number))


# ---------------------------------------------------------------------------------- exercises on strings


def _strings(
    length: int,
    alphabet: str,
    exercise: Callable[[str], tuple[str, str]],
    train: int,
    validation: int,
    seed: int,
) -> Exercises:
    _at_least(1, length=length)
    if not isinstance(alphabet, str) or len(set(alphabet)) != len(alphabet) or len(alphabet) < 2:
        raise grpo.ConfigError(f"alphabet is {alphabet!r}, expected at least two different characters")
    if any(character.isspace() or character == "=" for character in alphabet):
        raise grpo.ConfigError(f"alphabet is {alphabet!r}, expected no white space and no '='")

    def numbered(number: int) -> tuple[str, str]:
        characters = []
        for _ in range(length):
            number, index = divmod(number, len(alphabet))
            characters.append(alphabet[index])
        return exercise("".join(characters))

    return Exercises(len(alphabet) ** length, numbered, train=train, validation=validation, seed=seed)


def copy(
    length: int = 5, alphabet: str = DIGITS, *, train: int = 20_000, validation: int = 500, seed: int = 0
) -> Exercises:
    """Copy the digits: ``:52341=`` is ``52341``."""
    return _strings(length, alphabet, lambda text: (f":{text}=", text), train, validation, seed)


def reverse(
    length: int = 5, alphabet: str = DIGITS, *, train: int = 20_000, validation: int = 500, seed: int = 0
) -> Exercises:
    """Reverse the digits: ``<52341=`` is ``14325``."""
    return _strings(length, alphabet, lambda text: (f"<{text}=", text[::-1]), train, validation, seed)


def sort(
    length: int = 5, alphabet: str = DIGITS, *, train: int = 20_000, validation: int = 500, seed: int = 0
) -> Exercises:
    """Sort the digits: ``52341=`` is ``12345``, in the order of ``alphabet``."""

    def exercise(text: str) -> tuple[str, str]:
        return f"{text}=", "".join(sorted(text, key=alphabet.index))

    return _strings(length, alphabet, exercise, train, validation, seed)


# ---------------------------------------------------------------------------------- exercises on numbers


def _numbers(
    operands: Sequence[range],
    exercise: Callable[..., tuple[str, str]],
    *,
    train: int,
    validation: int,
    seed: int,
) -> Exercises:
    """Return exercises with one number from each range."""
    sizes = [operand.stop - operand.start for operand in operands]

    def numbered(number: int) -> tuple[str, str]:
        chosen = []
        for operand, size in zip(operands, sizes, strict=True):
            number, offset = divmod(number, size)
            chosen.append(operand.start + offset)
        return exercise(*chosen)

    return Exercises(math.prod(sizes), numbered, train=train, validation=validation, seed=seed)


def _of(digits: int) -> range:
    """Return the range of numbers with exactly this many digits; 0 has one digit."""
    _at_least(1, digits=digits)
    return range(0 if digits == 1 else 10 ** (digits - 1), 10**digits)


def maximum(
    digits: int = 2, count: int = 3, *, train: int = 20_000, validation: int = 500, seed: int = 0
) -> Exercises:
    """Find the maximum: ``max 31,75,42=`` is ``75``."""
    _at_least(1, count=count)

    def exercise(*numbers: int) -> tuple[str, str]:
        return f"max {','.join(map(str, numbers))}=", str(max(numbers))

    return _numbers([_of(digits)] * count, exercise, train=train, validation=validation, seed=seed)


def addition(digits: int = 2, *, train: int = 20_000, validation: int = 500, seed: int = 0) -> Exercises:
    """Add two numbers: ``23+45=`` is ``68``."""

    def exercise(a: int, b: int) -> tuple[str, str]:
        return f"{a}+{b}=", str(a + b)

    return _numbers([_of(digits)] * 2, exercise, train=train, validation=validation, seed=seed)


def subtraction(digits: int = 2, *, train: int = 20_000, validation: int = 500, seed: int = 0) -> Exercises:
    """Subtract two numbers: ``23-45=`` is ``-22``."""

    def exercise(a: int, b: int) -> tuple[str, str]:
        return f"{a}-{b}=", str(a - b)

    return _numbers([_of(digits)] * 2, exercise, train=train, validation=validation, seed=seed)


def modulo(digits: int = 2, *, train: int = 20_000, validation: int = 500, seed: int = 0) -> Exercises:
    """Take a remainder: ``731%45=`` is ``11``, with ``digits + 1`` and ``digits`` digits."""

    def exercise(a: int, b: int) -> tuple[str, str]:
        return f"{a}%{b}=", str(a % b)

    divisors = range(max(2, _of(digits).start), 10**digits)
    return _numbers([_of(digits + 1), divisors], exercise, train=train, validation=validation, seed=seed)


def _at_least(smallest: int, **options: int) -> None:
    for name, value in options.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
            raise grpo.ConfigError(f"{name} is {value!r}, expected a whole number of at least {smallest}")
