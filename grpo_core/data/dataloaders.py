"""The dataloader of a plugin, which is made and read on a thread.

The thread keeps a look-ahead: as many prompts as a request may need.  ``take`` returns from it at once, so
the event loop never waits for a row.  A look-ahead and the state of the rows behind it are always exchanged
together; therefore a checkpoint can be taken at any moment, without a call of the dataloader.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import islice
from types import MappingProxyType
from typing import Any, TypeVar

from attrs import frozen

from grpo_core.config import SourceConfig
from grpo_core.contracts.errors import CheckpointError, GrpoError, PluginError
from grpo_core.contracts.records import Prompt
from grpo_core.data.rows import Feed, RowReader, feed, in_order, plain, raised, readable

T = TypeVar("T")

Adopt = Callable[[Sequence[Prompt]], Coroutine[Any, Any, "list[Prompt] | None"]]
"""Lets an environment convert the prompts of rows; returns None if it does not."""
NO_PROMPTS: Mapping[int, Prompt] = MappingProxyType({})


@frozen
class ReadPrompt:
    """A prompt, and its place if the rows are read by index."""

    place: Any
    prompt: Prompt


class Dataloader:
    """A ``Loader`` for the rows of a plugin's dataloader.

    It is made when its first prompt is needed.

    Args:
        task: name of the task.
        name: name of the dataloader in the configuration.
        make: makes the dataloader of a split; called on the thread.
        source: names the fields of a row.
        seed: seed of the shuffling.
        deadline: seconds that each wait for a prompt may take.
        adopt: see ``Adopt``.
    """

    def __init__(
        self,
        task: str,
        name: str,
        make: Callable[[str], Any],
        source: SourceConfig,
        *,
        seed: int,
        deadline: float,
        adopt: Adopt | None = None,
    ) -> None:
        self.task, self.name = task, name
        self.who = f"task {task!r}: dataloader {name!r}"
        self.fits: Callable[[Prompt], bool] = lambda prompt: True
        """Whether a prompt is kept; the others are passed over."""
        self.rows = 0
        """Number of rows that were read."""
        self._left_out = 0
        """Number of rows that did not become a prompt."""
        self._make, self._source, self._reader = make, source, RowReader(task, name, source)
        self._seed, self._deadline, self._adopt = seed, deadline, adopt
        self.size: int | None = None
        """Number of rows of an epoch; None if unknown, such as before the dataloader is made."""
        self._lock = threading.Condition()
        """Guards everything below."""
        self._ahead: deque[ReadPrompt] = deque()
        self._state: Any = None
        """State of the rows behind the look-ahead; None before the first row."""
        self._wanted = 0
        """Number of prompts that the look-ahead should have."""
        self._work: deque[Callable[[Feed], None]] = deque()
        """Other work for the thread, done before reading."""
        self._progress = 0.0
        """Last time when a row became a prompt, or nothing was wanted."""
        self._thread: threading.Thread | None = None
        self._ended = False
        self._error: GrpoError | None = None
        self._offered: dict[int, Prompt] = {}
        """Prompts that were offered to a sampler, which has not decided on them."""
        self._unfinished: dict[str, Prompt] = {}
        """Prompts of a checkpoint that were drawn and not trained, by slot."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed: Callable[[], None] = lambda: None
        self._timer: asyncio.TimerHandle | None = None

    # ------------------------------------------------------------------------------ waiting

    def ready(self, n: int, changed: Callable[[], None]) -> bool:
        """Return whether ``n`` prompts can be taken at once.

        If not, they are read, and ``changed`` is called on the running event loop when another call may
        succeed.  Raises PluginError if the dataloader fails or takes too long.
        """
        with self._lock:
            if self._error is not None:
                raise self._error
            enough = len(self._ahead) >= n
            if not enough:
                self._want(n)
                self._loop, self._changed = asyncio.get_running_loop(), changed
                late = self._progress + self._deadline - time.monotonic()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if enough:
            return True
        if late <= 0:
            raise self._late()
        self._timer = asyncio.get_running_loop().call_later(late, changed)
        return False

    async def first(self, n: int) -> list[Prompt]:
        """Return the next ``n`` prompts without taking them.  Raises GrpoError."""
        changed = asyncio.Event()
        while not self.ready(n, changed.set):
            await changed.wait()
            changed.clear()
        with self._lock:
            return [row.prompt for row in list(self._ahead)[:n]]

    async def held_out(self, n: int) -> list[Prompt] | None:
        """Return the first ``n`` held-out prompts, or None if there are none.  Raises GrpoError."""

        def read(_: Feed) -> list[Prompt] | None:
            given = self._make("validation")
            if given is None:
                return None
            rows = in_order(readable(given, f"{self.who} for 'validation'"))
            found = (self._reader.prompt(row, place) for place, row in enumerate(rows))
            return list(islice((prompt for prompt in found if prompt is not None), n))

        return await asyncio.to_thread(self._call, read)

    def close(self) -> None:
        """Let the thread end when it returns from the dataloader."""
        with self._lock:
            self._ended = True
            self._lock.notify_all()
        if self._timer is not None:
            self._timer.cancel()

    def keep(self, fits: Callable[[Prompt], bool]) -> None:
        """Pass over prompts that do not fit, including those read ahead."""
        with self._lock:
            self.fits = fits
            kept = [row for row in self._ahead if fits(row.prompt)]
            self._left_out += len(self._ahead) - len(kept)
            self._ahead = deque(kept)
            self._lock.notify_all()

    # ------------------------------------------------------------------------------ drawing

    def __len__(self) -> int:
        if self.size is None:
            raise PluginError(
                f"{self.who} does not know its number of rows, which the sampler needs; choose a "
                "sampler that only takes the next prompts, such as mix"
            )
        return self.size

    def take(self, n: int) -> list[Prompt]:
        """Return the next ``n`` prompts: at once if they are ``ready``."""
        return [row.prompt for row in self._take_rows(n)]

    def offer(self, n: int) -> list[int]:
        """Return the places, in the dataloader's rows, of the next ``n`` prompts."""
        rows = self._take_rows(n)
        if any(row.place is None for row in rows):
            raise PluginError(
                f"{self.who} is a stream, and the sampler selects prompts by index; choose a sampler "
                "that only takes the next prompts, such as mix, or let the dataloader return a sequence"
            )
        self._offered |= {row.place: row.prompt for row in rows}
        return [row.place for row in rows]

    def prompts_at(self, places: Sequence[int]) -> list[Prompt]:
        """Return the prompts at places that were offered."""
        return [self._offered.pop(place) for place in places]

    def pass_over(self, place: int, reason: str) -> None:
        """Leave an offered prompt out of this epoch."""
        self._offered.pop(place)

    def _take_rows(self, n: int) -> list[ReadPrompt]:
        with self._lock:
            self._want(n)
            there = self._lock.wait_for(
                lambda: self._error is not None or len(self._ahead) >= n, self._deadline
            )
            if self._error is not None:
                raise self._error
            if not there:
                raise self._late()
            rows = [self._ahead.popleft() for _ in range(n)]
            self._progress = time.monotonic()
            self._lock.notify_all()
        return rows

    # ------------------------------------------------------------------------------ checkpoints

    def state_dict(self, unfinished: Mapping[int, Prompt] = NO_PROMPTS) -> dict[str, Any]:
        """Return the look-ahead with the state of the rows behind it, and the prompts in use.

        Args:
            unfinished: prompts that were drawn and not trained, by slot: a stream cannot return them again.
        """
        with self._lock:
            return {
                "dataloader": self.name,
                "rows": self.rows,
                "ahead": [[row.place, plain(row.prompt)] for row in self._ahead],
                "behind": self._state,
                "unfinished": {str(slot): plain(prompt) for slot, prompt in unfinished.items()},
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state.  Raises CheckpointError if it belongs to other rows."""
        if state.get("dataloader") != self.name:
            raise CheckpointError(
                f"{self.who} is new: in the checkpoint its prompts came from "
                f"{state.get('dataloader') or 'its environment or source'!r}; resume with what the run was "
                "started with, or start a new run"
            )
        rows = [ReadPrompt(place, self._prompt(given)) for place, given in state["ahead"]]
        self._unfinished = {slot: self._prompt(given) for slot, given in state["unfinished"].items()}

        def restore(feed: Feed) -> None:
            if state["behind"] is not None:
                feed.restore(state["behind"])
            with self._lock:
                self._ahead = deque(row for row in rows if self.fits(row.prompt))
                self._state, self.rows = state["behind"], state["rows"]

        self._call(restore)

    def prompt(self, id: str, slot: int) -> Prompt:
        """Return the prompt of a slot of the checkpoint."""
        try:
            return self._unfinished[str(slot)]
        except KeyError:
            raise CheckpointError(f"{self.who}: the checkpoint lacks prompt {id!r} of slot {slot}") from None

    def _prompt(self, given: Mapping[str, Any]) -> Prompt:
        return Prompt(**given, environment=self.task)

    # ------------------------------------------------------------------------------ the thread

    def _want(self, n: int) -> None:
        """Let the thread read, with the lock held."""
        if len(self._ahead) >= self._wanted:
            self._progress = time.monotonic()
        self._wanted = max(self._wanted, n)
        self._begin()

    def _begin(self) -> None:
        if self._thread is None:
            self._progress = time.monotonic()
            self._thread = threading.Thread(target=self._run, name=self.who, daemon=True)
            self._thread.start()
        self._lock.notify_all()

    def _call(self, work: Callable[[Feed], T]) -> T:
        """Run ``work`` on the thread, and wait for it."""
        done: Future[T] = Future()

        def do(feed: Feed) -> None:
            try:
                done.set_result(work(feed))
            except Exception as error:
                done.set_exception(raised(self.who, "it", error))

        with self._lock:
            self._work.append(do)
            self._begin()
            answered = self._lock.wait_for(lambda: self._error is not None or done.done(), self._deadline)
            if self._error is not None:
                raise self._error
        if not answered:
            raise self._late()
        return done.result()

    def _run(self) -> None:
        try:
            rows = feed(
                partial(self._make, "train"),
                self._reader,
                task=self.task,
                who=self.who,
                seed=self._seed,
                workers=self._source.workers,
            )
            self.size = rows.size
            while self._next(rows):
                self._announce()
        except BaseException as error:  # a plugin's code may raise anything
            with self._lock:
                self._error = raised(self.who, "it", error)
        self._announce()

    def _next(self, feed: Feed) -> bool:
        """Do the next piece of work.  Return False at the end."""
        with self._lock:
            self._lock.wait_for(lambda: self._ended or self._work or len(self._ahead) < self._wanted)
            work = self._work.popleft() if self._work else None
            missing = self._wanted - len(self._ahead)
        if self._ended:
            return False
        if work is not None:
            work(feed)
        else:
            self._read(feed, missing)
        return True

    def _read(self, feed: Feed, missing: int) -> None:
        """Read until ``missing`` prompts are there, or other work waits."""
        rows: list[ReadPrompt] = []
        while len(rows) < missing and not self._work and not self._ended:
            place, prompt = feed.read()
            self.rows += 1
            if prompt is None or not self.fits(prompt):
                self._left_out += 1
            else:
                rows.append(ReadPrompt(place, prompt))
                self._progress = time.monotonic()
        rows = self._adopted(rows)
        state = feed.state()
        with self._lock:
            self._ahead += rows
            self._state = state

    def _adopted(self, rows: list[ReadPrompt]) -> list[ReadPrompt]:
        """Return the rows with the environment's conversions of their prompts, if it converts any."""
        if self._adopt is None or self._loop is None or not rows:
            return rows
        calling = asyncio.run_coroutine_threadsafe(self._adopt([row.prompt for row in rows]), self._loop)
        made = calling.result()
        if made is None:
            self._adopt = None
            return rows
        if len(made) != len(rows):
            raise PluginError(
                f"{self.who}: the environment made {len(made)} prompts of {len(rows)}; expected one per row"
            )
        return [ReadPrompt(row.place, prompt) for row, prompt in zip(rows, made, strict=True)]

    def _announce(self) -> None:
        with self._lock:
            self._lock.notify_all()
            loop, changed = self._loop, self._changed
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(changed)

    def _late(self) -> PluginError:
        what = (
            f"it has read {self.rows:,} rows" if self.size is not None or self.rows else "it is not made yet"
        )
        left_out = f", of which {self._left_out:,} are left out" if self._left_out else ""
        return PluginError(
            f"{self.who} gave no prompt within {self._deadline:g} s (environment.start_deadline); {what}"
            f"{left_out}"
        )
