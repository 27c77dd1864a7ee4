"""The shuffled order in which rows are read by index: a function of (seed, task, epoch).  Pure.

A permutation of ``range(n)`` is computed place by place, so that n may be a billion.  A Feistel network
permutes the numbers below ``a * b``.  ``a`` and ``b`` are near the square root of n, so ``a * b`` is hardly
larger than n; a number that the network maps to n or above is mapped again until it is below ("cycle
walking").
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from math import isqrt

ROUNDS = 8
_MASK = 2**64 - 1


class Permutation:
    """A permutation of ``range(n)`` that is determined by a key.

    ``permutation[place]`` is computed anew each time, in constant time and memory.
    """

    def __init__(self, n: int, key: str) -> None:
        self._n = n
        self._left = isqrt(max(0, n - 1)) + 1
        self._right = -(-n // self._left)
        digest = hashlib.sha256(key.encode()).digest() + hashlib.sha256(f"{key}/more".encode()).digest()
        self._keys = [int.from_bytes(digest[8 * i : 8 * i + 8]) for i in range(ROUNDS)]

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, place: int) -> int:
        if not 0 <= place < self._n:
            raise IndexError(place)
        while True:
            place = self._mapped(place)
            if place < self._n:
                return place

    def _mapped(self, number: int) -> int:
        left, right = divmod(number, self._right)
        for nth, key in enumerate(self._keys):
            if nth % 2:
                right = (right + _mixed(left, key)) % self._right
            else:
                left = (left + _mixed(right, key)) % self._left
        return left * self._right + right


def _mixed(number: int, key: int) -> int:
    """Return 64 bits that depend on all bits of the number and the key (the finalizer of SplitMix64)."""
    mixed = (number * 0x9E3779B97F4A7C15 + key) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)


def some(n: int, wanted: int, key: str) -> Sequence[int]:
    """Return ``wanted`` of ``range(n)``, in order, chosen by a key; all if there are no more."""
    if n <= wanted:
        return range(n)
    order = Permutation(n, key)
    return sorted(order[place] for place in range(wanted))


def shuffled(number: int, n: int, key: str) -> int:
    """Return the place of a row in an endless sequence of epochs over ``n`` rows, each in another order.

    Args:
        number: of the row, counted from the first epoch.
    """
    epoch, position = divmod(number, n)
    return Permutation(n, f"{key}/{epoch}")[position]
