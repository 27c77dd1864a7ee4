"""Programs of a model against tests: right ones, wrong ones, and hostile ones, in the sandbox."""

import asyncio
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
import tomllib
import venv
from pathlib import Path

import pytest

import grpo_core as grpo
from grpo_core.testing import make_offer
from grpo_plugin_code import launch, sandbox
from grpo_plugin_code.blocks import program_of
from grpo_plugin_code.cases import cases_of
from grpo_plugin_code.python import PythonCode

HOSTILE = {
    name: code
    for group in tomllib.loads(Path(__file__).with_name("hostile.toml").read_text()).values()
    for name, code in group.items()
}
in_a_sandbox = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
PRINTS = [{"input": "3\n", "output": "6\n"}, {"input": "-5\n", "output": "-10"}]
CALLS = ["assert double(3) == 6", {"call": "double(-5)", "expected": -10}]
SMALL = {
    "seconds": 2.5,
    "cpu_seconds": 1,
    "memory": 256,
    "processes": 8,
    "output": 64,
    "files": 8,
    "ready": 1,
}


def episode(code, tests, *, fence="python"):
    prompt = grpo.Prompt(messages="Double it.", id="1", info={"tests": tests})
    reply = f"Here it is:\n```{fence}\n{code}\n```\nDone."
    return grpo.Episode(prompt=prompt, messages=[*prompt.messages, {"role": "assistant", "content": reply}])


def judged(*episodes, **options):
    async def story():
        environment = PythonCode(**{**SMALL, **options})
        try:
            return await asyncio.gather(*map(environment.score, episodes))
        finally:
            await environment.aclose()

    return asyncio.run(story())


# ---------------------------------------------------------------------------------- right and wrong


@pytest.mark.long
@in_a_sandbox
def test_programs_that_print_and_programs_that_return_are_judged_by_their_tests():
    prints, returns = "print(2 * int(input()))", "def double(n):\n    return 2 * n"
    right = judged(episode(prints, PRINTS), episode(returns, CALLS), episode(prints, PRINTS, fence=""))
    assert [feedback.reward for feedback in right] == [1.0, 1.0, 1.0]
    assert right[0].metrics == {"passed": 1.0, "without_code": 0.0}
    half = "print(6)", "def double(n):\n    return abs(2 * n)"
    partly = judged(episode(half[0], PRINTS), episode(half[1], CALLS), reward="share")
    assert [feedback.reward for feedback in partly] == [0.5, 0.5]
    assert [feedback.metrics["failed_wrong"] for feedback in partly] == [0.5, 0.5]
    assert [feedback.reward for feedback in judged(episode(half[0], PRINTS))] == [0.0]


@pytest.mark.long
@in_a_sandbox
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("[1, (2, 3.5), {'a': None}]", "[1, (2, 3.5), {'a': None}]"),
        ("{1, 2}", "set([2, 1, 1])"),
        ("10**5000", "10**5000"),
        ("4.0", "4"),
        ("b'x', 'ü', True, 1j", "(b'x', 'ü', True, 1j)"),
        ("float('inf')", "float('inf')"),
    ],
)
def test_values_are_compared_as_python_compares_them(value, expected):
    code = f"def f():\n    return {value}"
    (right,) = judged(episode(code, [f"assert f() == {expected}"]))
    (wrong,) = judged(episode(code, [f"assert f() == [{expected}]"]))
    assert (right.reward, wrong.reward) == (1.0, 0.0)


@in_a_sandbox
def test_tests_may_be_a_json_text_as_in_many_data_sets():
    (feedback,) = judged(episode("print(2 * int(input()))", json.dumps(PRINTS)))
    assert feedback.reward == 1.0


@pytest.mark.long
@in_a_sandbox
def test_a_program_that_is_cancelled_leaves_nothing():
    async def story():
        environment = PythonCode(**SMALL)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                await environment.score(episode("while True: pass", PRINTS))
        await environment.aclose()

    before = children()
    asyncio.run(story())
    assert only(before)


ENDLESS = """
import asyncio, sys
from grpo_plugin_code.sandbox import Job, Limits, Sandboxes

async def main():
    sandboxes = Sandboxes(Limits(seconds=60, cpu_seconds=60), at_once=1, ready=1)
    await sandboxes.run(Job(code=""))
    endless = asyncio.create_task(sandboxes.run(Job(code="while True: pass")))
    await asyncio.sleep(1)
    print("running", endless.done(), flush=True)
    await endless

asyncio.run(main())
"""


@pytest.mark.long
@in_a_sandbox
def test_sandboxes_end_with_the_process_that_has_started_them():
    before = children()
    with subprocess.Popen([sys.executable, "-c", ENDLESS], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"running False\n"
        assert not children() <= before
        process.kill()
    assert only(before)


@in_a_sandbox
def test_a_call_that_raises_fails_alone():
    code = "def double(n):\n    return 2 * n if n > 0 else 1 / 0"
    (feedback,) = judged(episode(code, CALLS), reward="share")
    assert feedback.reward == 0.5


@pytest.mark.long
@in_a_sandbox
def test_a_program_has_the_standard_library_a_private_tmp_and_nothing_of_others():
    writes = "import json, os, random, socket\nopen('/tmp/mark', 'w').write('x')\nprint(os.listdir('/tmp'))"
    tests = [{"input": "", "output": "['mark']"}, {"input": "", "output": "['mark']"}]
    feedback = judged(episode(writes, tests), episode(writes, tests))
    assert [each.reward for each in feedback] == [1.0, 1.0]
    assert not Path("/tmp/mark").exists()


WRITABLE = """
import os
for place, names, _ in os.walk("/"):
    if place.count("/") > 2:
        names.clear()
    names[:] = [name for name in names if name not in ("proc", "sys", "mqueue")]  # kept by the kernel
    try:
        open(place + "/mark", "w").close()
        print(place)
    except OSError:
        pass
print(sorted(os.listdir("/proc/self/fd")), os.getuid() > 0)
print(*sorted(set(os.environ) - {"HOSTNAME", "PWD", "TERM"}))
"""


@pytest.mark.long
@in_a_sandbox
def test_a_program_can_write_to_nothing_but_its_tmp():
    seen = "/tmp\n['0', '1', '2', '3'] True\nHOME LC_CTYPE PATH"
    (feedback,) = judged(episode(WRITABLE, [{"input": "", "output": seen}]))
    assert feedback.reward == 1.0, feedback


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        ("```python\na\n```", "a"),
        ("```\na\n```", "a"),
        ("```py\na\n``` and ```python\nb\n```", "b"),
        ("```python\na\nb", "a\nb"),
        ("a = 1", None),
        ("```python\n" + "x" * 100_001 + "\n```", None),
        ("```python\na\n```\nRun it:\n```bash\npython a.py\n```\nIt prints 1.", "a"),
        ("```python\na\n```\nIt prints:\n```\n1\n```", "a"),
        ("```\na\n```\nor:\n```\nb\n```", "b"),
        ("```bash\nls\n```", None),
        ("```Python\na\n```\nDone.", "a"),
        ("``` py title=a.py\na\n```", "a"),
        ("```python:a.py\na\n```", "a"),
        ("So:\r\n```python\r\na\r\nb\r\n```\r\nDone.\r\n", "a\nb"),
        ("1. So:\n\n   ```python\n   if a:\n       b\n   ```\n2. Done.", "if a:\n    b"),
        ("- ```python\n  a\n  ```\n- Done.", "a"),
        ("So: ```python\na\n```</answer>", "a"),
        ("Write it between ``` and ```, as always.\n```python\na\n```", "a"),
        ("It goes after ``` as always.\n```python\na\n```", "a"),
        ("````python\n'''\n```\na\n```\n'''\n````", "'''\n```\na\n```\n'''"),
        ("```python\ndef f():\n    '''\n    ```\n    '''\n```", "def f():\n    '''\n    ```\n    '''"),
        ("```python\na\n```python\nb\n```", "b"),
        ("```python\na\n```\n```bash\npyth", "a"),
        ("```python\na\n```\n```python\n", "a"),
        ("```python\n\n```", ""),
        ("```python\n```", ""),
        ("```python\n\u2028 = 'a\x0cb'\n```", "\u2028 = 'a\x0cb'"),
    ],
)
def test_the_last_block_of_python_is_the_program(reply, code):
    assert program_of(reply) == code


@pytest.mark.parametrize(
    "reply",
    ["```" + "a" * 400_000 + "`", " " * 400_000 + "`", "```py\n" + " " * 400_000 + "x", "```a\n" * 80_000],
    ids=["language", "margin", "line", "fences"],
)
def test_fences_are_found_in_linear_time(reply):
    begin = time.process_time()
    program_of(reply)
    assert time.process_time() - begin < 10.0, "linear time is below a second, quadratic time takes minutes"


@in_a_sandbox
def test_a_reply_without_code_earns_nothing_and_is_counted():
    prompt = grpo.Prompt(messages="?", id="1", info={"tests": PRINTS})
    said = [*prompt.messages, {"role": "assistant", "content": "print(6)"}]
    (feedback,) = judged(grpo.Episode(prompt=prompt, messages=said))
    assert (feedback.reward, feedback.metrics["without_code"]) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("tests", "why"),
    [
        (None, "expected a list of"),
        ([], "expected a list of"),
        (["assert abs(f(1) - 2) < 1e-6"], "outside of the sandbox"),
        (["assert f(1)"], "outside of the sandbox"),
        (["assert f(1) == 2 == g(1)"], "outside of the sandbox"),
        (["import os"], "outside of the sandbox"),
        (["assert f( == 2"], "not a single assertion"),
        ([{"call": "f(", "expected": 1}], "is not an expression"),
        ([{"input": "1"}], "expected {"),
        ("[1", "expected a list of"),
    ],
)
def test_malformed_tests_are_refused_before_the_run(tests, why):
    with pytest.raises(grpo.PluginError) as raised:
        cases_of(tests, "prompt '7'")
    assert why in str(raised.value)
    assert "prompt '7'" in str(raised.value)


@in_a_sandbox
def test_an_expected_value_that_cannot_be_computed_is_an_error_of_the_tests():
    with pytest.raises(grpo.PluginError, match="the expected value 'missing'"):
        judged(episode("def f(): return 1", ["assert f() == missing"]))


# ---------------------------------------------------------------------------------- hostile programs


def test_there_are_enough_hostile_programs():
    assert len(HOSTILE) >= 60


@pytest.mark.long
@in_a_sandbox
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_program_earns_nothing_in_bounded_time_and_leaves_nothing(name, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("6\n")  # the right answer is on the host
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.0)
        port = str(server.getsockname()[1])
        code = HOSTILE[name].replace("{secret}", str(secret)).replace("{port}", port)
        before, begin = children(), time.monotonic()
        feedback = judged(episode(code, PRINTS[:1]), episode(code, CALLS[:1]))
        seconds = time.monotonic() - begin
        with pytest.raises(BlockingIOError):
            server.accept()
    for each in feedback:
        assert (each.reward, each.error) == (0.0, None)
        assert any(metric.startswith("failed_") for metric in each.metrics), "a reason is given"
    assert seconds < 15
    assert secret.read_text() == "6\n"
    assert [*tmp_path.iterdir()] == [secret]
    assert only(before), "no process is left"


def only(before):
    """Whether all other processes of sandboxes end within a few seconds; the kernel needs a moment."""
    until = time.monotonic() + 5
    while not children() <= before:
        if time.monotonic() > until:
            return False
    return True


def children():
    """Return the processes of this machine that sandboxes have started."""
    found = set()
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):
            lines = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
            mine = int(lines["Uid"].split()[0]) >= launch.PREFERRED[0] or lines["Name"].strip() in (
                "bwrap",
                "conmon",
            )
            if mine and not lines["State"].strip().startswith("Z"):
                found.add(int(status.parent.name))
    return found


# ---------------------------------------------------------------------------------- without a sandbox


def test_without_bubblewrap_nothing_is_run(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(grpo.PluginError, match=r"never run without one. Install bubblewrap") as raised:
        make_offer("environment", "code:python", plugins=["code"])
    assert raised.value.exit_status == 2


@in_a_sandbox
def test_a_directory_of_the_sandbox_that_would_hide_this_python_is_refused_at_the_start():
    with pytest.raises(grpo.ConfigError, match=r"its own directory at .* which hides it"):
        sandbox.command(sandbox.Limits(), [os.path.realpath(sys.base_prefix)])


def test_a_bubblewrap_that_cannot_make_a_sandbox_is_refused(monkeypatch, tmp_path):
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create a new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(grpo.PluginError, match="cannot make a sandbox on this machine: bwrap: No"):
        make_offer("environment", "code:python", plugins=["code"])


@pytest.mark.parametrize("options", [{"seconds": 0}, {"memory": 1}, {"cpu_seconds": 0}, {"processes": 0}])
def test_a_limit_that_cannot_be_is_refused(options):
    with pytest.raises(grpo.PluginError) as raised:
        make_offer("environment", "code:python", plugins=["code"], **options)
    assert next(iter(options)) in str(raised.value)


@pytest.mark.long
@in_a_sandbox
def test_an_environment_whose_python_is_a_copy_has_a_sandbox(tmp_path):
    venv.create(tmp_path / "copied", symlinks=False)
    python = tmp_path / "copied" / "bin" / "python"
    (libraries,) = (tmp_path / "copied" / "lib").glob("python3*/site-packages")
    (libraries / "ours.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    program = (
        "import asyncio\n"
        "from grpo_plugin_code.sandbox import Job, Limits, Sandboxes\n"
        "async def main():\n"
        "    sandboxes = Sandboxes(Limits(), at_once=1, ready=0)\n"
        "    print((await sandboxes.run(Job(code='print(6 * 7)'))).output)\n"
        "    await sandboxes.aclose()\n"
        "asyncio.run(main())\n"
    )
    assert subprocess.check_output([python, "-c", program], text=True).strip() == "42"
