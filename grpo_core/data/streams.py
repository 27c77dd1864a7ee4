"""The rows of a stream, epoch after epoch, its position, and the trial of both before a run begins.

A mark is the stream's state before a row.  A position is proved by reading the rows since a mark again.

In the trial, the state is restored in another process, and has to give the same rows.  The first reading is
in a child process with another PYTHONHASHSEED, so that an order that depends on the process is found.  What
no trial can show, such as a shuffle buffer, is known by its structure.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from attrs import evolve, frozen

from grpo_core.contracts.errors import CheckpointError, ConfigError, PluginError, describe, plugin_errors
from grpo_core.contracts.typed import Count
from grpo_core.data.positions import Difference, Fingerprint, difference, fingerprint, varying
from grpo_core.data.rows import is_of, readable
from grpo_core.data.states import packed, unpacked
from grpo_core.plugins.host import PluginHost
from grpo_core.plugins.installed import PluginSelection
from grpo_core.processes.child import Child

EVERY = 32
"""Number of rows between two marks."""
_END = object()


@frozen
class Mark:
    """A stream's state before a row."""

    row: Count
    """Number of the row, counted from the first epoch."""
    epoch: Count
    of_epoch: Count
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
        exact: whether its position has to be saved.
    """

    def __init__(self, make: Callable[[], Any], who: str, *, exact: bool = True) -> None:
        self._make, self.who, self._exact = make, who, exact
        self.source: Any = None
        """The dataloader; None until it is made."""
        self._iterator: Iterator[Any] | None = None
        self.row = self.epoch = self._of_epoch = 0

    def next(self) -> Any:
        """Return the next row.

        Raises ExhaustedError if an epoch has none, PluginError if the stream raises.
        """
        while True:
            with plugin_errors(f"{self.who}: it"):  # also StopIteration, which is the end of next() alone
                if self._iterator is None:
                    self._begin()
                    self._iterator = iter(self.source)
                if (row := next(self._iterator, _END)) is not _END:
                    break
            if not self._of_epoch:
                raise ExhaustedError(self.who, self.row)
            if self._iterator is self.source:  # it is read once
                self.source = None
            self.epoch, self._of_epoch, self._iterator = self.epoch + 1, 0, None
        self.row, self._of_epoch = self.row + 1, self._of_epoch + 1
        return row

    def _begin(self) -> None:
        """Begin an epoch of the stream, which is made if it is not there."""
        if self.source is None:
            self.source = readable(self._make, self.who, exact=self._exact)
        _set_epoch(self.source, self.epoch)

    def mark(self, *, counts: bool) -> Mark:
        """Return the state before the next row; ``counts`` if rows are counted instead."""
        has_state = self.row and not counts and hasattr(self.source, "state_dict")
        own = _state(self.source, self.who) if has_state else None
        return Mark(self.row, self.epoch, self._of_epoch, own)

    def restore(self, mark: Mark) -> None:
        """Continue from a mark by its state.  Raises CheckpointError if the stream does not accept it."""
        self.row, self.epoch, self._of_epoch = mark.row, mark.epoch, mark.of_epoch
        self.source, self._iterator = None, None
        if mark.own is None:
            return
        self._begin()
        try:
            self.source.load_state_dict(mark.own)
            self._iterator = iter(self.source)
        except Exception as error:
            raise CheckpointError(
                f"{self.who} cannot continue from its state in the checkpoint: {describe(error)}"
            ) from error

    def count(self, mark: Mark, *, from_epoch: int, progress: Callable[[int, int], None]) -> None:
        """Continue from a mark by reading all rows before it, from the beginning of an epoch on."""
        self.source, self._iterator = None, None
        self.epoch, self._of_epoch = from_epoch, 0
        wanted = mark.of_epoch if from_epoch == mark.epoch else mark.row
        self.row = mark.row - wanted
        for nth in range(wanted):
            progress(nth, wanted)
            self.next()


def _state(given: Any, who: str) -> Any:
    """Return a copy of the state of a stream, which may change what it returned."""
    with plugin_errors(f"{who}: state_dict()"):
        state = given.state_dict()
    return unpacked(packed(state, f"{who}: state_dict()"))


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


def resume(
    stream: Stream,
    mark: Mark,
    since: Sequence[Fingerprint],
    without: Collection[str],
    *,
    proves: bool,
    progress: Callable[[int, int], None],
) -> None:
    """Continue a stream behind the rows of a checkpoint, which are read again.

    The stream's own state comes first, then the number of rows of the epoch, then the number of all rows.

    Args:
        mark: state before the rows.
        since: fingerprints of the rows.
        without: fields that differ each time a row is read.
        proves: whether the rows have to be those of the checkpoint.
        progress: called with the number of rows that have been counted, and of all that are.

    Raises ConfigError if the rows differ from those of the checkpoint in every way.
    """
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
            found = [fingerprint(stream.next(), without) for _ in since]
        except (CheckpointError, PluginError) as error:
            first = first or CheckpointError(str(error))
            continue
        if (differs := difference(since, found, mark.row)) is None or not proves:
            return
        first = first or differs
    raise refusal(stream.who, stream.source, first, ", and counting the rows from the beginning did not help")


def refusal(who: str, given: Any, why: Difference | CheckpointError | None, tried: str = "") -> ConfigError:
    """Return the error for a dataloader that does not give the rows that it gave, after what was tried."""
    told = f"does not continue: {why}"
    if isinstance(why, Difference):
        told = (
            f"does not give the rows that it gave: row {why.row + 1} has {why.actual!r} in its field "
            f"{why.field!r}, expected {why.expected!r}{tried}"
        )
    return ConfigError(
        f"{who} {told}. {_remedy(given)}data_options.exact = false continues without this proof"
    )


def _remedy(given: Any) -> str:
    """Return what to change in a dataloader that is recognised."""
    if is_of(given, "torch.utils.data", "DataLoader") and given.generator is None:
        return "Give the loader a generator with a fixed seed: generator=torch.Generator().manual_seed(0). "
    if is_of(given, "datasets", "Dataset") and given.format["type"] == "custom":
        return "Its transform changes rows at random: let Environment.prompt make what the seed decides. "
    return "Let it give the same rows each time, or return rows with a length, which the core shuffles. "


# ---------------------------------------------------------------------------------- the trial

ROWS, SECONDS = 64, 20.0
"""Number of rows that are read, if they take no longer than this."""
MORE, MORE_SECONDS = 5_003, 2.0
"""Number of rows that are read within these seconds: a prime, which is seldom the end of an epoch."""
AFTER = 16
"""Number of rows that are compared, at the beginning and behind the state."""
ANOTHER_SEED = "4711"


@frozen
class Reading:
    """The rows that a stream gave when it was read first, and what a second reading found."""

    first: Sequence[Fingerprint]
    rows: int
    seconds: float
    mark: Mark
    """The state behind the rows."""
    after: Sequence[Fingerprint]
    lost: str
    """Rows or numbers that its state is known to lack, for a message."""
    without: frozenset[str] = frozenset()
    """Fields that differ each time a row is read."""
    ends: int | None = None
    """Number of its rows if it cannot be read twice."""


def read(make: Callable[[], Any], who: str, ends: int | None = None) -> Reading:
    """Read the rows of a stream for a while, and ``AFTER`` more; ``ends``: the number of all, if it ends."""
    stream, began = Stream(make, who), time.monotonic()
    most = MORE if ends is None else max(0, ends - AFTER)
    first: list[Fingerprint] = []
    while stream.row < min(ROWS, most) or (stream.row < most and time.monotonic() - began < MORE_SECONDS):
        if stream.row and time.monotonic() - began > SECONDS:
            break
        row = stream.next()
        if len(first) < AFTER:
            first.append(fingerprint(row))
    seconds = time.monotonic() - began
    rows, mark, lost = stream.row, stream.mark(counts=False), loses_state(stream.source)
    after = [fingerprint(stream.next()) for _ in range(AFTER if ends is None else min(AFTER, ends))]
    return Reading(first, rows, seconds, mark, after, lost, ends=ends)


def compare(reading: Reading, make: Callable[[], Any], who: str) -> Reading:
    """Read the same rows again: from the beginning, and behind the restored state.

    Raises ConfigError if they differ.
    """
    stream = Stream(make, who)
    first = [fingerprint(stream.next()) for _ in reading.first]
    without = varying(reading.first, first)

    def kept(rows: Sequence[Fingerprint]) -> list[Fingerprint]:
        return [{name: each[name] for name in each if name not in without} for each in rows]

    known, every = ({repr(sorted(each.items())) for each in rows if each} for rows in (kept(first), first))
    if without and 2 * len(known) < len(every):
        refused = refusal(who, stream.source, difference(reading.first, first))
        raise ConfigError(f"{refused} (its first {len(first)} rows were read twice)")
    if not reading.lost:
        stream = Stream(make, who)
        stream.restore(reading.mark)
        after = [fingerprint(stream.next(), without) for _ in reading.after]
        if (differs := difference(kept(reading.after), after, reading.rows)) is not None:
            refused = refusal(who, stream.source, differs)
            raise ConfigError(f"{refused} (its state was restored behind {reading.rows:,} rows)")
    return evolve(reading, without=frozenset(without))


def try_here(make: Callable[[], Any], who: str) -> Reading | None:
    """Try a dataloader of a program in this process: a function with two streams, an object on itself.

    An object is left at its beginning.  One without a state, or whose state is known to lack something, is
    not read: it is proved when the run is resumed.

    Raises ConfigError if the rows differ, PluginError if the dataloader raises.
    """
    given = make()
    if given is not make():
        return compare(read(make, who), make, who)
    if not hasattr(given, "state_dict") or loses_state(given):
        return None
    begin = _state(given, who)

    def begin_again() -> None:
        _set_epoch(given, 0)
        given.load_state_dict(begin)

    try:
        reading = read(make, who)
    except ExhaustedError as error:
        begin_again()
        reading = read(make, who, error.rows)
    begin_again()
    tried = compare(reading, make, who)
    begin_again()
    return tried


class Reader:
    """The child's side: makes a dataloader of a plugin, and reads it."""

    def read(
        self, selection: PluginSelection, name: str, split: str, options: Mapping[str, Any], who: str
    ) -> Reading:
        host = PluginHost.of(selection)
        return read(lambda: host.make("dataloader", name, split, **options), who)


async def read_elsewhere(
    selection: PluginSelection, name: str, split: str, options: Mapping[str, Any], who: str, *, seconds: float
) -> Reading:
    """Read a stream in a child process.  Raises GrpoError."""
    environ = {"PYTHONHASHSEED": ANOTHER_SEED}
    child = Child(f"{__name__}:Reader", name=f"trial of {who}", environ=environ)
    try:
        await child.started(seconds=seconds)
        found: Reading = await child.call("read", selection, name, split, options, who, seconds=seconds)
        return found
    finally:
        child.kill()
        await child.aclose()
