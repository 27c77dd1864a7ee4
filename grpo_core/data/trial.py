"""Tries a stream before a run begins: its state, restored in another process, has to give the same rows.

The first reading is in a child process with another PYTHONHASHSEED, so that an order that depends on the
process is found.  What no trial can show, such as a shuffle buffer, is known by its structure.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from attrs import frozen

from grpo_core.contracts.errors import CheckpointError, ConfigError, plugin_errors
from grpo_core.data.positions import Fingerprint, difference, fingerprint, varying
from grpo_core.data.rows import ignore_warnings_of_torchdata, readable
from grpo_core.data.states import packed, unpacked
from grpo_core.data.streams import ExhaustedError, Mark, Stream, loses_state, refusal
from grpo_core.plugins.host import PluginHost
from grpo_core.plugins.selection import PluginSelection
from grpo_core.processes.child import Child

ROWS, SECONDS = 64, 20.0
"""Number of rows that are read, if they take no longer than this."""
MORE, MORE_SECONDS = 5_003, 2.0
"""Number of rows that are read within these seconds: a prime, which is seldom the end of an epoch."""
AFTER = 16
"""Number of rows that are compared, at the beginning and behind the state."""
ANOTHER_SEED = "4711"


@frozen
class Reading:
    """The rows that a stream gave in a child process."""

    first: Sequence[Fingerprint]
    rows: int
    seconds: float
    mark: Mark
    """The state behind the rows."""
    after: Sequence[Fingerprint]
    lost: str
    """Rows or numbers that its state is known to lack, for a message."""


@frozen
class Tried:
    """The result of a trial."""

    without: frozenset[str]
    """Fields that differ each time a row is read."""
    lost: str
    seconds: float
    """Seconds to read a row."""


def read(make: Callable[[], Any], who: str, most: int = MORE) -> Reading:
    """Read the rows of a stream for a while, up to ``most`` of them and ``AFTER`` more."""
    ignore_warnings_of_torchdata()
    stream, began = Stream(lambda: readable(make(), who), who), time.monotonic()
    first: list[Fingerprint] = []
    while stream.row < min(ROWS, most) or (stream.row < most and time.monotonic() - began < MORE_SECONDS):
        if stream.row and time.monotonic() - began > SECONDS:
            break
        row = stream.next()
        if len(first) < AFTER:
            first.append(fingerprint(row))
    seconds = time.monotonic() - began
    rows, mark, lost = stream.row, stream.mark(counts=False), loses_state(stream.given)
    after = [fingerprint(stream.next()) for _ in range(AFTER)]
    return Reading(first, rows, seconds, mark, after, lost)


def compare(reading: Reading, make: Callable[[], Any], who: str) -> Tried:
    """Read the same rows again: from the beginning, and behind the restored state.

    Raises ConfigError if they differ.
    """
    ignore_warnings_of_torchdata()
    stream = Stream(lambda: readable(make(), who), who)
    first = [fingerprint(stream.next()) for _ in reading.first]
    without = varying(reading.first, first)
    kept = [{name: each[name] for name in each if name not in without} for each in reading.first]
    known = len({repr(sorted(each.items())) for each in kept if each})
    if without and 2 * known < len({repr(sorted(each.items())) for each in reading.first}):
        refused = refusal(who, stream.given, difference(reading.first, first))
        raise ConfigError(f"{refused} (two processes have read its first {len(first)} rows)")
    if not reading.lost:
        _restore(reading, Stream(lambda: readable(make(), who), who), without)
    return Tried(frozenset(without), reading.lost, reading.seconds / reading.rows)


def _restore(reading: Reading, stream: Stream, without: Collection[str]) -> None:
    """Read on behind the restored state.  Raises ConfigError if the rows differ."""
    try:
        stream.restore(reading.mark)
    except CheckpointError as error:
        raise ConfigError(str(error)) from error
    after = [fingerprint(stream.next(), without) for _ in reading.after]
    expected = [{name: each[name] for name in each if name not in without} for each in reading.after]
    if (differs := difference(expected, after, reading.rows)) is not None:
        refused = refusal(stream.who, stream.given, differs)
        raise ConfigError(f"{refused} (its state was restored behind {reading.rows:,} rows)")


def on_itself(given: Any, who: str) -> int | None:
    """Try a stream that cannot be made anew; return the number of its rows if it cannot be read twice.

    It is left at its beginning.

    Raises ConfigError if its state does not give the same rows, PluginError if it raises.
    """
    stream, rows = Stream(lambda: given, who), None
    with plugin_errors(f"{who}: state_dict()"):
        begin = Mark(0, 0, 0, unpacked(packed(given.state_dict(), f"{who}: state_dict()")))
    try:
        reading = read(lambda: given, who)
    except ExhaustedError as error:
        rows = error.rows
        stream.restore(begin)
        if rows <= AFTER:  # too few for a trial
            return rows
        reading = read(lambda: given, who, rows - AFTER)
    _restore(reading, stream, ())
    stream.restore(begin)
    return rows


class Reader:
    """The child's side: makes a dataloader of a plugin, and reads it."""

    def read(
        self, selection: PluginSelection, name: str, split: str, options: Mapping[str, Any], who: str
    ) -> Reading:
        host = PluginHost.discover(selection.allow, selection.block)
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
