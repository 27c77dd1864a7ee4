"""Each program has bounded memory, few system calls, and a separate user id."""

import asyncio
import errno
import gc
import os
import shutil
import struct
import subprocess
import sys
import time
import tomllib
import tracemalloc
from collections import Counter, OrderedDict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import grpo_core as grpo
from grpo_plugin_code import calls, commands, launch
from grpo_plugin_code.sandbox import Job, Limits, Sandboxes
from grpo_plugin_code.values import form_in, form_of, text_in

HOSTILE = tomllib.loads(Path(__file__).with_name("hostile.toml").read_text())
HOARDERS = HOSTILE["memory that no process counts"]
in_a_sandbox = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")


def ended(*jobs, **limits):
    """Return the ends of programs, which run one after another."""

    async def story():
        sandboxes = Sandboxes(Limits(**limits), at_once=1, ready=0)
        try:
            return [await sandboxes.run(job) for job in jobs]
        finally:
            await sandboxes.aclose()

    return asyncio.run(story())


# ---------------------------------------------------------------------------------- memory

MEASURED = """
def shared():
    return next(int(line.split()[1]) for line in open('/proc/meminfo') if line.startswith('Shmem:'))

before = shared()
try:
    exec({code!r})
except Exception:
    pass
print((shared() - before) // 1024)
"""


@pytest.mark.long
@in_a_sandbox
@pytest.mark.parametrize("name", HOARDERS)
def test_a_program_holds_no_memory_that_its_limits_do_not_count(name):
    job = Job(code=MEASURED.format(code=HOARDERS[name]))
    (end,) = ended(job, memory=192, files=8, seconds=20.0)
    assert end.reason in ("", "killed"), end
    held = int(end.output) if not end.reason else 0
    assert held < 200, f"the machine holds {held} MiB for it"


@in_a_sandbox
def test_the_input_of_a_program_cannot_be_changed_and_may_be_larger_than_its_files():
    code = "import os, sys\nprint(len(sys.stdin.read()))\nos.pwrite(0, b'x', 0)"
    (end,) = ended(Job(code=code, stdin="é" * 2**20), files=1)
    assert (end.output, end.reason) == (f"{2**20}\n", "error")
    assert "Operation not permitted" in end.message


# ---------------------------------------------------------------------------------- honest programs

HONEST = {
    "processes": (
        "import multiprocessing as m\n"
        "def f(pipe): pipe.send(6)\n"
        "a, b = m.Pipe()\np = m.Process(target=f, args=(b,))\np.start()\nprint(a.recv())\np.join()"
    ),
    "threads": (
        "from concurrent.futures import ThreadPoolExecutor as Pool\n"
        "with Pool(4) as pool: print(sum(pool.map(abs, [1, -2, 3])))"
    ),
    "programs": "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'print(6)'], check=True)",
    "event loops": (
        "import asyncio, sys\n"
        "async def f():\n"
        "    p = await asyncio.create_subprocess_exec(sys.executable, '-c', 'print(6)')\n"
        "    await p.wait()\n"
        "asyncio.run(f())"
    ),
    "mapped files": (
        "import mmap\n"
        "m = mmap.mmap(-1, 13)\nm[0] = 1\n"
        "f = open('/tmp/f', 'w+b')\nf.truncate(2**20)\n"
        "m = mmap.mmap(f.fileno(), 0)\nm[2**19] = 6\nprint(m[2**19])"
    ),
    "sockets": (
        "import socket\n"
        "s = socket.create_server(('127.0.0.1', 0))\nc = socket.create_connection(s.getsockname())\n"
        "s.accept()[0].send(b'6')\nprint(int(c.recv(1)))"
    ),
    "a database": (
        "import sqlite3\n"
        "c = sqlite3.connect('/tmp/a')\nc.execute('pragma journal_mode = wal')\n"
        "c.execute('create table t(a)')\nc.execute('insert into t values (6)')\nc.commit()\n"
        "print(*c.execute('select a from t').fetchone())"
    ),
    "zeros": "print(open('/dev/zero', 'rb').read(6).count(0))",
    "large arrays": "x = bytearray(2**27)\nx[-1] = 6\nprint(x[-1])",
}


@pytest.mark.long
@in_a_sandbox
def test_honest_programs_run():
    ends = ended(*(Job(code=code) for code in HONEST.values()))
    results = {name: (end.output, end.message) for name, end in zip(HONEST, ends, strict=True)}
    assert results == dict.fromkeys(HONEST, ("6\n", ""))


UNDER_THE_FILTER = """
import ctypes, errno, struct
calls = bytes.fromhex("{calls}")
kept = ctypes.create_string_buffer(calls, len(calls))
library = ctypes.CDLL(None, use_errno=True)
library.prctl(38, 1, 0, 0, 0)
library.prctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_char_p]
if library.prctl(22, 2, struct.pack("HxxxxxxQ", len(calls) // 8, ctypes.addressof(kept))):
    raise OSError(ctypes.get_errno(), "the kernel takes no filter of system calls")
import numpy, os
x = numpy.random.default_rng(0).random((300, 300))
print(round(float(numpy.abs(numpy.linalg.inv(x) @ x - numpy.eye(300)).max()), 3), (x @ x).shape)
try:
    os.memfd_create("x")
except OSError as error:
    print(errno.errorcode[error.errno])
"""


@pytest.mark.long
def test_numpy_computes_under_the_filter():
    pytest.importorskip("numpy")
    program = UNDER_THE_FILTER.format(calls=calls.filter_of().hex())
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "0.0 (300, 300)\nENOSYS\n", done.stderr


# ---------------------------------------------------------------------------------- system calls


def answered(machine, number, *arguments, architecture=None):
    """Return what the kernel would do for a call: play the filter as its virtual machine does."""
    name = calls.MACHINES[machine][1] if architecture is None else architecture
    halves = [half for each in (*arguments, *[0] * 6)[:6] for half in (each & 0xFFFFFFFF, each >> 32)]
    told = struct.pack("=IIQ12I", number, name, 0, *halves)
    code = list(struct.iter_unpack("=HBBI", calls.filter_of(machine)))
    at, word = 0, 0
    while True:
        kind, yes, no, value = code[at]
        at += 1
        if kind == calls.RETURN:
            return value
        if kind == calls.LOAD:
            (word,) = struct.unpack_from("=I", told, value)
            continue
        holds = {
            calls.EQUAL: word == value,
            calls.MORE: word > value,
            calls.FROM: word >= value,
            calls.BITS: bool(word & value),
        }
        at += yes if holds[kind] else no


@pytest.mark.parametrize("machine", calls.MACHINES)
def test_the_filter_refuses_what_it_names_and_nothing_else(machine):
    place = calls.MACHINES[machine][0]
    named = {numbers[place]: errno.ENOSYS for numbers in calls.ABSENT.values()}
    named |= {numbers[place]: errno.EPERM for numbers in calls.FORBIDDEN.values()}
    assert len(named) == len(calls.ABSENT) + len(calls.FORBIDDEN), "no number is there twice"
    for number in range(500):
        if number not in (calls.CLONE[place], calls.SOCKET[place], calls.MMAP[place]):
            expected = calls.ERROR | named[number] if number in named else calls.ALLOW
            assert answered(machine, number) == expected, number
    assert answered(machine, 1, architecture=0x40000003) == calls.KILL, "of another machine"
    assert answered(machine, 0x40000001) == calls.KILL, "of another interface"


@pytest.mark.parametrize("machine", calls.MACHINES)
def test_the_filter_looks_at_arguments(machine):
    place = calls.MACHINES[machine][0]
    clone, socket, mmap = calls.CLONE[place], calls.SOCKET[place], calls.MMAP[place]
    assert answered(machine, clone, 0x3D0F00) == calls.ALLOW, "a thread"
    assert answered(machine, clone, 17) == calls.ALLOW, "a process"
    for flag in (0x20000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000):
        assert answered(machine, clone, flag | 17) == calls.ERROR | errno.EPERM, "a namespace"
    for family in range(50):
        allowed = family in (1, 2, 10, 16)
        expected = calls.ALLOW if allowed else calls.ERROR | errno.EAFNOSUPPORT
        assert answered(machine, socket, family) == expected
    no_memory = calls.ERROR | errno.ENOMEM
    assert answered(machine, mmap, 0, 2**30, 3, 0x22) == calls.ALLOW, "private memory"
    assert answered(machine, mmap, 0, 2**30, 3, 0x01) == calls.ALLOW, "a file"
    assert answered(machine, mmap, 0, 4096, 3, 0x21) == calls.ALLOW, "a page"
    assert answered(machine, mmap, 0, 4097, 3, 0x21) == no_memory
    assert answered(machine, mmap, 0, 2**32, 3, 0x21) == no_memory, "whose lower half is 0"
    assert answered(machine, mmap, 0, 2**20, 3, 0x23) == no_memory, "MAP_SHARED_VALIDATE"


def test_a_machine_whose_calls_are_unknown_is_refused():
    with pytest.raises(grpo.ConfigError, match=r"this machine is riscv64 .* x86_64 and aarch64"):
        calls.filter_of("riscv64")


# ---------------------------------------------------------------------------------- cancelled runs


def left_by(story, monkeypatch):
    """Run a story, and return what Python says of pipes and processes that it has left open."""
    gc.collect()  # what other tests have left
    gc.freeze()  # what they keep takes a third of a second to look at
    said = []
    with monkeypatch.context() as patched:
        patched.setattr(sys, "unraisablehook", lambda unraisable: said.append(str(unraisable.exc_value)))
        asyncio.run(story())
        gc.collect()
    return said


async def cancelled(sandboxes, turns, pause=0.0):
    """Begin a program, and cancel its run after some turns of the event loop."""
    run = asyncio.create_task(sandboxes.run(Job(code="import time; time.sleep(60)")))
    for _ in range(turns):
        await asyncio.sleep(pause)
    run.cancel()
    return run


@in_a_sandbox
@pytest.mark.parametrize("turns", [*range(8), 200])
def test_a_run_may_be_cancelled_at_any_time_and_leaves_nothing_open(turns, monkeypatch):
    async def story():
        sandboxes = Sandboxes(Limits(), at_once=1, ready=1)
        run = await cancelled(sandboxes, turns, 0.001 if turns > 100 else 0.0)
        await asyncio.wait([run], timeout=20)
        assert run.cancelled()
        end = await sandboxes.run(Job(code="print('after it')"))
        assert end.output == "after it\n"
        await sandboxes.aclose()

    assert left_by(story, monkeypatch) == []


@in_a_sandbox
@pytest.mark.parametrize("turns", range(8))
def test_the_end_of_the_event_loop_ends_a_sandbox_that_starts(turns, monkeypatch):
    async def story():
        await cancelled(Sandboxes(Limits(), at_once=1, ready=0), turns)

    assert left_by(story, monkeypatch) == []


@in_a_sandbox
def test_a_job_that_is_larger_than_a_pipe_arrives_whole():
    text = "x" * 1_000_000
    (end,) = ended(Job(code=f"print(len({text!r}))"))
    assert end.output == "1000000\n"


# ---------------------------------------------------------------------------------- user ids

PRINTS_ITS_USER = """
import asyncio
from grpo_plugin_code.sandbox import Job, Limits, Sandboxes

async def main():
    sandboxes = Sandboxes(Limits(), at_once=1, ready=0)
    for _ in range(3):
        end = await sandboxes.run(Job(code="import os; print(os.getuid(), os.getgid())"))
        print(end.output.strip(), end.message)
    await sandboxes.aclose()

asyncio.run(main())
"""


def users_of_programs(*before):
    words = [*before, sys.executable, "-c", PRINTS_ITS_USER]
    return subprocess.run(words, capture_output=True, text=True)


@pytest.mark.long
@in_a_sandbox
@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives programs user ids of their own")
def test_programs_of_two_processes_of_a_machine_have_different_users():
    first, second = users_of_programs().stdout.splitlines(), users_of_programs().stdout.splitlines()
    assert len(first) == len(second) == 3
    assert first != second
    assert len(set(first)) == len(set(second)) == 3


@pytest.mark.long
@in_a_sandbox
def test_root_of_a_user_namespace_without_other_ids_runs_programs_only_if_their_limits_hold():
    done = users_of_programs("unshare", "--user", "--map-root-user")
    if done.stderr.startswith("unshare"):
        pytest.skip(f"there are no user namespaces: {done.stderr.strip()[-200:]}")
    if os.geteuid():
        assert done.stdout == "0 0 \n" * 3, done.stderr
    else:
        assert done.stdout == ""
        assert "ConfigError: code: bubblewrap cannot make a sandbox" in done.stderr
        assert "the kernel does not limit the processes of this user" in done.stderr
        assert "root with the user ids 200000 to 259999 or others of its own" in done.stderr


@pytest.mark.long
@in_a_sandbox
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may choose the ids of a user namespace")
def test_root_of_a_container_gives_programs_ids_that_it_has():
    waits = ["unshare", "--user", "sh", "-c", 'echo made; read -r go; exec "$@"', "sh"]
    words = [*waits, sys.executable, "-c", PRINTS_ITS_USER]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        if process.stdout.readline() != "made\n":
            pytest.skip(f"there are no user namespaces: {process.stderr.read().strip()[-200:]}")
        for name in ("uid_map", "gid_map"):
            Path(f"/proc/{process.pid}/{name}").write_text("0 0 1\n1 100001 65535\n")
        told, error = process.communicate("go\n")
    lines = [line.split() for line in told.splitlines()]
    assert len(lines) == 3, error
    assert all(10_000 <= int(user) < 65_534 and user == group for user, group in lines)


@pytest.mark.parametrize(
    ("user_map", "group_map", "ids"),
    [
        ("0 0 4294967295", "0 0 4294967295", range(200_000, 260_000)),
        ("0 1000 1\n1 100000 65536", "0 1000 1\n1 100000 65536", range(10_000, 65_534)),
        ("0 100000 65536", "0 100000 30000", range(10_000, 30_000)),
        ("0 0 1000\n1000000 1000000 1000000000", "0 0 4294967295", range(1_000_000, 1_001_000_000)),
        ("0 1000 1", "0 1000 1", range(0)),
        ("0 1000 10500", "0 1000 10500", range(0)),
        ("", "", range(0)),
    ],
)
def test_the_ids_of_programs_are_those_that_the_user_namespace_has(user_map, group_map, ids):
    assert launch.chosen(user_map, group_map) == ids


def test_no_id_is_drawn_twice_in_a_round():
    drawn = launch.in_random_order(range(200_000, 260_000))
    first, second = ([next(drawn) for _ in range(launch.ROUND)] for _ in range(2))
    assert len(set(first)) == launch.ROUND
    assert first != second
    assert next(launch.in_random_order(range(7, 8))) == 7


# ---------------------------------------------------------------------------------- values

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda each: st.lists(each, max_size=4) | st.lists(each, max_size=4).map(tuple),
    max_leaves=6,
)
KEYS = st.recursive(
    st.booleans() | st.integers(-3, 3) | st.sampled_from([0.0, -0.0, 1.0, 1.5, 2j, 1 + 0j, "1", b"1", None]),
    lambda each: st.tuples(each, each) | st.frozensets(each, max_size=3),
    max_leaves=6,
)
VALUES = (
    PLAIN
    | st.dictionaries(KEYS, KEYS, max_size=3)
    | st.sets(KEYS, max_size=3)
    | KEYS
    | st.lists(KEYS, max_size=4)
)


@given(VALUES, VALUES)
def test_values_have_the_same_form_exactly_if_python_takes_them_as_equal(one, other):
    assert (form_of(one) == form_of(other)) == (one == other)


def test_a_value_of_a_dataloader_has_the_form_of_the_value_that_it_equals():
    """Rows of a program have numbers of numpy and other subclasses, which no sandbox returns."""
    assert form_of(np.float64(1.5)) == form_of(1.5)
    assert form_of(np.str_("a")) == form_of("a")
    assert form_of([Counter("aab"), OrderedDict(b=1)]) == form_of([{"a": 2, "b": 1}, {"b": 1}])


@pytest.mark.long
@in_a_sandbox
def test_a_value_has_the_same_form_inside_and_outside():
    values = [
        *(
            None,
            True,
            -7,
            10**30,
            1.5,
            1e300,
            float("-inf"),
            -0.0,
            2j,
            'a"\\\n\ud800ü😀',
            b"\0x",
            (),
            [],
            {},
            set(),
        ),
        [1, (2.5, {"a": [None]}), {1, 2, (3,)}, frozenset({"x"})],
        {1: {2: 3}, (4,): "5", None: b"6"},
    ]
    code = f"inf = float('inf')\nvalues = {values!r}"
    (end,) = ended(Job(code=code, calls=[f"values[{at}]" for at in range(len(values))]))
    assert [form_in(line) for line in end.values] == [form_of(value) for value in values]


def line_of_colliding(count, kind="set"):
    """Return the line of a set of numbers that all have the hash 0."""
    numbers = [f'["int", "{number * sys.hash_info.modulus:x}"]' for number in range(1, count + 1)]
    parts = numbers if kind == "set" else [f'[{number}, ["NoneType", null]]' for number in numbers]
    return f'["{kind}", [{", ".join(parts)}]]'


@pytest.mark.parametrize("kind", ["set", "dict"])
def test_numbers_that_have_the_same_hash_are_read_in_linear_time(kind):
    line = line_of_colliding(16_000, kind)
    begin = time.process_time()
    form_in(line)
    assert time.process_time() - begin < 1.5


def test_a_value_that_is_too_long_is_refused_before_it_takes_memory():
    line = '["list",[' + "[]," * 2_000_000 + "[]]]"
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="at most 1048576 are read"):
            form_in(line)
        with pytest.raises(ValueError, match="no text"):
            text_in(line)
        with pytest.raises(ValueError, match=r"no text|delimiter|Unterminated"):
            text_in('["str", "a\\\\",' + "[]," * 2_000_000 + '"]')
        assert tracemalloc.get_traced_memory()[1] < 30 * 2**20
    finally:
        tracemalloc.stop()


FORGES = """
import os
for text in (b'["str", "', b'[],' * 2**21, b'"]\\n["str", ""]\\n'):
    while text:
        text = text[os.write(3, text) :]
os._exit(0)
"""


@pytest.mark.long
@in_a_sandbox
def test_a_command_that_forges_its_result_takes_little_memory(monkeypatch):
    monkeypatch.setattr(commands, "_program", lambda: FORGES)  # as one that writes to its descriptor

    async def story():
        limits = Limits(memory=512, files=8, output=4, seconds=20.0, processes=32)
        running = commands.Commands(limits, directory="/work", at_once=1, ready=0)
        try:
            return await running.run("true", "the files before")
        finally:
            await running.aclose()

    tracemalloc.start()
    try:
        ran = asyncio.run(story())
        assert tracemalloc.get_traced_memory()[1] < 60 * 2**20
    finally:
        tracemalloc.stop()
    assert (ran.tree, ran.lost) == ("the files before", "it returned nothing")
