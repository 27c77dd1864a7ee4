"""The command that runs the suite repeats a few failed tests alone, and forgives only what passes then."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SUITE = Path(__file__).with_name("suite.py")
PASSES_ALONE = """
from pathlib import Path

def test_a():
    seen = Path("seen").exists()
    Path("seen").touch()
    assert seen
"""
FAILS_ALONE = "def test_a():\n    assert False\n"
CANNOT_BE_IMPORTED = "import nothing_of_this_name\n"
MANY_FAIL = "".join(PASSES_ALONE.replace("test_a", f"test_{n}").replace("seen", f"seen{n}") for n in range(6))
HAS_A_BROKEN_FIXTURE = """
import pytest

@pytest.fixture
def broken():
    raise ValueError

def test_a(broken):
    pass
"""


def suite(directory: Path, text: str, workers: int = 0) -> tuple[int, str]:
    directory.joinpath("test_one.py").write_text(text)
    command = [sys.executable, str(SUITE), "-q", "-n", str(workers), "--rootdir", ".", "test_one.py"]
    ended = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.long
def test_a_test_that_passes_alone_is_named_and_forgiven(tmp_path):
    status, said = suite(tmp_path, PASSES_ALONE + "def test_b():\n    pass\n", workers=2)
    assert status == 0
    assert said.rstrip().endswith("they depend on what runs beside them:\n    test_one.py::test_a")


@pytest.mark.long
@pytest.mark.parametrize("text", [FAILS_ALONE, CANNOT_BE_IMPORTED, MANY_FAIL, HAS_A_BROKEN_FIXTURE])
def test_what_fails_alone_or_in_numbers_fails_the_suite(tmp_path, text):
    status, said = suite(tmp_path, text)
    assert status != 0, said
    assert "passed alone" not in said
