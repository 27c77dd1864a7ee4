"""Finds prompts and ids that are repeated.  Pure."""

from __future__ import annotations

import json
from collections import OrderedDict
from hashlib import blake2b

from grpo_core.contracts.errors import PluginError
from grpo_core.contracts.records import Prompt
from grpo_core.data.positions import Fingerprint, difference

COMPARED = 8
"""Number of first rows that show whether two epochs have one order."""
WINDOW = 65_536
"""Number of the last rows whose ids are compared."""


def exact_digest(prompt: Prompt) -> bytes:
    """Return bytes that are equal for prompts of equal messages alone, with their roles, borders and calls.

    White space around a text makes no difference.
    """
    messages = [
        {key: value.strip() if isinstance(value, str) else value for key, value in message.items()}
        for message in prompt.messages
    ]
    return blake2b(json.dumps(messages, sort_keys=True, default=repr).encode(), digest_size=16).digest()


class Beginnings:
    """The first rows of the first two epochs of a stream, which show whether it repeats its order."""

    def __init__(self) -> None:
        self._rows: tuple[list[Fingerprint], list[Fingerprint]] = [], []

    def repeated(self, epoch: int, row: Fingerprint) -> bool:
        """Note a row; return whether the second epoch has now begun with the rows of the first."""
        if epoch > 1 or len(self._rows[epoch]) == COMPARED:
            return False
        self._rows[epoch].append(row)
        first, second = self._rows
        return len(second) == COMPARED and difference(first, second) is None and len(first) == COMPARED


class Ids:
    """The ids of the rows of a dataloader, which may come once in an epoch.

    A repeat within the look-ahead and the open slots is an error: two groups of one prompt would be in use at
    once, which is nearly always a loader whose workers all read the same rows.  Repeats that are farther
    apart are counted.

    Args:
        who: the dataloader, for messages.
    """

    def __init__(self, who: str) -> None:
        self._who = who
        self._seen: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        """Epoch and number of the row, by a digest of its id."""
        self.repeated = 0
        """Number of rows whose id came before in their epoch, within ``WINDOW`` rows."""

    def add(self, id: str, epoch: int, row: int, *, near: int, hint: str = "") -> str:
        """Note the id of a row; return a warning about the first repeat.

        Args:
            row: number of the row, from 0, over all epochs.
            near: number of rows that are read ahead or in use at once.
            hint: what the dataloader is likely to be, for the error.

        Raises PluginError for a repeat that is near.
        """
        key = blake2b(id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        before = self._seen.pop(key, None)
        self._seen[key] = epoch, row
        while len(self._seen) > WINDOW:
            self._seen.popitem(last=False)
        if before is None or before[0] != epoch or row - before[1] > WINDOW:
            return ""
        rows = f"rows {before[1] + 1:,} and {row + 1:,}, of one epoch, have the id {id!r}"
        if row - before[1] <= near:
            raise PluginError(
                f"{self._who}: {rows}; ids are unique among the prompts in use.{hint} If the repeat is "
                "meant, as with a weighted sampler, set data_options.repeats = true"
            )
        self.repeated += 1
        if self.repeated > 1:
            return ""
        return f"{self._who}: {rows}; such repeats are counted (data_options.repeats = true allows them)"
