"""The two loaders: ``IndexedLoader`` for rows that are read by index, ``StreamLoader`` for all others.

Rows that have to be read or converted are read ahead, on a thread for each loader, as many as the next
request may need.  ``take`` returns from this look-ahead at once, so the event loop never waits for a row.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import queue
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from types import MappingProxyType
from typing import Any, TypeVar

from attrs import asdict, field, frozen

from grpo_core.config import RowOptions
from grpo_core.contracts.errors import CheckpointError, PluginError, describe, plugin_errors
from grpo_core.contracts.records import Prompt
from grpo_core.data.order import ShuffledOrder
from grpo_core.data.positions import Beginnings, Fingerprint, Ids, difference, fingerprint
from grpo_core.data.rows import RawRows, ReadRows, RowReader, plain, readable
from grpo_core.data.states import packed
from grpo_core.data.streams import EVERY, Mark, Saved, Stream, loses_state, refusal, resumed
from grpo_core.data.workers import readers_of

T = TypeVar("T")

Convert = Callable[[Sequence[Mapping[str, Any]]], Awaitable["list[Prompt] | None"]]
"""Lets an environment make the prompts of rows; returns None if it does not."""
NO_PROMPTS: Mapping[int, Prompt] = MappingProxyType({})
RECENT = 65_536
"""Number of prompts whose places are remembered, and whose ids are compared."""
PART = 0.5
"""Seconds after which rows that were read become prompts, although more are wanted."""
SAYS_EVERY = 5.0
"""Seconds between two reports of rows that are counted."""
PROVED = 32
"""Number of rows by index that a resumed run reads again."""


class Thread:
    """Runs calls one after another on a daemon thread: many sources may be used on one thread only.

    Args:
        who: the source, for messages.
    """

    def __init__(self, who: str) -> None:
        self._who = who
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] | None = None

    async def __call__(self, call: Callable[[], T]) -> T:
        """Run a call, and wait for it."""
        if self._calls is None:
            self._calls = queue.SimpleQueue()
            threading.Thread(target=self._run, args=(self._calls,), name=self._who, daemon=True).start()
        done: Future[T] = Future()
        self._calls.put((done, call))
        return await asyncio.wrap_future(done)

    def close(self) -> None:
        """Let the thread end when its call returns."""
        if self._calls is not None:
            self._calls.put(None)
            self._calls = None

    def _run(self, calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]) -> None:
        while (item := calls.get()) is not None:
            done, call = item
            if done.set_running_or_notify_cancel():
                try:
                    done.set_result(call())
                except BaseException as error:  # a plugin's code may raise anything
                    if not isinstance(error, Exception) or isinstance(error, StopIteration | CancelledError):
                        error = PluginError(f"{self._who}: it raised {type(error).__name__}: {error}")
                    done.set_exception(error)


@frozen
class Ahead:
    """A prompt of the look-ahead."""

    row: int
    """Number of its row, counted from the first epoch."""
    place: int
    """Place of its row in the data, or its number in a stream."""
    prompt: Prompt


@frozen(kw_only=True)
class Part:
    """Rows that were read together."""

    rows: list[tuple[int, int, Any, dict[str, Any]]]
    """Number, place, contents and fields of each."""
    since: list[Fingerprint]
    """Fingerprints of the rows, and of rows before them that were read again."""
    marks: list[Mark] = field(factory=list)
    behind: Mark | None = None
    """State behind the rows, where it is kept instead of their fingerprints."""
    again: bool = False
    """Whether it begins a resumed run."""


async def converted(
    reader: RowReader, convert: Convert | None, rows: Sequence[tuple[Any, Mapping[str, Any], int]]
) -> list[Prompt]:
    """Return the prompts of rows, which are given with their fields and places."""
    made = await convert([fields for _, fields, _ in rows]) if convert is not None and rows else None
    if made is None:
        return [reader.prompt(*each) for each in rows]
    if len(made) != len(rows):
        raise PluginError(
            f"{reader.who}: the environment made {len(made)} prompts of {len(rows)} rows; expected one each"
        )
    return made


class LookAhead:
    """A loader whose rows are read ahead on a thread; a subclass reads them.

    Args:
        task: name of the task.
        name: name of the dataloader in the configuration.
        options: how rows become prompts.
        deadline: seconds that each wait for a prompt may take.
        convert: see ``Convert``.
        thread: the thread on which the dataloader was made.
    """

    def __init__(
        self,
        task: str,
        name: str,
        options: RowOptions,
        *,
        deadline: float = 120.0,
        convert: Convert | None = None,
        thread: Thread | None = None,
    ) -> None:
        self.task, self.name = task, name
        self.who = f"task {task!r}: dataloader {name!r}" if name else f"task {task!r}: its data"
        self.options, self.reader = options, RowReader(task, self.who, options)
        self.fits: Callable[[Prompt], bool] = lambda prompt: True
        """Whether a prompt is kept; the others are left out."""
        self.rows = 0
        """Number of rows that became prompts or were left out, until the last prompt that was taken."""
        self.left_out = 0
        self._deadline, self._convert = deadline, convert
        self._ahead: deque[Ahead] = deque()
        self._wanted = 0
        self._reading: asyncio.Task[None] | None = None
        self._progress = 0.0
        """Last time when a row became a prompt, or was counted."""
        self._unfinished: dict[str, Prompt] = {}
        """Prompts of a checkpoint that were drawn and not trained, by slot."""
        self._recent: OrderedDict[str, int] = OrderedDict()
        """Places of the prompts that were taken last, by id."""
        self.slots = 0
        """Largest number of prompts that are in use at once."""
        self.warn: Callable[[str, str], None] = lambda cause, message: None
        """Called with the cause and the text of a warning."""
        self.status: Callable[[str], None] = lambda message: None
        """Called with what the loader is doing, where that takes long."""
        self._ids = Ids(self.who)
        self._named = False
        """Whether the named fields have been found in the first rows."""
        self.thread = thread or Thread(self.who)

    @property
    def size(self) -> int | None:
        """Number of rows of an epoch; None if it is unknown."""
        return None

    @property
    def exact(self) -> bool:
        """Whether a resumed run proves the position."""
        return True

    # ------------------------------------------------------------------------------ of a subclass

    def read(self, n: int) -> Part:
        """Read up to ``n`` of the next rows; called on the thread."""
        raise NotImplementedError

    def origin(self, place: int) -> int:
        """Return the place of a row in the file or table that it comes from."""
        return place

    def epoch_of(self, row: int) -> int:
        """Return the epoch of a row that is added to the look-ahead."""
        raise NotImplementedError

    def readers(self) -> int:
        """Return the number of workers that may each read all rows; 0 if each row is read once."""
        return 0

    def kept(self, part: Part) -> None:
        """Keep what a checkpoint needs of rows that are added to the look-ahead."""

    # ------------------------------------------------------------------------------ waiting

    def ready(self, n: int, changed: Callable[[], None]) -> bool:
        """Return whether ``n`` prompts can be taken at once.

        If not, they are read, and ``changed`` is called on the running event loop when another call may
        succeed.  Raises PluginError if the dataloader fails or takes too long.
        """
        self._wanted = n
        if len(self._ahead) >= n:
            return True
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._fill())
            self._reading.add_done_callback(lambda task: task.cancelled() or task.exception())
            self._reading.add_done_callback(lambda _: changed())
        elif self._reading.done():
            self._reading.result()
            self._reading = None
            return self.ready(n, changed)
        return False

    async def first(self, n: int) -> list[Prompt]:
        """Return the next ``n`` prompts without taking them.  Raises GrpoError."""
        while not self.ready(n, lambda: None):
            assert self._reading is not None
            await asyncio.wait([self._reading])
        return [row.prompt for row in list(self._ahead)[:n]]

    def close(self) -> None:
        """End reading; a call that runs on the thread is abandoned."""
        if self._reading is not None:
            self._reading.cancel()
        self.thread.close()

    def keep(self, fits: Callable[[Prompt], bool]) -> None:
        """Leave out prompts that do not fit, also of those read ahead."""
        self.fits = fits
        kept = [row for row in self._ahead if fits(row.prompt)]
        self.left_out += len(self._ahead) - len(kept)
        self._ahead = deque(kept)

    async def _fill(self) -> None:
        """Read until all prompts that are wanted are there.

        Raises PluginError if the dataloader fails, or gives no prompt within its deadline.
        """
        self._progress = time.monotonic()
        while (missing := self._wanted - len(self._ahead)) > 0:
            reading = asyncio.ensure_future(self.thread(functools.partial(self.read, missing)))
            try:
                while not reading.done():
                    if (left := self._progress + self._deadline - time.monotonic()) <= 0:
                        raise self._late()
                    await asyncio.wait([reading], timeout=left)
            finally:
                reading.cancel()
            with plugin_errors(f"{self.who}: it"):
                await self._add(reading.result())

    def _fields(self, rows: Iterable[tuple[int, int, Any]]) -> list[tuple[int, int, Any, dict[str, Any]]]:
        """Return rows with their fields.  Raises ConfigError if the first lack a field that is named."""
        made = [(nth, place, row, self.reader.fields(row, self.origin(place))) for nth, place, row in rows]
        if not self._named:
            self._named = True
            self.reader.check_named([row for _, _, row, _ in made])
        return made

    async def _add(self, part: Part) -> None:
        """Convert rows, and add their prompts to the look-ahead."""
        rows = [(row, fields, self.origin(place)) for _, place, row, fields in part.rows]
        prompts = await converted(self.reader, self._convert, rows)
        self.kept(part)
        for (number, place, row, _), prompt in zip(part.rows, prompts, strict=True):
            packed(plain(prompt), f"{self.who}, row {place + 1}")
            self._check_id(prompt, row, number, place)
            if self.fits(prompt):
                self._ahead.append(Ahead(number, place, prompt))
                self._progress = time.monotonic()
            else:
                self.left_out += 1

    def _check_id(self, prompt: Prompt, row: Any, number: int, place: int) -> None:
        """Raise PluginError if an id repeats among the prompts in use; warn about others."""
        epoch = self.epoch_of(number)
        if self.options.repeats:
            return
        id, hint = prompt.id, ""
        if (readers := self.readers()) and id == str(self.origin(place)):  # the row brings no id
            id = " ".join(digest for digest, _ in fingerprint(row).values())
        if readers:
            hint = (
                f" Its data set is an iterable, which each of its {readers} workers reads whole: divide it "
                "by torch.utils.data.get_worker_info(), or set num_workers to 0."
            )
        near = self._wanted + self.slots
        if warning := self._ids.add(id, epoch, number, near=near, hint=hint):
            self.warn(f"repeated_ids/{self.task}", warning)

    def _late(self) -> PluginError:
        left_out = f", of which {self.left_out:,} are left out" if self.left_out else ""
        return PluginError(
            f"{self.who} gave no prompt within {self._deadline:g} s (environment.start_deadline); it has "
            f"given {self.rows + len(self._ahead) + self.left_out:,} rows{left_out}"
        )

    # ------------------------------------------------------------------------------ drawing

    def take(self, n: int) -> list[Prompt]:
        """Return the next ``n`` prompts, which are ``ready``.  Raises PluginError if there are fewer."""
        if len(self._ahead) < n:
            raise PluginError(
                f"{self.who}: {n} prompts were taken at once, and {len(self._ahead)} have been read; a "
                "sampler that takes more than it returns says so with looks_at"
            )
        taken = [self._ahead.popleft() for _ in range(n)]
        for each in taken:
            self._recent[each.prompt.id] = each.place
            if len(self._recent) > RECENT:
                self._recent.popitem(last=False)
        if taken:
            self.rows = taken[-1].row + 1
            self.forget()
        return [each.prompt for each in taken]

    def forget(self) -> None:
        """Drop what no later checkpoint needs."""

    def place(self, prompt: Prompt) -> int:
        """Return the place of a prompt that was taken.  Raises PluginError for a stream."""
        raise self._no_places()

    def skip(self, prompt: Prompt, reason: str) -> None:
        """Leave a prompt out of this epoch.  Raises PluginError for a stream."""
        raise self._no_places()

    def __len__(self) -> int:
        """Number of rows in an epoch.  Raises PluginError for a stream."""
        raise self._no_places()

    def _no_places(self) -> PluginError:
        return PluginError(
            f"{self.who} is a stream, and the sampler selects prompts by index; choose a sampler that only "
            "takes the next prompts, such as mix, or let the dataloader return a sequence"
        )

    def prompt(self, id: str, slot: int) -> Prompt:
        """Return the prompt of a slot of the checkpoint."""
        try:
            return self._unfinished[str(slot)]
        except KeyError:
            raise CheckpointError(f"{self.who}: the checkpoint lacks prompt {id!r} of slot {slot}") from None

    # ------------------------------------------------------------------------------ checkpoints

    def state_dict(self, unfinished: Mapping[int, Prompt] = NO_PROMPTS) -> dict[str, Any]:
        """Return the position, and the prompts in use.

        Args:
            unfinished: prompts that were drawn and not trained, by slot.
        """
        return {
            "dataloader": self.name,
            "rows": self.rows,
            "unfinished": {str(slot): plain(prompt) for slot, prompt in unfinished.items()},
            "position": self._position(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state when the first prompt is read.

        Raises CheckpointError if it belongs to another dataloader.
        """
        if state.get("dataloader") != self.name:
            raise CheckpointError(
                f"{self.who} is new: in the checkpoint its prompts came from "
                f"{state.get('dataloader') or 'other data'!r}; resume with what the run was started with, or "
                "start a new run"
            )
        self.rows = state["rows"]
        self._unfinished = {
            slot: Prompt(**given, environment=self.task) for slot, given in state["unfinished"].items()
        }
        self._ahead.clear()
        self._ids = Ids(self.who)  # rows that were read before are read again
        try:
            self._restore(state["position"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{self.who}: its position in the checkpoint is of another kind of dataloader or version "
                f"({describe(error)}); resume with what the run was started with, or start a new run"
            ) from error

    def _position(self) -> Any:
        raise NotImplementedError

    def _restore(self, position: Any) -> None:
        raise NotImplementedError


class StreamLoader(LookAhead):
    """A loader of rows that come one after another.

    A checkpoint holds a state of the stream before its last rows, and the fingerprints of the rows since.
    With ``exact = false`` it holds the prompts read ahead, and the state behind them.

    Args:
        make: makes the stream; called on the thread.
        first: the stream that was made already.
        without: fields that differ each time a row is read.
    """

    def __init__(
        self,
        task: str,
        name: str,
        make: Callable[[], Any],
        options: RowOptions,
        *,
        first: Any = None,
        without: Collection[str] = (),
        **waiting: Any,
    ) -> None:
        super().__init__(task, name, options, **waiting)
        self._make, self._first = make, first
        self.without = set(without)
        self._stream = Stream(self._made, self.who)
        self._marks: deque[Mark] = deque()
        self._since: deque[Fingerprint] = deque()
        """Fingerprints of the rows since the first mark."""
        self._behind: Mark | None = None
        self._beginnings = Beginnings()
        self._said = time.monotonic()
        """Last time when counted rows were reported."""
        self._epochs: dict[int, int] = {}
        """Epochs of the rows that were read and not yet added to the look-ahead, by number."""
        self._resume: Saved | Mark | None = None
        """Where a resumed run continues, until its first row is read."""

    @property
    def exact(self) -> bool:
        return self.options.exact

    def _made(self) -> Any:
        given, self._first = self._first, None
        return readable(self._make() if given is None else given, self.who, exact=self.exact)

    def read(self, n: int) -> Part:
        if (resume := self._resume) is not None:
            return self._again(resume)
        stream, marks = self._stream, list[Mark]()
        rows, since = list[tuple[int, int, Any]](), list[Fingerprint]()
        until = time.monotonic() + PART
        while len(rows) < n and (not rows or time.monotonic() < until):
            if self.exact and stream.row % EVERY == 0:
                marks.append(stream.mark(counts=self._counts()))
            number, row = stream.row, stream.next()
            self._epochs[number] = stream.epoch
            if not number:
                stream.mark(counts=False)  # a state that no checkpoint can hold is an error now
            rows.append((number, number, row))
            if self.exact:
                since.append(fingerprint(row, self.without))
        behind = None if self.exact else stream.mark(counts=False)
        return Part(rows=self._fields(rows), since=since, marks=marks, behind=behind)

    def epoch_of(self, row: int) -> int:
        return self._epochs.pop(row, self._stream.epoch)

    def readers(self) -> int:
        return readers_of(self._stream.source)

    def _counts(self) -> bool:
        """Return whether a resumed run has to count the rows, since the state of the stream lacks some."""
        return self._stream.source is not None and bool(loses_state(self._stream.source))

    def _again(self, resume: Saved | Mark) -> Part:
        """Continue behind the rows of a checkpoint.  Raises ConfigError."""
        self._resume = None
        if isinstance(resume, Mark):
            self._stream.restore(resume)
            return Part(rows=[], since=[], behind=resume)
        rows, mark = resumed(self._stream, resume, progress=self._counted), resume.mark
        since: list[Fingerprint] = [fingerprint(row, self.without) for row, _ in rows]
        ahead = list[tuple[int, int, Any]]()
        for number, (row, epoch) in enumerate(rows, mark.row):
            if number >= self.rows:
                ahead.append((number, number, row))
                self._epochs[number] = epoch
        return Part(rows=self._fields(ahead), since=since, marks=[mark], again=True)

    def _compare_epochs(self, part: Part) -> None:
        """Warn if the second epoch begins as the first did."""
        for (number, *_), row in zip(part.rows, part.since, strict=False):
            if self._beginnings.repeated(self._epochs[number], row):
                self.warn(
                    f"same_order/{self.task}",
                    f"{self.who}: it gives its rows in the same order in each epoch; let it shuffle anew in "
                    "set_epoch(epoch), or return rows with a length, which the core shuffles",
                )

    def _counted(self, read: int, wanted: int) -> None:
        """Report rows that are counted: the deadline of a prompt is that of a row meanwhile."""
        now = time.monotonic()
        self._progress = now
        if now - self._said > SAYS_EVERY:
            self._said = now
            self.status(f"{self.who}: counting its rows: {read:,} of {wanted:,}")

    def kept(self, part: Part) -> None:
        if part.again:
            self._marks.clear()
            self._since.clear()
        else:
            self._compare_epochs(part)
        self._marks += part.marks
        self._since += part.since
        self._behind = part.behind or self._behind

    def forget(self) -> None:
        while len(self._marks) > 2 and self._marks[2].row <= self.rows:
            first = self._marks.popleft()
            for _ in range(self._marks[0].row - first.row):
                self._since.popleft()

    def _position(self) -> Any:
        if self._resume is not None:  # nothing was read since the run was resumed
            return self._saved(self._resume)
        if not self.exact:
            return self._saved(self._behind or Mark(0, 0, 0))
        mark = self._marks[0] if self._marks else Mark(0, 0, 0)
        return self._saved(Saved(mark, list(self._since), sorted(self.without)))

    def _saved(self, where: Saved | Mark) -> Any:
        if isinstance(where, Mark):
            ahead = [[each.row, each.place, plain(each.prompt)] for each in self._ahead]
            return {"ahead": ahead, "behind": asdict(where, recurse=False)}
        return {"mark": asdict(where.mark, recurse=False), "since": where.since, "without": where.without}

    def _restore(self, position: Any) -> None:
        self._stream = Stream(self._made, self.who)
        if "behind" in position:
            self._resume = Mark(**position["behind"])
            for row, place, given in position["ahead"]:
                self._ahead.append(Ahead(row, place, Prompt(**given, environment=self.task)))
        else:
            self._resume = saved = Saved(**{**position, "mark": Mark(**position["mark"])})
            self.without = set(saved.without)


class IndexedLoader(LookAhead):
    """A loader of rows that are read by index, in an order of our own for each epoch.

    Prompts that are at hand are read when they are taken; other rows are read ahead.

    Args:
        task: name of the task; part of the seed, so that tasks of equal length differ in order.
        rows: the prompts, with unique ids; or rows that are read ahead.
        seed: seed of the shuffling.
        at_hand: whether the rows are prompts that can be read at once.
    """

    def __init__(
        self,
        task: str,
        rows: Sequence[Any],
        *,
        seed: int,
        name: str = "",
        options: RowOptions | None = None,
        at_hand: bool = True,
        **waiting: Any,
    ) -> None:
        super().__init__(task, name, options or RowOptions(), **waiting)
        self._rows, self._seed, self.at_hand = rows, seed, at_hand
        self._number: int | None = None
        self.read_rows: ReadRows | None = None
        """All rows, if they have been read before the run."""
        self._read_until = 0
        """Number of the next row to read ahead."""
        self._since: deque[tuple[int, Fingerprint]] = deque()
        """Fingerprints of the last rows before the next one, and of those read ahead, with their numbers."""
        self._proof: list[tuple[int, Fingerprint]] = []
        """Rows of a checkpoint that are still to be compared."""

    def __len__(self) -> int:
        """Number of rows in an epoch; first used on the thread of the rows."""
        if self._number is None:
            self._number = len(self._rows)
        return self._number

    @property
    def size(self) -> int | None:
        return len(self)

    @functools.cached_property
    def _order(self) -> ShuffledOrder:
        return ShuffledOrder(len(self), seed=self._seed, task=self.task)

    # ------------------------------------------------------------------------------ drawing

    def ready(self, n: int, changed: Callable[[], None]) -> bool:
        if not self.at_hand:
            return super().ready(n, changed)
        if n and not len(self):
            raise PluginError(
                f"task {self.task!r}: its environment has no training prompts; expected at least one"
            )
        while len(self._ahead) < n:
            place = self._order[self._read_until]
            self._ahead.append(Ahead(self._read_until, place, self._rows[place]))
            self._read_until += 1
        return True

    def take(self, n: int) -> list[Prompt]:
        if self.at_hand:
            self.ready(n, lambda: None)
        return super().take(n)

    def place(self, prompt: Prompt) -> int:
        """Return the place, in the task's data, of a prompt that was taken."""
        return self._recent[prompt.id]

    def skip(self, prompt: Prompt, reason: str) -> None:
        """Leave a prompt that was taken out of this epoch; the caller that draws prompts records it."""

    def prompt(self, id: str, slot: int = 0) -> Prompt:
        if not self.at_hand:
            return super().prompt(id, slot)
        try:
            return self._rows[self._index_of[id]]  # type: ignore[no-any-return]
        except KeyError:
            raise CheckpointError(
                f"task {self.task!r}: the checkpoint mentions prompt {id!r}, which is not among the "
                f"{len(self)} prompts that the environment offers; resume with the environment and the "
                "options that the run was started with"
            ) from None

    def read(self, n: int) -> Part:
        if self._proof:
            self._prove(self._proof)
            self._proof = []
        rows: list[tuple[int, int, Any]] = []
        until = time.monotonic() + PART
        while len(rows) < n and (not rows or time.monotonic() < until):
            place = self._order[self._read_until]
            rows.append((self._read_until, place, self._rows[place]))
            self._read_until += 1
        proving = [] if self._known else rows
        since: list[Fingerprint] = [fingerprint(row) for _, _, row in proving]
        return Part(rows=self._fields(rows), since=since)

    def epoch_of(self, row: int) -> int:
        return row // len(self)

    def origin(self, place: int) -> int:
        return int(self._rows.places[place]) if isinstance(self._rows, RawRows) else place

    def _prove(self, proof: Sequence[tuple[int, Fingerprint]]) -> None:
        """Raise ConfigError unless rows are those of the checkpoint."""
        found = [fingerprint(self._rows[self._order[number]]) for number, _ in proof]
        if (differs := difference([each for _, each in proof], found, proof[0][0])) is not None:
            raise refusal(self.who, self._rows, differs)

    def kept(self, part: Part) -> None:
        self._since += [(row[0], each) for row, each in zip(part.rows, part.since, strict=False)]

    def forget(self) -> None:
        while self._since and self._since[0][0] < self.rows - PROVED:
            self._since.popleft()

    # ------------------------------------------------------------------------------ checkpoints

    def state_dict(self, unfinished: Mapping[int, Prompt] = NO_PROMPTS) -> dict[str, Any]:
        """Return the position; prompts at hand that are unfinished are found again by their ids."""
        return super().state_dict(NO_PROMPTS if self.at_hand else unfinished)

    def _position(self) -> Any:
        return {**self._source, "since": [list(each) for each in self._proof or self._since]}

    def _restore(self, position: Any) -> None:
        self._compare(position)
        self._read_until = self.rows
        self._proof = [(number, each) for number, each in position["since"]]

    def _compare(self, state: Mapping[str, Any]) -> None:
        """Raise CheckpointError for the state of other prompts or another seed."""
        for key, expected in self._source.items():
            if state.get(key) != expected:
                raise CheckpointError(
                    f"task {self.task!r}: its prompts differ from the checkpoint's ({key} is "
                    f"{expected!r}, in the checkpoint {state.get(key)!r}); resume with the environment, the "
                    "options and the seed that the run was started with, or start a new run"
                )

    @property
    def _known(self) -> str:
        """The hash of all rows, if it is known."""
        return str(getattr(self._rows, "fingerprint", ""))

    @functools.cached_property
    def _index_of(self) -> dict[str, int]:
        return {prompt.id: index for index, prompt in enumerate(self._rows)}

    @functools.cached_property
    def _source(self) -> dict[str, Any]:
        """Values that determine the rows; answers may be corrected, so they are left out."""
        kind = type(self._rows)
        lazy = "" if self.at_hand else f"{kind.__module__}.{kind.__qualname__}"
        return {
            "prompts": len(self),
            "fingerprint": self._known or lazy or hash_of(self._rows),
            "seed": self._seed,
        }


def hash_of(prompts: Iterable[Prompt]) -> str:
    """Hash ids and messages, in order."""
    digest = hashlib.sha256()
    for prompt in prompts:
        line = json.dumps([prompt.id, prompt.messages], default=lambda value: type(value).__name__)
        digest.update(line.encode())
    return digest.hexdigest()[:16]
