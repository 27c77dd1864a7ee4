"""The contract of environments, as checks that anybody may run on theirs; no library is needed for them.

from grpo_plugin_devkit.environments import EnvironmentContract

class TestMine(EnvironmentContract):
environment = Mine  # or a name, as in "math:sort"; then it runs in a process of its own
options = {"length": 3}
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from typing import Any, ClassVar

from grpo_core import ConfigError, GrpoError
from grpo_core.kit import Incident, PluginSelection, reported_to, sourced
from grpo_core.testing import HostedEnvironment, finished
from grpo_plugin_devkit.conformance import Conformance, Finding


class EnvironmentContract:
    """A test class for pytest: a subclass names its environment in attributes."""

    environment: ClassVar[Any] = None
    """A class or function that makes the environment, or its name as in a configuration."""
    options: ClassVar[Mapping[str, Any]] = {}
    """Options of the environment."""
    source: ClassVar[Mapping[str, Any]] = {}
    """Where its prompts come from, as ``source`` of a task: ``{"path": "train.jsonl"}``.  With a source the
    environment runs in a process of its own."""

    def test_the_environment_keeps_its_contract(self) -> None:
        """Check everything; the test fails with all that is broken."""
        environment = inspect.getattr_static(type(self), "environment")
        given = environment.__func__ if isinstance(environment, staticmethod) else environment
        assert given is not None, (
            f"{type(self).__name__} names no environment: set environment = YourClass, or its name"
        )
        if self.source and not isinstance(given, str):
            given = name_of(given)
        if isinstance(given, str):
            sections = {"source": self.source} if self.source else {}
            _assert_all(findings_by_name(given, {**self.options, **sections}))
        else:
            check_environment(functools.partial(given, **self.options))


def check_environment(make: Callable[[], Any]) -> None:
    """Runs ``grpo_plugin_devkit.conformance``; the test fails with all that is broken.

    Args:
        make: a new environment, the same each time; a class will do.  With ``async def run`` it plays its
            rollouts in a thread of this process; ``check_agent`` ends also if that blocks for ever.
    """
    _assert_all(environment_findings(make))


def check_agent(agent: type, **options: Any) -> None:
    """Check an environment with ``async def run``, a class of a module, in a child process.

    The test fails with all that is broken.
    """
    _assert_all(findings_by_name(name_of(agent), options))


def name_of(environment: Any) -> str:
    """Return the name by which another process finds a class or function of a module."""
    return f"{inspect.getfile(environment)}:{environment.__qualname__}"


def environment_findings(make: Callable[[], Any]) -> list[Finding]:
    """Return the findings of ``grpo_plugin_devkit.conformance`` about an environment in this process."""
    incidents: list[Incident] = []
    with reported_to(incidents.append), contextlib.closing(asyncio.Runner()) as runner:

        def wait(coroutine: Coroutine[Any, Any, Any]) -> Any:  # an agent asks a server, which needs a loop
            return runner.run(coroutine) if conformance.environment.runs_agents else finished(coroutine)

        conformance = Conformance(
            lambda: HostedEnvironment(make()), wait, incidents=incidents, side_by_side=False
        )
        conformance.start()
        try:
            return list(conformance.run())
        finally:
            conformance.end()


def findings_by_name(
    name: str, options: Mapping[str, Any], plugins: PluginSelection | None = None
) -> Iterator[Finding]:
    """Yield the findings about an environment in a child process, as a run starts it: it may hang or exit.

    Args:
        name: as in a configuration.
        options: of the environment; the tables ``environment`` and ``source`` are those of a run.
        plugins: that the child loads.

    Raises ConfigError if the options are wrong, or its source cannot be read.
    """
    own = dict(options)
    sections = sourced.taken_sections(own)
    config = sections.environment
    make = functools.partial(
        sourced.SourcedProcess,
        "check",
        name,
        own,
        config=config,
        plugins=plugins or PluginSelection(),
        source=sections.source,
    )
    incidents: list[Incident] = []
    with reported_to(incidents.append), asyncio.Runner() as runner:
        conformance = Conformance(make, runner.run, max_batch=config.max_batch, incidents=incidents)
        try:
            conformance.start()
        except GrpoError as error:
            if error.exit_status == ConfigError.exit_status:
                raise  # the options are wrong, and not the environment
            yield Finding("it can be made", "failed", str(error))
            return
        try:
            yield Finding("it can be made", "passed", "in a process of its own")
            yield from conformance.run()
        finally:
            conformance.end()


def broken(findings: Iterable[Finding]) -> list[str]:
    """Return a line for each check that failed."""
    return [f"{each.check}: {each.told}" for each in findings if each.outcome == "failed"]


def _assert_all(findings: Iterable[Finding]) -> None:
    failed = broken(findings)
    assert not failed, "\n".join(failed)
