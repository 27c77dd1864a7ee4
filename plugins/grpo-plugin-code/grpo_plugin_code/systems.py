"""The root file system of a sandbox: this machine's libraries and programs, or an image's."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from attrs import field, frozen

import grpo_core as grpo
from grpo_plugin_code.images import Image, base_python, python_of_this_machine

SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/sbin")
"""Directories of libraries and programs; on Debian and others all but the first are links into /usr."""


@frozen(kw_only=True)
class System:
    """The read-only files of a sandbox."""

    directories: Mapping[str, str]
    """Directories of this machine by mount point in the sandbox."""
    links: Mapping[str, str] = field(factory=dict)
    """Targets of symbolic links by path in the sandbox."""
    python: Sequence[str]
    """Command that starts Python in the sandbox."""


def of_this_machine(mounts: Sequence[str]) -> System:
    """Return this machine's libraries and Python.

    Raises ConfigError if one of the mount points ``mounts`` would hide them.
    """
    python = base_python()
    for path in mounts:
        if any(Path(os.path.realpath(part)).is_relative_to(path) for part in (python, sys.base_prefix)):
            raise grpo.ConfigError(
                f"code: this Python is {python}, and the sandbox has its own directory at {path}, "
                "which hides it; use a Python that is installed elsewhere"
            )
    links = {path: os.readlink(path) for path in SYSTEM if os.path.islink(path)}
    directories = {path: path for path in SYSTEM if path not in links and os.path.isdir(path)}
    base = os.path.realpath(sys.base_prefix)
    if not Path(base).is_relative_to("/usr"):
        directories[base] = base
    return System(directories=directories, links=links, python=[python])


def of_an_image(image: Image) -> System:
    """Return the files of an image, with this machine's Python added."""
    directories, python = python_of_this_machine()
    return System(directories={"/": str(image.root), **directories}, python=python)
