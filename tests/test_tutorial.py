"""The tutorials, done as they say: their files are written and their commands run, in their order."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
from documents import ROOT, TUTORIALS, blocks

from grpo_core.app import launch
from grpo_core.plugins.host import PluginHost

INSTALLED = {
    r"^python -m venv|^source ": "the test's interpreter is the environment",
    r"^(tasksets/bin/)?pip install(?! --no-deps --no-build-isolation -e \.$)": "needs an index",
    r"--engine openai": "needs a service; the tests of grpo-plugin-openai serve one",
}
"""Commands that prepare an environment, or need a service: no page has them run."""

NOT_RUN = {
    "tutorial": {
        r"^python -m build|^twine": "needs an index",
        r"^grpo-core train --env caesar$": "is what was done before with fewer steps",
        r"runs/far": "is the same run with an option, which the tests of the environment set",
        r"^grpo-core validate": "tests/test_validation_cli.py measures by it",
    },
    "hosted": {"^export": "sets a variable"},
    "tinker": {r"^export|^grpo-core": "needs a service; the tests of grpo-plugin-tinker start one"},
    "from-trl": {r"^grpo-core train": "would warm the tiny model up, and the page has no solutions"},
    "real-model": {r"^grpo-core train": "takes minutes; grpo-plugin-smollm2 tests its model"},
    "one-gpu": {
        r"^grpo-core watch": "it serves a page until ctrl-C; tests/test_watch.py does that",
        r"--engine vllm": "the tests of grpo-plugin-vllm run it",
    },
}
"""Further commands that are not run, by page, and why."""

REPLACED = {
    "from-trl": {
        '"path": "smollm2"': '"path": "tiny", "options": {"warm_start_steps": 0}',
        "steps=20": "steps=2",
        "prompts_per_step=8": "prompts_per_step=2",
    },
    "one-gpu": {
        'path = "Qwen/Qwen3-0.6B"': 'path = "tiny"',
        "chat_template_kwargs = { enable_thinking = false }\n": "",
    },
}
"""Text in the files of a page, and its replacement: a model that need not be downloaded."""

SMALL = {
    "trainer.steps": 2,
    "trainer.prompts_per_step": 4,
    "trainer.updates_per_step": 1,
    "rollout.group_size": 2,
    "rollout.max_tokens": 16,
    "model.options.warm_start_steps": 1,
    "validation.prompts": 2,
}
"""Settings that make a run end soon."""

TYPED = "4\n/quit\n"
"""Lines that a reader types where a command asks for some."""

VERIFIERS = os.environ.get("GRPO_VERIFIERS_PYTHON", "")


def not_run(page, command):
    return next((p for p in INSTALLED | NOT_RUN.get(page.stem, {}) if re.search(p, command)), None)


def changed(page, command, site):
    """The command as a test can run it: small, and installed into a directory of the test's own."""
    words = shlex.split(command)
    if words[:2] == ["pip", "install"]:
        return [sys.executable, "-m", *(word for word in words if word != "-e"), "-q", "--target", str(site)]
    if words[0] == "python":
        return [sys.executable, *words[1:]]
    small = {}
    if words[:2] == ["grpo-core", "train"]:
        small = {"trainer.steps": 3} if "--resume" in words else SMALL
        if page.stem == "tutorial":  # its model learns the form of a reply, so that there is something to see
            small = {"trainer.steps": 2}
    elif words[:2] == ["grpo-core", "validate"]:
        small = {"validation.prompts": 2}
    words += [word for key, value in small.items() for word in ("--set", f"{key}={value}")]
    program = [sys.executable, "-c", "from grpo_core.cli import main; main()"]
    return [*program, *words[1:]] if words[0] == "grpo-core" else words


def without_numbers(text):
    return re.sub(r"\d[\d.,]*", "0", text)


def write(page, block, project):
    """Write the file that a block shows."""
    path = project / block.title
    assert path.parent.is_dir(), f"{block}: no command has made {path.parent.name}/"
    text = block.text
    for shown, written in REPLACED.get(page.stem, {}).items():
        text = text.replace(shown, written)
    path.write_text(text)


def prepared(page, directory):
    """A directory with what a page says that its reader has; skips if a library is not there."""
    if page.stem == "from-verifiers":
        if not VERIFIERS:
            pytest.skip("needs GRPO_VERIFIERS_PYTHON: a virtual environment with verifiers and without torch")
        (directory / "tasksets").symlink_to(Path(VERIFIERS).parent.parent)
    if page.stem == "first-cluster" and find_spec("ray") is None:
        pytest.skip("needs Ray: pip install 'grpo-core[ray]'")
    if page.stem == "one-gpu":
        for name in ("train.jsonl", "test.jsonl"):
            rows = (f'{{"question": "What is {n} + 1?", "answer": "#### {n + 1}"}}\n' for n in range(40))
            (directory / name).write_text("".join(rows))
    if page.stem == "tutorial":
        directory = directory / "grpo-plugin-caesar"
        directory.mkdir()
    return directory


@pytest.mark.nightly
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_does_what_it_says(page, tmp_path):
    site, project = tmp_path / "site", prepared(page, tmp_path)
    paths = [str(site), str(project), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "200", "HF_HUB_OFFLINE": "1"}
    told, used = "", set()
    for block in blocks(page):
        if block.title:
            write(page, block, project)
        elif block.language == "text":
            for line in without_numbers(block.text).splitlines():
                assert line in without_numbers(told).splitlines(), f"{block}: {line!r} is not in\n{told}"
        elif block.language == "bash":
            told = ""
            for command in block.text.replace("\\\n", " ").splitlines():
                if command in ("mkdir grpo-plugin-caesar", "cd grpo-plugin-caesar"):
                    continue
                if reason := not_run(page, command):
                    used.add(reason)
                    continue
                done = subprocess.run(
                    changed(page, command, site),
                    cwd=project,
                    env=environ,
                    capture_output=True,
                    text=True,
                    input=TYPED,
                    timeout=240,
                )
                assert done.returncode == 0, f"{block}: {command}\n{done.stdout}\n{done.stderr}"
                told += done.stdout
    assert used >= set(NOT_RUN.get(page.stem, ())), "each reason is that of a command"
    assert page.stem != "tutorial" or (project / "runs/first/report.html").is_file()


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_the_configurations_of_a_tutorial_are_valid(page, tmp_path, monkeypatch):
    """They name environments, samplers and options that its own files, or installed plugins, have."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tests").mkdir()
    (tmp_path / "grpo_plugin_caesar").mkdir()
    files = [block for block in blocks(page) if block.title]
    for block in files:
        (tmp_path / block.title).write_text(block.text)
    host = PluginHost.discover()
    for block in files:
        if block.title.endswith(".toml") and block.title != "pyproject.toml":
            config = launch.configure([tomllib.loads(block.text)], {})[0]
            assert config.tasks
            for task in config.tasks.values():
                if not task.python:  # only that interpreter can find it
                    host.find("environment", task.env)
            host.make("sampler", config.sampler.name, **config.sampler.options)


def test_every_tutorial_of_the_site_is_followed():
    nav = (ROOT / "mkdocs.yml").read_text().partition("- Tutorials:")[2].partition("- How to:")[0]
    assert sorted(re.findall(r": ([\w-]+)\.md", nav)) == sorted(page.stem for page in TUTORIALS)
