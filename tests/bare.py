"""Makes a virtual environment with the packages that an environment's process needs, and nothing else."""

from __future__ import annotations

import venv
from importlib.metadata import distribution
from pathlib import Path

from grpo_core.processes.interpreters import PACKAGES


def bare_venv(place: Path) -> Path:
    """Make the virtual environment with links to this interpreter's packages; return its directory."""
    venv.create(place, symlinks=True, with_pip=False)
    (packages,) = place.glob("lib/python*/site-packages")
    for name in PACKAGES:
        for file in distribution(name).files or ():
            if ".." not in file.parts and file.suffix != ".pyc":
                (packages / file).parent.mkdir(parents=True, exist_ok=True)
                (packages / file).symlink_to(file.locate())
    return place
