"""Child processes: calls, errors, deaths, deadlines; a child never outlives its parent."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from pathlib import Path

import pytest
from killing import alive, killed, left_after

from grpo_core.contracts.errors import ChildDied, ConfigError, DeadlineExceeded, GrpoError
from grpo_core.contracts.incidents import reported_to
from grpo_core.processes import child as processes
from grpo_core.processes import orphans
from grpo_core.processes.child import Child
from grpo_core.processes.served import RemoteTraceback

HERE = Path(__file__).parent
PYTHONPATH = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))


class Target:
    """The object that the child owns in these tests; it is made there by name."""

    def __init__(self, greeting="hello"):
        self.greeting = greeting
        if greeting == "refuse":
            raise ConfigError("greeting: expected something nicer")

    def description(self):
        return {"pid": os.getpid()}

    def greet(self, name):
        return f"{self.greeting} {name}"

    def fail(self):
        raise KeyError("gold")

    def fail_oddly(self):
        class LocalError(Exception):
            pass

        raise LocalError("cannot be pickled")

    def hang(self):
        while True:
            time.sleep(1)

    def talk(self):
        print("a line", flush=True)
        print("another", file=sys.stderr, flush=True)
        return "talked"

    def die(self):
        print("last words", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    def start_another(self, how="in its group"):
        if how == "as a daemon":  # whose parent ends at once
            shell = ["sh", "-c", "setsid sleep 1234 >/dev/null & echo $!"]
            return int(subprocess.run(shell, stdout=subprocess.PIPE).stdout)
        return subprocess.Popen(["sleep", "1234"], start_new_session=how == "in its session").pid

    def later(self, name):
        """Answered when ``now`` is called."""
        self.promise = Future()
        return self.promise

    def now(self, error=None):
        if error is not None:
            self.promise.set_exception(error)
        else:
            self.promise.set_result("at last")

    def on_main_thread(self):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        return True

    def poison(self):
        return Poison()

    def fork(self):
        if (pid := os.fork()) == 0:
            signal.pause()
        return pid

    def leave(self):
        os._exit(1)

    def ended_by(self, number, how):
        """Start something; return the status with which it ends by a signal."""
        if how == "a program":
            started = subprocess.Popen(["sleep", "1234"])
            started.send_signal(number)
            return started.wait()
        ready, begun = os.pipe()
        if (pid := os.fork()) == 0:
            os.write(begun, b".")
            signal.pause()
        os.read(ready, 1)
        os.kill(pid, number)
        return -os.WTERMSIG(os.waitpid(pid, 0)[1])


class Poison:
    """An object that only the process that made it can unpickle."""

    def __reduce__(self):
        return _only_in, (os.getpid(),)


def _only_in(pid):
    if os.getpid() != pid:
        raise TypeError("not here")


class Echo:
    """A target that runs its own loop and answers out of order."""

    def serve(self, connection):
        calls = []
        while len(calls) < 3:
            calls.append(connection.receive())
        for call in reversed(calls):
            connection.reply(call.id, call.args[0])
        connection.receive()


def child(factory="Target", log=None, **kwargs):
    environ = {"PYTHONPATH": PYTHONPATH}
    return Child(f"test_processes:{factory}", kwargs, name="child of a test", environ=environ, log=log)


def story(coroutine):
    return asyncio.run(coroutine)


async def closing(target, use):
    try:
        return await use(target)
    finally:
        await target.aclose()


@pytest.mark.long
def test_a_call_is_answered_on_the_childs_main_thread():
    async def use(c):
        assert (await c.started(seconds=20))["pid"] == c.pid != os.getpid()
        assert await c.call("greet", "you", seconds=5) == "hello you"
        assert await c.call("on_main_thread", seconds=5)

    story(closing(child(), use))


@pytest.mark.long
def test_a_child_imports_from_where_its_program_does(tmp_path, monkeypatch):
    (tmp_path / "only_here.py").write_text("class Target:\n    def greet(self):\n        return 'hello'\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])

    async def use(c):
        await c.started(seconds=20)
        assert await c.call("greet", seconds=5) == "hello"

    story(closing(Child("only_here:Target", name="child of a test"), use))


@pytest.mark.long
def test_a_child_has_its_own_group_in_its_parents_session():
    """So ctrl-C in a terminal does not reach it, and Linux shares the cores among all of a run."""

    async def use(c):
        await c.started(seconds=20)
        assert (os.getpgid(c.pid), os.getsid(c.pid)) == (c.pid, os.getsid(0))

    story(closing(child(), use))


@pytest.mark.long
def test_an_exception_is_raised_here_with_the_childs_traceback_as_its_cause():
    async def use(c):
        with pytest.raises(KeyError, match="gold") as caught:
            await c.call("fail", seconds=20)
        assert isinstance(caught.value.__cause__, RemoteTraceback)
        assert 'raise KeyError("gold")' in str(caught.value.__cause__)
        with pytest.raises(GrpoError, match="LocalError: cannot be pickled"):
            await c.call("fail_oddly", seconds=5)
        assert await c.call("greet", "again", seconds=5) == "hello again"

    story(closing(child(), use))


@pytest.mark.long
def test_a_target_that_cannot_be_made_says_why():
    async def use(c):
        with pytest.raises(ConfigError, match="expected something nicer"):
            await c.started(seconds=20)

    story(closing(child(greeting="refuse"), use))


@pytest.mark.long
def test_a_call_past_its_deadline_kills_the_child_and_fails_all_waiting_calls():
    async def use(c):
        await c.started(seconds=20)
        hanging = asyncio.create_task(c.call("hang", seconds=0.2))
        behind = asyncio.create_task(c.call("greet", "you", seconds=60))
        began = time.monotonic()
        with pytest.raises(
            DeadlineExceeded, match=r"child of a test: no answer to 'hang' within 0\.2 s; killed"
        ):
            await hanging
        with pytest.raises(DeadlineExceeded):
            await behind
        assert time.monotonic() - began < 5
        assert not c.alive

    story(closing(child(), use))


@pytest.mark.long
def test_a_child_that_dies_is_named_with_its_last_words(tmp_path):
    async def use(c):
        with pytest.raises(ChildDied, match=r"died \(killed by SIGKILL\); the end of .*log:\n    last words"):
            await c.call("die", seconds=20)
        with pytest.raises(ChildDied):
            await c.call("greet", "nobody", seconds=5)

    story(closing(child(log=tmp_path / "log"), use))


@pytest.mark.long
def test_a_child_that_dies_of_a_signal_without_a_name_is_one_that_died(tmp_path):
    async def use(c):
        assert await c.call("greet", "you", seconds=20) == "hello you"
        os.kill(c.pid, signal.SIGRTMIN + 6)
        with pytest.raises(ChildDied, match=rf"died \(killed by signal {signal.SIGRTMIN + 6}\)"):
            await c.call("greet", "you", seconds=20)

    story(closing(child(log=tmp_path / "no log"), use))


@pytest.mark.long
def test_a_log_that_cannot_be_written_ends_no_child():
    async def use(c):
        assert await c.call("talk", seconds=20) == "talked"
        assert await c.call("greet", "you", seconds=5) == "hello you"
        with pytest.raises(ChildDied, match=r"died \(killed by SIGKILL\)"):
            await c.call("die", seconds=20)

    story(closing(child(log=Path("/dev/full")), use))


@pytest.mark.long
def test_an_answer_that_cannot_be_unpickled_ends_the_child_and_no_caller_waits_for_ever():
    async def use(target):
        poison = asyncio.create_task(target.call("poison", seconds=None))
        hanging = asyncio.create_task(target.call("hang", seconds=None))
        for call in (poison, hanging):
            with pytest.raises(ChildDied, match="its answer is unreadable: TypeError: not here"):
                await asyncio.wait_for(call, 60)
        assert not target.alive

    story(closing(child(), use))


@pytest.mark.long
def test_a_process_that_the_child_forked_does_not_hide_its_death():
    async def use(target):
        forked = await target.call("fork", seconds=60)
        try:
            with pytest.raises(ChildDied, match="exit status 1"):
                await asyncio.wait_for(target.call("leave", seconds=None), 60)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(forked, signal.SIGKILL)

    story(closing(child(), use))


@pytest.mark.long
def test_a_future_is_answered_when_it_is_done_and_holds_no_other_call_up():
    async def use(c):
        first = asyncio.create_task(c.call("later", "you", seconds=20))
        await c.call("greet", "you", seconds=20)
        assert not first.done()
        await c.call("now", seconds=5)
        assert await first == "at last"
        second = asyncio.create_task(c.call("later", "you", seconds=20))
        await asyncio.sleep(0)
        await c.call("now", OSError(28, "No space left on device"), seconds=5)
        with pytest.raises(OSError, match="No space left") as caught:
            await second
        assert caught.value.errno == 28

    story(closing(child(), use))


@pytest.mark.long
def test_a_target_may_run_its_own_loop_and_answer_out_of_order():
    async def use(c):
        answers = await asyncio.gather(*(c.call("any", i, seconds=20) for i in range(3)))
        assert answers == [0, 1, 2]

    story(closing(child("Echo"), use))


@pytest.mark.long
def test_a_caller_that_goes_away_leaves_the_others_alone():
    async def use(c):
        await c.started(seconds=20)
        gone = asyncio.create_task(c.call("greet", "nobody", seconds=5))
        await asyncio.sleep(0)
        gone.cancel()
        assert await c.call("greet", "you", seconds=5) == "hello you"

    story(closing(child(), use))


@pytest.mark.long
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_no_child_outlives_its_parent(sent):
    script = (
        "import asyncio, sys; from test_processes import child\n"
        "async def main():\n"
        "    c = child(); await c.started(seconds=20); print(c.pid, flush=True)\n"
        "    await c.call('hang', seconds=None)\n"
        "asyncio.run(main())"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
        text=True,
    )
    with parent:
        pid = int(parent.stdout.readline())
        parent.send_signal(sent)
        parent.wait()
        assert not left_after([pid])


@pytest.mark.long
def test_nothing_that_a_child_has_started_outlives_a_parent_that_is_killed():
    hows = ("in its group", "in its session", "as a daemon")
    script = (
        "import asyncio; from test_processes import child\n"
        "async def main():\n"
        "    c = child()\n"
        f"    pids = [await c.call('start_another', how, seconds=20) for how in {hows}]\n"
        "    print(c.pid, *pids, flush=True)\n"
        "    await c.call('hang', seconds=None)\n"
        "asyncio.run(main())"
    )
    # the parent itself is a descendant of some child, as a run that an environment starts would be
    variables = {**os.environ, "PYTHONPATH": PYTHONPATH, orphans.MARK: "of an outer process"}
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, env=variables, text=True, process_group=0
    )
    with parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert [alive(pid) for pid in pids] == [True] * 4
        os.killpg(parent.pid, signal.SIGKILL)
        parent.wait()
    assert left_after(pids, 20) == []


@pytest.mark.long
def test_what_ends_a_run_from_outside_ends_no_child_but_what_the_child_has_started():
    async def use(c):
        await c.started(seconds=20)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(c.pid, number)
        assert await c.call("greet", "you", seconds=20) == "hello you"
        for number in (signal.SIGTERM, signal.SIGHUP):
            for how in ("a program", "a fork"):
                assert await c.call("ended_by", number, how, seconds=20) == -number

    story(closing(child(), use))


@pytest.mark.long
def test_what_ends_a_run_from_outside_does_not_end_its_watcher():
    script = (
        "import os, subprocess; from grpo_core.processes import orphans\n"
        "mark = orphans.Marks().make()\n"
        "watcher = open(f'/proc/self/task/{os.getpid()}/children').read()\n"
        "started = subprocess.Popen(['sleep', '1234'], env={**os.environ, orphans.MARK: mark})\n"
        "print(watcher, started.pid, flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        watcher, started = (int(pid) for pid in parent.stdout.readline().split())
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(watcher, number)
        parent.kill()
    assert not left_after([started], 20)
    assert not left_after([watcher], 20)


@pytest.mark.long
def test_a_process_that_is_killed_leaves_no_temporary_files(tmp_path):
    """The directory of another process, and what others call by such a name, stay."""
    script = (
        "import os; from grpo_core.processes import child as processes\n"
        "directory = processes.scratch_directory()\n"
        "open(f'{directory.name}/model', 'w').close()\n"
        "watcher = open(f'/proc/self/task/{os.getpid()}/children').read().strip()\n"
        "print(watcher, directory.name, flush=True); input()"
    )
    mine, link = tmp_path / "grpo-core-of-another", tmp_path / "kept"
    mine.mkdir()
    link.mkdir()
    variables = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=variables,
    ) as parent:
        watcher, name = parent.stdout.readline().split()
        directory = Path(name)
        assert [path.name for path in directory.iterdir()] == ["model"]
        (tmp_path / f"{directory.name}-link").symlink_to(link)
        parent.kill()
    assert not left_after([int(watcher)], 20)
    assert {path.name for path in tmp_path.iterdir()} == {mine.name, link.name, f"{directory.name}-link"}


@pytest.mark.long
@pytest.mark.parametrize(
    ("end", "how"),
    [
        *((end, "in its group") for end in ("closed", "leaves by itself", "killed", "at its deadline")),
        *(("noticed late", how) for how in ("in its group", "in its session", "as a daemon")),
        ("closed", "in its session"),
        ("killed", "as a daemon"),
        ("at its deadline", "as a daemon"),
    ],
)
def test_what_a_child_has_started_never_outlives_it(end, how):
    async def use(c):
        pid = await c.call("start_another", how, seconds=20)
        assert alive(pid)
        if end == "leaves by itself":
            with pytest.raises(ChildDied, match="exit status 1"):
                await c.call("leave", seconds=20)
        elif end == "killed":
            with pytest.raises(ChildDied):
                await c.call("die", seconds=20)
        elif end == "at its deadline":
            with pytest.raises(DeadlineExceeded):
                await c.call("hang", seconds=0.1)
        elif end == "noticed late":  # nobody waits for it
            killed(c.pid)
            assert not c.alive
        if end != "closed":
            assert not left_after([pid], 20)
        return pid

    assert not left_after([asyncio.run(closing(child(), use))], 20)


class KeptByTheKernel(Child):
    """A child that SIGKILL does not end for some seconds, as one that waits for a broken device."""

    def _launch(self, theirs, environ, interpreter):
        # in the group of this process: it leads none that could be killed
        return _Kept(["sleep", "30"], pass_fds=[theirs.fileno()])


class _Kept(subprocess.Popen):
    def kill(self):
        """Change nothing."""


@pytest.mark.long
def test_a_child_that_the_kernel_does_not_end_holds_nobody_up(monkeypatch):
    monkeypatch.setattr(processes, "ENDING", 0.2)
    told = []

    async def use():
        child = KeptByTheKernel("nobody", name="child of a test")
        with pytest.raises(DeadlineExceeded):
            await child.call("hang", seconds=0.1)
        assert not child.alive
        assert child._process.poll() is None
        await child.aclose()
        return child

    began = time.monotonic()
    with reported_to(told.append):
        child = story(use())
    assert time.monotonic() - began < 10
    os.kill(child.pid, signal.SIGKILL)
    child._process.wait()
    assert told[0].component == "child of a test"
    assert f"its process {child.pid} was killed and has not ended within 0.2 s" in told[0].message


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone shows the variables of a process")
def test_a_program_that_is_just_beginning_has_its_mark():
    """The kernel shows none until its stack is there, and a child may be killed before that."""
    for number in range(50):
        with subprocess.Popen(["sleep", "100"], env={orphans.MARK: f"x.{number}"}) as begun:
            seen = orphans.variables(begun.pid)
            begun.kill()
        assert seen == f"{orphans.MARK}=x.{number}\0".encode()
