"""The commands about one run that has ended, or goes on: ``verify``, ``score``, ``replay`` and others."""

from __future__ import annotations

from pathlib import Path


def verify(run: Path, /) -> int:
    """Check the events of a run: no prompt was lost, trained twice, or trained too late.

    Parameters
    ----------
    run
        Directory of the run.
    """
    from grpo_core.commands import running

    return running.verify(directory=run)
