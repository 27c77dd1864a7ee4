"""Container images as directories: the system of a sandbox where this machine's own will not do.

podman or docker builds an image from a Dockerfile once.  Its files are kept in a directory, which a sandbox
shows, read-only, as its whole system; the image itself is never run.  The Python that serves the sandbox is
this machine's, with its libraries, so an image needs no Python of its own.
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
"""Directories of an image that a sandbox covers, so that they have to be there."""
ABOUT = "image.json"


class ImageError(Exception):
    """An image cannot be built, or has not what a sandbox needs."""


@frozen(kw_only=True)
class Image:
    """The files of an image, and what it says about them."""

    root: Path
    place: str
    """Its working directory."""
    environ: Mapping[str, str] = field(factory=dict)
    """Its environment variables."""


def default_cache() -> Path:
    """Return the directory in which images are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "grpo-core" / "images"


def built(context: Path, program: str, cache: Path, places: Sequence[str]) -> Image:
    """Build the image of a directory with a Dockerfile, unless it is kept already.

    Args:
        context: the directory.
        program: podman or docker.
        cache: directory in which the files of images are kept, by the digest of ``context``.
        places: absolute paths of directories that a sandbox covers, besides the working directory.

    Raises:
        ConfigError: there is no such program.
        ImageError: it cannot build the image, or the image has not what a sandbox needs.
    """
    digest = _digest(context)
    kept = cache / digest
    if not (kept / ABOUT).is_file():
        if shutil.which(program) is None:
            raise grpo.ConfigError(f'code: images = "{program}", and this machine has no program {program}')
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix=".building-") as scratch:
            made = Path(scratch) / "image"
            _build(context, program, f"localhost/grpo-core/{digest[:32]}", made, places)
            try:
                made.rename(kept)
            except OSError:  # another process was first
                if not (kept / ABOUT).is_file():
                    raise
    about = json.loads((kept / ABOUT).read_text())
    return Image(root=kept / "root", place=about["place"], environ=about["environ"])


def base_python() -> str:
    """Return the path of the Python that an environment was made from, or of this one, without links.

    The one of a virtual environment may be a copy, which no sandbox shows.
    """
    return os.path.realpath(getattr(sys, "_base_executable", "") or sys.executable)


def python_of_this_machine() -> tuple[dict[str, str], list[str]]:
    """Return this machine's Python for an image: directories by their places, and the words that start it.

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
    """Return the directory of the C library of this process, and the name of its loader there."""
    with open("/proc/self/maps") as maps:
        paths = {Path(line.split(maxsplit=5)[5].strip()) for line in maps if line.count(" /")}
    library = next((path for path in paths if path.name == "libc.so.6"), None)
    loader = next((path for path in paths if path.name.startswith("ld-linux")), None)
    if library is None or loader is None or library.parent != loader.parent:
        raise grpo.ConfigError(
            "code: images need a Python that runs with the GNU C library, whose loader lies beside it"
        )
    return str(library.parent), loader.name


def _digest(context: Path) -> str:
    """Return a digest of the names, rights and contents of all files of a directory."""
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


def _build(context: Path, program: str, name: str, made: Path, places: Sequence[str]) -> None:
    """Build an image, and write its files and what it says about them to a new directory."""
    dockerfile = str(context / "Dockerfile")
    _said([program, "build", "--quiet", "--tag", name, "--file", dockerfile, str(context)])
    config = json.loads(_said([program, "image", "inspect", name]))[0]["Config"]
    place = os.path.normpath(config.get("WorkingDir") or "/")
    if place == "/":
        raise ImageError("its image works in /, and a sandbox needs a directory of its own (WORKDIR)")
    root = made / "root"
    root.mkdir(parents=True)
    container = _said([program, "create", name, "true"]).split()[-1]
    try:
        _extract([program, "export", container], root)
    finally:
        _said([program, "rm", container])
    if not any(os.path.lexists(root / path) for path in ("bin/bash", "usr/bin/bash")):
        raise ImageError("its image has no bash, with which commands are run")
    for each in (*MOUNTED, *places, place):
        inside = root / each.lstrip("/")
        if not inside.resolve().is_relative_to(root.resolve()):
            raise ImageError(f"its image has a link in place of {each}, which leads out of it")
        inside.mkdir(parents=True, exist_ok=True)
    environ = dict(entry.split("=", 1) for entry in config.get("Env") or () if "=" in entry)
    (made / ABOUT).write_text(json.dumps({"place": place, "environ": environ}))


def _extract(words: Sequence[str], root: Path) -> None:
    """Write the files of a container below a directory, without owners and devices."""
    unpack = ["tar", "--extract", "--no-same-owner", "--exclude=dev/*", "--directory", str(root)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as exporting:
        done = subprocess.run(unpack, stdin=exporting.stdout, capture_output=True, text=True)
        assert exporting.stdout is not None
        exporting.stdout.close()
    if exporting.returncode or done.returncode:
        raise ImageError(f"the files of its image cannot be read: {done.stderr.strip()[-300:]}")


def _said(words: Sequence[str]) -> str:
    """Run a command and return what it prints.  Raises ImageError."""
    done = subprocess.run(words, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL)
    if done.returncode:
        told = (done.stderr.strip() or done.stdout.strip())[-300:]
        raise ImageError(f"its image cannot be built ({' '.join(words[:2])}): {told}")
    return done.stdout
