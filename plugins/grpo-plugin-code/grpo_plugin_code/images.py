"""The root file systems of sandboxes: this machine's libraries and programs, or a container image.

podman or docker builds an image from a Dockerfile once.  Its files are exported to a directory, which a
sandbox mounts read-only as its root; the image is never run as a container.  The sandbox runs this machine's
Python with its libraries, so an image needs no Python.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from attrs import field, frozen

import grpo_core as grpo

OURS = "/.grpo"
"""Directory of a sandbox with this machine's Python and its libraries."""
MOUNTED = ("proc", "dev", "tmp", f"{OURS}/python", f"{OURS}/system")
"""Mount points of a sandbox, which must exist in an image."""
SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/sbin")
"""Directories of libraries and programs; on Debian and others all but the first are links into /usr."""
ABOUT = "image.json"


class ImageError(Exception):
    """Raised if an image cannot be built or is unsuitable for a sandbox."""


@frozen(kw_only=True)
class Image:
    """The files of an image and its settings."""

    root: Path
    directory: str
    """Working directory."""
    environ: Mapping[str, str] = field(factory=dict)
    """Environment variables."""


def default_cache() -> Path:
    """Return the default directory for images."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "grpo-core" / "images"


def built(context: Path, program: str, cache: Path, mounts: Sequence[str]) -> Image:
    """Build the image of a directory with a Dockerfile, or return it from the cache.

    Args:
        context: the directory.
        program: podman or docker.
        cache: directory for the files of images, by the digest of ``context``.
        mounts: absolute paths of the sandbox's mount points, in addition to the working directory.

    Raises:
        ConfigError: there is no such program.
        ImageError: the image cannot be built or is unsuitable for a sandbox.
    """
    digest = _digest(context)
    kept = cache / digest
    if not (kept / ABOUT).is_file():
        if shutil.which(program) is None:
            raise grpo.ConfigError(f'code: images = "{program}", and this machine has no program {program}')
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix=".building-") as scratch:
            made = Path(scratch) / "image"
            _build(context, program, f"localhost/grpo-core/{digest[:32]}", made, mounts)
            try:
                made.rename(kept)
            except OSError:  # another process has built it meanwhile
                if not (kept / ABOUT).is_file():
                    raise
    about = json.loads((kept / ABOUT).read_text())
    return Image(root=kept / "root", directory=about["place"], environ=about["environ"])


def base_python() -> str:
    """Return the resolved path of the base Python of a virtual environment, or of this Python.

    The executable of a virtual environment may be a copy outside of the directories that a sandbox mounts.
    """
    return os.path.realpath(getattr(sys, "_base_executable", "") or sys.executable)


def python_of_this_machine() -> tuple[dict[str, str], list[str]]:
    """Return mounts of this machine's Python for an image, and the words that start it.

    Raises ConfigError if the C library that this Python runs with is not found.
    """
    libraries, loader = _libraries()
    base = os.path.realpath(sys.base_prefix)
    program = os.path.relpath(base_python(), base)
    found = f"{OURS}/system:{OURS}/python/lib"
    words = [f"{OURS}/system/{loader}", "--library-path", found, f"{OURS}/python/{program}"]
    return {f"{OURS}/python": base, f"{OURS}/system": libraries}, words


@functools.cache
def _libraries() -> tuple[str, str]:
    """Return the directory of this process's C library, and the name of its loader."""
    with open("/proc/self/maps") as maps:
        paths = {Path(line.split(maxsplit=5)[5].strip()) for line in maps if line.count(" /")}
    library = next((path for path in paths if path.name == "libc.so.6"), None)
    loader = next((path for path in paths if path.name.startswith("ld-linux")), None)
    if library is None or loader is None or library.parent != loader.parent:
        raise grpo.ConfigError(
            "code: images need a Python that runs with the GNU C library, whose loader is next to it"
        )
    return str(library.parent), loader.name


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


def _digest(context: Path) -> str:
    """Return a digest of the names, modes and contents of all files of a directory."""
    digest = hashlib.sha256()
    for path in sorted(context.rglob("*")):
        status = path.lstat()
        content = b""
        if path.is_symlink():
            content = os.readlink(path).encode()
        elif path.is_file():
            content = path.read_bytes()
        digest.update(f"{path.relative_to(context)}\0{status.st_mode:o}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def _build(context: Path, program: str, name: str, made: Path, mounts: Sequence[str]) -> None:
    """Build an image, and write its files and settings to a new directory."""
    dockerfile = str(context / "Dockerfile")
    _output([program, "build", "--quiet", "--tag", name, "--file", dockerfile, str(context)])
    config = json.loads(_output([program, "image", "inspect", name]))[0]["Config"]
    directory = os.path.normpath(config.get("WorkingDir") or "/")
    if directory == "/":
        raise ImageError("its image works in /, and a sandbox needs its own directory (WORKDIR)")
    root = made / "root"
    root.mkdir(parents=True)
    container = _output([program, "create", name, "true"]).split()[-1]
    try:
        _extract([program, "export", container], root)
    finally:
        _output([program, "rm", container])
    if not any(os.path.lexists(root / path) for path in ("bin/bash", "usr/bin/bash")):
        raise ImageError("its image has no bash, with which commands are run")
    for each in (*MOUNTED, *mounts, directory):
        inside = root / each.lstrip("/")
        if not inside.resolve().is_relative_to(root.resolve()):
            raise ImageError(f"its image has a link in place of {each}, which leads out of it")
        inside.mkdir(parents=True, exist_ok=True)
    environ = dict(entry.split("=", 1) for entry in config.get("Env") or () if "=" in entry)
    (made / ABOUT).write_text(json.dumps({"place": directory, "environ": environ}))


def _extract(words: Sequence[str], root: Path) -> None:
    """Export the files of a container to a directory, without owners and devices."""
    unpack = ["tar", "--extract", "--no-same-owner", "--exclude=dev/*", "--directory", str(root)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as exporting:
        done = subprocess.run(unpack, stdin=exporting.stdout, capture_output=True, text=True)
        assert exporting.stdout is not None
        exporting.stdout.close()
    if exporting.returncode or done.returncode:
        raise ImageError(f"the files of its image cannot be read: {done.stderr.strip()[-300:]}")


def _output(words: Sequence[str]) -> str:
    """Run a command and return its output.  Raises ImageError."""
    done = subprocess.run(words, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL)
    if done.returncode:
        error = (done.stderr.strip() or done.stdout.strip())[-300:]
        raise ImageError(f"its image cannot be built ({' '.join(words[:2])}): {error}")
    return done.stdout
