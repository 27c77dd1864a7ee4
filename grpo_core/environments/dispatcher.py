"""The queue of the calls of one worker.

    ask ──units──> queue ──> call ──results──> ask
                     ^        │
                     └────────┴── it failed: again alone, or when its service answers

A unit is what is judged together: an episode or a group.  A call has as many units as fit into a batch, or,
in a slot, a single one.  The units of a batch that fails are called again alone, and so are those whose
process died next to others: only the culprit fails.

While a service is away its units wait, and one of them is called alone, with growing pauses; without an
answer for the budget, callers get Unavailable.  A unit whose call takes too long waits for the next one: if
that is answered, or if there is none, it fails; if one with another prompt is late as well, the service is
away.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from attrs import define, field, frozen

from grpo_core.contracts.errors import (
    DeadlineExceeded,
    GrpoError,
    PluginError,
    Unavailable,
    describe,
    fault_of,
)
from grpo_core.contracts.incidents import report
from grpo_core.contracts.protocols import Description, Slotted
from grpo_core.contracts.records import Episode, Judgement, Prompt, SessionStart
from grpo_core.environments.host import calls_of, units
from grpo_core.environments.outages import JITTER, Outage, unavailable
from grpo_core.processes.aio import UNLIMITED, cancel, not_counted

R = TypeVar("R")

GIVE_UP_AFTER = 20
"""Number of units of a batch in a row that fail alone, after which the others are not tried."""
MOST_ALONE = 3
"""A prompt is at fault after this many failed calls with it alone, if its service answered others."""
COMPANY = 4
"""Each death divides by this the number of calls that run next to those the process held."""
EARLY = 0.01
"""Seconds by which a clock may be early."""


@frozen
class Failure:
    """Why a call has no results.

    Attributes:
        cause: what it raised.
        brief: what happened, in one line.
        died: whether its process died or was killed.
        alone: whether no other call was running then.
    """

    cause: Exception
    brief: str
    died: bool = False
    alone: bool = False

    @property
    def unavailable(self) -> Unavailable | None:
        """The error of the service, or None if it is not at fault."""
        if isinstance(self.cause, DeadlineExceeded):
            late = Unavailable(str(self.cause))
            late.timed_out = True
            return late
        return self.cause if isinstance(self.cause, Unavailable) else None


class Caller(Protocol):
    """Makes the calls: a worker."""

    about: Description

    async def call(self, method: str, items: Sequence[Any], slots: int) -> Sequence[Any] | Failure:
        """Return a result for each item; no other call takes the ``slots`` meanwhile."""


@define(eq=False)
class _Batch:
    """A call that failed, while its units are called alone."""

    failure: Failure
    left: dict[Unit, None]
    size: int
    units: int
    succeeded: int = 0
    in_a_row: int = 0


@define(eq=False)
class _Request:
    """The units of a caller that have no results yet."""

    dispatcher: Dispatcher
    left: dict[Unit, None]
    error: Exception | None = None
    change: asyncio.Future[None] = field(factory=lambda: asyncio.get_running_loop().create_future())
    """Done when there are none, and when the caller begins or ends to wait for a service."""
    context: contextvars.Context = field(factory=contextvars.copy_context)

    def stir(self) -> None:
        if not self.change.done():
            self.change.set_result(None)

    def fail(self, error: Exception) -> None:
        self.error = self.error or error
        self.stir()


@define(eq=False)
class Unit:
    """Items that are called together.

    Attributes:
        service: the service that they call first.
        record: makes the result of an item whose call failed.
        slotted: whether a call has this unit alone, and others run at the same time.
        again: whether it is called again when its service answers.
        stands: whether its results stand; False is a service that is away.
    """

    method: str
    service: Service
    prompt: str
    items: Sequence[Any]
    record: Callable[..., Any] = Judgement
    slotted: bool = False
    again: bool = True
    stands: bool = True
    results: Sequence[Any] = ()
    slots: int = 1
    arrived: float = 0.0
    batch: _Batch | None = None
    """The failed call for which it is called alone."""
    running: bool = False
    request: _Request = field(init=False)

    @property
    def alone(self) -> bool:
        """Whether it is called alone: its batch or prompt has failed, or its process died next to others."""
        died = self.slots > 1 and not self.slotted
        return died or self.batch is not None or self.prompt in self.service.suspects

    def failed(self, failure: Failure) -> list[Any]:
        cause = failure.cause
        result = self.record(error=describe(cause), fault=fault_of(cause), unavailable=failure.unavailable)
        return [result] * len(self.items)

    def deliver(self, results: Sequence[Any]) -> None:
        if self in self.request.left:
            self.results = results
            self.leave()

    def leave(self) -> None:
        """End: it has its results, or its caller is gone."""
        self.request.left.pop(self, None)
        self.service.units.pop(self, None)
        self.forget_batch()
        if not self.request.left:
            self.request.stir()

    def forget_batch(self) -> None:
        if self.batch is not None:
            self.batch.left.pop(self, None)
            self.batch = None


class Services(dict[str, "Service"]):
    """The services of an environment by what calls them: ``evaluate``, ``open``, or a tool.

    Args:
        who, budget, key: see ``Service``.
    """

    def __init__(self, who: str, budget: float | None, *, key: str = "") -> None:
        self._make = partial(Service, who, budget, key=key)

    def __missing__(self, name: str) -> Service:
        service = self[name] = self._make()
        return service

    def evaluations(self, episodes: Sequence[Episode], about: Description) -> list[Unit]:
        """Return the units of episodes, in order."""
        made = []
        for part in units(episodes, whole_groups=about.needs_group):
            calls = calls_of(part[0])
            service = self[f"tool {calls[0]['function']['name']}" if calls else "evaluate"]
            slotted = about.slots == "all" or (about.slots == "tools" and bool(calls))
            made.append(Unit("evaluate", service, part[0].prompt.id, part, slotted=slotted))
        return made

    def openings(self, prompts: Iterable[tuple[str, Prompt]], slots: Slotted) -> list[Unit]:
        """Return the units that open sessions."""
        service, alone = self["open"], slots != "none"
        return [Unit("open", service, pair[1].id, [pair], SessionStart, slotted=alone) for pair in prompts]


# ---------------------------------------------------------------------------------- services


class Service:
    """A service that is away or here; its units wait while it is away.

    Args:
        who: part of the run that uses it, for messages.
        budget: seconds without an answer until callers get Unavailable; None waits for none: units whose
            service is away fail.
        key: configuration key of the budget.
    """

    def __init__(self, who: str, budget: float | None, *, key: str = "") -> None:
        self._who, self._budget, self._key = who, budget, key
        self._outage = Outage(budget or 0.0, JITTER.random)
        self._began = ""
        """Time of day at which it went away."""
        self._last = Unavailable()
        self.units: dict[Unit, None] = {}
        """Its units that have no results yet."""
        self.late: dict[Unit, Sequence[Any]] = {}
        """Units that were late since its last answer, with their results if they are at fault."""
        self._probe: Unit | None = None
        """The unit that tries while it is away, or that is the next to do so."""
        self.suspects: dict[str, tuple[int, int]] = {}
        """Prompts that failed alone: how often, and the number of the service's answers before."""
        self._single = Dispatcher(_Single(), who)

    @property
    def away(self) -> bool:
        return self._outage.since is not None

    def may_call(self, unit: Unit) -> bool:
        """Return whether a unit may be called: one while the service is away, else all.

        Those with the prompt of a late unit let others go first.
        """
        if not self.away:
            late = {each.prompt for each in self.late}
            return unit.prompt not in late or all(each.running or each.prompt in late for each in self.units)
        if asyncio.get_running_loop().time() < self._outage.due:
            return False
        if self._probe not in self.units:
            waiting = (each for each in self.units if not each.running)
            self._probe = min(waiting, key=lambda each: self.suspects.get(each.prompt, (0, 0))[0])
        return self._probe is unit

    def join(self, unit: Unit) -> None:
        """Add a unit.  Raises Unavailable if it has been away for too long."""
        if self._outage.over:
            raise self._ended()
        self.units[unit] = None

    def answered(self, unit: Unit, began: float) -> None:
        """Record an answer to a call that ``began`` then."""
        since, failures = self._outage.since, self._outage.failures
        self._outage.answered(began)
        if self.suspects:
            self.suspects.pop(unit.prompt, None)
        if self.late:
            self._end_late()
        if since is not None and not self.away:
            seconds = asyncio.get_running_loop().time() - since
            text = f"its service answers again, after {seconds:.0f} s and {failures} failed attempts"
            report("available", self._who, text)
            self._stir()

    def failed(self, unit: Unit, error: Unavailable, results: Sequence[Any], *, alone: bool) -> bool:
        """Record that a unit got no answer: it waits, or gets the results if it is at fault.

        Returns whether the service is away; then call ``go_away``.
        """
        times, before = self.suspects.get(unit.prompt, (0, self._outage.answers))
        if alone:
            times += 1
            self.suspects[unit.prompt] = times, before
        if times >= MOST_ALONE and self._outage.answers > before:
            unit.deliver(results)
            return False
        unit.running = False
        self.late[unit] = results
        unit.request.stir()
        return not error.timed_out or self.away or len({each.prompt for each in self.late}) > 1

    def go_away(self, error: Unavailable) -> None:
        """Let the units wait, and those that failed."""
        loop, outage = asyncio.get_running_loop(), self._outage
        late, self.late = self.late, {}
        if self._budget is None:
            for unit in [unit for unit in self.units if not unit.running]:
                failed = unit.record(error=str(error), unavailable=error)
                unit.deliver(late.get(unit) or [failed] * len(unit.items))
            return
        if not self.away:
            self._began = time.strftime("%H:%M:%S")
        longer = outage.failed(loop.time(), error.retry_after)
        self._last, self._probe = error, None
        for unit, results in late.items():
            unit.stands = unit.again
            if not unit.again:
                unit.deliver(results)
        for unit in list(self.units):
            unit.forget_batch()  # what had failed was the service
            if outage.over:
                unit.request.fail(self._ended())
        for dispatcher in {unit.request.dispatcher: None for unit in late if unit.again}:
            dispatcher.put_first(unit for unit in late if unit.request.dispatcher is dispatcher)
        self._stir()
        loop.call_at(outage.due + EARLY, self._stir)
        if longer:
            left, again = outage.until - loop.time(), outage.due - loop.time()
            report(
                "unavailable",
                self._who,
                f"its service has been unavailable since {self._began}: {error}. Next attempt in "
                f"{again:.0f} s; the run ends if there is no answer for {left:.0f} s more ({self._key})",
            )

    def settle(self) -> None:
        """Let late units fail if no other unit can show whose fault it is."""
        if len(self.late) == len(self.units):
            self._end_late()

    async def call(self, prompt: str, call: Callable[[], Awaitable[R]]) -> R:
        """Return the result of a call; retry it while the service is unavailable.

        Raises its last error if the service answers calls with other prompts, and Unavailable if it has been
        away for too long.
        """

        async def tried() -> R | Exception:
            try:
                return await call()
            except Exception as error:
                if unavailable(error) is None:
                    raise
                return error

        result, _ = await self.once(prompt, tried, again=True)
        if isinstance(result, Exception):
            raise result
        return result

    async def once(
        self, prompt: str, call: Callable[[], Awaitable[R]], *, again: bool = False
    ) -> tuple[R, bool]:
        """Call when the service is here; return the result, and whether it stands.

        A result with ``unavailable`` does not, unless the service answers calls with other prompts.
        """
        unit = Unit("call", self, prompt, [call], slotted=True, again=again)
        (result,) = await self._single.ask([unit])
        return result, unit.stands

    def _end_late(self) -> None:
        late, self.late = self.late, {}
        for unit, results in late.items():
            unit.deliver(results)

    def _stir(self) -> None:
        """Wake the callers, and begin the next calls."""
        for unit in list(self.units):
            unit.request.stir()
        for dispatcher in {unit.request.dispatcher: None for unit in self.units}:
            dispatcher.schedule()

    def _ended(self) -> Unavailable:
        outage = self._outage
        seconds = outage.until - (outage.since or 0.0)
        first = "" if outage.answers else "; it has never answered"
        return Unavailable(
            f"{self._who}: its service has been unavailable for {seconds:.0f} s ({self._key}{first}), since "
            f"{self._began}; {outage.failures} attempts failed, the last with: {self._last}. "
            "Start it again, and then continue the run"
        )


class _Single:
    """Calls functions, any number at once."""

    about = Description(concurrency=UNLIMITED)

    async def call(self, method: str, items: Sequence[Any], slots: int) -> Sequence[Any]:
        return [await item() for item in items]


# ---------------------------------------------------------------------------------- the queue


class Dispatcher:
    """Decides which units are called next, together or alone.

    Args:
        caller: makes the calls.
        who: part of the run that calls, for messages.
        max_batch: largest number of items in a call, unless a unit has more.
        max_wait: seconds that the first unit of a batch waits for others while no batch is running.
    """

    def __init__(
        self, caller: Caller, who: str, *, max_batch: int = UNLIMITED, max_wait: float = 0.0
    ) -> None:
        self._caller, self._who = caller, who
        self._max_batch, self._max_wait = max_batch, max_wait
        self._queue: dict[Unit, None] = {}
        self._calls: dict[asyncio.Task[None], list[Unit]] = {}
        self._requests: dict[_Request, None] = {}
        self._used = 0
        """Number of slots of the running calls."""
        self._batching = False
        """Whether one of them is a batch."""
        self._timer: asyncio.Handle | None = None
        self._broken: PluginError | None = None
        """A contract error that no caller has received."""
        self._closed = False

    async def ask(self, some: Sequence[Unit]) -> list[Any]:
        """Return the results of units, in order.  Cancelling the caller removes them.

        The time during which one of them waits for its service does not count.  Raises PluginError if the
        environment breaks its contract; Unavailable if a service has been away for too long.
        """
        if self._closed:
            raise GrpoError(f"the {self._who} is closed")
        if self._broken is not None:
            raise self._broken
        loop = asyncio.get_running_loop()
        request = _Request(self, dict.fromkeys(some))
        self._requests[request] = None
        for unit in some:
            unit.request, unit.arrived = request, loop.time()
        try:
            for unit in some:
                unit.service.join(unit)
            self._queue |= request.left
            self.schedule()
            while request.left and request.error is None:
                request.change = loop.create_future()
                waits = any(unit.service.away or unit in unit.service.late for unit in request.left)
                with not_counted() if waits else contextlib.nullcontext():
                    await request.change
            if request.error is not None:
                raise request.error
        finally:
            del self._requests[request]
            if request.left:
                await self._withdraw(request)
        return [result for unit in some for result in unit.results]

    async def aclose(self) -> None:
        """Stop the running calls; all callers get a GrpoError."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for request in self._requests:
            running = any(unit.running for unit in request.left)
            when = "during its call" if running else "before its call began"
            request.fail(GrpoError(f"the {self._who} was closed {when}"))
        await cancel(list(self._calls))

    def put_first(self, some: Iterable[Unit]) -> None:
        """Put units back into the queue, unless their caller is gone."""
        first = [unit for unit in some if unit in unit.request.left]
        for unit in first:
            unit.running = False
        self._queue = dict.fromkeys(first) | self._queue

    def schedule(self, *, waited: bool = False) -> None:
        """Begin the calls for which there is room; a batch if it is full or has ``waited``."""
        while not self._closed and (chosen := self._next(waited=waited)) is not None:
            some, slots, alone = chosen
            for unit in some:
                del self._queue[unit]
                unit.running = True
            self._used += slots
            self._batching |= not some[0].slotted
            # a call has the context of its first caller, whoever begins it
            running = asyncio.get_running_loop().create_task(
                self._call(some, slots, alone=alone),
                name="call" if some[0].slotted else "batched call",
                context=some[0].request.context,
            )
            self._calls[running] = some
            running.add_done_callback(partial(self._ended, slots))

    # ------------------------------------------------------------------------------ internals

    def _next(self, *, waited: bool) -> tuple[list[Unit], int, bool] | None:
        """Return the units of the next call, the number of its slots, and whether the unit is alone."""
        number = max(1, self._caller.about.concurrency)
        free = number - self._used
        batch: list[Unit] = []
        size = 0
        for unit in self._queue if free else ():
            away = unit.service.away
            if (away or unit.service.late) and not unit.service.may_call(unit):
                continue
            alone = away or unit.alone
            if unit.slotted or alone:
                slots = 1 if away else number if alone else min(unit.slots, number)
                if slots > free or (self._batching and not unit.slotted):
                    break  # later ones wait as well, so that its turn comes
                return [unit], slots, alone
            if self._batching:
                continue
            if batch and (size + len(unit.items) > self._max_batch or not _together(unit, batch[0])):
                size = self._max_batch
                break
            batch.append(unit)
            size += len(unit.items)
            if size >= self._max_batch:
                break
        if not batch:
            return None
        loop = asyncio.get_running_loop()
        due = batch[0].arrived + (self._max_wait if batch[0].method != "open" else 0.0)
        if waited or size >= self._max_batch or due < loop.time():
            return batch, 1, False
        if self._timer is None:  # one of no wait is for those of the same moment
            now = due <= loop.time()
            self._timer = loop.call_soon(self._waited) if now else loop.call_at(due, self._waited)
        return None

    def _waited(self) -> None:
        self._timer = None
        self.schedule(waited=True)

    async def _call(self, some: list[Unit], slots: int, *, alone: bool) -> None:
        items = [item for unit in some for item in unit.items]
        began = asyncio.get_running_loop().time()
        try:
            found = await self._caller.call(some[0].method, items, slots)
            if isinstance(found, Failure):
                self._failed(some, found, slots, began, alone=alone)
            else:
                if len(found) != len(items):
                    raise PluginError(f"a call with {len(items)} items returned {len(found)} results")
                self._deliver(some, found, began, alone=alone)
        except Exception as error:
            if isinstance(error, PluginError) and not any(unit in unit.request.left for unit in some):
                self._broken = error
            for unit in some:
                unit.request.fail(error)

    def _ended(self, slots: int, call: asyncio.Task[None]) -> None:
        some = self._calls.pop(call)
        self._used -= slots
        self._batching &= some[0].slotted
        for unit in some:
            unit.service.settle()
        self.schedule()

    def _deliver(self, some: list[Unit], results: Sequence[Any], began: float, *, alone: bool) -> None:
        """Give the units their results, unless a service was away."""
        here, away = [], []
        begin = 0
        for unit in some:
            its = results[begin : begin + len(unit.items)]
            begin += len(its)
            if (error := next(filter(None, map(_unavailable, its)), None)) is None:
                here.append((unit, its))
            else:
                away.append((unit, error, its))
        self._unanswered(away, alone=alone)
        for unit, its in here:
            unit.service.answered(unit, began)
            self._count(unit, None)
            unit.deliver(its)

    def _unanswered(self, some: Sequence[tuple[Unit, Unavailable, Sequence[Any]]], *, alone: bool) -> None:
        away: dict[Service, Unavailable] = {}
        for unit, error, results in some:
            if unit.service.failed(unit, error, results, alone=alone):
                away[unit.service] = error
        for service, error in away.items():
            service.go_away(error)

    def _failed(self, some: list[Unit], failure: Failure, slots: int, began: float, *, alone: bool) -> None:
        error = failure.unavailable
        if error is not None and not error.timed_out:
            self._unanswered([(unit, error, unit.failed(failure)) for unit in some], alone=alone)
            return
        unit = some[0]
        if len(some) > 1:
            batch = _Batch(failure, dict.fromkeys(some), sum(len(each.items) for each in some), len(some))
            for each in some:
                each.batch = batch
            self.put_first(some)
            return
        if failure.died and not failure.alone and slots < self._caller.about.concurrency:
            unit.slots = slots * COMPANY
            self.put_first([unit])
            return
        if isinstance(failure.cause, DeadlineExceeded) and not failure.died:
            report("deadline", self._who, failure.brief)
        elif not failure.died:
            report("call_failed", self._who, failure.brief, fault=fault_of(failure.cause))
        results = unit.failed(failure)
        self._count(unit, failure)
        if error is not None:
            self._unanswered([(unit, error, results)], alone=alone)
        else:
            unit.service.answered(unit, began)
            unit.deliver(results)

    def _count(self, unit: Unit, failure: Failure | None) -> None:
        """Count the result of a unit that was called alone because its batch had failed."""
        batch = unit.batch
        if batch is None:
            return
        unit.forget_batch()
        batch.succeeded += failure is None
        batch.in_a_row = batch.in_a_row + 1 if failure else 0
        if failure is not None and batch.in_a_row >= GIVE_UP_AFTER:
            for rest in list(batch.left):
                self._queue.pop(rest, None)
                rest.deliver(rest.failed(failure))
        if batch.succeeded and not batch.left:
            report(
                "batch_failed",
                self._who,
                f"batches of {batch.size} fail ({batch.failure.brief}); {batch.succeeded} of {batch.units} "
                f"{'single calls' if batch.size == batch.units else 'calls with one group'} succeed",
                fault=fault_of(batch.failure.cause),
            )

    async def _withdraw(self, request: _Request) -> None:
        """Remove the units of a caller that is gone, and cancel the calls that are for it alone."""
        for unit in list(request.left):
            self._queue.pop(unit, None)
            unit.leave()
            unit.service.late.pop(unit, None)
            unit.service.settle()
        gone = [
            call
            for call, some in self._calls.items()
            if some[0].slotted and not any(unit in unit.request.left for unit in some)
        ]
        await cancel(gone)
        self.schedule()


def _together(unit: Unit, first: Unit) -> bool:
    """Return whether two units may share a call: opening takes time, which counts for one caller."""
    return unit.method == first.method and (unit.method != "open" or unit.request is first.request)


def _unavailable(result: Any) -> Unavailable | None:
    """Return the error of the service; after answers of tools, it is that of another one."""
    if isinstance(result, Exception):
        return unavailable(result)
    found: Unavailable | None = getattr(result, "unavailable", None)
    return None if found is None or getattr(result, "messages", None) else found
