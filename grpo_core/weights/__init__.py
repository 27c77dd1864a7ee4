"""Transports of weights from the trainer to engines.

``shm`` is built in.  ``transports`` finds it and others, ``reading`` reads what any of them published, and
``copies`` keeps it.  This module needs no torch.
"""

from __future__ import annotations

import os
import tempfile

from grpo_core.contracts.errors import WeightSyncError
from grpo_core.contracts.records import Weights


def anonymous_file(name: str) -> int:
    """Make a file in memory and return its descriptor; it has no name and vanishes with its process."""
    if hasattr(os, "memfd_create"):
        made = os.memfd_create(name)
        os.fchmod(made, 0o600)  # the kernel lets its user alone open it through /proc; this says so, too
        return made
    return os.dup(tempfile.TemporaryFile().fileno())  # pragma: no cover - not on Linux


def unreadable(weights: Weights, error: Exception) -> WeightSyncError:
    """Make the error for shared memory that cannot be mapped."""
    return WeightSyncError(
        f"version {weights.version}: the trainer's shared memory {weights.location} cannot be read "
        f"({error}); it is read on the machine of the trainer, under its user"
    )
