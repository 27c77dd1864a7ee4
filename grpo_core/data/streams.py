"""The rows of a stream, epoch after epoch, and its position.

A mark is the stream's state before a row.  A position is proved by reading the rows since a mark again.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from attrs import frozen

from grpo_core.contracts.errors import CheckpointError, ConfigError, PluginError, describe, plugin_errors
from grpo_core.data.positions import Difference, Fingerprint, difference, fingerprint
from grpo_core.data.rows import is_of
from grpo_core.data.states import packed, unpacked

EVERY = 32
"""Number of rows between two marks."""
_END = object()


@frozen
class Mark:
    """A stream's state before a row."""

    row: int
    """Number of the row, counted from the first epoch."""
    epoch: int
    of_epoch: int
    """Number of rows of the epoch before it."""
    own: Any = None
    """The state itself; None before the first row, and for streams whose rows are counted."""


class ExhaustedError(PluginError):
    """A stream that has ended and cannot be read again.

    Args:
        who: the dataloader, for the message.
        rows: number of its rows.
    """

    def __init__(self, who: str, rows: int) -> None:
        remedy = (
            f" after {rows:,} rows: it cannot be read twice; give a function that makes it, for each epoch "
            "anew, or train no more steps than it has rows for"
        )
        super().__init__(f"{who}: it ended without a row{remedy if rows else ''}")
        self.rows = rows


class Stream:
    """Reads a stream row by row; an epoch is a new ``iter`` of the same object, after ``set_epoch``.

    Args:
        make: makes the stream.
        who: the dataloader, for messages.
    """

    def __init__(self, make: Callable[[], Any], who: str) -> None:
        self._make, self.who = make, who
        self.given: Any = None
        """The stream; None until it is made."""
        self._iterator: Iterator[Any] | None = None
        self.row = self.epoch = self._of_epoch = 0

    def next(self) -> Any:
        """Return the next row.

        Raises ExhaustedError if an epoch has none, PluginError if the stream raises.
        """
        while True:
            with plugin_errors(f"{self.who}: it"):  # also StopIteration, which is the end of next() alone
                if self.given is None:
                    self.given = self._make()
                    _set_epoch(self.given, self.epoch)
                if self._iterator is None:
                    self._iterator = iter(self.given)
                if (row := next(self._iterator, _END)) is _END:
                    self._end_epoch()
                    continue
            self.row, self._of_epoch = self.row + 1, self._of_epoch + 1
            return row

    def _end_epoch(self) -> None:
        if not self._of_epoch:
            raise ExhaustedError(self.who, self.row)
        self.epoch, self._of_epoch = self.epoch + 1, 0
        once = self._iterator is self.given
        self._iterator = None
        if once:
            self.given = None
        else:
            _set_epoch(self.given, self.epoch)

    def mark(self, *, counts: bool) -> Mark:
        """Return the state before the next row; ``counts`` if rows are counted instead."""
        own = None
        if self.row and not counts and hasattr(self.given, "state_dict"):
            with plugin_errors(f"{self.who}: state_dict()"):
                state = self.given.state_dict()
            # a copy: the stream may change what it returned
            own = unpacked(packed(state, f"{self.who}: state_dict()"))
        return Mark(self.row, self.epoch, self._of_epoch, own)

    def restore(self, mark: Mark) -> None:
        """Continue from a mark by its state.  Raises CheckpointError if the stream does not accept it."""
        self.given, self._iterator = self._make(), None
        _set_epoch(self.given, mark.epoch)
        self.row, self.epoch, self._of_epoch = mark.row, mark.epoch, mark.of_epoch
        if mark.own is None:
            return
        try:
            self.given.load_state_dict(mark.own)
        except Exception as error:
            raise CheckpointError(
                f"{self.who} cannot continue from its state in the checkpoint: {describe(error)}"
            ) from error

    def count(self, mark: Mark, *, from_epoch: int, progress: Callable[[int, int], None]) -> None:
        """Continue from a mark by reading all rows before it, from the beginning of an epoch on."""
        self.given, self._iterator = None, None
        self.epoch, self._of_epoch = from_epoch, 0
        wanted = mark.of_epoch if from_epoch == mark.epoch else mark.row
        self.row = mark.row - wanted
        for nth in range(wanted):
            progress(nth, wanted)
            self.next()


def _set_epoch(given: Any, epoch: int) -> None:
    """Call ``set_epoch`` of a loader, its data set and its sampler, each once."""
    parts = [given, *(getattr(given, name, None) for name in ("dataset", "sampler", "batch_sampler"))]
    for part in {id(part): part for part in parts if part is not None}.values():
        if callable(method := getattr(part, "set_epoch", None)):
            method(epoch)


def loses_state(given: Any) -> str:
    """Return what the state of a stream is known to lack; empty if nothing is known.

    Rows of such a stream are counted when a run is resumed.
    """
    if buffer := shuffle_buffer(given):
        return f"a shuffle buffer of {buffer:,} rows"
    if is_of(given, "torch.utils.data", "DataLoader"):
        if hasattr(given.sampler, "generator"):
            return "the random order of its later epochs"
        if is_of(given.dataset, "torch.utils.data", "IterableDataset") and not hasattr(
            given.dataset, "state_dict"
        ):
            return "the place in its data set, which has no state_dict()"
    return ""


def shuffle_buffer(given: Any) -> int:
    """Return the size of the shuffle buffer of an iterable data set of ``datasets``, whose state lacks it."""
    if "datasets" not in sys.modules:
        return 0
    if not is_of(given, "datasets", "IterableDataset"):
        given = getattr(given, "dataset", None)
    seen: list[Any] = [getattr(given, "_ex_iterable", None)]
    largest = 0
    while seen:
        part = seen.pop()
        if part is None:
            continue
        largest = max(largest, int(getattr(part, "buffer_size", 0) or 0))
        seen += [getattr(part, "ex_iterable", None), *(getattr(part, "ex_iterables", None) or [])]
    return largest


@frozen
class Saved:
    """The mark of a checkpoint, and the fingerprints of the rows since."""

    mark: Mark
    since: Sequence[Fingerprint]
    without: Collection[str]
    """Fields that differ each time a row is read."""

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Saved:
        return cls(Mark(**state["mark"]), list(state["since"]), set(state["without"]))

    def proved(self, stream: Stream) -> tuple[list[tuple[Any, int]], Difference | None]:
        """Read the rows since the mark again; return them with their epochs, and the first difference."""
        rows = [(stream.next(), stream.epoch) for _ in self.since]
        found = [fingerprint(row, self.without) for row, _ in rows]
        return rows, difference(self.since, found, self.mark.row)


def resumed(stream: Stream, saved: Saved, *, progress: Callable[[int, int], None]) -> list[tuple[Any, int]]:
    """Continue a stream behind the rows of a checkpoint; return the rows since its mark, with their epochs.

    The stream's own state comes first, then the number of rows of the epoch, then the number of all rows.

    Raises ConfigError if the rows differ from those of the checkpoint in every way.
    """
    mark = saved.mark
    ways: list[Callable[[], None]] = []
    if mark.own is not None or not mark.row:
        ways.append(lambda: stream.restore(mark))
    ways += [
        functools.partial(stream.count, mark, from_epoch=epoch, progress=progress)
        for epoch in sorted({mark.epoch, 0}, reverse=True)
    ]
    first: Difference | CheckpointError | None = None
    for way in ways:
        try:
            way()
            rows, differs = saved.proved(stream)
        except (CheckpointError, PluginError) as error:
            first = first or CheckpointError(str(error))
            continue
        if differs is None:
            return rows
        first = first or differs
    raise refusal(stream.who, stream.given, first, ", and counting the rows from the beginning did not help")


def refusal(who: str, given: Any, why: Difference | CheckpointError | None, tried: str = "") -> ConfigError:
    """Return the error for a dataloader that does not give the rows that it gave, after what was tried."""
    remedy = _remedy(given)
    if isinstance(why, Difference):
        return ConfigError(
            f"{who} does not give the rows that it gave: row {why.row + 1} has {why.found!r} in its field "
            f"{why.field!r}, expected {why.expected!r}{tried}. {remedy}data_options.exact = false continues "
            "without this proof"
        )
    return ConfigError(
        f"{who} does not continue: {why}. {remedy}data_options.exact = false continues without this proof"
    )


def _remedy(given: Any) -> str:
    """Return what to change in a dataloader that is recognised."""
    if is_of(given, "torch.utils.data", "DataLoader") and given.generator is None:
        return "Give the loader a generator with a fixed seed: generator=torch.Generator().manual_seed(0). "
    if is_of(given, "datasets", "Dataset") and given.format["type"] == "custom":
        return "Its transform changes rows at random: let Environment.prompt make what the seed decides. "
    return "Let it give the same rows each time, or return rows with a length, which the core shuffles. "
