"""Profiles of Hypothesis, threads of torch, the collector of garbage, and a stand-in for GPUs.

Hypothesis tries the same examples each time, or new ones in the night; only then is a failure made small.

Choose one with ``--hypothesis-profile=nightly`` or ``HYPOTHESIS_PROFILE=nightly``.
"""

import os

from hypothesis import Phase, settings

from grpo_core.processes.garbage import collect_rarely, spare_the_collector

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


def pytest_collection_finish():
    """A million objects of tests and libraries stay: no test looks at them again."""
    spare_the_collector()
