"""Runs the quick tests with the newest released versions of all dependencies, in an environment of its own.

    python tests/newest.py [ARGUMENTS OF PYTEST]

The other environments have the versions of `constraints.txt`; a user who installs today gets the newest.
This one, in `.venv-newest` or where GRPO_NEWEST says, is resolved without constraints and upgraded on each
call; its versions that differ from the constraints are printed.  pip chooses the build of torch: on Linux
the package index has the one for CUDA, and PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS may name one for CPUs.
Ray and vLLM are left out, and so are their tests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent
WHERE = Path(os.environ.get("GRPO_NEWEST", ROOT / ".venv-newest")).absolute()
LEFT_OUT = "grpo-plugin-ray"
QUICK = "not slow and not long and not nightly"


def projects() -> Iterator[str]:
    """Yield the arguments that install the core and its plugins from this directory."""
    yield from ("-e", f"{ROOT}[dev]")
    for path in sorted(ROOT.glob("plugins/*/pyproject.toml")):
        if path.parent.name != LEFT_OUT:
            yield from ("-e", str(path.parent))


def pinned(text: str) -> dict[str, str]:
    """Return the versions that a file of constraints names, by normalised names."""
    pairs = (line.partition(";")[0].split("==") for line in text.splitlines() if "==" in line)
    return {normalised(name): version.strip() for name, version in pairs}


def normalised(name: str) -> str:
    return name.strip().lower().replace("_", "-")


def differing(installed: Mapping[str, str], pins: Mapping[str, str]) -> list[str]:
    """Return a line for each package whose version is another one than the pinned one."""
    return [
        f"{name} {version}, pinned {pins[name]}"
        for name, version in sorted(installed.items())
        if name in pins and version.partition("+")[0] != pins[name].partition("+")[0]
    ]


def main(arguments: list[str]) -> int:
    python = WHERE / "bin" / "python"
    if not python.exists():
        venv.create(WHERE, with_pip=True)
    environ = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PIP_CONSTRAINT")}
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    newest = ["--quiet", "--upgrade", "--upgrade-strategy", "eager"]
    print(f"installing the newest versions into {WHERE}", flush=True)
    subprocess.run([*pip, "install", *newest, *projects()], check=True, env=environ)
    listed = subprocess.run([*pip, "list", "--format", "json"], check=True, env=environ, capture_output=True)
    installed = {normalised(each["name"]): each["version"] for each in json.loads(listed.stdout)}
    others = differing(installed, pinned((ROOT / "constraints.txt").read_text()))
    print(f"{len(installed)} packages, {len(others)} newer or older than the constraints:")
    print("\n".join(f"    {line}" for line in others), flush=True)
    words = arguments or ["-n", "auto", "-m", QUICK]
    return subprocess.call([python, "-m", "pytest", *words], cwd=ROOT, env=environ)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
