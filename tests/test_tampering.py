"""``grpo-core verify`` notices what was changed in the files of a run; the run was real, killed and resumed.

``test_laws.py`` shows the laws awake without the files.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from grpo_core import cli
from grpo_core.loop import checkpoint
from grpo_core.loop.laws import LAWS, Laws
from grpo_core.reporting.verification import verified

pytestmark = pytest.mark.long

GRPO = Path(sys.executable).with_name("grpo-core")
STEPS = 8
ENVIRONMENT = """
import grpo_core as grpo

class Words(grpo.Environment):
    def prompts(self, split):
        return [grpo.Prompt(messages=f"t{i}=", answer=str(i % 10)) for i in range(24)]
    def evaluate(self, episodes):
        return [float(e.reply == e.prompt.answer) for e in episodes]
"""
SETTINGS = {
    "trainer.steps": STEPS, "trainer.prompts_per_step": 3, "trainer.updates_per_step": 1,
    "rollout.group_size": 2, "rollout.max_tokens": 4, "validation.every": 2, "validation.prompts": 3,
    "checkpoint.every": 2,
    "model.options.width": 32, "model.options.warm_start_steps": 0,
}  # fmt: skip


def grpo(cwd, *arguments):
    return subprocess.Popen(
        [GRPO, "train", *arguments], cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of eight steps that was killed after its fifth and resumed."""
    cwd = tmp_path_factory.mktemp("tampering")
    (cwd / "words.py").write_text(ENVIRONMENT)
    settings = [part for key, value in SETTINGS.items() for part in ("--set", f"{key}={value}")]
    process = grpo(cwd, "--env", "./words.py:Words", *settings, "--output", "run")
    until = time.monotonic() + 120
    while not (cwd / "run" / "rollouts" / "step-000005.jsonl.gz").exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < until
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    killed = verified(cwd / "run")
    assert not killed.findings, killed
    process = grpo(cwd, "--resume", "run")
    assert process.wait(120) == 0, process.communicate()[0]
    process.communicate()
    return cwd / "run"


@pytest.fixture
def run(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


def test_nothing_is_found_in_what_the_run_wrote(finished):
    found = verified(finished)
    assert not found.findings
    assert f"{len(LAWS)} laws hold over" in str(found)
    assert "checkpoints are as the run wrote them" in str(found)


# ---------------------------------------------------------------------------------- changes


def lines_of(path):
    return path.read_bytes().splitlines(keepends=True)


def place(lines, event, nth=0):
    """The number of the nth event of a kind in the last life."""
    found = [i for i, line in enumerate(lines) if b'"event": "%s"' % event.encode() in line]
    return found[nth]


def on(name, change):
    """Change the lines of a file."""

    def apply(run):
        lines = lines_of(run / name)
        change(lines)
        (run / name).write_bytes(b"".join(lines))

    return apply


def dropped(event, nth=-1):
    return on("events.jsonl", lambda lines: lines.pop(place(lines, event, nth)))


def doubled(event, nth=-1):
    def change(lines):
        at = place(lines, event, nth)
        lines.insert(at, lines[at])

    return on("events.jsonl", change)


def exchanged(event, nth=-1):
    def change(lines):
        at = place(lines, event, nth)
        lines[at - 1], lines[at] = lines[at], lines[at - 1]

    return on("events.jsonl", change)


def edited(event, edit, nth=-1):
    """A field has another value."""

    def change(lines):
        at = place(lines, event, nth)
        value = json.loads(lines[at])
        edit(value)
        lines[at] = json.dumps(value).encode() + b"\n"

    return on("events.jsonl", change)


def setting(*path_and_value):
    *path, last, value = path_and_value

    def edit(record):
        for key in path:
            record = record[key]
        record[last] = value

    return edit


def adding(*path_and_amount):
    *path, last, amount = path_and_amount

    def edit(record):
        for key in path:
            record = record[key]
        record[last] += amount

    return edit


def replaced(old, new, nth=0):
    def change(lines):
        at = [i for i, line in enumerate(lines) if old in line][nth]
        lines[at] = lines[at].replace(old, new, 1)

    return on("events.jsonl", change)


def file(pattern, change, nth=-1):
    def apply(run):
        change(sorted(run.glob(pattern))[nth])

    return apply


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def swap(first, second):
    def apply(run):
        a, b = run / first, run / second
        a.rename(run / "aside")
        b.rename(a)
        (run / "aside").rename(b)

    return apply


def copied(source, target):
    def apply(run):
        (shutil.copytree if (run / source).is_dir() else shutil.copy)(run / source, run / target)

    return apply


def cut_tail(run):
    """The last step is cut off, and the end is kept."""
    lines = lines_of(run / "events.jsonl")
    (run / "events.jsonl").write_bytes(b"".join([*lines[: place(lines, "GroupsReady", -1)], lines[-1]]))


def emptied(name):
    return lambda run: (run / name).write_bytes(b"")


def deleted(name):
    return lambda run: shutil.rmtree(run / name) if (run / name).is_dir() else (run / name).unlink()


def resealed(run):
    """A checkpoint with another weight, and a manifest that fits."""
    directory = run / "checkpoints" / f"step-{STEPS:06d}"
    flip(directory / "trainer" / "model.safetensors")
    manifest = json.loads((directory / "manifest.json").read_text())
    manifest["files"]["trainer/model.safetensors"] = checkpoint.fingerprint(
        directory / "trainer" / "model.safetensors"
    )
    (directory / "manifest.json").write_text(json.dumps(manifest))


KINDS = (
    "Opened", "RunStarted", "Dispatched", "GroupFinished", "GroupsReady", "StepEnded", "Synced",
    "Validated", "Saving", "Saved", "RunEnded",
)  # fmt: skip
REPEATABLE = ("Opened", "RunStarted")
"""Events that a run may write twice without anything else between them."""
UNNOTICED = ("Opened", "Validated", "RunEnded")
"""Events without which the others fit one another."""
GROUP = ("groups", 0)
COUNTED = ("dispatched", "in_flight", "retrying", "ready", "skipped", "filtered", "attempts")


TAMPERINGS = {
    **{f"drop {kind}": dropped(kind) for kind in KINDS if kind not in UNNOTICED},
    **{f"double {kind}": doubled(kind) for kind in KINDS if kind not in REPEATABLE},
    "exchange RunEnded with the line before": exchanged("RunEnded"),
    "drop the first RunStarted": dropped("RunStarted", 0),
    "older token version": edited("GroupsReady", adding(*GROUP, "token_versions", 0, -3)),
    "newer token version": edited("GroupsReady", setting(*GROUP, "token_versions", 1, 999)),
    "token versions of the next step": edited("GroupsReady", setting(*GROUP, "token_versions", [8, 8])),
    "no token versions": edited("GroupsReady", setting(*GROUP, "token_versions", [])),
    "generation version": edited("GroupsReady", adding(*GROUP, "generation_version", -1)),
    "target version": edited("GroupsReady", adding(*GROUP, "target_version", 1)),
    "another prompt is trained": edited("GroupsReady", setting(*GROUP, "prompt", "x")),
    "another slot is trained": edited("GroupsReady", setting(*GROUP, "slot", 0)),
    "another reward": edited("GroupsReady", setting(*GROUP, "rewards", [0.5, 0.5])),
    "a reward is text": edited("GroupsReady", setting(*GROUP, "rewards", ["1.0", "0.0"])),
    "no reward": edited("GroupsReady", setting(*GROUP, "rewards", 0, None)),
    "a reward is missing": edited("GroupsReady", lambda e: e["groups"][0]["rewards"].pop()),
    "a group is missing": edited("GroupsReady", lambda e: e["groups"].pop()),
    "another attempt": edited("Dispatched", setting("slots", 0, "attempt", 1)),
    "another prompt is dispatched": edited("Dispatched", setting("slots", 0, "prompt", "x")),
    "another slot is finished": edited("GroupFinished", setting("slot", 0)),
    "another step ended": edited("StepEnded", adding("step", 1)),
    "another version is synced": edited("Synced", adding("step", 1)),
    "another version is validated": edited("Validated", adding("version", 1)),
    "staleness": edited("StepEnded", setting("metrics", "staleness_max", 50.0)),
    **{f"buffer/{name}": edited("StepEnded", adding("metrics", f"buffer/{name}", 1.0)) for name in COUNTED},
    "max_staleness raised": edited("RunStarted", setting("config", "pipeline", "max_staleness", 9)),
    "max_staleness lowered": edited("RunStarted", setting("config", "pipeline", "max_staleness", 0)),
    "fewer steps": edited("RunStarted", setting("config", "trainer", "steps", 4)),
    "a list": on("events.jsonl", lambda lines: lines.insert(9, b"[1, 2]\n")),
    "a number": on("events.jsonl", lambda lines: lines.insert(9, b"7\n")),
    "no JSON": on("events.jsonl", lambda lines: lines.insert(9, b"{\n")),
    "an empty line": on("events.jsonl", lambda lines: lines.insert(9, b"\n")),
    "bad UTF-8": replaced(b'"prompt": "', b'"prompt": "\xff'),
    "a missing field": edited("GroupsReady", lambda e: e.pop("groups")),
    "a missing name": edited("GroupsReady", lambda e: e.pop("event")),
    "half a line in the middle": on("events.jsonl", lambda lines: lines.insert(9, lines.pop(9)[:40] + b"\n")),
    "the last step is cut off and the end is kept": cut_tail,
    "the first life is cut off": on("events.jsonl", lambda ls: ls.__delitem__(slice(place(ls, "Opened", 1)))),
    "no events": emptied("events.jsonl"),
    "checkpoint: a weight": file("checkpoints/*/trainer/model.safetensors", flip),
    "checkpoint: the pipeline": file("checkpoints/*/pipeline.json", flip),
    "checkpoint: a file is missing": file("checkpoints/*/pipeline.json", Path.unlink),
    "checkpoint: a weight, with a manifest that fits": resealed,
    "checkpoint: exchanged": swap("checkpoints/step-000006", "checkpoints/step-000008"),
    "checkpoint: one more": copied("checkpoints/step-000008", "checkpoints/step-000010"),
    "checkpoint: the newest is deleted": deleted("checkpoints/step-000008"),
    "checkpoint: the manifest is no JSON": file("checkpoints/*/manifest.json", lambda p: p.write_text("[")),
    "metrics are missing": edited("StepEnded", lambda e: e.pop("metrics")),
}


@pytest.mark.parametrize("what", TAMPERINGS)
def test_it_is_noticed(run, what, capsys):
    TAMPERINGS[what](run)
    assert cli.make_app()(["verify", str(run)], exit_on_error=True, result_action="return_value") == 1
    said = capsys.readouterr().out
    assert said.strip()
    assert "Traceback" not in said


NOT_NOTICED = {
    "a kill at the end of a line": (
        on("events.jsonl", lambda lines: lines.pop()),
        "RunEnded is the last line; without it the run looks killed, which it might have been",
    ),
    "half a line at the end": (
        on("events.jsonl", lambda lines: lines.append(b'{"time": 17')),
        "kill -9 leaves such a line, and the next process cuts it off",
    ),
    "rollouts": (
        file("rollouts/*.gz", Path.unlink),
        "the laws and a resume read none; replay compares their digests before it reads them",
    ),
    "a report": (
        lambda run: (run / "report.html").write_text("made of other things"),
        "it is made from the other files: grpo-core report writes it again",
    ),
    "a log": (
        file("logs/*.log", lambda path: path.write_text("nothing")),
        "logs hold what child processes print, and nothing reads them",
    ),
    "an older checkpoint is deleted": (
        deleted("checkpoints/step-000006"),
        "the run deletes older checkpoints, too, and continues from the newest",
    ),
}


@pytest.mark.parametrize("what", NOT_NOTICED)
def test_what_changes_nothing_that_happened_is_allowed(run, what):
    change, _reason = NOT_NOTICED[what]
    change(run)
    assert not verified(run).findings


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"step": "5"}, 'step is "5"; expected a whole number'),
        ({"step": None}, "step is null; expected a whole number"),
        ({"step": 1.5}, "step is 1.5; expected a whole number"),
        ({"step": True}, "step is true; expected a whole number"),
        ({"manifest": 5}, "manifest is 5; expected a string"),
    ],
)
def test_a_saved_event_of_wrong_types_is_a_finding(tmp_path, wrong, said):
    event = {"event": "Saved", "step": 5, "manifest": "", **wrong}
    (tmp_path / "events.jsonl").write_text(json.dumps(event) + "\n")
    assert f"events.jsonl, line 1: lacks a field of its kind: ValueError: {said}" in str(verified(tmp_path))


def test_the_account_of_a_real_run_is_compared_number_by_number(finished):
    """Each counted metric of each StepEnded."""
    events = [json.loads(line) for line in lines_of(finished / "events.jsonl")]
    places = [i for i, event in enumerate(events) if event["event"] == "StepEnded"]
    for at in places:
        for name in COUNTED:
            changed = json.loads(json.dumps(events[at]))
            changed["metrics"][f"buffer/{name}"] += 1
            laws = Laws()
            for event in [*events[:at], changed]:
                laws.observe(event)
            assert "conservation" in [violation.law for violation in laws.violations], (at, name)


def halved(run, outside):
    path = run / "checkpoints/step-000008/trainer/model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def linked(run, outside):
    path = run / "checkpoints/step-000008/trainer"
    shutil.move(path, outside / "trainer")
    path.symlink_to(outside / "trainer")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("damage", "told"),
    [
        pytest.param(
            halved,
            "step-000008: trainer/model.safetensors has changed since it was written (its sha256 differs)",
            marks=pytest.mark.nightly,  # test_cli.py changes a byte of one
        ),
        (linked, "step-000008: trainer is a symbolic link; put the original in its place"),
    ],
)
def test_a_damaged_checkpoint_is_named_by_every_command_and_not_used(run, tmp_path, damage, told):
    outside = tmp_path / "outside"
    outside.mkdir()
    damage(run, outside)
    before = {path: path.read_bytes() for path in outside.rglob("*") if path.is_file()}
    (run.parent / "words.py").write_text(ENVIRONMENT)
    for status, *arguments in (
        (1, "verify", "run"),
        (0, "validate", "run"),
        (0, "train", "--resume", "run", "--set", f"trainer.steps={STEPS + 1}"),
    ):
        done = subprocess.run(
            [GRPO, *arguments], cwd=run.parent, capture_output=True, text=True, timeout=120, check=False
        )
        said = done.stdout + done.stderr
        assert done.returncode == status, said
        assert sum(told in line for line in said.splitlines()) == 1, said
        assert "Traceback" not in said
    assert {path: path.read_bytes() for path in outside.rglob("*") if path.is_file()} == before
    assert not verified(run).findings
    shutil.rmtree(run / "checkpoints/step-000006", ignore_errors=True)
    for directory in (run / "checkpoints").glob("step-*"):
        (directory / "pipeline.json").write_bytes(b"")
    for arguments in (["validate", "run"], ["train", "--resume", "run", "--set", "trainer.steps=12"]):
        done = subprocess.run(
            [GRPO, *arguments], cwd=run.parent, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 2
        assert "no checkpoint can be used" in done.stderr
        assert "Traceback" not in done.stderr
