"""Runs the quick tests of the source distribution where only the built distributions are installed.

    python tests/released.py dist [--newest] [ARGUMENTS OF PYTEST]

``make dist`` has built them.  All are installed, with their dependencies, into an empty environment,
`.venv-released` or where GRPO_RELEASED says: with the versions of `constraints.txt`, or with the newest ones.
Nothing of the repository is imported there.  vLLM and other libraries that a plugin only names are left out.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
from collections.abc import Iterator
from pathlib import Path

import distributions
from newest import QUICK

ROOT = Path(__file__).parent.parent
WHERE = Path(os.environ.get("GRPO_RELEASED", ROOT / ".venv-released")).absolute()
PLACES = """
from importlib.metadata import distributions
from importlib.util import find_spec
names = sorted({each.name for each in distributions() if each.name.startswith("grpo-")})
print(len(names))
for name in names:
    print(name, find_spec(name.replace("-", "_")).origin)
"""


def requirements() -> Iterator[str]:
    """Yield what is installed: each project in its own version, the core with what its tests need."""
    for project in distributions.PROJECTS:
        read = tomllib.loads((project / "pyproject.toml").read_text())["project"]
        yield f"{read['name']}{'[dev]' if project == ROOT else ''}=={read['version']}"


def strangers(told: str, where: Path) -> list[str]:
    """Return the lines of PLACES that name a package outside of an environment."""
    return [line for line in told.splitlines()[1:] if not Path(line.split()[1]).is_relative_to(where)]


def main(folder: Path, words: list[str]) -> int:
    pins = [] if "--newest" in words else ["-c", str(ROOT / "constraints.txt")]
    words = [word for word in words if word != "--newest"] or ["-n", "auto", "-m", QUICK]
    environ = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PIP_CONSTRAINT")}
    python = WHERE / "bin" / "python"
    venv.create(WHERE, clear=True, with_pip=True)
    install = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--prefer-binary"]
    wanted = list(requirements())
    print(f"installing {len(wanted)} distributions of {folder} into {WHERE}", flush=True)
    subprocess.run([*install, *pins, "--find-links", folder, *wanted], check=True, env=environ)
    with tempfile.TemporaryDirectory() as scratch:
        (source,) = folder.glob("grpo_core-*.tar.gz")
        with tarfile.open(source) as archive:
            archive.extractall(scratch, filter="data")
        tree = Path(scratch) / source.name.removesuffix(".tar.gz")
        told = subprocess.check_output([python, "-P", "-c", PLACES], cwd=tree, env=environ, text=True)
        if told.split()[0] != str(len(wanted)) or strangers(told, WHERE):
            print(f"expected {len(wanted)} distributions below {WHERE}, found\n{told}")
            return 1
        return subprocess.call([python, "-P", "-m", "pytest", *words], cwd=tree, env=environ)


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]).absolute(), sys.argv[2:]))
