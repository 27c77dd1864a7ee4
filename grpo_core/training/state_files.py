"""The files of an optimizer's state in a checkpoint: safetensors, one of each rank, and a JSON file."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from attrs import frozen
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from grpo_core.contracts import typed
from grpo_core.contracts.typed import Count

ABOUT = "state.json"


@frozen
class About:
    """The saved values that are not tensors."""

    version: Count
    files: Count
    optimizer: str
    numbers: Mapping[str, float | bool | str | None]
    twins: Mapping[str, str]
    entropy: tuple[float, float | None, float] | None = None


def write_state(
    directory: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any], *, rank: int, ranks: int
) -> None:
    """Write the tensors that a rank saves; the first rank also writes ``about``."""
    directory.mkdir(parents=True, exist_ok=True)
    part = "" if ranks == 1 else f"-{rank + 1:05d}-of-{ranks:05d}"  # as transformers names parts of a model
    save_file(dict(tensors), directory / f"state{part}.safetensors")
    if rank == 0:
        (directory / ABOUT).write_text(json.dumps({**about, "files": ranks}) + "\n")


def read_about(directory: Path) -> About:
    """Return the values that are not tensors.  Raises OSError, or CheckpointError for wrong types."""
    return typed.read(directory / ABOUT, About)


def read_state(directory: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that all ranks wrote, one by one.

    Raises OSError, ValueError or SafetensorError if files are missing or incomplete.
    """
    expected, files = read_about(directory).files, sorted(directory.glob("state*.safetensors"))
    if len(files) != expected:
        raise ValueError(f"there are {len(files)} of {expected} files in {directory}")
    for file in files:
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is not a mapping
                yield name, opened.get_tensor(name)


@contextmanager
def disk_errors() -> Iterator[None]:
    """Convert safetensors' text of a system error to an OSError."""
    try:
        yield
    except SafetensorError as error:
        said = re.search(r"\(os error (\d+)\)", str(error))
        number = int(said[1]) if said else errno.EIO
        raise OSError(number, os.strerror(number)) from error
