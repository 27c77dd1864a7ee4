"""The two loaders: ``IndexedLoader`` for rows that are read by index, ``StreamLoader`` for all others.

Rows that have to be read or converted are read ahead, on a thread for each loader, as many as the next
request may need.  ``take`` returns from this look-ahead at once, so the event loop never waits for a row.
"""

from __future__ import annotations

import asyncio
import bisect
import functools
import hashlib
import json
import queue
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from types import MappingProxyType
from typing import Any, TypeVar

from attrs import asdict, evolve, frozen

from grpo_core.config import RowOptions
from grpo_core.contracts.errors import CheckpointError, GrpoError, PluginError, describe, plugin_errors
from grpo_core.contracts.records import Prompt
from grpo_core.data.order import shuffled
from grpo_core.data.positions import Beginnings, Fingerprint, Ids, difference, fingerprint
from grpo_core.data.rows import ReadRows, RowReader, plain
from grpo_core.data.states import packed
from grpo_core.data.streams import EVERY, Mark, Stream, loses_state, refusal, resume
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
        """Run a call, and wait for it.  Raises PluginError or another GrpoError."""
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
                    with plugin_errors(f"{self._who}: it"):
                        done.set_result(call())
                except GrpoError as error:
                    done.set_exception(error)
                except BaseException as error:  # a plugin's code may raise anything
                    told = f"{self._who}: it raised {type(error).__name__}: {error}"
                    done.set_exception(PluginError(told))


@frozen(kw_only=True)
class Read:
    """A row that was read."""

    number: int
    """Counted from the first epoch."""
    epoch: int
    place: int
    """Place of the row in the data that it comes from; its number in a stream."""
    row: Any
    fields: dict[str, Any]
    proof: tuple[Fingerprint, Mark] | None = None
    """Fingerprint by which a resumed run proves its position, and the newest state before the row."""
    behind: Mark | None = None
    """State behind the row, where nothing is proved."""


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
        self.exact = options.exact
        """Whether a resumed run proves the position."""
        self.fits: Callable[[Prompt], bool] = lambda prompt: True
        """Whether a prompt is kept; the others are left out."""
        self.rows = 0
        """Number of rows that became prompts or were left out, until the last prompt that was taken."""
        self.left_out = 0
        self._deadline, self._convert = deadline, convert
        self._ahead: deque[tuple[int, Prompt]] = deque()
        """Prompts that can be taken, with the numbers of their rows."""
        self._since: list[tuple[Fingerprint, Mark]] = []
        """Fingerprints of the last rows, and for each the newest state before it."""
        self._resumed = False
        """Whether the rows of a checkpoint are still to be proved."""
        self._wanted = 0
        self._reading: asyncio.Task[None] | None = None
        self._progress = 0.0
        """Last time when a row became a prompt, or was counted."""
        self._unfinished: dict[str, Prompt] = {}
        """Prompts of a checkpoint that were drawn and not trained, by slot."""
        self._recent: OrderedDict[str, int] = OrderedDict()
        """Numbers of the rows of the prompts that were taken last, by id."""
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

    # ------------------------------------------------------------------------------ of a subclass

    def read(self) -> Read:
        """Read the next row; called on the thread."""
        raise NotImplementedError

    def prove(self) -> None:
        """Continue behind the rows of a checkpoint, on the thread.  Raises ConfigError if they differ."""
        raise NotImplementedError

    def readers(self) -> int:
        """Return the number of workers that may each read all rows; 0 if each row is read once."""
        return 0

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
        return [prompt for _, prompt in list(self._ahead)[:n]]

    def close(self) -> None:
        """End reading; a call that runs on the thread is abandoned."""
        if self._reading is not None:
            self._reading.cancel()
        self.thread.close()

    def keep(self, fits: Callable[[Prompt], bool]) -> None:
        """Leave out prompts that do not fit, also of those read ahead."""
        self.fits = fits
        kept = [each for each in self._ahead if fits(each[1])]
        self.left_out += len(self._ahead) - len(kept)
        self._ahead = deque(kept)

    async def _fill(self) -> None:
        """Read until all prompts that are wanted are there.

        Raises PluginError if the dataloader fails, or gives no prompt within its deadline.
        """
        self._progress = time.monotonic()
        while (missing := self._wanted - len(self._ahead)) > 0:
            reading = asyncio.ensure_future(self.thread(functools.partial(self._read, missing)))
            try:
                while not reading.done():
                    if (left := self._progress + self._deadline - time.monotonic()) <= 0:
                        raise self._late()
                    await asyncio.wait([reading], timeout=left)
            finally:
                reading.cancel()
            with plugin_errors(f"{self.who}: it"):
                await self._add(reading.result())

    def _read(self, n: int) -> list[Read]:
        """Read up to ``n`` of the next rows; called on the thread.

        Raises ConfigError if the first rows lack a field that is named.
        """
        if self._resumed:
            self.prove()
            self._resumed = False
        found, until = [self.read()], time.monotonic() + PART
        while len(found) < n and time.monotonic() < until:
            found.append(self.read())
        if not self._named:
            self._named = True
            self.reader.check_named([each.row for each in found])
        return found

    async def _add(self, found: Sequence[Read]) -> None:
        """Convert rows, and add their prompts to the look-ahead."""
        rows = [(each.row, each.fields, each.place) for each in found]
        prompts = await converted(self.reader, self._convert, rows)
        for each, prompt in zip(found, prompts, strict=True):
            if each.proof is not None:
                self._since.append(each.proof)
            packed(plain(prompt), f"{self.who}, row {each.place + 1}")
            self._check_id(prompt, each)
            if self.fits(prompt):
                self._ahead.append((each.number, prompt))
                self._progress = time.monotonic()
            else:
                self.left_out += 1

    def _check_id(self, prompt: Prompt, read: Read) -> None:
        """Raise PluginError if an id repeats among the prompts in use; warn about others."""
        if self.options.repeats:
            return
        id, hint = prompt.id, ""
        if readers := self.readers():
            if id == str(read.place):  # the row brings no id
                id = " ".join(digest for digest, _ in fingerprint(read.row).values())
            hint = (
                f" Its data set is an iterable, which each of its {readers} workers reads whole: divide it "
                "by torch.utils.data.get_worker_info(), or set num_workers to 0."
            )
        near = self._wanted + self.slots
        if warning := self._ids.add(id, read.epoch, read.number, near=near, hint=hint):
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
        for number, prompt in taken:
            self.rows = number + 1
            self._recent[prompt.id] = number
            if len(self._recent) > RECENT:
                self._recent.popitem(last=False)
        passed = bisect.bisect_right(self._since, self.rows - PROVED, key=lambda each: each[1].row)
        if passed:
            del self._since[: self._since[passed - 1][1].row - self._since[0][1].row]
        return [prompt for _, prompt in taken]

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
        self._unfinished = {slot: Prompt(**given) for slot, given in state["unfinished"].items()}
        self._ahead.clear()
        self._since = []
        self._ids = Ids(self.who)  # rows that were read before are read again
        self._resumed = True
        try:
            self._restore(state["position"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{self.who}: its position in the checkpoint is of another kind of dataloader or version "
                f"({describe(error)}); resume with what the run was started with, or start a new run"
            ) from error

    def _position(self) -> dict[str, Any]:
        """Return the state before the last rows that were taken, and their fingerprints."""
        mark = self._since[0][1] if self._since else Mark(self.rows, 0, 0)
        since = [each for each, _ in self._since[: self.rows - mark.row]]
        return {"mark": asdict(mark, recurse=False), "since": since}

    def _restore(self, position: Mapping[str, Any]) -> None:
        """Set what ``prove`` continues from."""
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
        self._make, self.without = make, set(without)
        self._stream = Stream(make, self.who, exact=self.exact)
        self._stream.source = first
        self._behind = Mark(0, 0, 0)
        """The state behind the prompts read ahead that are not proved."""
        self._newest: Mark | None = None
        """The newest state that a checkpoint may hold."""
        self._beginnings = Beginnings()
        self._said = time.monotonic()
        """Last time when counted rows were reported."""

    def read(self) -> Read:
        stream, newest = self._stream, self._newest
        if self.exact and (newest is None or stream.row >= newest.row + EVERY):
            newest = self._newest = stream.mark(counts=bool(loses_state(stream.source)))
        number, row = stream.row, stream.next()
        if not number:
            stream.mark(counts=False)  # a state that no checkpoint can hold is an error now
        return Read(
            number=number,
            epoch=stream.epoch,
            place=number,
            row=row,
            fields=self.reader.fields(row, number),
            proof=(fingerprint(row, self.without), newest) if newest else None,
        )

    def _read(self, n: int) -> list[Read]:
        found = super()._read(n)
        if not self.exact:
            found[-1] = evolve(found[-1], behind=self._stream.mark(counts=False))
        return found

    async def _add(self, found: Sequence[Read]) -> None:
        await super()._add(found)
        self._behind = found[-1].behind or self._behind
        for each in found:
            if each.proof is not None and self._beginnings.repeated(each.epoch, each.proof[0]):
                self.warn(
                    f"same_order/{self.task}",
                    f"{self.who}: it gives its rows in the same order in each epoch; let it shuffle anew in "
                    "set_epoch(epoch), or return rows with a length, which the core shuffles",
                )

    def prove(self) -> None:
        if not self._since:
            self._stream.restore(self._behind)
            return
        rows, mark = [each for each, _ in self._since], self._since[0][1]
        resume(self._stream, mark, rows, self.without, proves=self.exact, progress=self._counted)
        if self.exact:
            self._newest = mark
        else:
            self._since, self._behind = [], self._stream.mark(counts=False)

    def readers(self) -> int:
        return readers_of(self._stream.source)

    def _counted(self, read: int, wanted: int) -> None:
        """Report rows that are counted: the deadline of a prompt is that of a row meanwhile."""
        now = time.monotonic()
        self._progress = now
        if now - self._said > SAYS_EVERY:
            self._said = now
            self.status(f"{self.who}: counting its rows: {read:,} of {wanted:,}")

    def _position(self) -> dict[str, Any]:
        if self._since and self.rows > self._since[0][1].row:
            return {**super()._position(), "without": sorted(self.without)}
        behind = self._behind
        ahead = [[number, plain(prompt)] for number, prompt in self._ahead if number < behind.row]
        return {"ahead": ahead, "behind": asdict(behind, recurse=False)}

    def _restore(self, position: Mapping[str, Any]) -> None:
        self._stream, self._newest = Stream(self._make, self.who, exact=self.exact), None
        if "behind" in position:
            self._behind = Mark(**position["behind"])
            self._ahead.extend((number, Prompt(**given)) for number, given in position["ahead"])
        else:
            self.without, mark = set(position["without"]), Mark(**position["mark"])
            self._since = [(each, mark) for each in position["since"]]


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
        self.data, self._seed, self.at_hand = rows, seed, at_hand
        self._read_until = 0
        """Number of the next row to read ahead."""

    @functools.cached_property
    def size(self) -> int:
        """Number of rows in an epoch; first used on the thread of the rows."""
        return len(self.data)

    def __len__(self) -> int:
        return self.size

    def _index(self, number: int) -> int:
        """Return the index of the row with a number, counted from the first epoch."""
        return shuffled(number, len(self), f"{self._seed}/{self.task}")

    # ------------------------------------------------------------------------------ drawing

    def ready(self, n: int, changed: Callable[[], None]) -> bool:
        if not self.at_hand:
            return super().ready(n, changed)
        if n and not len(self):
            raise PluginError(
                f"task {self.task!r}: its environment has no training prompts; expected at least one"
            )
        while len(self._ahead) < n:
            self._ahead.append((self._read_until, self.data[self._index(self._read_until)]))
            self._read_until += 1
        return True

    def take(self, n: int) -> list[Prompt]:
        if self.at_hand:
            self.ready(n, lambda: None)
        return super().take(n)

    def place(self, prompt: Prompt) -> int:
        """Return the place, in the task's data, of a prompt that was taken."""
        return self._index(self._recent[prompt.id])

    def skip(self, prompt: Prompt, reason: str) -> None:
        """Leave a prompt that was taken out of this epoch; the caller that draws prompts records it."""

    def prompt(self, id: str, slot: int = 0) -> Prompt:
        if not self.at_hand:
            return super().prompt(id, slot)
        try:
            return self.data[self._index_of[id]]  # type: ignore[no-any-return]
        except KeyError:
            raise CheckpointError(
                f"task {self.task!r}: the checkpoint mentions prompt {id!r}, which is not among the "
                f"{len(self)} prompts that the environment offers; resume with the environment and the "
                "options that the run was started with"
            ) from None

    def read(self) -> Read:
        number = self._read_until
        index = self._index(number)
        row, place = self.data[index], index
        if isinstance(self.data, ReadRows):
            place = self.data.places[index]
        self._read_until += 1
        return Read(
            number=number,
            epoch=number // len(self),
            place=place,
            row=row,
            fields=self.reader.fields(row, place),
            proof=None if self._known else (fingerprint(row), Mark(number, 0, 0)),
        )

    def prove(self) -> None:
        first = self.rows - len(self._since)
        found = [fingerprint(self.data[self._index(number)]) for number in range(first, self.rows)]
        differs = difference([each for each, _ in self._since], found, first)
        if differs is None:
            return
        if self.exact:
            raise refusal(self.who, self.data, differs)
        self._since = [(each, mark) for each, (_, mark) in zip(found, self._since, strict=True)]

    # ------------------------------------------------------------------------------ checkpoints

    def state_dict(self, unfinished: Mapping[int, Prompt] = NO_PROMPTS) -> dict[str, Any]:
        """Return the position; prompts at hand that are unfinished are found again by their ids."""
        return super().state_dict(NO_PROMPTS if self.at_hand else unfinished)

    def _position(self) -> dict[str, Any]:
        return {**super()._position(), **self._source}

    def _restore(self, position: Mapping[str, Any]) -> None:
        for key, expected in self._source.items():
            if position.get(key) != expected:
                raise CheckpointError(
                    f"task {self.task!r}: its prompts differ from the checkpoint's ({key} is "
                    f"{expected!r}, in the checkpoint {position.get(key)!r}); resume with the environment, "
                    "the options and the seed that the run was started with, or start a new run"
                )
        self._since = [
            (each, Mark(number, 0, 0))
            for number, each in enumerate(position["since"], position["mark"]["row"])
        ]
        self._read_until = self.rows

    @property
    def _known(self) -> str:
        """The hash of all rows, if it is known."""
        return str(getattr(self.data, "fingerprint", ""))

    @functools.cached_property
    def _index_of(self) -> dict[str, int]:
        return {prompt.id: index for index, prompt in enumerate(self.data)}

    @functools.cached_property
    def _source(self) -> dict[str, Any]:
        """Values that determine the rows; answers may be corrected, so they are left out."""
        kind = type(self.data)
        lazy = "" if self.at_hand else f"{kind.__module__}.{kind.__qualname__}"
        return {
            "prompts": len(self),
            "fingerprint": self._known or lazy or hash_of(self.data),
            "seed": self._seed,
        }


def hash_of(prompts: Iterable[Prompt]) -> str:
    """Hash ids and messages, in order."""
    digest = hashlib.sha256()
    for prompt in prompts:
        line = json.dumps([prompt.id, prompt.messages], default=lambda value: type(value).__name__)
        digest.update(line.encode())
    return digest.hexdigest()[:16]
