"""What the documents promise is what the code has."""

from __future__ import annotations

import importlib.util
import inspect
import re
import tomllib
from pathlib import Path

import pytest

from grpo_core import commands, events, hookspecs
from grpo_core.config import read_toml

ROOT = Path(__file__).parent.parent


def hooks():
    return [name for name in vars(hookspecs) if name.startswith("grpo_")]


@pytest.mark.parametrize("hook", hooks())
def test_every_hook_is_documented_with_its_arguments(hook):
    arguments = ", ".join(inspect.signature(getattr(hookspecs, hook)).parameters)
    assert f"### {hook}({arguments})" in (ROOT / "docs" / "plugins.md").read_text()


def test_no_hook_is_documented_that_does_not_exist():
    documented = set(re.findall(r"### (grpo_\w+)\(", (ROOT / "docs" / "plugins.md").read_text()))
    assert documented == set(hooks())


def test_every_event_is_documented():
    text = (ROOT / "docs" / "plugins.md").read_text()
    kinds = {
        name
        for name, value in vars(events).items()
        if inspect.isclass(value) and value.__module__ == events.__name__
    }
    assert all(name in text for name in kinds - {"Event"})


def test_the_configuration_page_is_what_the_code_says():
    spec = importlib.util.spec_from_file_location("configuration_page", ROOT / "docs" / "_configuration.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (ROOT / "docs" / "configuration.md").read_text() == module.page()


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.toml")), ids=lambda path: path.name)
def test_example_configurations_are_valid(path):
    assert commands.configure([read_toml(path)], {})[0].tasks


def test_the_configuration_in_the_readme_is_valid():
    shown = re.search(r"```toml\n(# gsm8k.toml.*?)```", (ROOT / "README.md").read_text(), re.S).group(1)
    assert commands.configure([tomllib.loads(shown)], {})[0].model.path == "Qwen/Qwen3-0.6B"


def test_the_readme_shows_the_example_as_it_is():
    shown = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S).group(1)
    assert shown in (ROOT / "examples" / "shout.py").read_text()
