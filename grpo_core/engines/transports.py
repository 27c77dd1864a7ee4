"""The transports of weights: an engine's factory declares those it accepts, and the core chooses one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar, get_args

Transport = Literal["shm", "cuda_ipc", "collective"]
"""``shm``: memory of the trainer's machine; ``cuda_ipc``: memory of the trainer's GPU; ``collective``: sent
by NCCL or TCP, also to other machines."""

FactoryT = TypeVar("FactoryT", bound=Callable[..., Any])

_ATTRIBUTE = "__grpo_transports__"
_DEFAULT: tuple[Transport, ...] = ("shm",)


def takes_weights_by(*transports: Transport) -> Callable[[FactoryT], FactoryT]:
    """Decorates an engine's factory (a class or a function) with the transports that its engines can take.

    Without it, weights come as ``"shm"``: a file that the engine maps.  An engine that reads weights with
    ``grpo_core.kit.read_weights`` can take them by all three.

        @takes_weights_by("shm", "cuda_ipc", "collective")
        class MyEngine(ChildEngine): ...

    Raises ValueError for a transport that does not exist.
    """
    known = get_args(Transport)
    for transport in transports:
        if transport not in known:
            raise ValueError(f"transport {transport!r}: expected {', '.join(map(repr, known))}")

    def decorate(factory: FactoryT) -> FactoryT:
        setattr(factory, _ATTRIBUTE, transports)
        return factory

    return decorate


def transports_of(factory: Callable[..., Any]) -> tuple[Transport, ...]:
    """The transports that a factory declares; ``("shm",)`` if it declares nothing."""
    declared: tuple[Transport, ...] = getattr(factory, _ATTRIBUTE, _DEFAULT)
    return declared
