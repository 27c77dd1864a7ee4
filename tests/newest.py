"""Runs the quick tests with the newest released versions of all dependencies, in an environment of its own.

    python tests/newest.py [--lowest] [ARGUMENTS OF PYTEST]

The other environments have the versions of `constraints.txt`; a user who installs today gets the newest.
This one, in `.venv-newest` or where GRPO_NEWEST says, is resolved without constraints and upgraded on each
call; its versions that differ from the constraints are printed.  pip chooses the build of torch: on Linux
the package index has the one for CUDA, and PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS may name one for CPUs.
Ray and vLLM are left out, and so are their tests.

With ``--lowest`` the environment has the lowest versions that the core and the plugins of LOWEST declare, and
the pinned torch; the tests of the main job, of SmolLM2 and of exports run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import tomllib
import venv
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent
WHERE = Path(os.environ.get("GRPO_NEWEST", ROOT / ".venv-newest")).absolute()
LEFT_OUT = "grpo-plugin-ray"
LOWEST = ("algorithms", "devkit", "math", "report", "scale", "smollm2")
"""Plugins of the environment with the lowest versions."""
OF_LOWEST = ("tests/test_export.py", "tests/test_cli.py", "plugins/grpo-plugin-smollm2/tests")
QUICK = "not slow and not long and not nightly"


def projects() -> Iterator[str]:
    """Yield the arguments that install the core and its plugins from this directory."""
    yield from ("-e", f"{ROOT}[dev]")
    for path in sorted(ROOT.glob("plugins/*/pyproject.toml")):
        if path.parent.name != LEFT_OUT:
            yield from ("-e", str(path.parent))


def lowest() -> dict[str, str]:
    """Return the versions that the core and the plugins of LOWEST ask for at least, but for torch."""
    pins: dict[str, str] = {}
    for path in (ROOT, *(ROOT / f"plugins/grpo-plugin-{name}" for name in LOWEST)):
        project = tomllib.loads((path / "pyproject.toml").read_text())["project"]
        for each in [*project["dependencies"], *project.get("optional-dependencies", {}).get("lora", [])]:
            name, _, version = each.partition(">=")
            if version:
                pins[name] = max(pins.get(name, version), version, key=_numbers)
    return pins | {"torch": pinned((ROOT / "constraints.txt").read_text())["torch"]}


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


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
    low = "--lowest" in arguments
    where = WHERE.with_name(".venv-lowest") if low else WHERE
    python = where / "bin" / "python"
    if not python.exists():
        venv.create(where, with_pip=True)
    environ = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PIP_CONSTRAINT")}
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    newest = ["--quiet", "--upgrade", "--upgrade-strategy", "eager"]
    print(f"installing the {'lowest' if low else 'newest'} versions into {where}", flush=True)
    if low:
        ours = [f"{ROOT}[lora,testing]", *(str(ROOT / f"plugins/grpo-plugin-{name}") for name in LOWEST)]
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as pins:
            pins.write("".join(f"{name}=={version}\n" for name, version in lowest().items()))
            pins.flush()
            wanted = [word for path in ours for word in ("-e", path)]
            needed = ["pytest-xdist", "pytest-timeout", "-c", pins.name]
            subprocess.run([*pip, "install", *needed, *wanted], check=True, env=environ)
    else:
        subprocess.run([*pip, "install", *newest, *projects()], check=True, env=environ)
    listed = subprocess.run([*pip, "list", "--format", "json"], check=True, env=environ, capture_output=True)
    installed = {normalised(each["name"]): each["version"] for each in json.loads(listed.stdout)}
    others = differing(installed, pinned((ROOT / "constraints.txt").read_text()))
    print(f"{len(installed)} packages, {len(others)} newer or older than the constraints:")
    print("\n".join(f"    {line}" for line in others), flush=True)
    chosen = ["-m", "not nightly", *OF_LOWEST] if low else ["-n", "auto", "-m", QUICK]
    words = [word for word in arguments if word != "--lowest"] or chosen
    return subprocess.call([python, "-m", "pytest", *words], cwd=ROOT, env=environ)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
