"""The pytest plugin: environments are checked by an option, or by a class with attributes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from grpo_plugin_devkit.environments import EnvironmentContract

GAME = """
import grpo_core as grpo

class Fine(grpo.Environment):
    success = 1.0

    def __init__(self, length: int = 1):
        self.length = length

    def prompts(self, split):
        first = 0 if split == "train" else 50
        return [grpo.Prompt(messages=f"{i}?", answer=f"{i}" * self.length) for i in range(first, first + 40)]

    def evaluate(self, episodes):
        return [float(e.reply == e.prompt.answer) for e in episodes]

class Generous(Fine):
    def evaluate(self, episodes):
        return [1.0 for e in episodes]
"""


def pytest_in(directory, *arguments):
    """Run pytest with the plugin, as where grpo-plugin-devkit is installed with its entry point."""
    plugin = "grpo_plugin_devkit.pytest_plugin"
    command = [sys.executable, "-m", "pytest", "-p", plugin, "-p", "no:cacheprovider"]
    return subprocess.run([*command, *arguments], cwd=directory, capture_output=True, text=True, timeout=200)


@pytest.fixture
def here(tmp_path):
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "game.py").write_text(GAME)
    return tmp_path


@pytest.mark.long
def test_environments_are_checked_by_name_without_any_file_of_tests(here):
    ended = pytest_in(here, "--grpo-environment", "./game.py:Fine", "--grpo-set", "length=2", "-v")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "1 passed" in ended.stdout
    ended = pytest_in(
        here, "--grpo-environment", "./game.py:Generous", "--grpo-environment", "./game.py:Missing"
    )
    assert ended.returncode == 1
    assert "2 failed" in ended.stdout
    assert "environment ./game.py:Generous" in ended.stdout
    assert "passed: prompts to train" in ended.stdout, "the other checks are a section of the report"
    assert "Missing" in ended.stdout
    assert "Traceback" not in ended.stdout


@pytest.mark.long
def test_a_class_with_attributes_is_a_test(here):
    (here / "test_mine.py").write_text(
        "from game import Fine, Generous\n"
        "from grpo_plugin_devkit.environments import EnvironmentContract\n\n"
        "class TestFine(EnvironmentContract):\n    environment = Fine\n    options = {'length': 3}\n\n"
        "class TestGenerous(EnvironmentContract):\n    environment = Generous\n\n"
        "class TestByName(EnvironmentContract):\n    environment = './game.py:Fine'\n\n"
        "class TestNothing(EnvironmentContract):\n    pass\n"
    )
    ended = pytest_in(here)
    assert "2 failed, 2 passed" in ended.stdout, ended.stdout + ended.stderr
    assert "TestNothing names no environment: set environment = YourClass, or its name" in ended.stdout


@pytest.mark.long
def test_a_setting_that_cannot_be_read_is_wrong_usage(here):
    ended = pytest_in(here, "--grpo-environment", "./game.py:Fine", "--grpo-set", "length")
    assert ended.returncode == pytest.ExitCode.USAGE_ERROR
    assert "--grpo-set: " in ended.stderr


@pytest.mark.long
def test_a_session_without_the_option_imports_nothing_of_ours_but_the_plugin(here):
    (here / "test_light.py").write_text(
        "import sys\n\ndef test_light():\n"
        "    heavy = {'torch', 'numpy', 'attrs', 'grpo_core.config', 'hypothesis'}\n"
        "    assert not heavy & set(sys.modules)\n"
    )
    ended = pytest_in(here, "-p", "no:hypothesispytest")
    assert ended.returncode == 0, ended.stdout


def test_without_hypothesis_the_message_names_the_extra():
    program = (
        "import sys\nsys.modules['hypothesis'] = None\n"
        "from grpo_plugin_devkit.environments import check_environment, EnvironmentContract\n"
        "from grpo_plugin_devkit.samplers import check_sampler\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.stderr.splitlines()[-1] == (
        "ImportError: samplers are checked with Hypothesis: pip install 'grpo-core[testing]'"
    )


def test_a_factory_may_be_a_function():
    class Made(EnvironmentContract):
        environment = None

    with pytest.raises(AssertionError, match="Made names no environment"):
        Made().test_the_environment_keeps_its_contract()
