"""Wheels work where they are installed from a directory into an empty environment.

``make dist`` builds those of all projects, and tests/distributions.py checks them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from importlib.util import find_spec
from pathlib import Path

import distributions
import pytest
import released
import yaml

ROOT = Path(__file__).parent.parent
INSTALLED = ("grpo-core", "grpo-plugin-math", "grpo-plugin-curriculum", "grpo-plugin-devkit")
NOT_SOURCE = shutil.ignore_patterns("build", "dist", "*.egg-info", "__pycache__", ".*", "runs")


def run(*command, cwd=None, **environ):
    """Run a command, without what the caller's PYTHONPATH would hide."""
    ended = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": "", **environ},
    )
    assert ended.returncode == 0, f"{command}\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    """A directory with the wheels that are installed."""
    made = tmp_path_factory.mktemp("dist")
    for project in [ROOT, *(ROOT / "plugins" / name for name in INSTALLED[1:])]:
        source = tmp_path_factory.mktemp("source") / project.name
        if project == ROOT:
            for name in ("pyproject.toml", "README.md", "LICENSE"):
                source.mkdir(exist_ok=True)
                shutil.copy(ROOT / name, source)
            shutil.copytree(ROOT / "grpo_core", source / "grpo_core", ignore=NOT_SOURCE)
        else:
            shutil.copytree(project, source, ignore=NOT_SOURCE)
        run(
            sys.executable,
            "-m",
            "build",
            "--wheel",
            "--no-isolation",
            "--outdir",
            made,
            source,
        )
    return made


@pytest.fixture(scope="module")
def environment(index, tmp_path_factory):
    """An empty environment with the core and three plugins; other libraries are those of this one."""
    directory = tmp_path_factory.mktemp("environment")
    venv.create(directory, with_pip=True)
    python = directory / "bin" / "python"
    found = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    libraries = directory / "libraries"
    libraries.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if (
            not entry.name.replace("__editable__", "").lstrip("_.").startswith("grpo")
            and entry.suffix != ".pth"
        ):
            (libraries / entry.name).symlink_to(entry)
    (Path(found) / "libraries.pth").write_text(f"{libraries}\n")
    run(python, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--find-links", index, *INSTALLED)
    return directory


@pytest.mark.slow
@pytest.mark.skipif(find_spec("build") is None, reason="the package build is not installed")
@pytest.mark.timeout(900)
def test_wheels_are_installed_into_an_empty_environment_and_train(environment, tmp_path):
    clean = {"GRPO_PLUGINS": "math,curriculum,devkit"}
    grpo = environment / "bin" / "grpo-core"
    program = "import grpo_core; print(grpo_core.__file__)"
    where = run(environment / "bin" / "python", "-c", program, cwd=tmp_path, **clean)
    assert Path(where.strip()).is_relative_to(environment), "the installed core is used, not the repository's"
    plugins = json.loads(run(grpo, "plugins", "--json", cwd=tmp_path, **clean))
    assert {row["distribution"] for row in plugins if not row.get("error")} == set(INSTALLED)
    settings = {
        "trainer.steps": 2,
        "trainer.prompts_per_step": 4,
        "rollout.group_size": 4,
        "model.options.warm_start_steps": 5,
        "validation.every": 0,
        "sampler.name": "curriculum:learnable",
    }
    sets = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    run(grpo, "train", "--env", "math:sort", "--output", "run", *sets, cwd=tmp_path, **clean)
    run(grpo, "verify", "run", cwd=tmp_path, **clean)
    line = json.loads((tmp_path / "run" / "provenance.jsonl").read_text())
    assert set(line["plugins"]) == {"math", "curriculum"}
    script = run(grpo, "completion", "bash", cwd=tmp_path, **clean)
    assert "validate" in script


@pytest.mark.slow
@pytest.mark.skipif(find_spec("build") is None, reason="the package build is not installed")
def test_installed_pytest_knows_the_option_by_the_entry_point(environment, tmp_path):
    python = environment / "bin" / "python"
    told = run(python, "-m", "pytest", "--help", cwd=tmp_path)
    assert "--grpo-environment" in told
    run(python, "-m", "pytest", "-q", "--grpo-environment", "math:sort", cwd=tmp_path)


def test_releases_are_published_without_a_stored_secret():
    text = (ROOT / ".github" / "workflows" / "publish.yml").read_text()
    jobs = yaml.safe_load(text)["jobs"]
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert jobs["publish"]["needs"] == "build"
    assert "secrets." not in text
    assert "password" not in text
    targets = {line.split(":")[0] for line in (ROOT / "Makefile").read_text().splitlines() if ":" in line}
    commands = [step["run"] for step in jobs["build"]["steps"] if "run" in step]
    assert {command.split()[1] for command in commands if command.startswith("make ")} <= targets


def test_a_release_is_tested_from_its_wheels_alone(tmp_path):
    wanted = list(released.requirements())
    assert wanted[0].startswith("grpo-core[dev]==")
    assert len(wanted) == len(distributions.PROJECTS)
    told = f"2\ngrpo-core {tmp_path}/site/grpo_core/__init__.py\ngrpo-plugin-math {ROOT}/plugins/math.py\n"
    assert released.strangers(told, tmp_path) == [f"grpo-plugin-math {ROOT}/plugins/math.py"]
    lines = (ROOT / "Makefile").read_text().splitlines()
    at = lines.index("test-released: dist")
    assert "tests/released.py dist" in lines[at + 1]
    assert "--newest" in lines[at + 2]
