"""The commands about one run that has ended, or goes on: ``verify``, ``score``, ``replay`` and others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter


def verify(run: Path, /) -> int:
    """Check the events of a run: no prompt was lost, trained twice, or trained too late.

    Parameters
    ----------
    run
        Directory of the run.
    """
    from grpo_core.commands import running

    return running.verify(directory=run)


def replay(
    run: Path,
    /,
    *,
    step: int,
    no_plugin: Annotated[list[str] | None, Parameter(name="--no-plugin", negative="")] = None,
) -> int:
    """Compute a step of a run again from its files, and compare it bit for bit with what the run recorded.

    It needs no engine and no environment.  The exit status is 1 if something differs.

    Parameters
    ----------
    run
        Directory of the run.
    step
        Step that is computed again, from 1; those between it and the checkpoint before it are as well.
    no_plugin
        Do not load this installed plugin; may be repeated.
    """
    from grpo_core.commands import replay as replaying

    return replaying.main(run, step=step, block=no_plugin or [])


def fork(
    run: Path,
    /,
    *,
    step: int,
    set_: Annotated[list[str] | None, Parameter(name="--set", negative="")] = None,
    scored: Path | None = None,
    no_plugin: Annotated[list[str] | None, Parameter(name="--no-plugin", negative="")] = None,
) -> int:
    """Compute a step of a run again with another loss, learning rate or advantage, and show what differs.

    Parameters
    ----------
    run
        Directory of the run.
    step
        Step that is computed twice from the same weights and rollouts: as it was, and with the changes.
    set_
        Set a configuration key for this step, as in "trainer.lr=1e-4"; may be repeated.
    scored
        Directory that grpo-core score has written: the step has the rewards in it.
    no_plugin
        Do not load this installed plugin; may be repeated.
    """
    from grpo_core.commands import fork as forking

    return forking.main(run, step=step, settings=set_ or [], scored=scored, block=no_plugin or [])
