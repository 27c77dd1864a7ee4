"""Exit statuses: 0 done, 1 failed, 2 wrong input, 130 interrupted; wrong input is one clear message."""

from __future__ import annotations

import subprocess
import sys

import pytest
from test_cli import ENVIRONMENTS, grpo

from grpo_core.config import build, parse_setting, read_toml
from grpo_core.contracts.errors import ConfigError
from grpo_core.storage.run_directory import RunDirectory

pytestmark = pytest.mark.long

SORT = ["--env", "math:sort"]
DEEP = "[" * 5000 + "]" * 5000


@pytest.fixture
def here(tmp_path):
    (tmp_path / "envs.py").write_text(ENVIRONMENTS)
    (tmp_path / "broken.py").write_text("import no_such_module\n")
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", *SORT, "--stesp", "3"], "--stesp"),
        (["tarin"], "tarin"),
        (["train", *SORT, "--set", "steps=3"], "key 'steps'. Did you mean 'trainer.steps'?"),
        (["train", *SORT, "--engine", "./broken.py:Engine"], "no_such_module"),
        (["train", "--env", "./nowhere.py:Sort"], "there is no file"),
        (["train", *SORT, "--set", "model.path=./nowhere"], "there is no such directory"),
        (["train", *SORT, "--set", f"seed={2**63}"], "configuration: 'seed' must be < 9223372036854775808"),
        (["train", "--set", "tasks.a/b.env=math:sort"], "the name 'a/b' of a task must be 1 to 64 letters"),
        (["validate", "./nowhere"], "nowhere"),
        (["validate", "tiny", "--env", "math:sorting"], "math:sorting"),
        (
            ["validate", "tiny", *SORT, "--set", "trainer.lr=1"],
            "--set trainer.lr: validate measures the model as it is",
        ),
        (["validate", "tiny", *SORT, "--set", "steps=3"], "key 'steps'. Did you mean 'trainer.steps'?"),
        (["verify", "nowhere"], "nowhere is not a run"),
        (["report", "nowhere"], "nowhere is not a run"),
        (["check", "math:sorting"], "math:sorting"),
        (["check", "math:sort", "--set", "lenght=3"], "has no option 'lenght'. Did you mean 'length'?"),
        (["check", "math:sort", "--kind", "nothing"], "--kind nothing"),
        (["check", "mix", "--set", "weihgts=3"], "has no option 'weihgts'. Did you mean 'weights'?"),
    ],
    ids=str,
)
def test_wrong_input_is_one_message_and_status_2(here, arguments, message):
    done = grpo(here, *arguments)
    assert message in " ".join(done.stderr.replace("│", " ").split())
    assert "Traceback" not in done.stderr
    assert done.returncode == 2
    assert not (here / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["check", "sums.toml"],
            "'sums.toml'. It looks like a configuration: use `grpo-core train sums.toml`.",
        ),
        (["check", "elsewhere.toml"], "It looks like a configuration"),
        (["validate", "sums.toml"], "It looks like a configuration"),
        (["verify", "sums.toml"], "It looks like a configuration"),
        (["train", "./envs.py"], "It is Python: use `grpo-core train --env envs.py:NAME`."),
        (["train", "--env", "math:sort", "--model", "tniy"], "Did you mean 'tiny'?"),
        (
            ["train", "old"],
            "old is a directory; expected a TOML configuration. It is the directory of a run: use `grpo-core",
        ),
        (["check", "old"], "It is the directory of a run"),
        (["report", "."], "It contains the runs old."),
        (["train", "math:sort"], "It looks like an environment: use `grpo-core train --env math:sort`."),
        (["validate", "./envs.py:Sort"], "It looks like an environment"),
        (["check", "./envs.py"], "the name in it is missing. Write ./envs.py:NAME with one of:"),
    ],
    ids=str,
)
def test_an_argument_of_another_command_is_known(here, arguments, message):
    (here / "sums.toml").write_text("[tasks.a]")
    (here / "old").mkdir()
    (here / "old" / "config.toml").write_text("")
    done = grpo(here, *arguments)
    assert message in " ".join(done.stderr.replace("│", " ").split())
    assert done.returncode == 2


def test_a_check_that_finds_a_fault_has_failed(here):
    done = grpo(here, "check", "./envs.py:WrongCount")
    assert done.returncode == 1, done.stderr
    assert "FAILED" in done.stdout


def test_the_package_is_the_command(here):
    done = subprocess.run(
        [sys.executable, "-m", "grpo_core", "--version"], cwd=here, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == grpo(here, "--version").stdout


def test_values_that_are_nested_too_deeply_are_one_error(tmp_path):
    (tmp_path / "deep.toml").write_text(f"x = {DEEP}\n")
    with pytest.raises(
        ConfigError, match=r"deep\.toml: not readable as TOML: its values are nested too deeply"
    ):
        read_toml(tmp_path / "deep.toml")
    with pytest.raises(ConfigError, match=r"--set x\.y: its value is nested too deeply"):
        parse_setting(f"x.y={DEEP}")
    options = {"env": "math:sort", "options": {}}
    for _ in range(5000):
        options["options"] = {"a": options["options"]}
    with pytest.raises(ConfigError, match="nested too deeply"):
        build([{"tasks": {"sort": options}}])


def test_too_little_memory_is_one_line(tmp_path):
    with open(tmp_path / "huge.toml", "wb") as file:
        file.truncate(2**31)  # takes no room on the disk
    done = subprocess.run(
        ["prlimit", f"--as={2**30}", sys.executable, "-m", "grpo_core", "train", "huge.toml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("grpo-core: out of memory")
    assert "1,024 MiB of address space (ulimit -v)" in line


def test_a_run_of_a_newer_version_can_be_looked_at(tmp_path):
    """Its configuration has a key that this version does not know."""
    run = RunDirectory.create(tmp_path / "run", build([{"tasks": {"sort": {"env": "math:sort"}}}]))
    (run.path / "config.toml").write_text("new_key = 3\n" + (run.path / "config.toml").read_text())
    (run.path / "events.jsonl").write_text("")
    assert grpo(tmp_path, "report", "run").returncode == 0
    verified = grpo(tmp_path, "verify", "run")
    assert "new_key" not in verified.stdout + verified.stderr
    assert "Traceback" not in verified.stderr
    del run
    resumed = grpo(tmp_path, "train", "--resume", "run")
    assert resumed.returncode == 2
    assert "run/config.toml: unknown configuration key 'new_key'" in resumed.stderr
