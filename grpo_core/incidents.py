"""Reports of faults that a run survived, from any component to the run that it works for.

A component does not know its run.  The run says where reports go (``reported_to``), and every task that it
starts inherits that, as all context variables are inherited.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

from attrs import frozen

Kind = Literal[
    "batch_failed",  # a batch failed while its parts, tried one by one, succeeded
    "call_failed",  # a call of an environment failed
    "deadline",  # a call took too long, and its process was killed
    "died",  # a process ended by itself
    "replaced",  # an engine of a pool was replaced
    "given_up",  # an engine of a pool is not replaced any more
    "retried",  # a request or a call was made again
    "session_lost",  # a session died with its process
]

log = logging.getLogger("grpo_core")


@frozen(kw_only=True)
class Incident:
    """A fault that was survived.

    Attributes:
        kind: its cause; incidents of one kind and component are counted together.
        component: the part of the run, as messages name it: ``environment of task 'sort'``.
        message: what happened, with which value, and what to do if it goes on.
        traceback: text for the log.
    """

    kind: Kind
    component: str
    message: str
    traceback: str = ""


Receive = Callable[[Incident], None]


def _to_log(incident: Incident) -> None:
    log.warning("%s: %s", incident.component, incident.message)


_receive: ContextVar[Receive] = ContextVar("receiver of incidents", default=_to_log)


def report(kind: Kind, component: str, message: str, *, traceback: str = "") -> None:
    """Report a fault that was survived; call it on the event loop of the run."""
    _receive.get()(Incident(kind=kind, component=component, message=message, traceback=traceback))


@contextmanager
def reported_to(receive: Receive) -> Iterator[None]:
    """Send the reports of this context, and of all tasks that it starts, to ``receive``."""
    token = _receive.set(receive)
    try:
        yield
    finally:
        _receive.reset(token)
