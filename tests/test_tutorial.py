"""The tutorial, done as it says: its files are written and its commands run, in their order."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys

import pytest
from documents import ROOT, blocks

TUTORIAL = ROOT / "docs" / "tutorial.md"

NOT_RUN = {
    r"^python -m venv|^source ": "the test's interpreter is the environment",
    r"^pip install (grpo-core|grpo-plugin-caesar|build)\b": "needs an index",
    r"^python -m build|^twine": "needs an index",
    r"^cd grpo-plugin-caesar": "the test is there",
    r"^grpo-core train --env caesar$": "is what was done before with fewer steps",
    r"runs/far": "is the same run with an option, which the tests of the environment set",
    r"^grpo-core validate": "tests/test_validation_cli.py measures by it",
}
"""Commands that are not run, and why."""


def changed(command, site):
    """The command as a test can run it: few steps, and installed into a directory of the test's own."""
    words = shlex.split(command)
    if words[:2] == ["pip", "install"]:
        return [sys.executable, "-m", *(word for word in words if word != "-e"), "-q", "--target", str(site)]
    if words[0] == "python":
        return [sys.executable, *words[1:]]
    if words[:2] == ["grpo-core", "train"]:
        words = [re.sub(r"trainer\.steps=\d+", "trainer.steps=2", word) for word in words]
    program = [sys.executable, "-c", "from grpo_core.cli import main; main()"]
    return [*program, *words[1:]] if words[0] == "grpo-core" else words


def without_numbers(text):
    return re.sub(r"\d[\d.,]*", "0", text)


@pytest.mark.long
def test_the_tutorial_does_what_it_says(tmp_path):
    site, project = tmp_path / "site", tmp_path / "grpo-plugin-caesar"
    project.mkdir()
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), str(project)]), "COLUMNS": "200"}
    told, used = "", set()
    for block in blocks(TUTORIAL):
        if block.title:
            path = project / block.title
            assert path.parent.is_dir(), f"{block}: no command has made {path.parent.name}/"
            path.write_text(block.text)
        elif block.language == "text":
            for line in without_numbers(block.text).splitlines():
                assert line in without_numbers(told).splitlines(), f"{block}: {line!r} is not in\n{told}"
        else:
            told = ""
            for command in block.text.splitlines():
                if command == "mkdir grpo-plugin-caesar":
                    continue
                if reason := next((pattern for pattern in NOT_RUN if re.search(pattern, command)), None):
                    used.add(reason)
                    continue
                done = subprocess.run(
                    changed(command, site),
                    cwd=project,
                    env=environ,
                    capture_output=True,
                    text=True,
                    timeout=240,
                )
                assert done.returncode == 0, f"{block}: {command}\n{done.stdout}\n{done.stderr}"
                told += done.stdout
    assert used == set(NOT_RUN), "each reason is that of a command"
    assert (project / "runs/first/report.html").is_file()
