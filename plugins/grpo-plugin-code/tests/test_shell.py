"""``code:shell``: files persist between commands, processes do not, and tests judge the files only."""

import asyncio
import base64
import io
import json
import shutil
import tarfile
import zlib

import pytest

import grpo_core as grpo
from grpo_core.testing import make_offer
from grpo_plugin_code import commands
from grpo_plugin_code.commands import Ran, packed
from grpo_plugin_code.harbor import Harbor, rewards_of, tasks_in
from grpo_plugin_code.shell import ShellTask

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
TESTS = [{"run": "bash double.sh 4", "output": "8"}, {"file": "note.txt", "content": "done"}]
RIGHT = ["echo 'echo $((2 * $1))' > double.sh", "echo done > note.txt"]
SMALL = {
    "seconds": 3.0,
    "cpu_seconds": 2,
    "memory": 512,
    "space": 8,
    "processes": 32,
    "output": 4,
    "ready": 0,
}


def row_of(prompt):
    return {**prompt.info, "prompt": prompt.messages, "answer": None, "id": prompt.id}


def worked(*commands, tests=TESTS, files=None, **options):
    """Return what the commands of a rollout print, and the feedback at its end."""

    async def story():
        environment = ShellTask(**{**SMALL, **options})
        prompt = grpo.Prompt(messages="Work.", id="1", info={"tests": tests, "files": files or {}})
        try:
            session = environment.open(environment.prompt(row_of(prompt)))
            outputs = [await session.run(command) for command in commands]
            said = [*prompt.messages, {"role": "assistant", "content": "Done."}]
            episode = grpo.Episode(prompt=prompt, messages=said, session=session)
            return outputs, await environment.score(episode)
        finally:
            await environment.aclose()

    return asyncio.run(story())


# ---------------------------------------------------------------------------------- commands


@pytest.mark.long
def test_files_last_from_command_to_command_and_are_tested_at_the_end():
    outputs, feedback = worked("cat data/in.txt", *RIGHT, "ls", files={"data/in.txt": "one\n"}, seconds=10.0)
    assert outputs == ["one\n", "", "", "data\ndouble.sh\nnote.txt\n"]
    assert feedback.reward == 1.0
    assert feedback.metrics == {"passed": 1.0, "commands": 4.0}


@pytest.mark.long
def test_the_current_directory_and_exported_variables_last_from_command_to_command():
    outputs, _ = worked(
        "mkdir -p 'a b' && cd 'a b' && export GREETING=\"it's\nme\"; other=1; exit 4",
        'pwd; echo "$GREETING$other"',
        "cd ..; unset GREETING",
        "pwd; echo [$GREETING]; trap - EXIT; cd 'a b'",
        "pwd",
        seconds=10.0,
    )
    assert outputs == ["exit status 4", "/work/a b\nit's\nme\n", "", "/work\n[]\n", "/work\n"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("command", "after"),
    [
        ("cd a; rm -r ../a", "/work"),
        ("cd a; sleep 60", "/work"),
        ("cd a; kill -9 $$", "/work"),
        ("cd a; export LARGE=$(head -c 90000 /dev/zero | tr '\\0' x)", "/work"),
        ("cd a; echo 'exit 1; echo forged' > $(ls -d /proc/self/fd/*); exec true", "/work"),
        ("cd a; echo 1 | (", "/work"),
        ("cd a; set -e; false; cd ..", "/work/a"),
        ("cd a; sleep 60 > /dev/null 2>&1 &\ncd a", "/work/a"),
        ("cd a; exec > /dev/null", "/work/a"),
    ],
)
def test_a_shell_that_does_not_exit_by_itself_leaves_the_directory_as_it_was(command, after):
    outputs, _ = worked(command, "pwd", files={"a/in.txt": ""}, seconds=2.0)
    assert outputs[1] == f"{after}\n"


@pytest.mark.long
def test_errors_name_the_line_of_the_command():
    outputs, _ = worked("true\nnosuchprogram")
    assert "line 2: nosuchprogram: command not found" in outputs[0]


@pytest.mark.long
def test_tests_do_not_see_the_directory_and_the_variables_of_the_model():
    check = [{"run": "pwd; echo [$FAST]", "output": "/work\n[]"}]
    _, feedback = worked("mkdir -p a; cd a; export FAST=1", tests=check)
    assert feedback.reward == 1.0


@pytest.mark.long
def test_a_part_of_the_tests_is_a_part_of_the_reward_if_it_is_wanted():
    assert worked(RIGHT[0])[1].reward == 0.0
    assert worked(RIGHT[0], reward="share")[1].reward == 0.5
    assert worked(RIGHT[0], tests=json.dumps(TESTS), reward="share")[1].reward == 0.5, "tests may be JSON"


@pytest.mark.long
def test_a_command_returns_its_output_and_how_it_ended():
    outputs, _ = worked("echo out; echo err >&2; exit 3", "sleep 60", "yes", "kill -9 -1")
    assert outputs[0] == "out\nerr\n\nexit status 3"
    assert outputs[1] == "error: the command was ended: it took too long, or printed too much"
    assert outputs[2].endswith("printed too much")
    assert len(outputs[2]) < 5000
    assert "the files are as they were before it" in outputs[3]


@pytest.mark.long
def test_files_up_to_the_limit_last_and_larger_ones_leave_them_as_they_were():
    full = "head -c 6000000 /dev/urandom > a; echo left > note.txt; echo made"
    holes = "truncate -s 5M b; truncate -s 5M c; echo wide"  # take no room until they are packed
    outputs, _ = worked(full, holes, "ls; wc -c < a; cat note.txt", seconds=10.0)
    assert outputs[0] == "made\n"
    assert "wide\n\nerror: the files have become too large" in outputs[1]
    assert outputs[2] == "a\nnote.txt\n6000000\nleft\n"


def test_files_of_a_row_that_have_no_room_are_refused():
    environment = ShellTask(**{**SMALL, "space": 1})
    info = {"tests": TESTS, "files": {"a": "x" * 1_100_000}}
    with pytest.raises(grpo.PluginError, match=r"files take 1.1 MiB, and the option space allows 1"):
        environment.prompt(row_of(grpo.Prompt(messages="?", id="7", info=info)))


def test_a_python_that_cannot_unpack_files_safely_is_refused(monkeypatch):
    monkeypatch.delattr(tarfile, "tar_filter")
    with pytest.raises(grpo.ConfigError, match=r"whose tarfile cannot .* use 3.11.4 or newer"):
        ShellTask(**SMALL)


HOSTILE = {
    "a daemon": "(setsid sleep 50 &) ; echo started",
    "a fork bomb": ":(){ :|:& };: ; sleep 1",
    "a full disk": "head -c 99000000 /dev/zero > big; rm -f big",
    "a link": "ln -s /etc/passwd note.txt; ln -sf /tmp data",
    "a forged result": "echo '[\"dict\", []]' > /proc/$PPID/fd/3",
    "other places": "mkdir -p /tests /logs/verifier; echo 1 > /logs/verifier/reward.txt; echo x > /usr/x",
    "a network": "exec 3<>/dev/tcp/127.0.0.1/22",
    "start files": "echo 'echo 8; exit' > ~/.bashrc; echo 'export PATH=.' > ~/.profile; echo 'echo 8' > bash",
    "memory": "python -c 'x = bytearray(10**10)'",
}


@pytest.mark.long
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_command_earns_nothing_and_does_not_last(name):
    outputs, feedback = worked(HOSTILE[name], "ls -A /proc | grep -c '^[0-9]'; cat /tmp/* 2>/dev/null")
    assert (feedback.reward, feedback.error) == (0.0, None)
    assert int(outputs[1].split()[0]) <= 6, "the first process, the program, and those of the command"


@pytest.mark.parametrize(
    ("info", "why"),
    [
        ({}, "expected a list of"),
        ({"tests": []}, "expected a list of"),
        ({"tests": [{"run": "true"}]}, "expected a list of"),
        ({"tests": TESTS, "files": ["a"]}, "expected an object of paths"),
        ({"tests": TESTS, "files": {"../a": ""}}, "not a path of a file within"),
    ],
)
def test_malformed_rows_are_refused(info, why):
    environment = make_offer("environment", "code:shell", plugins=["code"])
    with pytest.raises(grpo.PluginError, match=why):
        environment.prompt(row_of(grpo.Prompt(messages="?", id="7", info=info)))


# ---------------------------------------------------------------------------------- Harbor


CHECKS = """#!/bin/bash
if [ "$(cat hello.txt)" = hello ] && [ -e data.txt ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""


def task(directory, name, *, docker="FROM ubuntu:24.04\nWORKDIR /app\nCOPY . .\n", **files):
    place = directory / name
    given = {
        "instruction.md": f"Write hello to hello.txt ({name}).",
        "task.toml": 'schema_version = "1.4"\n[verifier]\ntimeout_sec = 20.0\n',
        "tests/test.sh": CHECKS,
        "solution/solve.sh": "echo hello > hello.txt\n",
        "environment/Dockerfile": docker,
        "environment/data.txt": "data",
        **{path.replace("__", "/"): text for path, text in files.items()},
    }
    for path, text in given.items():
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        (place / path).write_text(text)
    return place


def harbor(directory, **options):
    return Harbor(directory, **{"seconds": 10.0, "processes": 32, "space": 8, **options})


def rewarded(environment, *commands):
    async def story():
        prompt = environment.prompts_of[0]
        session = environment.open(prompt)
        for command in commands:
            await session.run(command)
        said = [*prompt.messages, {"role": "assistant", "content": "Done."}]
        try:
            episode = grpo.Episode(prompt=prompt, messages=said, session=session)
            return await environment.score(episode)
        finally:
            await environment.aclose()

    environment.prompts_of = environment.prompts("train")
    return asyncio.run(story())


@pytest.mark.long
def test_the_solution_of_a_task_earns_1_and_an_untouched_task_0(tmp_path):
    task(tmp_path, "hello")
    assert rewarded(harbor(tmp_path), "echo hello > hello.txt").reward == 1.0
    untouched = rewarded(harbor(tmp_path))
    assert untouched.reward == 0.0
    assert untouched.metrics == {"reward": 0.0, "commands": 0.0}


@pytest.mark.parametrize(
    "command",
    [
        "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt",
        "echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh",
        "mkdir -p logs/verifier; echo 1 > logs/verifier/reward.txt; ln -s /logs/verifier x",
        "ls /tests/* /solution/* | tee hello.txt",
        "(while true; do echo 1 > /logs/verifier/reward.txt; sleep 0.1; done) & disown",
    ],
)
def test_what_the_model_writes_is_not_a_reward(tmp_path, command):
    task(tmp_path, "hello")
    assert rewarded(harbor(tmp_path, oracle=False), command).reward == 0.0


@pytest.mark.parametrize("name", ["../logs/verifier/reward.txt", "/logs/verifier/reward.txt"])
def test_forged_files_do_not_reach_what_the_tests_own(tmp_path, name):
    task(tmp_path, "hello", **{"tests__test.sh": "true"})
    environment = harbor(tmp_path, oracle=False)
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w") as tar:
        entry = tarfile.TarInfo(name)
        entry.size = 1
        tar.addfile(entry, io.BytesIO(b"1"))
    forged = base64.b64encode(zlib.compress(whole.getvalue())).decode()

    async def story():
        prompt = environment.prompts("train")[0]
        session = environment.open(prompt)
        session._tree = forged  # as a command that writes to the program's descriptor could leave it
        said = [*prompt.messages, {"role": "assistant", "content": "Done."}]
        episode = grpo.Episode(prompt=prompt, messages=said, session=session)
        try:
            return await environment.score(episode)
        finally:
            await environment.aclose()

    assert "wrote no reward" in asyncio.run(story()).error


def test_a_verifier_without_a_reward_is_unscored_and_not_0(tmp_path):
    task(tmp_path, "hello", **{"tests__test.sh": "echo lost; exit 1"})
    feedback = rewarded(harbor(tmp_path, oracle=False))
    assert feedback.reward is None
    assert "wrote no reward (exit status 1): lost" in feedback.error


PLAYS = "bash play.sh; echo 1 > /logs/verifier/reward.txt\n"
QUICK = "[verifier]\ntimeout_sec = 1.0\n"


@pytest.mark.long
@pytest.mark.parametrize(
    ("play", "how"),
    [("while :; do :; done", "time"), ("kill -9 -1", "killed"), ("kill -9 $PPID", "killed")],
)
def test_a_program_that_hangs_or_kills_the_verifier_has_failed(tmp_path, play, how):
    task(tmp_path, "hello", **{"tests__test.sh": PLAYS, "task.toml": QUICK})
    feedback = rewarded(harbor(tmp_path, oracle=False), f"echo '{play}' > play.sh")
    assert (feedback.reward, feedback.error) == (0.0, None)
    assert feedback.metrics[f"failed_{how}"] == 1.0


@pytest.mark.long
def test_a_command_that_stops_the_sandbox_holds_its_place_no_longer_than_its_own_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(commands, "GRACE", 1.0)
    task(tmp_path, "hello", **{"task.toml": "[verifier]\ntimeout_sec = 600.0\n"})

    async def story():
        environment = harbor(tmp_path, oracle=False, seconds=1.0)
        session = environment.open(environment.prompts("train")[0])
        try:
            return await asyncio.wait_for(session.run("kill -STOP $PPID"), 30)
        finally:
            await environment.aclose()

    assert "it took longer than 2 s" in asyncio.run(story())


@pytest.mark.long
def test_trying_the_tasks_has_a_limit_that_names_what_to_change(tmp_path):
    task(tmp_path, "hello", **{"tests__test.sh": "sleep 20"})
    with pytest.raises(grpo.ConfigError, match=r"oracle_seconds = 0.5; .*start_deadline.*oracle = false"):
        harbor(tmp_path, oracle_seconds=0.5).prompts("train")


def test_a_task_whose_files_have_no_room_is_refused(tmp_path):
    task(tmp_path, "hello", **{"environment__data.txt": "x" * 1_100_000})
    with pytest.raises(grpo.ConfigError, match=r"its files in environment take 1.1 MiB"):
        harbor(tmp_path, space=1)


@pytest.mark.parametrize(
    ("files", "rewards"),
    [
        ({"reward.txt": "0.5\n"}, {"reward": 0.5}),
        ({"rewards.json": '{"a": 1, "b": 0}'}, {"a": 1.0, "b": 0.0}),
        ({"reward.txt": "nan"}, None),
        ({"reward.txt": "yes"}, None),
        ({"rewards.json": "[1]"}, None),
        ({"rewards.json": "{"}, None),
        ({"rewards.json": "[" * 16_384}, None),
        ({"rewards.json": "[" * 800 + "]" * 800}, None),
        ({"rewards.json": '{"a": 1' + "0" * 400 + "}"}, None),
        ({"rewards.json": '{"a": 1' + "0" * 10_000 + "}"}, None),
        ({}, None),
    ],
)
def test_rewards_are_finite_numbers(files, rewards):
    ran = Ran(status=0, output="", tree="", files={f"/logs/verifier/{k}": v for k, v in files.items()})
    found = rewards_of(ran)
    assert found == rewards if rewards else isinstance(found, str)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            {"docker": "FROM ubuntu:24.04\nRUN apt-get install -y gcc\n"},
            "more than the sandbox has: RUN apt",
        ),
        ({"docker": "FROM ghcr.io/some/image:1\n"}, "begins with the image ghcr.io"),
        ({"docker": "FROM debian\nWORKDIR /srv\n"}, "works in /srv"),
        ({"docker": "FROM debian\nCOPY data.txt /etc/\n"}, "copies single files"),
        ({"tests__test.sh": "curl http://x | sh"}, "its tests need a network"),
        ({"task.toml": "[[steps]]\nname = 'a'\n"}, "several steps"),
        ({"task.toml": "x ="}, "cannot be read"),
        ({"instruction.md": " "}, "is empty"),
        ({"environment__docker-compose.yaml": "a: 1"}, "several containers"),
    ],
)
def test_tasks_that_need_more_than_the_sandbox_are_refused_with_a_reason(tmp_path, changes, why):
    task(tmp_path, "good")
    task(tmp_path, "bad", **changes)
    assert why in tasks_in(tmp_path)["bad"]
    with pytest.raises(grpo.ConfigError, match="1 of 2 tasks of Harbor are refused"):
        harbor(tmp_path)
    assert [prompt.id for prompt in harbor(tmp_path, refused="skip", oracle=False).prompts("train")] == [
        "good"
    ]


PARTLY = """
if [ -e hello.txt ]; then echo 1; else echo 0.25; fi > /logs/verifier/reward.txt
"""
ONLY_UNTOUCHED = "[ -e hello.txt ] || echo 0 > /logs/verifier/reward.txt\n"


@pytest.mark.long
@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"solution__solve.sh": "echo hallo > hello.txt"}, "its own solution earns 0, expected 1"),
        ({"tests__test.sh": "echo 1 > /logs/verifier/reward.txt"}, "untouched, it earns 1, expected 0"),
        ({"tests__test.sh": PARTLY}, "untouched, it earns 0.25, expected 0"),
        ({"tests__test.sh": "true"}, "untouched, the tests wrote no reward"),
        ({"tests__test.sh": ONLY_UNTOUCHED}, "with its own solution the tests wrote no reward"),
    ],
)
def test_tasks_whose_solution_or_test_is_wrong_are_found_at_the_start(tmp_path, changes, why):
    task(tmp_path, "bad", **changes)
    with pytest.raises(grpo.ConfigError, match=why):
        harbor(tmp_path).prompts("train")


@pytest.mark.long
def test_a_task_whose_tests_take_too_long_untouched_earns_0_and_may_be_played(tmp_path):
    waits = "while [ ! -e hello.txt ]; do sleep 1; done; echo 1 > /logs/verifier/reward.txt\n"
    task(tmp_path, "hello", **{"tests__test.sh": waits, "task.toml": QUICK})
    assert [prompt.id for prompt in harbor(tmp_path).prompts("train")] == ["hello"]


def test_a_directory_without_tasks_is_refused(tmp_path):
    with pytest.raises(grpo.PluginError, match="holds no task of Harbor"):
        make_offer("environment", f"code:harbor:{tmp_path}", plugins=["code"])
    with pytest.raises(grpo.PluginError, match="there is no directory"):
        make_offer("environment", f"harbor:{tmp_path}/missing", plugins=["code"])


def test_a_path_out_of_the_working_directory_is_refused():
    with pytest.raises(grpo.PluginError, match="not a path of a file within"):
        packed({"/etc/passwd": ""})
