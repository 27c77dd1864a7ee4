"""Other Python interpreters and virtual environments, in which an environment can run.

The other interpreter needs a few ``PACKAGES``, and not grpo-core: it imports this installation's files, so
both sides always have the same version.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from attrs import frozen

from grpo_core._version import __version__
from grpo_core.contracts.errors import ConfigError
from grpo_core.processes import schemas
from grpo_core.text.credentials import REFERENCE

OLDEST = (3, 11)
"""Oldest Python that runs grpo-core's part of an environment."""

PACKAGES: Mapping[str, tuple[int, ...]] = {"attrs": (23, 1), "pluggy": (1, 0), "packaging": (21, 0)}
"""Packages that an environment's process needs, with their oldest versions."""

_PATIENCE = 60.0
"""Seconds for another interpreter to print its version; a cold disk may need a few."""

_PROBE = """
import json, sys
from importlib.metadata import PackageNotFoundError, version
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = version(name)
    except PackageNotFoundError:
        pass
print(json.dumps([list(sys.version_info[:3]), found]))
"""

_BOOT = """
import sys, types, importlib.util
version = sys.modules["grpo_core._version"] = types.ModuleType("grpo_core._version")
version.__version__ = sys.argv[2]
spec = importlib.util.spec_from_file_location("grpo_core", sys.argv[1])
module = sys.modules["grpo_core"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
from grpo_core.processes import schemas, served
schemas.source = sys.argv[3]
served.main(int(sys.argv[4]), int(sys.argv[5]), own_errors_only=True)
"""


@frozen
class Interpreter:
    """Another Python interpreter, by the path of its program."""

    path: str

    @classmethod
    def find(cls, python: str) -> Interpreter:
        """Find an interpreter by its program or its virtual environment's directory.

        Raises ConfigError if there is none, or if it cannot run grpo-core's part of an environment.
        """
        place = Path(os.path.expanduser(python))
        inside = place / "bin" / "python"
        if place.is_dir() and not inside.exists():
            raise ConfigError(
                f"python = {python!r} is not a virtual environment: the directory has no bin/python"
            )
        name = str(inside if place.is_dir() else place)
        path = shutil.which(name)
        if path is None:
            raise ConfigError(f"python = {python!r}: there is no such program")
        found = cls(os.path.abspath(path))  # not resolved: a link distinguishes a venv from its base
        _check(found.path)
        return found

    def command(self, fd: int) -> list[str]:
        """Return the command of a child process connected by this descriptor."""
        grpo_core = str(Path(__file__).parents[1] / "__init__.py")
        given = [grpo_core, __version__, schemas.file(), str(fd), str(os.getpid())]
        return [self.path, "-P", "-c", _BOOT, *given]

    def variables(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return a child's environment variables: the parent's, with its own programs first in PATH."""
        kept = {name: value for name, value in environ.items() if name != "PYTHONHOME"}
        return {**kept, "PATH": os.pathsep.join([os.path.dirname(self.path), kept.get("PATH", os.defpath)])}


def from_here(env_vars: Mapping[str, str], key: str) -> dict[str, str]:
    """Replace ``$NAME`` and ``${NAME}`` by this process's variables, which no file of a run contains.

    ``$$`` becomes a dollar sign; a ``$`` without a name is unchanged.

    Raises ConfigError if a variable is not set.
    """
    known = variables_of(env_vars, key)

    def value(found: re.Match[str]) -> str:
        return "$" if found[1] else known[found[2] or found[3]]

    return {name: REFERENCE.sub(value, text) for name, text in env_vars.items()}


def variables_of(env_vars: Mapping[str, str], key: str) -> dict[str, str]:
    """Return the variables that ``from_here`` reads.  Raises ConfigError if one is not set."""
    known = {}
    for name, text in env_vars.items():
        for found in REFERENCE.finditer(text):
            variable = found[2] or found[3]
            if variable and variable not in os.environ:
                raise ConfigError(
                    f"{key}.{name}: the environment variable {variable} is not set; write $$ "
                    "for a dollar sign"
                )
            if variable:
                known[variable] = os.environ[variable]
    return known


@functools.cache
def _check(path: str) -> None:
    """Raise ConfigError if an interpreter cannot run grpo-core's part of an environment."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONHOME"}
    try:
        probe = subprocess.run(
            [path, "-c", _PROBE, *PACKAGES], capture_output=True, text=True, timeout=_PATIENCE, env=environ
        )
        version, packages = json.loads(probe.stdout.splitlines()[-1])
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError) as error:
        raise ConfigError(f"python = {path!r} does not answer as a Python interpreter: {error}") from error
    if tuple(version) < OLDEST:
        raise ConfigError(
            f"{path} is Python {_dotted(version)}: an environment needs {_dotted(OLDEST)} or newer"
        )
    old = {
        name: packages.get(name, "")
        for name, oldest in PACKAGES.items()
        if tuple(int(number) for number in re.findall(r"\d+", packages.get(name, ""))[:2]) < oldest
    }
    if old:
        there = ", ".join(f"{name} {version}" if version else f"no {name}" for name, version in old.items())
        needed = " ".join(f"'{name}>={_dotted(PACKAGES[name])}'" for name in old)
        raise ConfigError(
            f"{path} has {there}; grpo-core's part of an environment needs: {path} -m pip install {needed}"
        )


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
