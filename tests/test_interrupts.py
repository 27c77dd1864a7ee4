"""ctrl-C, SIGTERM and a terminal that is closed: each counts whenever it comes, and none loses work."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from grpo_core.app.stopping import Stop, interruptions
from grpo_core.loop import checkpoint
from grpo_core.processes import interrupts
from grpo_core.processes.aio import in_own_loop, to_the_end

PROGRAM = [sys.executable, "-m", "grpo_core"]
TINY = ["--env", "math:sort", "--output", "run"] + [
    part
    for key, value in {
        "trainer.steps": 100_000, "trainer.prompts_per_step": 2, "trainer.updates_per_step": 1,
        "rollout.group_size": 2, "validation.every": 0, "checkpoint.every": 0,
        "model.options.warm_start_steps": 0,
    }.items()
    for part in ("--set", f"{key}={value}")
]  # fmt: skip
ENDS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


# ---------------------------------------------------------------------------------- who receives a signal


@pytest.mark.parametrize("number", ENDS)
def test_a_signal_that_a_library_swallows_ends_the_next_event_loop(number):
    async def goes_on():
        await asyncio.sleep(60.0)

    before = interrupts.handle()
    try:
        with contextlib.suppress(BaseException):  # as an import of theirs does
            signal.raise_signal(number)
        with pytest.raises(KeyboardInterrupt):
            to_the_end(goes_on())
        assert signal.getsignal(number) is interrupts._receive
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    assert not interrupts._raised


def test_a_check_before_the_run_is_ended_while_it_computes():
    went_on = []

    async def check():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.5)  # noqa: ASYNC251 - it computes
        went_on.append(True)

    before = interrupts.handle()
    try:
        with pytest.raises(KeyboardInterrupt):
            in_own_loop(check())
    finally:
        interrupts._raised.clear()
        for each, handler in before.items():
            signal.signal(each, handler)
    assert not went_on


def test_a_signal_that_python_itself_swallows_comes_again():
    """Its interpreter ignores what a callback of a weak reference raises; imports have such callbacks."""
    program = """
import signal, time, weakref
from grpo_core.processes import interrupts

class Referent: pass

interrupts.begin()
referent = Referent()
reference = weakref.ref(referent, lambda _: signal.raise_signal(signal.SIGTERM))
try:
    exec("del referent; time.sleep(60)")
except KeyboardInterrupt:
    interrupts.leave()
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50)
    assert (ended.returncode, ended.stderr) == (130, "")


def test_a_program_ends_although_a_thread_of_a_module_does_not():
    """An environment's file may start a server; libraries may still take their time at the exit."""
    program = """
import atexit, threading, time
from grpo_core.processes import interrupts

interrupts.PATIENCE = 0.5
atexit.register(lambda: (time.sleep(1), print("libraries have ended")))
if {waits}:
    threading.Thread(target=threading.Event().wait, name="server").start()
interrupts.leave(2)
"""
    said = {True: "grpo-core: ended, although threads still run: server\n", False: "libraries have ended\n"}
    for waits, text in said.items():
        command = [sys.executable, "-c", program.format(waits=waits)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=50)
        assert (ended.returncode, ended.stdout + ended.stderr) == (2, text)


def test_a_program_that_nohup_has_started_ignores_sighup_in_its_loop():
    async def heard():
        for number in (signal.SIGHUP, signal.SIGHUP):
            signal.raise_signal(number)
            await asyncio.sleep(0)
        return "went on"

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert to_the_end(heard()) == "went on"
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


class Running:
    """The part of a pipeline that handles signals."""

    in_step = True

    def __init__(self):
        self.stops = 0

    def stop(self):
        self.stops += 1


@pytest.mark.parametrize(
    ("sent", "at_once"),
    [
        (["SIGHUP", "SIGHUP"], False),
        (["SIGTERM", "SIGHUP"], False),
        (["SIGHUP", "SIGTERM"], False),
        (["SIGHUP", "SIGTERM", "SIGTERM"], True),
        (["SIGINT", "SIGINT"], True),
        (["SIGINT", "SIGTERM"], True),
    ],
)
def test_a_second_signal_ends_a_run_at_once_unless_a_closed_terminal_has_sent_both(sent, at_once):
    pipeline, said = Running(), []

    async def story():
        with interruptions(said.append, Stop()) as interruptible:
            interruptible(pipeline)
            for name in sent:
                signal.raise_signal(getattr(signal, name))
                await asyncio.sleep(0)
            await asyncio.sleep(0)
        return "went on"

    if at_once:
        with pytest.raises(KeyboardInterrupt):
            to_the_end(story())
    else:
        assert to_the_end(story()) == "went on"
    assert pipeline.stops == 1
    assert said == [f"{sent[0]}: ending after this step, with a checkpoint (again: end at once)"]


# ---------------------------------------------------------------------------------- whole commands


def handles(process, number=signal.SIGTERM):
    """Wait until a program handles a signal, which it does before its imports."""
    status = Path(f"/proc/{process.pid}/status")
    deadline = time.monotonic() + 60
    while not int(status.read_text().partition("SigCgt:")[2].split()[0], 16) >> (number - 1) & 1:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.001)


def wait_for(condition, process, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.returncode
        assert time.monotonic() < deadline
        time.sleep(0.02)


def steps_of(run):
    path = run / "metrics.jsonl"
    return sum('"time/step"' in line for line in path.read_text().splitlines()) if path.exists() else 0


def saved(run):
    """The step of the newest checkpoint, which is that of the last step."""
    found = checkpoint.newest(run / "checkpoints")
    assert found is not None
    assert found.step == steps_of(run)
    return found.step


EARLY = [0.0, 0.4, 2.5]
SWEEP = [round(0.05 * i, 2) for i in range(61)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "background", "moments"),
    [
        (signal.SIGINT, True, EARLY),
        (signal.SIGHUP, False, EARLY[:2]),
        *(
            pytest.param(number, background, SWEEP, marks=pytest.mark.nightly)
            for number, background in [
                (signal.SIGINT, False), (signal.SIGINT, True), (signal.SIGTERM, False), (signal.SIGHUP, False)
            ]
        ),
    ],
)  # fmt: skip
def test_the_first_signal_counts_whenever_it_comes(tmp_path, number, background, moments):
    """Also ctrl-C for a program in the background of a script, whose shell lets it ignore that."""
    shell = ["sh", "-c", '"$@" & echo $!; wait $!', "sh"] if background else []
    for moment in moments:
        here = tmp_path / f"at-{moment}"
        here.mkdir()
        with subprocess.Popen(
            [*shell, *PROGRAM, "train", *TINY],
            cwd=here,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                pid = int(process.stdout.readline()) if background else process.pid
                handles(subprocess_of(pid, process))
                time.sleep(moment)
                os.kill(pid, number)
                said, _ = process.communicate(timeout=60)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        assert process.returncode == 130, (moment, said)
        assert any("interrupted" in line for line in said.splitlines()[-3:]), (moment, said)
        assert "Traceback" not in said, moment
        if "ending" in said:
            saved(here / "run")


class subprocess_of:  # noqa: N801 - reads as what it is
    """A process below another one that we have started."""

    def __init__(self, pid, parent):
        self.pid, self.poll = pid, parent.poll


class Terminal:
    """A program in its own terminal, which can be closed."""

    def __init__(self, *arguments, cwd, ignore_hangup=False):
        self.ours, theirs = pty.openpty()
        self.shown = b""

        def before():
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
            if ignore_hangup:
                signal.signal(signal.SIGHUP, signal.SIG_IGN)

        self.process = subprocess.Popen(
            [*PROGRAM, *arguments],
            cwd=cwd, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, preexec_fn=before,
        )  # fmt: skip
        os.close(theirs)
        os.set_blocking(self.ours, False)

    def shows(self, text):
        """Whether it has shown a text so far."""
        with contextlib.suppress(BlockingIOError):
            while True:
                self.shown += os.read(self.ours, 65536)
        return text in self.shown.decode(errors="replace")

    def close(self):
        """Close it; the kernel sends SIGHUP to the program."""
        os.close(self.ours)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def reason(run):
    lines = (run / "events.jsonl").read_text().splitlines()
    return [event["reason"] for event in map(json.loads, lines) if event["event"] == "RunEnded"]


SLOW_STEPS = """
import time

def slow(inputs):
    time.sleep(2.0)
    return -inputs.advantages * inputs.policy_logprobs, {}
"""


@pytest.mark.slow
@pytest.mark.parametrize("view", ["live", "lines"])
def test_a_closed_terminal_ends_a_run_with_a_checkpoint(tmp_path, view):
    with Terminal("train", *TINY, "--set", f'tracking.terminal.view="{view}"', cwd=tmp_path) as terminal:
        run = tmp_path / "run"
        wait_for(lambda: terminal.shows("reward") and steps_of(run) >= 2, terminal.process)
        terminal.close()
        assert terminal.process.wait(60) == 130
    assert saved(run) >= 2
    assert reason(run) == ["interrupted"]
    assert (run / "report.html").exists()


@pytest.mark.slow
def test_a_terminal_that_is_closed_during_the_last_step_costs_nothing(tmp_path):
    (tmp_path / "losses.py").write_text(SLOW_STEPS)
    slow = ["--set", "loss.name=./losses.py:slow", "--set", 'tracking.terminal.view="lines"']
    with Terminal("train", *TINY, *slow, cwd=tmp_path) as terminal:
        run = tmp_path / "run"
        wait_for(lambda: steps_of(run) >= 1, terminal.process)
        terminal.process.terminate()
        wait_for(lambda: terminal.shows("SIGTERM: ending"), terminal.process)
        terminal.close()
        assert terminal.process.wait(60) == 130
    assert saved(run) >= 1
    assert reason(run) == ["interrupted"]


@pytest.mark.nightly
def test_a_run_that_nohup_has_started_outlives_its_terminal(tmp_path):
    steps = ["--set", "trainer.steps=12"]
    with Terminal("train", *TINY, *steps, cwd=tmp_path, ignore_hangup=True) as terminal:
        run = tmp_path / "run"
        wait_for(lambda: steps_of(run) >= 1, terminal.process)
        terminal.close()
        assert terminal.process.wait(60) == 0
    assert saved(run) == 12
    assert reason(run) == ["finished"]


@pytest.mark.nightly
def test_a_run_whose_output_nobody_reads_any_more_ends_as_it_would(tmp_path):
    with subprocess.Popen(
        [*PROGRAM, "train", *TINY, "--set", 'tracking.trackers=["files"]'],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        process.stdout.close()
        run = tmp_path / "run"
        wait_for(lambda: steps_of(run) >= 2, process)
        process.terminate()
        assert process.wait(60) == 130
    assert saved(run) >= 2


HANGS = """
import time
import grpo_core as grpo

class Hangs(grpo.Environment):
    concurrency = 4
    def prompts(self, split):
        return [grpo.Prompt(messages=f"{split}{i}") for i in range(8)]
    def solve(self, prompt):
        return "a"
    async def evaluate(self, episodes):
        import asyncio
        open("judging", "w").close()
        await asyncio.sleep(3600)
"""
UNTIL_JUDGED = "judging"
UNTIL_WARM = "warming"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "moment", "number"),
    [
        (["audit", "./env.py:Hangs"], UNTIL_JUDGED, signal.SIGTERM),
        (["check", "./env.py:Hangs"], UNTIL_JUDGED, signal.SIGHUP),
        (["validate", "tiny", "--env", "./env.py:Hangs"], UNTIL_WARM, signal.SIGINT),
        (
            ["validate", "tiny", "--env", "./env.py:Hangs", "--set", "model.options.warm_start_steps=0"],
            UNTIL_JUDGED,
            signal.SIGTERM,
        ),
        (["try", "./env.py:Hangs", "--model", "tiny"], UNTIL_WARM, signal.SIGTERM),
        (["try", "./env.py:Hangs"], UNTIL_JUDGED, signal.SIGHUP),
    ],
)
def test_a_command_ends_at_once_with_one_line(tmp_path, command, moment, number):
    """Also while a thread of it makes a model."""
    (tmp_path / "env.py").write_text(HANGS)
    long = ["--set", "model.options.warm_start_steps=1000000"] if moment == UNTIL_WARM else []
    long = [] if command[0] == "try" else long  # it has the environment's options alone
    said = tmp_path / "said"
    with said.open("w") as file, subprocess.Popen(
        [*PROGRAM, *command, *long],
        cwd=tmp_path, stdin=subprocess.PIPE, stdout=file, stderr=file, start_new_session=True,
    ) as process:  # fmt: skip
        process.stdin.write(b"a\n" * 100)
        process.stdin.flush()
        judging = tmp_path / "judging"
        wait_for(lambda: judging.exists() or moment in said.read_text(), process)
        process.send_signal(number)
        assert process.wait(60) == 130, said.read_text()
    assert said.read_text().splitlines()[-1] == "grpo-core: interrupted"
    assert "Traceback" not in said.read_text()
    assert not [*tmp_path.glob("runs/*")], "nothing is recorded"
