"""The contract of environments, as checks for authors; they need no further library.

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

from grpo_core import ConfigError, GrpoError, events
from grpo_core.app import sourced
from grpo_core.kit import EnvironmentSpec, PluginSelection, reported_to
from grpo_core.testing import HostedEnvironment, finished
from grpo_plugin_devkit.conformance import Conformance
from grpo_plugin_devkit.contracts import Finding


class EnvironmentContract:
    """A test class for pytest; a subclass sets its environment in attributes."""

    environment: ClassVar[Any] = None
    """Factory of the environment, or its name as in a configuration."""
    options: ClassVar[Mapping[str, Any]] = {}
    """Options of the environment."""
    data: ClassVar[Mapping[str, Any]] = {}
    """Data of the prompts, as in ``tasks.NAME``: ``{"data": "train.jsonl"}``.  With data the
    environment runs in a separate process."""

    def test_the_environment_keeps_its_contract(self) -> None:
        """Run all checks; the test fails with a list of all violations."""
        environment = inspect.getattr_static(type(self), "environment")
        given = environment.__func__ if isinstance(environment, staticmethod) else environment
        assert given is not None, (
            f"{type(self).__name__} names no environment: set environment = YourClass, or its name"
        )
        if self.data and not isinstance(given, str):
            given = name_of(given)
        if isinstance(given, str):
            assert_all(findings_by_name(given, {**self.options, **self.data}))
        else:
            check_environment(functools.partial(given, **self.options))


def check_environment(make: Callable[[], Any]) -> None:
    """Run the checks of ``conformance``; fails with a list of all violations.

    Args:
        make: returns a new environment, the same each time, such as a class.  An agent (``async def run``)
            runs in a thread of this process; ``check_agent`` also ends if it blocks forever.
    """
    assert_all(environment_findings(make))


def check_agent(agent: type, **options: Any) -> None:
    """Check an environment with ``async def run`` in a child process; ``agent`` is a class of a module.

    Fails with a list of all violations.
    """
    assert_all(findings_by_name(name_of(agent), options))


def name_of(environment: Any) -> str:
    """Return the name by which another process can import a class or function of a module."""
    return f"{inspect.getfile(environment)}:{environment.__qualname__}"


def environment_findings(make: Callable[[], Any]) -> list[Finding]:
    """Return the findings of ``grpo_plugin_devkit.conformance`` about an environment in this process."""
    incidents: list[events.IncidentReported] = []
    with reported_to(incidents.append), contextlib.closing(asyncio.Runner()) as runner:

        def wait(coroutine: Coroutine[Any, Any, Any]) -> Any:  # the server for the agent needs a running loop
            return runner.run(coroutine) if conformance.environment.about.runs_agents else finished(coroutine)

        conformance = Conformance(
            lambda: HostedEnvironment(make()), wait, incidents=incidents, side_by_side=False
        )
        conformance.start()
        try:
            return list(conformance.findings())
        finally:
            conformance.end()


def findings_by_name(
    name: str, options: Mapping[str, Any], plugins: PluginSelection | None = None
) -> Iterator[Finding]:
    """Yield the findings about an environment in a child process, where it may hang or exit.

    Args:
        name: name of the environment, as in a configuration.
        options: options of the environment, with the table ``environment`` of a run and the data of a task.
        plugins: plugins that the child loads.

    Raises ConfigError if the options are wrong, or its data cannot be read.
    """
    own = dict(options)
    sections = sourced.pop_sections(own)
    config = sections.environment
    make = functools.partial(
        sourced.SourcedProcess,
        EnvironmentSpec(task="check", env=name, options=own, config=config),
        plugins=plugins or PluginSelection(),
        data=sections.task,
    )
    incidents: list[events.IncidentReported] = []
    with reported_to(incidents.append), asyncio.Runner() as runner:
        conformance = Conformance(make, runner.run, max_batch=config.max_batch, incidents=incidents)
        try:
            conformance.start()
        except GrpoError as error:
            if error.exit_status == ConfigError.exit_status:
                raise  # wrong options are an error of the user, not a finding
            yield Finding("it can be made", "failed", str(error))
            return
        try:
            yield Finding("it can be made", "passed", "in a process of its own")
            yield from conformance.findings()
        finally:
            conformance.end()


def assert_all(findings: Iterable[Finding]) -> None:
    """Raise AssertionError with a line for each failed check."""
    failed = [f"{each.check}: {each.result}" for each in findings if each.outcome == "failed"]
    assert not failed, "\n".join(failed)
