"""The connection to a cluster, and the comparison of a worker's software with the driver's."""

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
from grpo_core.contracts.incidents import Incident
from grpo_core.kit import PluginSelection, report
from grpo_core.plugins import offers
from grpo_core.processes.served import RemoteTraceback

ENVIRON = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
"""Environment variables that select Ray's future defaults, to avoid its warnings."""
ENVIRON_ALONE = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray's name; without clusters Ray listens on the loopback address only, on Linux as well
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}
"""Environment variables of a local cluster, which Ray reads during its import."""
REACH = 10.0
"""Time limit in seconds for the first answer of a cluster."""


@contextlib.contextmanager
def connected(address: str, *, cpus: int) -> Iterator[None]:
    """Connect to a Ray cluster for the duration of the block.

    Args:
        address: address of a running cluster ("auto", "host:6379", "ray://host:10001"); empty starts a
            cluster on this machine, unreachable for others, for the duration of the block.
        cpus: number of CPUs that a local cluster declares.

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
        # Ray would retry for more than a minute
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
    """Protect the run's signal handling while Ray starts.

    Ray's processes ignore SIGHUP, which a closed terminal sends to the whole process group, so that the run
    can save its work.  Ray's handler for SIGTERM, which exits at once, is replaced by the previous one.
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
    """Import Ray.  Raises ConfigError if it is not installed."""
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ConfigError(f"--ray: Ray is not installed ({error}); pip install 'grpo-core[ray]'") from None


# ---------------------------------------------------------------------------------- the software of a worker


@frozen(kw_only=True)
class PluginRequirement:
    """Versions of a plugin and its dependencies on the driver, to compare with a worker's."""

    name: str
    """Name of the offer on a worker."""
    plugins: PluginSelection = field(factory=PluginSelection)
    """Plugins that the worker loads."""
    versions: Mapping[str, str] = field(factory=dict)

    @classmethod
    def of(cls, selected: offers.Selected, directory: str = "") -> PluginRequirement:
        plugin = selected.plugin
        installed = (plugin.distribution,) if _version(plugin.distribution) != MISSING else ()
        allow = () if plugin.distribution == "grpo-core" else installed
        plugins = PluginSelection(allow=allow, directory=directory)
        return evolve(cls.software(*installed), name=absolute(selected.name), plugins=plugins)

    @classmethod
    def elsewhere(cls, name: str, directory: str) -> PluginRequirement:
        """Return the requirement for an offer that only another interpreter on the worker can import."""
        plugins = PluginSelection(directory=directory)
        return evolve(cls.software(), name=absolute(name), plugins=plugins)

    @classmethod
    def software(cls, *distributions: str) -> PluginRequirement:
        """Return the requirement of Python, grpo-core and other distributions, without a plugin."""
        versions = {"python": _python(), **{name: _version(name) for name in ("grpo-core", *distributions)}}
        return cls(name="", versions=versions)

    def check(self, who: str) -> None:
        """Raise PluginError with the differences to this process, if any."""
        here = {name: _python() if name == "python" else _version(name) for name in self.versions}
        differences = [
            f"{name} {here[name]} (the driver has {theirs})"
            for name, theirs in self.versions.items()
            if here[name] != theirs
        ]
        if differences:
            raise PluginError(
                f"{who}: versions differ from the driver's: {', '.join(differences)}; install the same ones"
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
    """Return ``./file.py:Class`` with an absolute path, since workers have another working directory."""
    spelled = re.fullmatch(r"(.+\.py)((?::.*)?)", name)
    return f"{Path(os.path.expanduser(spelled[1])).resolve()}{spelled[2]}" if spelled else name


def where() -> str:
    """Return the name of this machine and process, for messages."""
    return f"{platform.node()}, process {os.getpid()}"


# ---------------------------------------------------------------------------------- calls


async def call(worker: Any, method: str, *args: Any, who: str) -> Any:
    """Await a method of an actor.

    Raises the method's GrpoError, EngineError for any other error, or ChildDied if the actor is gone.
    """
    return await answer_of(getattr(worker, method).remote(*args), who=who)


async def answer_of(reference: Any, *, who: str, kept: type[Exception] = GrpoError) -> Any:
    """Await the answer of a submitted call; raises like ``call``.

    ``kept``: class of errors that are raised unchanged.
    """
    ray = load()
    try:
        return await reference
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        failure = cause if isinstance(cause, kept) else EngineError(f"{who}: {cause!r}")
        raise failure from RemoteTraceback(str(error))
    except ray.exceptions.RayError as error:
        raise ChildDied(f"{who} is gone: {brief(error)}") from error


def report_again(incidents: Iterable[Incident], name: str, who: str) -> None:
    """Report a worker's incidents to the driver's run.

    Args:
        name: name of the worker in the run, such as "engine 0".
        who: name with machine and process.
    """
    for each in incidents:
        report(each.kind, name, f"{who}: {each.message}", fault=each.fault)


def brief(error: BaseException) -> str:
    """Return Ray's message without its advice and identifiers."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    message = [
        line for line in lines if not re.match(r"(class_name|actor_id|pid|namespace|ip|name|repr):", line)
    ]
    return f"{type(error).__name__}: {' '.join(message)[:400]}"
