"""Environments in other interpreters: their inputs, their requirements, and refusals."""

import asyncio
import gzip
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import PIL.Image
import pytest
import torch
from attrs import evolve
from bare import bare_venv
from forks import grpo

from grpo_core.config import EnvironmentConfig
from grpo_core.contracts.errors import ConfigError, GrpoError, SelectionError
from grpo_core.contracts.records import AgentClient, Episode, Prompt
from grpo_core.environments.process import EnvironmentProcess, EnvironmentSpec
from grpo_core.plugins.installed import PluginSelection
from grpo_core.processes.interpreters import OLDEST, Interpreter
from grpo_core.processes.schemas import chat_template_utils

ABROAD = '''
    import json, os, shutil, sys
    import grpo_core as grpo

    class TheirError(Exception):
        """An error whose class the trainer's process does not have."""

    def add(a: int, b: list[int], c: str = "x") -> int:
        """Adds numbers.

        Args:
            a: the first
            b: the others
            c: a word (choices: ["x", "y"])

        Returns:
            the sum
        """
        return a + sum(b)

    class Abroad(grpo.Environment):
        max_turns = 2
        tools = (add,)

        def prompts(self, split):
            return [grpo.Prompt(messages="where?", answer="here")]

        def open(self, prompt):
            return None

        def evaluate(self, episodes):
            return [self.one(episode.reply) for episode in episodes]

        def one(self, reply):
            if reply == "raise":
                raise TheirError("of theirs")
            packages = {name.partition(".")[0] for name in sys.modules} - sys.stdlib_module_names
            told = {
                "prefix": sys.prefix,
                "version": list(sys.version_info[:2]),
                "packages": sorted(packages),
                "modules": [m.__file__ for name, m in sys.modules.items() if name.startswith("grpo_core.")
                            and getattr(m, "__file__", None)],
                "python": shutil.which("python"),
                "secret": os.environ.get("JUDGE_KEY"),
            }
            return grpo.Feedback(reward=1.0, answer=json.dumps(told))
'''


SECRET = "hunter2-hunter2"
KEYED = """
    import os
    import grpo_core as grpo

    class Keyed(grpo.Environment):
        def prompts(self, split):
            return [grpo.Prompt(messages=f"{i}=", answer="1") for i in range(8)]

        def evaluate(self, episodes):
            if os.environ["JUDGE_KEY"] != "hunter2-hunter2":
                raise ValueError("no key")
            return [float(len(episode.reply)) for episode in episodes]
"""


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """A virtual environment with the packages that are needed, and nothing else."""
    return bare_venv(tmp_path_factory.mktemp("abroad") / "bare")


@pytest.fixture
def abroad(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    file = tmp_path / "abroad.py"
    file.write_text(textwrap.dedent(ABROAD))
    return f"{file}:Abroad"


def run(spec, story, *, plugins=(), options=None, log=None, **config):
    async def main():
        settings = EnvironmentConfig(**config)
        play = EnvironmentSpec(task="play", env=spec, options=options or {}, config=settings, log=log)
        process = EnvironmentProcess(play, plugins=PluginSelection(allow=plugins))
        try:
            return await story(process)
        finally:
            await process.aclose()

    return asyncio.run(main())


def replied(*replies):
    return [
        Episode(prompt=Prompt(messages="?"), messages=({"role": "assistant", "content": reply},), session="s")
        for reply in replies
    ]


async def answers(process, *replies):
    await process.open({"s": Prompt(messages="?", id="0")})
    return await process.evaluate(replied(*replies))


def told(spec, **config):
    async def story(process):
        (feedback,) = await answers(process, "where")
        return feedback

    feedback = run(spec, story, **config)
    assert feedback.reward == 1.0, feedback.error
    return json.loads(feedback.answer)


# ---------------------------------------------------------------------------------- what runs there


@pytest.mark.long
def test_an_environment_runs_in_a_virtual_environment_with_three_packages(abroad, bare):
    there = told(abroad, python=str(bare))
    assert there["prefix"] == str(bare)
    assert there["python"] == str(bare / "bin" / "python"), "programs that it starts are those of its home"
    ours = {"attr", "attrs", "grpo_core", "grpo_core_schemas", "pluggy", "packaging"}
    of_the_test = {"__main__"}
    assert {*there["packages"]} <= ours | of_the_test, "no torch, transformers or numpy"


@pytest.mark.long
def test_tools_have_the_same_schemas_in_every_interpreter(abroad, bare):
    async def story(process):
        (start,) = await process.open({"s": Prompt(messages="?", id="0")})
        return start.tools

    (schema,) = there = run(abroad, story, python=str(bare))
    assert there == run(abroad, story)
    assert schema["function"]["parameters"]["properties"]["b"]["items"] == {"type": "integer"}


@pytest.mark.long
def test_an_error_of_a_class_that_only_they_have_costs_one_reward_and_not_the_process(abroad, bare):
    async def story(process):
        first, second = await answers(process, "raise", "where")
        return first, second, process.starts

    first, second, starts = run(abroad, story, python=str(bare))
    assert (first.reward, first.fault.kind, first.fault.message) == (None, "TheirError", "of theirs")
    assert re.fullmatch(r"abroad\.py:\d+ in one: TheirError: of theirs", first.error)
    assert (second.reward, starts) == (1.0, 1)


@pytest.mark.long
def test_a_list_of_plugins_may_name_some_that_are_not_installed_there(abroad, bare):
    assert told(abroad, python=str(bare), plugins=("math",))["prefix"] == str(bare)


def test_a_plugin_that_is_not_installed_there_is_missed_there(bare):
    async def story(process):
        await process.start()

    with pytest.raises(SelectionError, match=rf"in {bare}/bin/python: there is no environment 'math:sort'"):
        run("math:sort", story, python=str(bare))


# ---------------------------------------------------------------------------------- other versions of Python

GAME = '''
    from __future__ import annotations

    import asyncio, sys
    from pathlib import Path
    from typing import Optional

    import grpo_core as grpo
    from grpo_core import advantages, rewards

    class Session:
        def __init__(self, word):
            self.word, self.turn = word, asyncio.Lock()

        async def look(self, place: str, depth: Optional[int] = None) -> str:
            """Looks at a place.

            Args:
                place: where
                depth: how far
            """
            async with self.turn:
                await asyncio.sleep(0.01)
                return f"{self.word} at {place}"

        def stumble(self) -> str:
            """Stumbles."""
            raise KeyError("a stone")

    class Game(grpo.Environment):
        max_turns, concurrency, deadline = 3, 8, 5.0

        def __init__(self, data: Path | None = None, size: int | None = None):
            assert isinstance(data, Path), type(data)
            self.gate = asyncio.Semaphore(1)

        def prompts(self, split):
            return [grpo.Prompt(messages="?", answer="word")]

        def open(self, prompt):
            session = Session(prompt.answer)
            asyncio.run(asyncio.sleep(0))  # takes the current event loop away
            return session

        async def evaluate(self, episodes):
            async with self.gate:
                await asyncio.sleep(0.01)
                (episode,) = episodes
                if episode.reply == "sleep":
                    await asyncio.sleep(60)
                if episode.reply == "raise":
                    raise ValueError("of theirs")
                return [grpo.Feedback(reward=1.0, answer=f"{episode.session.word} {sys.version_info[:2]}")]

        async def close(self, session):
            await asyncio.sleep(0)
            print(f"closed {session.word}", flush=True)

        async def aclose(self):
            print("closed the game", flush=True)
'''


@pytest.fixture(scope="module", params=range(OLDEST[1], 15), ids="3.{}".format)
def version(request):
    if request.param == sys.version_info.minor:
        return request.param, sys.executable
    pyenv = Path.home().glob(f".pyenv/versions/3.{request.param}.*/bin/python")
    found = [*map(str, pyenv), *filter(None, [shutil.which(f"python3.{request.param}")])]
    if not found:
        pytest.skip(f"there is no Python 3.{request.param} on this machine")
    return request.param, found[0]


@pytest.fixture(scope="module")
def home(version, tmp_path_factory):
    """A virtual environment of a Python, where only what is needed is installed."""
    place = tmp_path_factory.mktemp("home") / "venv"
    subprocess.run([version[1], "-m", "venv", "--without-pip", place], check=True)
    try:
        Interpreter.find(str(place))
    except ConfigError as refusal:
        asked = shlex.split(str(refusal).rpartition(" -m pip ")[2])  # the venv has no pip
        pip = [sys.executable, "-m", "pip", "--python", place / "bin" / "python", "--quiet"]
        done = subprocess.run([*pip, *asked], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"{refusal}: {done.stderr}")
    return place


def look(*calls):
    asked = [{"id": str(i), "function": {"name": name, "arguments": a}} for i, (name, a) in enumerate(calls)]
    return Episode(
        prompt=Prompt(messages="?"),
        messages=({"role": "assistant", "content": "", "tool_calls": asked},),
        finish_reason="stop",
        session="s",
    )


@pytest.mark.long
def test_an_environment_plays_in_every_version_of_python(tmp_path, monkeypatch, version, home):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    (tmp_path / "game.py").write_text(textwrap.dedent(GAME))

    async def story(process):
        assert [prompt.answer for prompt in await process.prompts("train")] == ["word"]
        names = ["s", *"abcdef"]
        starts = await process.open({name: Prompt(messages="?", id=name, answer=name) for name in names})
        assert [start.error for start in starts] == [None] * len(names)
        assert sorted(tool["function"]["name"] for tool in starts[0].tools) == ["look", "stumble"]
        answered = await process.evaluate([
            look(("look", {"place": "sea"}), ("stumble", {})), look(("look", {"place": "sky", "depth": 2})),
        ])  # fmt: skip
        texts = [[message["content"] for message in feedback.messages] for feedback in answered]
        assert texts == [["s at sea", "error: KeyError: 'a stone'"], ["s at sky"]]
        judged = await process.evaluate(
            [evolve(episode, session=name) for name in names for episode in replied("x")]
        )
        assert [each.answer for each in judged] == [f"{name} (3, {version[0]})" for name in names], judged
        (failed,) = await process.evaluate(replied("raise"))
        assert (failed.reward, failed.fault.kind, failed.fault.message) == (None, "ValueError", "of theirs")
        assert re.fullmatch(r"game\.py:\d+ in evaluate: ValueError: of theirs", failed.error)
        await process.close(["a"])
        return process.starts

    log, options = tmp_path / "log", {"data": "x", "size": 1}
    assert run(f"{tmp_path}/game.py:Game", story, options=options, log=log, python=str(home)) == 1
    *closed, last = log.read_text().splitlines()
    assert (sorted(closed), last) == ([f"closed {name}" for name in "abcdefs"], "closed the game")


PLUGIN = {
    "their.py": """
        from grpo_core import Environment, Prompt, hookimpl

        class Sums(Environment):
            def prompts(self, split):
                return [Prompt(messages="1+1=", answer="2")]

            def evaluate(self, episodes):
                return [float(episode.reply == "2") for episode in episodes]

        @hookimpl
        def grpo_environments():
            return {"sums": Sums}
        """,
    "their-1.0.dist-info/METADATA": "Name: their\nVersion: 1.0\nRequires-Dist: NEEDS\n",
    "their-1.0.dist-info/entry_points.txt": "[grpo_core]\nsums = their\n",
}

SHOUTER = """
    import sys
    import grpo_core as grpo

    def prompts(split):
        return [grpo.Prompt(messages="shout")]

    async def run(prompt, client):
        reward = float(client.base_url == "http://127.0.0.1:1/v1")
        return grpo.Feedback(reward=reward, metrics={"minor": sys.version_info[1]})
"""


@pytest.mark.long
def test_an_agent_runs_in_every_version_of_python(tmp_path, monkeypatch, version, home):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    (tmp_path / "agent.py").write_text(textwrap.dedent(SHOUTER))

    async def played(process):
        client = AgentClient(base_url="http://127.0.0.1:1/v1", api_key="k", model="m")
        return await process.run("s", Prompt(messages="shout"), client)

    feedback = run(f"{tmp_path}/agent.py", played, python=str(home))
    assert (feedback.reward, feedback.metrics) == (1.0, {"minor": version[0]}), feedback.error


@pytest.mark.long
@pytest.mark.parametrize("needs", ["grpo-core>=0.1", "grpo-core>=99"])
def test_a_plugin_is_found_in_every_version_of_python(tmp_path, monkeypatch, home, needs):
    (packages,) = home.glob("lib/python*/site-packages")
    first, hidden = tmp_path, packages
    monkeypatch.setenv("PYTHONPATH", str(first))
    for name, text in PLUGIN.items():
        for place, requirement in ((first, needs), (hidden, "grpo-core>=98")):
            (place / name).parent.mkdir(exist_ok=True)
            (place / name).write_text(textwrap.dedent(text).replace("NEEDS", requirement))

    async def story(process):
        return await process.evaluate(replied("2"))

    if needs == "grpo-core>=99":
        with pytest.raises(GrpoError, match=r"it needs grpo-core>=99, this is"):
            run("sums:sums", story, plugins=("sums",), python=str(home))
    else:
        assert [each.reward for each in run("sums:sums", story, plugins=("sums",), python=str(home))] == [1.0]


@pytest.mark.long
def test_a_call_is_cancelled_at_its_deadline_in_every_version_of_python(tmp_path, monkeypatch, version, home):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    (tmp_path / "game.py").write_text(textwrap.dedent(GAME))

    async def story(process):
        (late,) = await answers(process, "sleep")
        (next,) = await process.evaluate(replied("x"))
        return late.error, next.reward, process.starts

    error, reward, starts = run(
        f"{tmp_path}/game.py:Game", story, options={"data": "x"}, deadline=0.5, python=str(home)
    )
    assert "no answer to 'evaluate' within 0.5 s; cancelled" in error
    assert (reward, starts) == (1.0, 1)


# ---------------------------------------------------------------------------------- what is refused


def program(tmp_path, says):
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("says", "why"),
    [
        ("[[3, 10, 18], {}]", r"is Python 3.10.18: an environment needs 3.11 or newer"),
        (
            '[[3, 12, 1], {"attrs": "19.3.0", "packaging": "24.0"}]',
            r"has attrs 19.3.0, no pluggy; .* -m pip install 'attrs>=23.1' 'pluggy>=1.0'$",
        ),
        ("hello", r"does not answer as a Python interpreter"),
    ],
)
def test_an_interpreter_that_will_not_do_is_refused(tmp_path, says, why):
    with pytest.raises(ConfigError, match=why):
        Interpreter.find(program(tmp_path, says))


def test_a_path_without_an_interpreter_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="is not a virtual environment: the directory has no bin/python"):
        Interpreter.find(str(tmp_path))
    with pytest.raises(ConfigError, match="there is no such program"):
        Interpreter.find(str(tmp_path / "python"))


@pytest.mark.long
def test_a_missing_interpreter_or_variable_is_found_before_anything_starts(abroad, tmp_path):
    def train(*settings):
        sets = [part for each in settings for part in ("--set", each)]
        ended = grpo(tmp_path, "train", "--env", abroad, *sets, "--output", "run")
        assert not (tmp_path / "run").exists()
        return ended.returncode, ended.stderr

    assert train("environment.python=/nowhere/python") == (
        2,
        "grpo-core: python = '/nowhere/python': there is no such program\n",
    )
    status, error = train("environment.env_vars.JUDGE_KEY=$NOT_SET_ANYWHERE")
    assert status == 2
    assert "environment.env_vars.JUDGE_KEY: the environment variable NOT_SET_ANYWHERE is not set" in error


# ---------------------------------------------------------------------------------- secrets


@pytest.mark.long
def test_a_secret_reaches_the_environment(abroad, bare, monkeypatch):
    monkeypatch.setenv("KEY_OF_TODAY", SECRET)
    for spelled in ("$KEY_OF_TODAY", "${KEY_OF_TODAY}"):
        assert told(abroad, python=str(bare), env_vars={"JUDGE_KEY": spelled})["secret"] == SECRET


@pytest.mark.nightly
def test_no_file_of_a_run_has_the_secret_that_its_environment_uses(tmp_path, bare):
    (tmp_path / "keyed.py").write_text(textwrap.dedent(KEYED))
    settings = [
        "tasks.keyed.env=./keyed.py:Keyed", f"tasks.keyed.python={bare}",
        "tasks.keyed.env_vars.JUDGE_KEY=$KEY_OF_TODAY", "trainer.steps=2", "trainer.prompts_per_step=2",
        "rollout.group_size=2", "rollout.max_tokens=4", "validation.prompts=2", "checkpoint.every=1",
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "grpo_core", "train", "--output", "run",
         *(part for each in settings for part in ("--set", each))],
        cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "KEY_OF_TODAY": SECRET},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    files = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert {"config.toml", "events.jsonl", "report.html", "environment-keyed.log"} <= {p.name for p in files}
    unpacked = [gzip.decompress(text) if path.suffix == ".gz" else text for path, text in files.items()]
    assert any(b"$KEY_OF_TODAY" in text for text in unpacked), "the name is written"
    for text in (*unpacked, done.stdout.encode(), done.stderr.encode()):
        assert SECRET.encode() not in text


def looked_at(picture: PIL.Image.Image, sound: torch.Tensor) -> str:
    """Look at a picture.

    Args:
        picture: what is seen
        sound: what is heard
    """
    return ""


def test_the_schema_of_a_tool_knows_pictures_and_tensors():
    schema = chat_template_utils().get_json_schema(looked_at)
    found = schema["function"]["parameters"]["properties"]
    assert {name: of["type"] for name, of in found.items()} == {"picture": "image", "sound": "audio"}


ALONE = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("schemas", sys.argv[1])
schemas = importlib.util.module_from_spec(spec)
spec.loader.exec_module(schemas)
schemas.source = sys.argv[2]
assert schemas.chat_template_utils().get_json_schema(None) == "no torch"
assert "numpy" not in sys.modules, "whoever imports it later must hear that it is missing"
"""


def test_schemas_of_tools_need_no_numpy(tmp_path):
    """The newest transformers import it in the module that writes the schemas, where none needs it."""
    module = tmp_path / "chat_template_utils.py"
    module.write_text(
        "import numpy as np\nfrom . import logging\nfrom .import_utils import is_torch_available\n"
        "def get_json_schema(function):\n    return 'torch' if is_torch_available() else 'no torch'\n"
    )
    schemas = Path(__file__).parents[1] / "grpo_core" / "processes" / "schemas.py"
    command = [sys.executable, "-I", "-S", "-c", ALONE, str(schemas), str(module)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
