"""The shuffled order in which rows are read by index: a function of (seed, task, epoch)."""

from __future__ import annotations

from grpo_core.data.permutation import Permutation


class ShuffledOrder:
    """The places of an endless sequence of epochs over ``n`` rows, each in another order."""

    def __init__(self, n: int, *, seed: int, task: str) -> None:
        self._n = n
        self._key = f"{seed}/{task}"
        self._epoch = -1
        self._order: Permutation | None = None

    def __getitem__(self, number: int) -> int:
        """Return the place of the row with a number, counted from the first epoch."""
        epoch, position = divmod(number, self._n)
        if self._order is None or epoch != self._epoch:
            self._epoch, self._order = epoch, Permutation(self._n, f"{self._key}/{epoch}")
        return self._order[position]
