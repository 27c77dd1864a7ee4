"""Seventy-eight mistakes of a first day, and what a newcomer reads after each.

A mistake is answered well if the last lines say what happened, with which value, and what to do, without a
traceback of ours above them, and if the exit status is 0 only where the run did what was meant.  An entry is
a line of the table; ``says`` are texts that must stand on the screen, in any order.
"""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from attrs import frozen
from forks import GRPO, grpo

HERE = Path(__file__).parent
PYTHON = sys.executable
SHORT = [
    "--set", "trainer.steps=2", "--set", "trainer.prompts_per_step=4", "--set", "rollout.group_size=4",
    "--set", "validation.prompts=4", "--set", "model.options.warm_start_steps=2",
]  # fmt: skip
REWARDS = """
import grpo_core as grpo

class Exact(grpo.Environment):
    def evaluate(self, episodes):
        return [float(e.reply == e.prompt.answer) for e in episodes]
"""


@frozen
class Mistake:
    """A command or a program, and what has to be read after it."""

    does: list[str]
    says: tuple[str, ...] = ()
    status: int = 2
    silent_about: tuple[str, ...] = ("Traceback",)
    lines: int = 8
    """Most lines of stderr, without those of a log of steps."""
    run: tuple[str, ...] = ()
    """Arguments of a run that is made before, in ``runs/before``."""


def train(*arguments: str) -> list[str]:
    return [GRPO, "train", *arguments]


def env(name: str) -> list[str]:
    return train("--env", f"./ok.py:{name}", *SHORT, "--output", "runs/made")


def program(name: str) -> list[str]:
    return [PYTHON, "program.py", name]


REFUSED = {
    "01 misspelled env": Mistake(train("--env", "math:srot"), ("'math:srot'", "Did you mean 'math:sort'?")),
    "02 missing plugin": Mistake(
        train("--env", "nosuch_gym:chain_sum"), ("'nosuch_gym:chain_sum'", "Installed:")
    ),
    "03 missing engine": Mistake(train("--env", "math:sort", "--engine", "vlm"), ("'vlm'", "vllm")),
    "04 forgotten file": Mistake(train("--env", "./nope.py:Shout"), ("there is no file", "nope.py")),
    "05 file, no class": Mistake(train("--env", "./ok.py"), ("./ok.py:NAME", "Base")),
    "06 wrong class": Mistake(train("--env", "./ok.py:Bsae"), ("'Bsae'", "Did you mean 'Base'?")),
    "07 toml missing": Mistake(train("gsm8k.toml"), ("gsm8k.toml", "no such file")),
    "08 bad TOML": Mistake(
        train("bad.toml"), ("bad.toml", "line 1"), silent_about=("use `grpo-core train bad.toml`",)
    ),
    "09 wrong type": Mistake(train("wrong_type.toml"), ("'trainer.lr'", "expected a number", "'high'")),
    "10 bad --set": Mistake(
        train("--env", "math:sort", "--set", "trainer.lr=2e-6x"), ("'trainer.lr'", "'2e-6x'")
    ),
    "11 set without =": Mistake(train("--env", "math:sort", "--set", "trainer.lr"), ("section.key=value",)),
    "12 no arguments": Mistake(train(), ("--env", "[tasks.NAME]", "grpo-core train --env ")),
    "13 unknown command": Mistake([GRPO, "tarin"], ("tarin", "train")),
    "14 resume nowhere": Mistake(train("--resume", "runs/nothing"), ("runs/nothing is not a run",)),
    "15 GPU option without GPU": Mistake(
        train("--env", "math:sort", "--set", "trainer.device=cuda"), ("trainer.device", "sees no GPU", "cpu")
    ),
    "16 hub model, no network": Mistake(
        train("--env", "math:sort", "--model", "Qwen/Qwen3-0.6B"),
        ("'Qwen/Qwen3-0.6B'", "cannot be loaded from the hub"),
        status=1,
    ),
    "28 no prompts": Mistake(env("Empty"), ("task 'empty'", "prompts('train')", "empty"), status=1),
    "29 no answer, all prompts equal": Mistake(env("NoAnswer"), ("solve(prompt)",)),
    "30 dicts as prompts": Mistake(
        env("Dicts"), ("prompts('train')[0]", "dict", "grpo_core.Prompt"), status=1
    ),
    "31 import error": Mistake(env("Imports"), ("ok.py", "No module named 'pandass'"), status=1),
    "32 no evaluate": Mistake(env("Typo"), ("Typo", "'evaluate'"), status=1),
    "40 data: broken row": Mistake(train("broken.toml"), ("broken.jsonl", "row 2", "not valid JSON")),
    "40 data: columns": Mistake(train("columns.toml"), ("answer", "question", "solution")),
    "40 data: empty": Mistake(train("empty.toml"), ("empty.jsonl", "empty")),
    "40 data: missing": Mistake(train("missing.toml"), ("missing.jsonl", "no such file")),
    "40 data: no answers": Mistake(
        train("noanswers.toml"), ("answer",), silent_about=("Traceback", "define solve")
    ),
    "40 data: no text": Mistake(train("random.toml"), ("random.jsonl", "row 1")),
    "41 a directory as CONFIG": Mistake(train("."), ("is a directory",)),
    "42 a Python file as CONFIG": Mistake(train("ok.py"), ("It is Python", "--env ok.py:NAME")),
    "46 a module that shadows numpy": Mistake(
        ["env", "PYTHONPATH=shadow", *train("--env", "math:sort", "--set", "trainer.steps=1")],
        ("shadow numpy", "numpy"),
        status=1,
    ),
    "52 own environment, wrong columns": Mistake(train("own.toml"), ("answer", "question", "solution")),
    "55 a model without weights": Mistake(
        train("--env", "math:sort", "--model", "./big"), ("./big", "safetensors", "tokenizer")
    ),
    "56 output that cannot be written": Mistake(
        train("--env", "math:sort", "--output", "/proc/x"), ("--output /proc/x", "cannot be written")
    ),
    "59 validate a wrong directory": Mistake(
        [GRPO, "validate", "runs"], ("runs is neither a run", "nor a model")
    ),
    "60 report of nothing": Mistake([GRPO, "report"], ("runs/",), lines=12),
}

STARTED = {
    "17 strings": Mistake(env("Strings"), ("ok.py:Strings", "'1.0' (str)", "expected a float"), status=1),
    "18 None for every reply": Mistake(env("Nones"), ("returned None for every reply", "`return`"), status=1),
    "19 no return": Mistake(env("NoReturn"), ("ok.py:NoReturn", "None"), status=1),
    "20 a result too few": Mistake(env("Short"), ("ok.py:Short", "results for"), status=1),
    "21 a numpy array": Mistake(env("Numpy"), ("finished",), status=0, lines=30),
    "22 coroutines": Mistake(
        env("Coroutine"), ("ok.py:Coroutine", "coroutine", "expected a float"), status=1
    ),
    "23 raises": Mistake(
        env("Raises"), ("ok.py:", "in evaluate: ZeroDivisionError: division by zero"), status=1
    ),
    "24 a scalar": Mistake(env("Scalar"), ("ok.py:Scalar", "float", "one result per episode"), status=1),
    "25 booleans": Mistake(env("Bools"), ("finished",), status=0, lines=30),
    "26 a flood of prints": Mistake(env("Flood"), ("finished",), status=0, lines=30),
    "33 os._exit": Mistake(env("Exits"), ("task 'exits'", "exit status 3"), status=1),
    "34 spaces and umlauts in a path": Mistake(
        train("--env", "./ok.py:Base", *SHORT, "--output", "runs/a b ü"), ("finished",), status=0, lines=30
    ),
    "35 the directory of another run": Mistake(
        train("--env", "./ok.py:Base", *SHORT, "--output", "runs/before"),
        ("--output runs/before", "holds another run", "--resume runs/before"),
        run=("--env", "./ok.py:Base"),
    ),
    "36 resume with more steps, elsewhere": Mistake(
        [
            "sh",
            "-c",
            f"mkdir elsewhere; cd elsewhere; {GRPO} train --resume ../runs/before --set trainer.steps=3",
        ],
        ("3 of 3 steps",),
        status=0,
        lines=30,
        run=("--env", "./ok.py:Base"),
    ),
    "37 resume with another configuration": Mistake(
        train("--resume", "runs/before", "--set", "trainer.steps=3", "--set", "trainer.prompts_per_step=8"),
        ("trainer.prompts_per_step is 4", "8 now", "cannot change"),
        run=("--env", "./ok.py:Base"),
    ),
    "38 resume with another model, nothing to do": Mistake(
        train("--resume", "runs/before", "--model", "./big"),
        ("model.path", "cannot change"),
        run=("--env", "./ok.py:Base"),
    ),
    "53 resume with another model and more steps": Mistake(
        train("--resume", "runs/before", "--model", "./big", "--set", "trainer.steps=3"),
        ('model.path is "tiny"', 'big"', "cannot change"),
        run=("--env", "./ok.py:Base"),
    ),
    "39 resume a finished run": Mistake(
        train("--resume", "runs/before"),
        ("finished all of its 2 steps", "--set trainer.steps="),
        status=0,
        run=("--env", "./ok.py:Base"),
    ),
    "43 head": Mistake(
        [
            "bash",
            "-c",
            f"{GRPO} train --env ./ok.py:Base {' '.join(SHORT)} | head -1; exit ${{PIPESTATUS[0]}}",
        ],
        status=0,
        lines=30,
    ),
    "44 NO_COLOR, TERM=dumb, LANG=C": Mistake(
        ["env", "NO_COLOR=1", "TERM=dumb", "LANG=C", *env("Base")], ("finished",), status=0, lines=30
    ),
    "45 python -O": Mistake(
        [PYTHON, "-O", "-m", "grpo_core", *env("Base")[1:]], ("finished",), status=0, lines=30
    ),
    "47 a random.py next to the environment": Mistake(
        ["sh", "-c", f"echo 'raise RuntimeError(0)' > random.py; {' '.join(env('Base'))}"],
        ("finished",),
        status=0,
        lines=30,
    ),
    "50 boolean": Mistake(program("boolean"), ("DONE",), status=0, lines=30),
    "50 async": Mistake(program("co"), ("DONE",), status=0, lines=30),
    "50 lambda": Mistake(program("lambda"), ("DONE",), status=0, lines=30),
    "50 list": Mistake(program("listed"), ("listed", "[1.0]", "expected a float"), status=1, silent_about=()),
    "50 nan": Mistake(
        program("nan"), ("nan", "reward is nan", "expected a number"), status=1, silent_about=()
    ),
    "50 None": Mistake(program("none"), ("none returned None for every reply",), status=1, silent_about=()),
    "50 no return": Mistake(
        program("noret"), ("noret returned None for every reply", "`return`"), status=1, silent_about=()
    ),
    "50 numpy array": Mistake(
        program("nparr"), ("nparr", "array([1., 0.])", "expected a float"), status=1, silent_about=()
    ),
    "50 numpy float": Mistake(program("npf"), ("DONE",), status=0, lines=30),
    "50 raises": Mistake(
        program("raising"),
        ("program.py:", "in raising: ZeroDivisionError: division by zero"),
        status=1,
        silent_about=(),
    ),
    "50 returns a coroutine": Mistake(program("retco"), ("retco", "coroutine"), status=1, silent_about=()),
    "50 string": Mistake(program("string"), ("string", "'1.0' (str)"), status=1, silent_about=()),
    "50 tensor": Mistake(program("tensor"), ("DONE",), status=0, lines=30),
    "50 a reward function of TRL": Mistake(
        program("trl_style"), ("trl_style", "TRL", "grpo-plugin-trl"), status=1, silent_about=()
    ),
    "50 another one of TRL": Mistake(
        program("trl_style2"), ("trl_style2", "TRL", "grpo-plugin-trl"), status=1, silent_about=()
    ),
    "50 an unknown parameter": Mistake(
        program("unknown"), ("unknown", "'solution'", "reply, answer"), status=1, silent_about=()
    ),
    "57 two runs in one directory": Mistake(
        [
            "bash",
            "-c",
            f"{' '.join(env('Base'))} > first & sleep 2; {' '.join(env('Base'))}; s=$?; wait; exit $s",
        ],
        ("runs/made", "is running in it"),
        status=2,
    ),
    "58 a program without a __main__ guard": Mistake(
        ["sh", "-c", f"sed 's/^if __name__.*/if True:/' program.py > bare.py; {PYTHON} bare.py boolean"],
        ("DONE",),
        status=0,
        lines=30,
    ),
}

ENDLESS = {
    "27 an infinite loop, then ctrl-C": [*env("Forever")],
    "51 an infinite loop of a program, then ctrl-C": program("forever"),
}


@pytest.fixture
def here(tmp_path):
    """The directory of a newcomer, with the files of the table."""
    for name in ("ok.py", "program.py"):
        shutil.copy(HERE / name, tmp_path)
    task = '[tasks.t]\nenv = "./rewards.py:Exact"\ndata = "{}.jsonl"\n'
    tables = ("broken", "columns", "empty", "missing", "noanswers", "random")
    files = {
        "rewards.py": REWARDS,
        "bad.toml": "[trainer\nlr = 1\n",
        "wrong_type.toml": '[trainer]\nlr = "high"\n[tasks.sort]\nenv = "math:sort"\n',
        "broken.jsonl": '{"prompt": "1+1=", "answer": "2"}\n{"prompt" "1+2="}\n',
        "columns.jsonl": '{"question": "1+1=", "solution": "2"}\n' * 2,
        "noanswers.jsonl": '{"prompt": "1+1="}\n{"prompt": "1+2="}\n',
        "empty.jsonl": "",
        "own.toml": '[tasks.t]\nenv = "./ok.py:Base"\ndata = "columns.jsonl"\n',
        "shadow/numpy.py": 'raise RuntimeError("shadow numpy")\n',
        "big/config.json": '{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}',
        **{f"{name}.toml": task.format(name) for name in tables},
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "random.jsonl").write_bytes(b"\xbe" + random.Random(0).randbytes(500))
    (tmp_path / "runs").mkdir()
    return tmp_path


def answered(mistake: Mistake, here: Path) -> None:
    if mistake.run:
        grpo(here, "train", *mistake.run, *SHORT, "--output", "runs/before", timeout=240).check_returncode()
    program, *arguments = mistake.does
    if program == GRPO:
        done = grpo(here, *arguments, timeout=240)
    else:
        done = subprocess.run(mistake.does, cwd=here, capture_output=True, text=True, timeout=240)
    screen = " ".join((done.stdout + done.stderr).replace("│", " ").split())
    assert done.returncode == mistake.status, screen
    for text in mistake.says:
        assert text in screen
    for text in mistake.silent_about:
        assert text not in screen
    assert len(done.stderr.splitlines()) <= mistake.lines, done.stderr


@pytest.mark.long
@pytest.mark.parametrize("mistake", REFUSED.values(), ids=REFUSED)
def test_a_mistake_is_refused_at_the_start(mistake, here):
    answered(mistake, here)


OFTEN = ("19", "20", "23", "33", "37", "39", "50 None", "50 raises", "50 a reward function of TRL", "57")
"""Mistakes that CI makes each time; the others are made at night."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "mistake",
    [
        pytest.param(each, id=name, marks=() if name.startswith(OFTEN) else pytest.mark.nightly)
        for name, each in STARTED.items()
    ],
)
def test_a_mistake_in_code_is_named(mistake, here):
    answered(mistake, here)


@pytest.mark.slow
@pytest.mark.parametrize("command", ENDLESS.values(), ids=ENDLESS)
def test_an_infinite_loop_can_be_interrupted(command, here):
    """The interrupt comes when the loop has begun; the end says how to continue."""
    with subprocess.Popen(
        command, cwd=here, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        while not (here / "looping").exists():
            assert process.poll() is None
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        screen, _ = process.communicate(timeout=120)
    assert "resume" in screen, screen
    assert process.returncode != 0


@pytest.mark.slow
def test_a_full_disk_is_named_and_nothing_else_is_suspected(here):
    """The page and ``explain`` speak of the disk."""
    small = here / "small"
    small.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=700k", "tmpfs", small], capture_output=True
    ).returncode:
        pytest.skip("this user may not mount a small disk")
    try:
        done = subprocess.run(
            train("--env", "./ok.py:Base", *SHORT, "--output", "small/run"),
            cwd=here, capture_output=True, text=True, timeout=240,
        )  # fmt: skip
        assert "No space left on device" in done.stdout + done.stderr
        assert "Traceback" not in done.stdout + done.stderr
        explained = subprocess.run(
            [GRPO, "explain", "small/run"], cwd=here, capture_output=True, text=True, timeout=60
        )
        assert "OOM" not in explained.stdout + explained.stderr
    finally:
        subprocess.run(["umount", small], check=True)


def test_the_table_is_whole():
    """Seventy-eight mistakes; the full disk is number 54."""
    assert len(REFUSED) + len(STARTED) + len(ENDLESS) + 1 == 78
