"""Runs the tests that need a library of another project, with its real code.

The libraries exclude each other's dependencies, so each has two virtual environments below ``.venv-foreign``:
one with the library and our plugin alone, as a user's ``environment.python`` would be, and one that also sees
the packages of this Python, where the tests run.

    python tests/foreign.py            # all of them
    python tests/foreign.py verifiers
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOREIGN = ROOT / ".venv-foreign"
LIBRARIES = {
    "verifiers": ("verifiers==0.4.0", ("plugins/grpo-plugin-verifiers/tests", "tests/test_verifiers.py")),
    "transferqueue": ("TransferQueue==0.1.11", ("plugins/grpo-plugin-transferqueue/tests",)),
    "inspect": ("inspect-ai==0.3.285", ("plugins/grpo-plugin-inspect/tests",)),
}
"""By the name of our plugin: what pip installs, and the tests that run with it."""
CHILD = ("attrs", "cattrs", "pluggy", "packaging", "numpy", "jinja2", "tomli-w")
"""Packages that grpo-core imports in the process of an environment."""


def main(names: list[str]) -> int:
    """Return the worst exit status of the tests."""
    return max(_tested(name, *LIBRARIES[name]) for name in names or LIBRARIES)


def _tested(name: str, requirement: str, tests: tuple[str, ...]) -> int:
    library, whole = FOREIGN / name, FOREIGN / f"{name}-tests"
    marker = library / f".{requirement}"
    if not marker.exists():
        print(f"installing {requirement} into {library.relative_to(ROOT)}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", library], check=True)
        ours = ["--no-deps", "-e", ROOT, "-e", ROOT / f"plugins/grpo-plugin-{name}"]
        for wanted in ([requirement, *CHILD], ours):
            quiet = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            subprocess.run([library / "bin/python", *quiet, *wanted], check=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", whole], check=True)
        here = sysconfig.get_path("purelib")
        seen = f"{_packages(library)}\nimport site; site.addsitedir({here!r})\n"
        (_packages(whole) / "seen.pth").write_text(seen)
        marker.touch()
    command = whole / "bin/grpo-core"  # tests start it as a user does
    command.write_text(f'#!/bin/sh\nexec {whole}/bin/python -m grpo_core "$@"\n')
    command.chmod(0o755)
    environ = {**os.environ, f"GRPO_{name.upper()}_PYTHON": str(library / "bin/python")}
    tested = [whole / "bin/python", "-m", "pytest", "-n", "2", "-m", "not nightly", *tests]
    return subprocess.run(tested, cwd=ROOT, env=environ, check=False).returncode


def _packages(environment: Path) -> Path:
    return environment / f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
