"""Profiles of Hypothesis, threads of torch, the collector of garbage, and a stand-in for GPUs.

Hypothesis tries the same examples each time, or new ones in the night; only then is a failure made small.

Choose one with ``--hypothesis-profile=nightly`` or ``HYPOTHESIS_PROFILE=nightly``.
"""

import contextlib
import os
import re
import sys
from unittest import mock

import forks
import pytest
from hypothesis import Phase, settings

from grpo_core.processes.memory import collect_rarely, spare_the_collector

# Workers of pytest share the cores: with several threads each, they would mostly wait for each other.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

collect_rarely()  # while the tests and what they test are imported

# Contract tests find planted faults: nobody reads what shrinking them would take most of the time for.
settings.register_profile(
    "repeatable", derandomize=True, database=None, deadline=None, phases=[Phase.explicit, Phase.generate]
)
settings.register_profile("nightly", max_examples=500, deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


def pytest_configure(config):
    if hasattr(config, "workerinput"):
        forks.share(config.workerinput["forks"])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config, specs):
    """Whoever collects all tests imports all libraries: one process does so for all workers."""
    if config.args_source is config.ArgsSource.TESTPATHS and sys.platform == "linux":
        for spec in specs:
            spec.python = forks.worker()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    """All workers take their forks of the processes that this one starts."""
    node.workerinput["forks"] = forks.shared()


def pytest_collection_finish():
    """A million objects of tests and libraries stay: no test looks at them again."""
    spare_the_collector()
    collect_rarely()  # what a test leaves may stay until the next fifty thousand objects


STARTED_ANEW = {"test_api", "test_engine_local", "test_environments", "test_processes"}
"""Files whose tests show how real child processes start and end."""


@pytest.fixture(scope="module", autouse=True)
def forked_children(request):
    """Let children of this process be forks, as those of commands are, in all other files.

    A variable that a file leaves would have the forks of all later files started anew.
    """
    with contextlib.ExitStack() as stack, mock.patch.dict(os.environ):
        if request.path.stem not in STARTED_ANEW:
            stack.callback(forks.install())
        yield


SKIPPED = (
    "needs (a|1|2|two) CUDA devices?",
    "podman (is not installed|runs no container|does not work)",
    "there are no user namespaces",
    "this (host would hold|user may not mount)",
    r"there is no Python 3\.\d+ on this machine",
    r"this Python can read it",
    "(verifiers|Inspect|it) is installed",  # what is said without them
    "needs (verifiers|Inspect): pip install",  # make test-foreign runs these
    "needs GRPO_(VERIFIERS|INSPECT|TEXTARENA|TRANSFERQUEUE|NEMO_GYM|SKYRL_GYM|TINKER|TRL)_PYTHON",
    "GRPO_(OPENENV|NEMO_GYM)_PYTHON names no interpreter",
    "needs TransferQueue and grpo-plugin-ray",
    "(TRL|Trackio|Tinker's SDK) is not installed",
    "needs torchao",
)
"""Reasons for which tests may be skipped on a machine without a GPU and podman."""
_unlisted: set[str] = set()


def pytest_runtest_logreport(report):
    """Collect the reasons of skipped tests that are not listed."""
    if report.skipped and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if not any(re.match(listed, reason) for listed in SKIPPED):
            _unlisted.add(f"{report.nodeid}: {reason}")


def pytest_sessionfinish(session):
    """Fail if a test was skipped for another reason, where ``.ci/run`` has installed what tests need."""
    if _unlisted and os.environ.get("GRPO_SKIPS") == "listed" and not hasattr(session.config, "workerinput"):
        print("\nskipped for reasons that conftest.py does not list:", *sorted(_unlisted), sep="\n")
        session.exitstatus = 1
