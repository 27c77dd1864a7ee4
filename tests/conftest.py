"""Profiles of Hypothesis: the same examples each time, or new ones in the night.

Choose one with ``--hypothesis-profile=nightly`` or ``HYPOTHESIS_PROFILE=nightly``.
"""

import os

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, database=None, deadline=None)
settings.register_profile("nightly", max_examples=500, deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))
