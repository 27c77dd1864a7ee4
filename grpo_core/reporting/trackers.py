"""Makes the trackers of a run, and sends them its events, each on its own thread, off the event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import Any

from attrs import evolve, fields

from grpo_core.config import Config, TrackingConfig
from grpo_core.contracts import events
from grpo_core.contracts.errors import (
    ConfigError,
    Fault,
    GrpoError,
    PluginError,
    TrackingError,
    did_you_mean,
    fault_of,
    shortened,
)
from grpo_core.contracts.incidents import IncidentCounts
from grpo_core.contracts.protocols import Tracker
from grpo_core.contracts.records import RunInfo
from grpo_core.environments.outages import JITTER, Outage, unavailable
from grpo_core.loop.metrics import validation_metrics
from grpo_core.plugins.host import PluginHost
from grpo_core.processes.secrets import masked

BACKLOG = 10_000
"""Number of events that may wait for a tracker."""
TOKENS = 20_000_000
"""Number of tokens of the rollouts that may wait for a tracker: about 300 MB."""
PATIENCE = 30.0
"""Seconds that the end of a run waits for a tracker to finish."""
AWAY = 600.0
"""Seconds for which calls of a tracker whose service is unavailable are retried."""
REQUIRED_PATIENCE = 300.0
"""Seconds that a run waits for a required tracker: enough for a slow disk."""

log = logging.getLogger(__name__)

OnFailure = Callable[[str, TrackingError, bool], None]
Item = events.Event | Callable[[], None] | None
"""An event, a function to call after all events before it, or the end."""


class Trackers:
    """The trackers of a run.

    Make it inside the event loop; every method but ``emit`` belongs to that loop.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._failed = asyncio.Event()
        self._error: TrackingError | None = None
        self.step = 0
        self.incidents = IncidentCounts(self._tell)
        """Counts incidents, and emits them as events, alone or with others of their kind."""
        self._threads: list[TrackerThread] = []
        self._metrics: dict[str, float] = {}
        self._reason = ""
        self._end: Callable[[str], None] | None = None
        self._closing = False

    def add(self, trackers: Mapping[str, Tracker], states: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Start trackers, by name, each with its state in the checkpoint of a resumed run, if it has one."""
        for name, tracker in trackers.items():
            thread = TrackerThread(name, tracker, self._on_failure)
            if name in states:
                thread.load(states[name])
            self._threads.append(thread)

    def info(self, run: RunInfo, name: str) -> RunInfo:
        """Return the run with functions that a tracker of this name may call, on any thread."""

        def warn(text: str, *, cause: str = f"tracker {name!r}", step: int | None = None) -> None:
            at = self.step if step is None else step
            warning = events.WarningRaised(step=at, cause=cause, message=str(text))
            self._in_loop(partial(self.emit, warning))

        def stop(reason: str) -> None:
            self._in_loop(partial(self._stop, str(reason) or f"tracker {name!r}"))

        def set_metrics(values: Mapping[str, float]) -> None:
            numbers = {str(key): float(value) for key, value in values.items()}
            self._in_loop(partial(self._metrics.update, numbers))

        def show(name: str, text: str) -> None:
            line = events.LineShown(step=self.step, name=str(name), text=str(text))
            self._in_loop(partial(self.emit, line))

        return evolve(run, warn=warn, stop=stop, set_metrics=set_metrics, show=show)

    def metrics(self) -> Mapping[str, float]:
        """Return the numbers that trackers have set."""
        return self._metrics

    def on_stop(self, end: Callable[[str], None]) -> None:
        """Call ``end`` with the reason when a tracker stops the run; at once if one already has."""
        self._end = end
        if self._reason:
            end(self._reason)

    def _stop(self, reason: str) -> None:
        self._reason = self._reason or reason
        if self._end is not None:
            self._end(self._reason)

    def states(self) -> Callable[[], Awaitable[dict[str, Any]]]:
        """Request the trackers' states after all events so far; the returned function waits for them.

        A state that does not come within ``PATIENCE`` is left out, with a warning.
        """
        asked = [
            (thread, asyncio.wrap_future(thread.state(), loop=self._loop))
            for thread in self._threads
            if thread.has_state
        ]

        async def found() -> dict[str, Any]:
            if asked:
                await asyncio.wait([state for _, state in asked], timeout=PATIENCE)
            for thread, state in asked:
                if not state.done():
                    message = (
                        f"{thread.who} has not returned from {thread.doing} for {PATIENCE:g} s; "
                        "the checkpoint does not contain its state"
                    )
                    self.emit(events.WarningRaised(step=self.step, cause=thread.who, message=message))
            done = {thread.name: state.result() for thread, state in asked if state.done()}
            return {name: state for name, state in done.items() if state is not None}

        return found

    def emit(self, event: events.Event) -> None:
        """Send an event to all trackers; returns at once.

        It waits only for a required tracker that is far behind.  Raises TrackingError if that takes longer
        than ``REQUIRED_PATIENCE``; the others have the event then, and this one gets no more.
        """
        if isinstance(event, events.RunEnded):
            self.incidents.flush()
        self.step = max(self.step, event.step)
        event = evolve(event, time=time.time(), **_texts(event))
        stuck = [error for thread in self._threads if (error := thread.put(event)) is not None]
        if stuck:
            raise stuck[0]

    def status(self, message: str, part: float | None = None) -> None:
        """Emit the run's current activity, and the share of it that is done."""
        self.emit(events.StatusChanged(step=self.step, message=message, part=part))

    def stage(self, stage: str) -> None:
        """Emit the stage of the loop that begins."""
        self.emit(events.StageBegan(step=self.step, stage=stage))

    async def flush(self) -> None:
        """Return when the working required trackers have handled every event so far.

        Raises TrackingError if one of them failed, or did not finish within ``REQUIRED_PATIENCE``.
        """
        for thread in self._required():
            if thread.dropped:
                continue
            written = asyncio.Event()
            thread.put(partial(self._in_loop, written.set))
            try:
                async with asyncio.timeout(REQUIRED_PATIENCE):
                    await written.wait()
            except TimeoutError:
                raise thread.is_stuck() from None
        self.check()

    async def watch(self) -> None:
        """Raise TrackingError as soon as a required tracker fails; never returns otherwise."""
        await self._failed.wait()
        self.check()

    def check(self) -> None:
        """Raise TrackingError if a required tracker failed."""
        if self._error is not None:
            raise self._error

    async def close(self) -> None:
        """End all trackers; the required ones first, since others may read what they wrote."""
        self._closing = True
        required = self._required()
        for threads in (required, [thread for thread in self._threads if thread not in required]):
            until = time.monotonic() + PATIENCE
            for thread in threads:
                thread.put(None)
            for thread in threads:
                await asyncio.to_thread(thread.join, until)

    @property
    def ended(self) -> bool:
        """Whether all trackers have handled everything, and were closed."""
        return all(thread.ended for thread in self._threads)

    def _tell(self, incident: events.IncidentReported) -> None:
        self.emit(evolve(incident, step=self.step))

    def _required(self) -> list[TrackerThread]:
        return [thread for thread in self._threads if thread.required]

    def _on_failure(self, name: str, error: TrackingError, required: bool) -> None:
        """Called on the tracker's thread, or by ``emit``."""
        self._in_loop(partial(self._report, name, error, required))

    def _report(self, name: str, error: TrackingError, required: bool) -> None:
        message = f"{error}; it is not called again"
        if required:
            self._error = self._error or error
            self._failed.set()
        elif self._closing:  # nobody hears an event any more
            log.warning("%s", message)
        else:
            self.emit(events.WarningRaised(step=self.step, cause=name, message=message, fault=error.fault))

    def _in_loop(self, call: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # a tracker that was left behind outlives the loop
            self._loop.call_soon_threadsafe(call)


class TrackerThread:
    """A tracker, its thread, and the events on their way to it.

    Args:
        name: as the configuration calls the tracker.
        tracker: called on the thread, and only there.
        on_failure: called once, with the tracker's name in messages, the error, and ``tracker.required``.
    """

    def __init__(self, name: str, tracker: Tracker, on_failure: OnFailure) -> None:
        self.name, self.who, self.required = name, f"tracker {name!r}", tracker.required
        self._tracker, self._on_failure = tracker, on_failure
        self._waiting: deque[Item] = deque()
        self._tokens = 0
        """Number of tokens of the rollouts in ``_waiting``."""
        self._change = threading.Condition()
        self.doing = "its start"
        """The event or method of its last call."""
        self.dropped = False
        """Whether it has failed, so that it is not called again."""
        self._thread = threading.Thread(target=self._run, name=self.who, daemon=True)
        self._thread.start()

    def put(self, item: Item) -> TrackingError | None:
        """Add an item; a tracker that is too far behind is dropped, which is an error if it is required."""
        if isinstance(item, events.Event) and not self._hears(item):
            return None
        with self._change:
            patience = REQUIRED_PATIENCE if self.required else 0.0
            room = not isinstance(item, events.Event) or self._change.wait_for(self._has_room, patience)
            if room:
                self._waiting.append(item)
                self._tokens += _tokens(item)
                self._change.notify_all()
        if room:
            return None
        behind = TrackingError(f"{self.who} is too far behind the run, in {self.doing}")
        error = self.is_stuck() if self.required else behind
        self._drop(error)
        return error if self.required else None

    @property
    def ended(self) -> bool:
        """Whether the tracker has handled everything, and was closed."""
        return not self._thread.is_alive()

    def is_stuck(self) -> TrackingError:
        """The error of a required tracker that does not finish."""
        return TrackingError(f"{self.who} has not returned from {self.doing} for {REQUIRED_PATIENCE:g} s")

    def join(self, until: float) -> None:
        """Wait for the end, until a moment of the monotonic clock."""
        self._thread.join(0.0 if self.dropped else max(0.0, until - time.monotonic()))
        if self._thread.is_alive() and not self.dropped:
            log.warning("%s has not returned from %s; the run ends without it", self.who, self.doing)

    @property
    def has_state(self) -> bool:
        """Whether it is still called, and has a state."""
        return not self.dropped and type(self._tracker).state_dict is not Tracker.state_dict

    def load(self, state: Any) -> None:
        """Give the tracker its state before any event."""
        self.put(partial(self._call, "load_state_dict()", partial(self._tracker.load_state_dict, state)))

    def state(self) -> concurrent.futures.Future[Any]:
        """Return a future of the tracker's state after all events so far; None if it fails before."""
        found: concurrent.futures.Future[Any] = concurrent.futures.Future()

        def ask() -> None:
            self._call("state_dict()", lambda: found.set_result(_as_saved(self._tracker.state_dict())))
            if not found.done():
                found.set_result(None)

        self.put(ask)
        return found

    def _hears(self, event: events.Event) -> bool:
        """Whether the tracker is still called, and defines a method for the event."""
        kind = type(self._tracker)
        return not self.dropped and (
            kind.event is not Tracker.event
            or (isinstance(event, events.GroupsReady) and kind.rollouts is not Tracker.rollouts)
            or (
                isinstance(event, events.StepEnded | events.Validated) and kind.metrics is not Tracker.metrics
            )
        )

    def _has_room(self) -> bool:
        return self.dropped or (len(self._waiting) < BACKLOG and self._tokens < TOKENS)

    # ------------------------------------------------------------------------------ on the thread

    def _run(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: bool(self._waiting))
                item = self._waiting.popleft()
                self._tokens -= _tokens(item)
                self._change.notify_all()
            if item is None:
                break
            if not isinstance(item, events.Event):
                item()
            else:
                self._call(type(item).__name__, partial(call, self._tracker, item))
        self.doing = "close()"
        self._try(self._tracker.close)

    def _call(self, doing: str, work: Callable[[], object]) -> None:
        if not self.dropped:
            self.doing = doing
            self._try(work)

    def _try(self, work: Callable[[], object]) -> None:
        try:
            self._when_here(work)
        except Exception as error:
            what_to_do = (
                ". The run needs it: fix the cause and continue with --resume" if self.required else ""
            )
            said = error if isinstance(error, GrpoError | OSError) else fault_of(error)
            failure = TrackingError(f"{self.who} failed in {self.doing}: {said}{what_to_do}")
            if self.required and isinstance(error, ConfigError):
                failure = TrackingError(str(error))
                failure.exit_status = error.exit_status
            failure.__cause__ = error
            self._drop(failure.carrying(fault_of(error)))

    def _when_here(self, work: Callable[[], object]) -> None:
        """Do the work; retry it while an error says that a service is unavailable."""
        outage = Outage(AWAY, JITTER.random)
        outage.answered(0.0)
        while True:
            try:
                work()
                return
            except Exception as error:
                away = unavailable(error)
                if away is None or self.dropped:
                    raise
                outage.failed(time.monotonic(), away.retry_after)
                if outage.over:
                    raise
                if outage.failures == 1:
                    message = f"{self.who}: its service is unavailable in {self.doing}: {away}; retrying"
                    log.warning("%s", message)
            time.sleep(max(0.0, outage.due - time.monotonic()))

    def _drop(self, error: TrackingError) -> None:
        with self._change:
            if self.dropped:
                return
            self._on_failure(self.who, error, self.required)
            self.dropped = True  # last: whoever sees it may end the loop that reports the error
            self._change.notify_all()


def call(tracker: Tracker, event: events.Event) -> None:
    """Call the methods of a tracker that an event is for; its rollouts have no secrets."""
    if isinstance(event, events.GroupsReady | events.ValidationPlayed):
        event = masked(event)
    tracker.event(event)
    match event:
        case events.GroupsReady():
            tracker.rollouts(event.step + 1, event.groups)
        case events.StepEnded():
            tracker.metrics(event.step, event.metrics)
        case events.Validated():
            tracker.metrics(event.version, validation_metrics(event.results))


def _as_saved(state: Any) -> Any:
    """Return a state as read back from a checkpoint.  Raises TypeError or ValueError if it is not JSON."""
    saved = json.loads(json.dumps(state, allow_nan=False))
    if not isinstance(saved, dict) or saved != state:
        raise TypeError("state_dict() returned a value that JSON would change; return a dict of JSON values")
    return saved


def _texts(event: events.Event) -> dict[str, Any]:
    """Return the texts of an event without secrets; an error that quotes a whole batch is shortened."""
    found: dict[str, Any] = {}
    for each in fields(type(event)):
        value = getattr(event, each.name)
        if isinstance(value, Fault):
            found[each.name] = masked(value)
        elif isinstance(value, str):
            text = masked(value)
            found[each.name] = shortened(text) if each.name in ("error", "message") else text
    return found


def _tokens(item: Item) -> int:
    if not isinstance(item, events.GroupsReady | events.ValidationPlayed):
        return 0
    rollouts = (rollout for group in item.groups for rollout in group.rollouts)
    return sum(len(segment.tokens) for rollout in rollouts for segment in rollout.segments)


# ---------------------------------------------------------------------------------- the choice of trackers

ALWAYS = ("diagnosis",)
"""Trackers of the core that each run has."""


def selected(config: TrackingConfig, host: PluginHost) -> list[str]:
    """Return the names of the run's trackers; ``"*"`` is those that plugins offer by default."""
    every = {"*": host.in_role("tracker", "is_default")}
    chosen = (each for name in config.trackers for each in every.get(name, [name]))
    return list(dict.fromkeys([*chosen, *ALWAYS]))


def check_trackers(config: TrackingConfig, host: PluginHost) -> None:
    """Check names and options without making a tracker.

    Raises ConfigError if a tracker is not installed or has no such option, and for options of a tracker that
    is not selected.
    """
    names = selected(config, host)
    for name in names:
        try:
            host.check_options("tracker", name, config.options.get(name, {}))
        except PluginError as error:
            raise ConfigError(f"tracking.trackers: {error}") from error
    for name in config.options:
        if name not in names:
            near = did_you_mean(name, set(names))
            raise ConfigError(
                f"tracking.{name}: options of a tracker that tracking.trackers does not select.{near} "
                f"It selects: {', '.join(names) or 'no tracker'}"
            )


def make_trackers(config: Config, host: PluginHost, run: Callable[[str], RunInfo]) -> dict[str, Tracker]:
    """Make the selected trackers and the trackers of sections, by name; each gets ``run(name)``.

    Raises PluginError if one cannot be made, after closing the others.
    """
    chosen = {name: config.tracking.options.get(name, {}) for name in selected(config.tracking, host)}
    own = {each.name: each.values for each in config.sections if host.offers("tracker", each.name)}
    made: dict[str, Tracker] = {}
    try:
        for name, options in (chosen | own).items():
            tracker = host.make("tracker", name, run(name), **options)
            if not isinstance(tracker, Tracker):
                raise PluginError(
                    f"{host.find('tracker', name)}: its factory returned {type(tracker).__name__}; expected "
                    "a subclass of grpo_core.Tracker"
                )
            made[name] = tracker
    except PluginError:
        for tracker in made.values():
            tracker.close()
        raise
    return made
