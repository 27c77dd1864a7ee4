"""The run with the newest versions of the dependencies: ``make test-newest`` (``tests/newest.py``)."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import newest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parent.parent


def test_versions_that_differ_from_the_constraints_are_named():
    pins = newest.pinned(
        "ast_serialize==0.13.1\ntorch==2.13.0\nnumpy==2.3.5 ; python_version > '3'\n# none\n"
    )
    assert pins == {"ast-serialize": "0.13.1", "torch": "2.13.0", "numpy": "2.3.5"}
    installed = {"torch": "2.13.0+cpu", "numpy": "2.4.6", "ast-serialize": "0.13.1", "unpinned": "1.0"}
    assert newest.differing(installed, pins) == ["numpy 2.4.6, pinned 2.3.5"]


def test_every_project_but_ray_is_installed_from_this_repository():
    named = [Path(word).name for word in newest.projects() if word != "-e"]
    plugins = {path.parent.name for path in ROOT.glob("plugins/*/pyproject.toml")}
    assert named[0].endswith("[dev]")
    assert set(named[1:]) == plugins - {"grpo-plugin-ray"}


def test_the_lowest_versions_are_those_that_the_projects_declare():
    lowest = newest.lowest()
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {each.name: each.specifier for each in map(Requirement, table["dependencies"])}
    assert set(declared) <= set(lowest)
    for name, specifier in declared.items():
        assert lowest[name] in specifier
        assert name == "torch" or f">={lowest[name]}" in str(specifier), (
            f"another project declares more: {name}"
        )
    assert lowest["torch"] == newest.pinned((ROOT / "constraints.txt").read_text())["torch"]
    assert "gguf" in lowest


def test_the_constraints_are_read_and_make_has_the_target():
    assert "torch" in newest.pinned((ROOT / "constraints.txt").read_text())
    lines = (ROOT / "Makefile").read_text().splitlines()
    assert "tests/newest.py" in lines[lines.index("test-newest:") + 1]
    assert "tests/newest.py --lowest" in lines[lines.index("test-lowest:") + 1]
    nightly = (ROOT / ".github/workflows/nightly.yml").read_text()
    assert "test-lowest" in nightly


def requirements(project: str) -> Iterator[Requirement]:
    """Yield what an argument of pip such as ``plugins/grpo-plugin-vllm[cuda]`` asks for."""
    path, _, extra = project.rstrip("]").partition("[")
    if not (ROOT / path / "pyproject.toml").exists():  # a package of the index
        yield Requirement(project)
        return
    table = tomllib.loads((ROOT / path / "pyproject.toml").read_text())["project"]
    yield from map(
        Requirement, [*table["dependencies"], *table.get("optional-dependencies", {}).get(extra, ())]
    )


def test_the_lock_of_the_environment_for_gpus_has_versions_that_its_projects_take():
    """The pins of `constraints.txt` have no vLLM, and a setuptools that vLLM refuses."""
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", "")
    (projects,) = re.findall(r"^GPU_PROJECTS := (.*)$", makefile, re.MULTILINE)
    named = re.sub(
        r"\$\(addprefix -e (\S+?-),(.*)\)", lambda m: " ".join(m[1] + n for n in m[2].split()), projects
    )
    lock = newest.pinned((ROOT / "tests" / "benchmarks" / "constraints-gpu.txt").read_text())
    asked = [each for word in named.split() if word != "-e" for each in requirements(word)]
    assert "vllm" in [each.name for each in asked]
    for each in asked:
        name = newest.normalised(each.name)
        if not name.startswith("grpo-"):
            assert each.specifier.contains(lock[name]), f"{each}, locked {lock[name]}"
    assert Version(lock["setuptools"]) < Version("81"), "vLLM refuses newer ones from Python 3.12 on"
    recipe = makefile.partition("\ngpu-check:")[2].partition("\n\n")[0]
    assert "$(GPU_LOCK)" in recipe
    assert "$(READY)" not in recipe, "it would install the builds for CPUs, and no vLLM"


def recipes(target: str, directory: Path) -> list[str]:
    """Return the commands of pip that make would run for a target in a new clone."""
    told = subprocess.run(
        ["make", "-n", target, f"VENV={directory}"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [line for line in told.stdout.splitlines() if " install " in line and "torch ||" not in line]


def test_the_demo_installs_the_core_and_two_plugins_and_shows_it(tmp_path):
    small, everything = recipes("demo", tmp_path), recipes("install", tmp_path)
    named = re.findall(r"-e (\S+)", " ".join(small))
    assert named == [".", "plugins/grpo-plugin-math", "plugins/grpo-plugin-report"]
    assert everything[: len(small)] == small
    assert "-e .[dev]" in everything[-1]
    assert not [line for line in everything if "--quiet" in line or " -q " in line]
    assert not any("install" in line for line in recipes("lint", tmp_path) if "quiet_pip" not in line)


def test_pip_does_not_list_what_is_there(tmp_path):
    there = ["install", "--no-index", "--dry-run", "pip"]
    for pip, lists in ((["-m", "pip"], True), ([ROOT / "tests" / "quiet_pip.py"], False)):
        done = subprocess.run(
            [sys.executable, *pip, *there], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        assert ("Requirement already satisfied: pip" in done.stdout) == lists
