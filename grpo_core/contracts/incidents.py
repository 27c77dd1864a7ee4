"""Reports of faults that a run survived, from any component to its run.

A component does not know its run.  The run sets where reports go (``reported_to``), a context variable that
its tasks inherit.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from math import inf

from attrs import define, evolve, field

from grpo_core.contracts.errors import Fault, one_line, shortened
from grpo_core.contracts.events import IncidentKind, IncidentReported
from grpo_core.contracts.unicode import well_formed

WORDS: Mapping[str, str] = {
    "batch_failed": "call{s} that passed in parts",
    "call_failed": "failed call{s}",
    "deadline": "call{s} over the deadline",
    "died": "dead process{es}",
    "replaced": "replaced engine{s}",
    "given_up": "engine{s} given up",
    "retried": "repeated call{s}",
    "session_lost": "lost session{s}",
    "doubted": "answer{s} right only on a second call",
    "late": "slow weight update{s}",
    "rollouts_late": "late batch{es} of rollouts",
    "rollouts_lost": "batch{es} of rollouts played again",
    "rollouts_orphaned": "batch{es} of rollouts without their process",
    "unscored": "batch{es} of rollouts without a reward",
    "skipped": "skipped prompt{s}",
    "agent_option": "unused option{s} of agents",
    "passed_over": "unusable checkpoint{s}",
    "control_in_text": "text{s} with a control token",
    "textless": "token{s} without text",
    "not_removed": "checkpoint{s} that could not be removed",
    "unavailable": "unavailable service{s}",
    "available": "service{s} back again",
}
"""Names of the kinds for people."""
MESSAGE = 2_000
"""Number of characters from which a message loses its middle."""
EVERY = 60.0
"""Seconds between two events of one kind and component."""
LINE = 300
"""Largest number of characters of a line for people."""

log = logging.getLogger("grpo_core")


Receive = Callable[[IncidentReported], None]
Cause = tuple[str, str]
"""Kind and component."""


def _to_log(incident: IncidentReported) -> None:
    log.warning("%s: %s", incident.component, incident.message)


_receive: ContextVar[Receive] = ContextVar("receiver of incidents", default=_to_log)


def report(kind: IncidentKind, component: str, message: str, *, fault: Fault | None = None) -> None:
    """Report a fault that was survived; call it on the event loop of the run.

    Args:
        kind: its cause; incidents of one kind and component are counted together.
        component: the part of the run, as messages name it: ``environment of task 'sort'``.
        message: what happened, with which value, and what to do if it continues.
        fault: the exception of an author's code, for the log.
    """
    said = well_formed(shortened(message, MESSAGE))
    _receive.get()(IncidentReported(kind=kind, component=component, message=said, fault=fault))


@contextmanager
def reported_to(receive: Receive) -> Iterator[None]:
    """Send the reports of this context, and of all tasks that it starts, to ``receive``."""
    token = _receive.set(receive)
    try:
        yield
    finally:
        _receive.reset(token)


@contextmanager
def reported_as(component: str) -> Iterator[None]:
    """Send the reports of this context under another name, such as the pool member's."""
    receive = _receive.get()
    with reported_to(lambda incident: receive(evolve(incident, component=component))):
        yield


@define(eq=False)
class IncidentCounts:
    """Counts incidents, and merges those that repeat.

    The first of a kind and component is told at once.  Later ones are told together, every ``EVERY`` seconds,
    and what is left when the counts are read.
    """

    tell: Receive
    """Receives an event, which may stand for several incidents."""
    clock: Callable[[], float] = time.monotonic
    """Returns the time in seconds."""
    counts: Counter[str] = field(init=False, factory=Counter)
    """Number of incidents by kind; ``read`` begins anew."""
    _waiting: dict[Cause, IncidentReported] = field(init=False, factory=dict)
    """The last incident of each cause that was not told."""
    _numbers: Counter[Cause] = field(init=False, factory=Counter)
    """How many there are."""
    _told: dict[Cause, float] = field(init=False, factory=dict)
    """Time when each cause was told last."""

    def receive(self, incident: IncidentReported) -> None:
        """Count an incident, or several in one event, and tell them now or later."""
        cause = incident.kind, incident.component
        self.counts[incident.kind] += incident.count
        self._waiting[cause] = incident
        self._numbers[cause] += incident.count
        self.flush(EVERY)

    def flush(self, after: float = 0.0) -> None:
        """Tell what waits, of causes that were not told for some seconds."""
        now = self.clock()
        for cause in [each for each in self._waiting if now - self._told.get(each, -inf) >= after]:
            self._told[cause] = now
            self.tell(evolve(self._waiting.pop(cause), count=self._numbers.pop(cause)))

    def read(self) -> dict[str, float]:
        """Return the numbers of incidents since the last call, by ``incidents/KIND``; ends a step."""
        self.flush()
        self._told.clear()
        counts = {f"incidents/{kind}": float(count) for kind, count in sorted(self.counts.items())}
        self.counts.clear()
        return counts


def line_of(incident: IncidentReported) -> str:
    """Describe an event on one line."""
    times = f" ({incident.count} times)" if incident.count > 1 else ""
    return f"{incident.component}: {one_line(incident.message, LINE)}{times}"


def lines_of_incidents(status: Callable[[str], None]) -> Receive:
    """Return a receiver that shows incidents as lines, at a limited rate."""
    return IncidentCounts(lambda incident: status(f"survived: {line_of(incident)}")).receive


def by_kind(counts: Mapping[str, float]) -> str:
    """Return numbers of incidents as text, the most frequent kind first: "12 failed calls, ..."."""
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    one, several = {"s": "", "es": ""}, {"s": "s", "es": "es"}
    named = ((WORDS.get(kind, kind), count) for kind, count in ranked)
    return ", ".join(
        f"{count:g} {words.format(**(one if count == 1 else several))}" for words, count in named
    )
