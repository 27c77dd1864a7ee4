"""The cluster, and what a worker must have in common with the driver."""

from __future__ import annotations

import contextlib
import importlib
import os
import platform
import re
import signal
import socket
import threading
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from attrs import evolve, field, frozen

from grpo_core import ChildDied, ConfigError, EngineError, GrpoError, PluginError
from grpo_core.kit import Incident, RemoteTraceback, Selected, report

ENVIRON = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
"""Environment variables that choose Ray's coming defaults, about which it warns."""
ENVIRON_ALONE = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # the name is Ray's: without clusters it listens on the loopback address only, on Linux too
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}
"""Environment variables of a local cluster; Ray reads them when it is imported."""
REACH = 10.0
"""Seconds for a cluster to answer at all."""


@contextlib.contextmanager
def connected(address: str, *, cpus: int) -> Iterator[None]:
    """A Ray cluster for as long as this lasts.

    Args:
        address: of a running cluster, as Ray writes it ("auto", "host:6379", "ray://host:10001"); empty:
            one of this machine alone is started, which no other machine can reach, and ended.
        cpus: that a cluster of this machine alone says it has.

    Raises ConfigError if Ray is not installed, or there is no such cluster.
    """
    alone = not address
    for key, value in (ENVIRON | ENVIRON_ALONE if alone else ENVIRON).items():
        os.environ.setdefault(key, value)
    ray = load()
    if ray.is_initialized():
        yield
        return
    chosen: dict[str, Any] = {"address": address}
    if alone:
        chosen = {"address": "local", "num_cpus": cpus, "include_dashboard": False}
    try:
        # Ray itself tries for more than a minute if nobody answers there
        if (spelled := re.fullmatch(r"(?:ray://)?([\w.-]+):(\d+)", address)) is not None:
            socket.create_connection((spelled[1], int(spelled[2])), timeout=REACH).close()
        with _signals_of_the_run():
            ray.init(log_to_driver=False, logging_level="error", **chosen)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"--ray {address}: cannot be joined or started ({error}); start a cluster with "
            "`ray start --head` and give its address, or leave the address out for one of this machine alone"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _signals_of_the_run() -> Iterator[None]:
    """Start Ray so that the run saves its work: Ray's processes get no SIGHUP, and the run gets SIGTERM.

    A closed terminal sends SIGHUP to all processes of the run's group.  For SIGTERM, Ray sets a handler that
    exits at once.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def load() -> Any:
    """Ray itself.  Raises ConfigError if it is not installed."""
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ConfigError(f"--ray: Ray is not installed ({error}); pip install 'grpo-core[ray]'") from None


# ---------------------------------------------------------------------------------- the software of a worker


@frozen(kw_only=True)
class PluginRequirement:
    """The driver's side of a plugin, for comparison with the worker's."""

    name: str
    """Name of the offer, as a worker finds it."""
    allow: tuple[str, ...] | None
    """Plugins that the worker loads: the one that is needed."""
    versions: Mapping[str, str] = field(factory=dict)

    @classmethod
    def of(cls, selected: Selected) -> PluginRequirement:
        plugin = selected.plugin
        installed = (plugin.distribution,) if _version(plugin.distribution) != MISSING else ()
        allow = () if plugin.distribution == "grpo-core" else installed
        return evolve(cls.software(*installed), name=absolute(selected.name), allow=allow)

    @classmethod
    def elsewhere(cls, name: str) -> PluginRequirement:
        """Return the requirement for an offer that only another interpreter of the worker can find."""
        return evolve(cls.software(), name=absolute(name))

    @classmethod
    def software(cls, *distributions: str) -> PluginRequirement:
        """Return the requirement of Python, grpo-core and other distributions, and of no plugin."""
        versions = {"python": _python(), **{name: _version(name) for name in ("grpo-core", *distributions)}}
        return cls(name="", allow=None, versions=versions)

    def check(self, who: str) -> None:
        """Raise PluginError that lists the differences to this process."""
        here = {name: _python() if name == "python" else _version(name) for name in self.versions}
        differences = [
            f"{name} {here[name]} (the driver has {theirs})"
            for name, theirs in self.versions.items()
            if here[name] != theirs
        ]
        if differences:
            raise PluginError(
                f"{who}: has not the driver's versions: {', '.join(differences)}; install the same everywhere"
            )


MISSING = "is not installed"


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return MISSING


def _python() -> str:
    return ".".join(platform.python_version_tuple()[:2])


def absolute(name: str) -> str:
    """``./file.py:Class`` as a worker finds it, which has another working directory."""
    spelled = re.fullmatch(r"(.+\.py)((?::.*)?)", name)
    return f"{Path(spelled[1]).expanduser().resolve()}{spelled[2]}" if spelled else name


def where() -> str:
    """Name this machine and process, for messages."""
    return f"{platform.node()}, process {os.getpid()}"


# ---------------------------------------------------------------------------------- calls


async def call(worker: Any, method: str, *args: Any, who: str) -> Any:
    """Await a method of an actor.

    Raises what it raised, an error that is none of ours as an EngineError; ChildDied if the actor is gone.
    """
    return await answer_of(getattr(worker, method).remote(*args), who=who)


async def answer_of(reference: Any, *, who: str, kept: type[Exception] = GrpoError) -> Any:
    """Await the answer of a call that an actor has been sent; raises as ``call`` does.

    ``kept``: class of the errors that are raised as they are.
    """
    ray = load()
    try:
        return await reference
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        told = cause if isinstance(cause, kept) else EngineError(f"{who}: {cause!r}")
        raise told from RemoteTraceback(str(error))
    except ray.exceptions.RayError as error:
        raise ChildDied(f"{who} is gone: {brief(error)}") from error


def report_again(incidents: Iterable[Incident], name: str, who: str) -> None:
    """Report what happened in a worker to the run of the driver.

    Args:
        name: of the worker in the run: "engine 0".
        who: the same with its machine and process.
    """
    for each in incidents:
        report(each.kind, name, f"{who}: {each.message}", traceback=each.traceback)


def brief(error: BaseException) -> str:
    """Ray's words, without the advice and the identifiers."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [
        line for line in lines if not re.match(r"(class_name|actor_id|pid|namespace|ip|name|repr):", line)
    ]
    return f"{type(error).__name__}: {' '.join(told)[:400]}"
