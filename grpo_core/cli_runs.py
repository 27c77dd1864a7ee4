"""The commands of ``grpo-core runs``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

runs = App(
    name="runs",
    help="List the runs of a directory, compare them, free their disk, or write their metrics as CSV.",
)


@runs.default
@runs.command(name="list")
def list_(directories: list[Path] | None = None, /, *, json: bool = False) -> int:
    """Print a line for each run: its state, steps, scores, start and size.

    Parameters
    ----------
    directories
        Runs, or directories of runs.  Default: runs.
    json
        Print the list as JSON.
    """
    from grpo_core.commands import runs as found

    return found.list_(directories or [], as_json=json)


@runs.command
def compare(directories: list[Path], /) -> int:
    """Print the settings in which runs differ, and their results, side by side.

    Parameters
    ----------
    directories
        Directories of two or more runs.
    """
    from grpo_core.commands import runs as found

    return found.compare(directories)


@runs.command
def prune(
    directories: list[Path],
    /,
    *,
    keep: int = 1,
    yes: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Remove old checkpoints of runs; the newest ones and the best one stay, and all records.

    Parameters
    ----------
    directories
        Runs, or directories of runs.  A run that goes on is refused.
    keep
        Number of the newest checkpoints that stay.
    yes
        Remove the checkpoints.  Without this option, they are only listed.
    """
    from grpo_core.commands import runs as found

    return found.prune(directories, keep=keep, yes=yes)


@runs.command
def export(directory: Path, /, *, output: Path | None = None) -> int:
    """Write the metrics of a run as CSV, with a row for each step and each validation.

    Parameters
    ----------
    directory
        Directory of the run.
    output
        File that is written.  Default: standard output.
    """
    from grpo_core.commands import runs as found

    return found.export(directory, output)
