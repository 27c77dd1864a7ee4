"""Every command and code block of the documents: parsed, checked against the program, and run."""

from __future__ import annotations

import inspect
import json
import re
import shutil
import tomllib
from pathlib import Path

import documents
import pytest
from documents import PAGES, ROOT, TUTORIALS, blocks, name_of
from forks import grpo

from grpo_core import cli
from grpo_core.app import launch
from grpo_core.contracts.errors import GrpoError
from grpo_core.plugins.host import PluginHost

COMMANDS = [command for page in PAGES for command in documents.commands(page)]
OURS = [command for command in COMMANDS if command.program == "grpo-core"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

RUN_HERE = [page for page in PAGES if page not in TUTORIALS]
"""Each tutorial has a directory of its own: test_tutorial.py writes its files and runs its commands."""

CONFIGURATIONS = [b for page in RUN_HERE for b in blocks(page, "toml") if "[project" not in b.text]

IN_CI = ("README.md", "docs/agents.md")
"""Pages that CI runs.  It parses the commands and checks the configurations of the others, too, which
`make test-nightly` runs."""


def in_ci(page):
    """Return the marks of a test that runs what a page says."""
    return () if name_of(page) in IN_CI else pytest.mark.nightly


WITH_BLOCKS = [page for page in RUN_HERE if page.name != "python.md" and next(blocks(page, "python"), None)]
"""Pages whose Python blocks are run here: those of docs/python.md train, and test_api.py makes them small."""

NOT_RUN = {
    r"watch runs/": "it serves a page until ctrl-C; tests/test_watch.py does that",
    r"--engine vllm|check vllm": "vLLM is large; the tests of grpo-plugin-vllm run it",
    r"--ray": "needs a cluster; plugins/grpo-plugin-ray/tests/test_ray.py starts one",
    r"train --env math:(sort|addition)$": "tests/test_cli.py trains on these environments",
    r"train --env ./examples/shout.py:Shout$": "test_printed_training.py trains on it",
    r"validate .*--only": "tests/test_validation_sets.py measures by name",
    r"examples/smollm2|--model smollm2": "its model is downloaded; the plugin's tests do that",
    r"train puzzles\.toml": "its model has to be downloaded",
    r"--profile": "it needs more steps than commands have here; tests/test_profile.py runs it",
    r"--output runs/sort$": "it has been run when the workspace was made",
    r"audit .*--model": "it warms a model up; grpo-plugin-audit's tests let the model of a run play",
    r"try .*--model": "it warms a model up; tests/test_try.py lets the model of a run play",
    r"--engine openai": "needs a service; the tests of grpo-plugin-openai serve one",
    r"--model tinker:|runs/hosted": "needs a service; the tests of grpo-plugin-tinker start one",
    r"check local": "tests/test_decoding.py tries the same laws",
    r"check (torch|tiny)": "tests/test_kits_of_parts.py asks the same",
    r"check (reverse|shout)$|--env (reverse|shout|caesar)$": "needs it installed; docs/tutorial.md does that",
    r"pass_at_k": "tests/test_validation_cli.py measures by it",
}
"""Commands of ours that are parsed but not run, and why."""

NOT_TRAINED = {
    r"^# gsm8k\.toml": "it is a file that the commands of its page train by",
    r'name = "vllm"': "vLLM is large; the tests of grpo-plugin-vllm run it",
    r"reasoning_gym:": "it starts slowly; the tests of grpo-plugin-reasoning-gym play its tasks",
    r"trl:trl": "needs TRL; the tests of grpo-plugin-trl train on a function of their own",
    r"textarena:": "needs TextArena; the tests of grpo-plugin-textarena play its games",
    r"verifiers:": "needs verifiers; the tests of grpo-plugin-verifiers play tasksets",
    r"inspect:": "needs Inspect; the tests of grpo-plugin-inspect play its tasks",
    r"judge:openai": "needs a model that judges; the tests of grpo-plugin-judge serve one",
    r"openenv:http": "needs a server; the tests of grpo-plugin-openenv have one",
    r"mcp:python": "needs a server; the tests of grpo-plugin-mcp have one",
    r"gym:FrozenLake": "needs gymnasium; the tests of grpo-plugin-gym play games",
    r"nemo_gym:http": "needs a server; the tests of grpo-plugin-nemo-gym have one",
    r"code:(shell|harbor)": "needs bubblewrap and rows; the tests of grpo-plugin-code play such tasks",
    r"code:python": "needs bubblewrap; the tests of grpo-plugin-code run programs",
    r"python = ": "needs another virtual environment; tests/test_interpreters.py makes one",
    r"problems\.csv": "needs the file; tests/test_sources.py reads such files",
}
"""Configurations that are checked but not run, and why."""

OTHERS = {
    "export": "sets a variable",
    "git": "this is a clone already",
    "cd": "the tests are there already",
    "mkdir": "makes a directory",
    "twine": "needs an index",
    "source": "the test's interpreter is the environment's",
    "pip": "needs an index; the names are checked",
    "make": "is how tests are run; the target is checked",
    "python": "the file or module is checked",
    "ray": "needs several machines",
    "tasksets/bin/pip": "needs an index",
    "vllm": "needs a GPU, or vLLM for the CPU",
}
"""Other programs, which are not run, and why."""

SMALL = {
    "trainer.steps": 1,
    "trainer.prompts_per_step": 4,
    "trainer.updates_per_step": 1,
    "rollout.group_size": 2,
    "rollout.max_tokens": 8,
    "model.path": "tiny",
    "model.dtype": "float32",
    "model.options.warm_start_steps": 1,
    "validation.prompts": 2,
}
"""Settings that make a run end soon."""


def shown(command):
    return f"{name_of(command.page)}:{command.line}: {command}"


def not_run(command):
    return next((why for pattern, why in NOT_RUN.items() if re.search(pattern, str(command))), None)


def not_trained(block):
    return next((why for pattern, why in NOT_TRAINED.items() if re.search(pattern, block.text)), None)


# ---------------------------------------------------------------------------------- what can be read


@pytest.mark.parametrize("command", OURS, ids=shown)
def test_every_command_of_ours_is_one_that_the_command_line_takes(command):
    arguments = cli._with_values(list(command.words[1:]))
    cli.make_app().parse_args(arguments, exit_on_error=False, print_error=False)


def test_an_option_that_does_not_exist_is_noticed():
    with pytest.raises(Exception, match="--no-such-option"):
        cli.make_app().parse_args(["train", "--no-such-option"], exit_on_error=False, print_error=False)


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.program != "grpo-core"], ids=shown)
def test_every_other_command_names_what_there_is(command):
    assert command.program in OTHERS, f"say in OTHERS why {command.program!r} is not run"
    words = command.words[command.words.index(command.program) :]
    if words[0] == "make":
        targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
        assert set(words[1:]) <= targets
    if words[0] == "pip":
        extras = {extra for word in words for extra in re.findall(r"^grpo-core\[(.+)\]$", word)}
        assert extras <= set(PROJECT["optional-dependencies"])
        files = [word for word in words if word.endswith(".txt")]
        assert all((ROOT / file).exists() for file in files)
    if words[0] == "python" and words[1].endswith(".py"):
        shown = {block.title for block in blocks(command.page)}
        assert (ROOT / words[1]).is_file() or words[1] in shown
    if words[:2] == ["python", "-m"] and words[2].startswith("simulation"):
        assert (ROOT / "tests" / Path(*words[2].split("."))).with_suffix(".py").is_file()


@pytest.mark.parametrize("block", CONFIGURATIONS, ids=str)
def test_every_configuration_is_valid_and_names_what_is_offered(block):
    config = launch.configure([tomllib.loads(block.text)], {})[0]
    host = PluginHost.discover()
    for task in config.tasks.values():
        if not task.python:  # only that interpreter can find it
            host.find("environment", task.env)
    engine = inspect.signature(host.factory("engine", config.engine.name))
    assert set(config.engine.options) <= set(engine.parameters)
    host.function("loss", config.loss.name, **config.loss.options)
    host.function("advantage", config.advantage.name, **config.advantage.options)
    host.make("validation_strategy", config.validation.name, **config.validation.options)
    host.make("sampler", config.sampler.name, **config.sampler.options)


def test_a_configuration_that_names_what_is_not_offered_is_noticed():
    config = launch.configure([{"sampler": {"name": "mix", "options": {"wieghts": {}}}}], {})[0]
    with pytest.raises(GrpoError, match="wieghts"):
        PluginHost.discover().make("sampler", config.sampler.name, **config.sampler.options)


def test_every_reason_not_to_run_a_command_is_needed():
    assert {pattern for pattern in NOT_RUN if not any(re.search(pattern, str(c)) for c in OURS)} == set()
    assert set(OTHERS) <= {command.program for command in COMMANDS}
    assert {
        pattern for pattern in NOT_TRAINED if not any(re.search(pattern, b.text) for b in CONFIGURATIONS)
    } == set()


# ---------------------------------------------------------------------------------- what is run


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_BLOCKS, ids=name_of)
def test_every_python_block_runs(page, tmp_path, monkeypatch):
    """In one namespace for a page; functions whose names begin with ``test_`` are called."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "documented"}
    for block in blocks(page, "python"):
        # annotations are not evaluated: a sketch of a protocol imports nothing
        flags = annotations.compiler_flag
        code = compile("\n" * block.line + block.text, str(page), "exec", flags=flags)
        exec(code, namespace)
    for name, function in list(namespace.items()):
        if name.startswith("test_"):
            function()


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """A directory in which the commands of the documents find what they name."""
    directory = tmp_path_factory.mktemp("documents")
    shutil.copytree(ROOT / "examples", directory / "examples")
    for page in RUN_HERE:
        for block in blocks(page):
            if block.title:
                (directory / block.title).parent.mkdir(exist_ok=True)
                (directory / block.title).write_text(block.text)
    rows = [{"question": f"What is {n} + 1?", "answer": f"#### {n + 1}"} for n in range(40)]
    for name in ("train.jsonl", "test.jsonl"):
        (directory / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "run.toml").write_text('[tasks.sort]\nenv = "math:sort"\n')
    assert run(directory, ["train", "--env", "math:sort", "--output", "runs/sort"]).returncode == 0
    return directory


def run(directory, arguments):
    """A command of ours, made small."""
    arguments = list(arguments)
    if arguments[0] in ("train", "validate"):
        small = dict(SMALL)
        if "--resume" in arguments:
            small = {"trainer.steps": 2}
        elif arguments[0] == "validate":
            small = {"validation.prompts": 2, "rollout.max_tokens": 8}
        arguments += [word for key, value in small.items() for word in ("--set", f"{key}={value}")]
    return grpo(directory, *arguments, timeout=240, HF_HUB_OFFLINE="1", COLUMNS="200")


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=in_ci(page), id=name_of(page))
        for page in RUN_HERE
        if any(c.page == page and not not_run(c) for c in OURS)
    ],
)
def test_the_commands_of_a_page_run_in_their_order(page, workspace):
    for command in OURS:
        if command.page != page or not_run(command):
            continue
        arguments = list(command.words[1:])
        if "path/to/model" in arguments:
            model = next((workspace / "runs/sort/checkpoints").glob("*/trainer"))
            arguments[arguments.index("path/to/model")] = str(model)
        ended = run(workspace, arguments)
        assert ended.returncode == 0, f"{shown(command)}\n{ended.stdout}\n{ended.stderr}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "block",
    [pytest.param(b, marks=in_ci(b.page), id=str(b)) for b in CONFIGURATIONS if not not_trained(b)],
)
def test_every_configuration_trains(block, workspace):
    """As printed, but without dynamic sampling, for which a model that knows nothing has no rewards.

    A configuration that says nothing of tasks trains on sorting.
    """
    written = workspace / "block.toml"
    written.write_text(block.text)
    task = [] if "tasks" in tomllib.loads(block.text) else ["--env", "math:sort"]
    ended = run(workspace, ["train", "block.toml", *task, "--set", "dynamic_sampling.enabled=false"])
    assert ended.returncode == 0, f"{block}\n{ended.stdout}\n{ended.stderr}"
