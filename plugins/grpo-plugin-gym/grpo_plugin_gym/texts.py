"""Actions and observations of gymnasium's spaces as text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import regex
from gymnasium import spaces

from grpo_core.kit import read_json

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")


PATTERN_SECONDS = 1.0
"""Time limit of a search in seconds; some patterns backtrack exponentially."""


class Actions:
    """Parses actions of a space from replies.

    Args:
        space: the space of actions.
        names: names of the actions of a discrete space, in order; without names actions are numbers.
        pattern: regular expression whose last matching group is the action; without it the last name or
            number in a reply counts.

    Raises ValueError for a space whose actions are not a single array, and for names that do not fit.
    """

    def __init__(self, space: Any, names: Sequence[str] = (), pattern: str = "") -> None:
        _check(space, names)
        self._space, self._names = space, [_plain_name(name) for name in names]
        self._named = _one_of(self._names)
        self._pattern = regex.compile(pattern) if pattern else None

    def instruction(self) -> str:
        """Return the instruction how to write an action."""
        space = self._space
        if isinstance(space, spaces.Text):
            return ""
        if self._names:
            return f"Reply with one of these actions: {', '.join(self._names)}."
        if isinstance(space, spaces.Discrete):
            return f"Reply with an action: a number from {space.start} to {space.start + space.n - 1}."
        shape = getattr(space, "shape", None)
        return f"Reply with an action: a JSON list of numbers of the shape {list(shape or ())}."

    def of(self, reply: str) -> Any:
        """Return the action of a reply.  Raises ValueError for an invalid action."""
        if self._pattern is not None:
            try:
                matches = self._pattern.finditer(reply, timeout=PATTERN_SECONDS)
                found = [match[match.lastindex or 0] for match in matches]
            except TimeoutError:
                raise ValueError(
                    f"options.pattern takes more than {PATTERN_SECONDS:g} s for the reply"
                ) from None
            if not found:
                raise ValueError("no action was found in the reply")
            reply = found[-1]
        action = self._read(reply)
        if not self._space.contains(action):
            raise ValueError(f"{reply.strip()[-80:]!r} is not an action")
        return action

    def _read(self, reply: str) -> Any:
        space = self._space
        if isinstance(space, spaces.Text):
            return reply
        if isinstance(space, spaces.Discrete):
            return self._discrete(reply)
        start, end = reply.find("["), reply.rfind("]")
        try:
            given = read_json(reply[start : end + 1], list)
            action = np.array(given, dtype=space.dtype)
            as_written = np.array(given, dtype=float)
        except (ValueError, TypeError, OverflowError) as error:
            raise ValueError(f"{reply.strip()[-80:]!r} is not a list of numbers") from error
        if np.issubdtype(action.dtype, np.integer) and not np.array_equal(action, as_written):
            raise ValueError(f"{reply.strip()[-80:]!r} has numbers that are not whole numbers")
        return action

    def _discrete(self, reply: str) -> Any:
        if self._names:
            found = self._named.findall(reply.lower())
            if not found:
                raise ValueError(f"{reply.strip()[-80:]!r} names no action")
            return self._space.dtype.type(self._space.start + self._names.index(_plain_name(found[-1])))
        numbers = _NUMBER.findall(reply)
        if not numbers or len(numbers[-1]) > 18:
            raise ValueError(f"{reply.strip()[-80:]!r} is not a number")
        if not float(numbers[-1]).is_integer():
            raise ValueError(f"{numbers[-1]!r} is not a whole number")
        return self._space.dtype.type(int(float(numbers[-1])))


def _check(space: Any, names: Sequence[str]) -> None:
    """Raise ValueError if actions of the space cannot be written as text, or the names do not fit."""
    one_array = getattr(space, "shape", None) is not None and getattr(space, "dtype", None) is not None
    if not isinstance(space, spaces.Text) and not one_array:
        raise ValueError(f"its actions are of the space {space!s:.100}, and not a text, a number or an array")
    if not names:
        return
    if not isinstance(space, spaces.Discrete):
        raise ValueError(f"options.actions names actions of a Discrete space, and it has {space!s:.100}")
    if len(names) != space.n:
        raise ValueError(f"it has {space.n} actions, and options.actions names {len(names)}")
    plain = [_plain_name(name) for name in names]
    if not all(plain) or len(set(plain)) < len(plain):
        raise ValueError(f"options.actions = {list(names)!s:.200} has an empty name, or one name twice")


def _plain_name(name: str) -> str:
    return " ".join(name.lower().split())


def _one_of(names: Sequence[str]) -> re.Pattern[str]:
    """Return a pattern of names as whole words, longest first, because "left" is also in "turn left"."""
    longest_first = sorted(names, key=len, reverse=True)
    found = "|".join(r"\s+".join(map(re.escape, name.split())) for name in longest_first)
    return re.compile(rf"(?<!\w)(?:{found})(?!\w)")


def shown(observation: Any) -> str:
    """Return an observation as text: texts unchanged, arrays and tuples as JSON."""
    if isinstance(observation, str):
        return observation
    return json.dumps(_plain(observation), ensure_ascii=False)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return _rounded(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    return _rounded(value) if isinstance(value, float | int) or value is None else str(value)


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return round(value, 4) if isinstance(value, float) else value
