"""A run's directory: one process at a time, what a resume may change, and what it keeps."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from killing import GRPO
from simulation.disk import Dead, FaultyDisk
from test_cli import ENVIRONMENTS, events, grpo, metrics, refused, start, steps_done, wait_for

from grpo_core.app import launch as launching
from grpo_core.app.launch import continued, identity
from grpo_core.app.model_sources import check_adapters
from grpo_core.config import as_table, build, merge, parse_setting, read_toml
from grpo_core.contracts.errors import CheckpointError, ConfigError, PluginError
from grpo_core.contracts.records import Group, Rollout, SampleRequest, Segment
from grpo_core.contracts.tokens import Tokens
from grpo_core.data.loaders import IndexedLoader
from grpo_core.data.samplers import PromptStream, RoundRobin, load_plugin_state
from grpo_core.demo.tiny import make_tiny_model
from grpo_core.loop import checkpoint
from grpo_core.loop.buffer import Buffer
from grpo_core.plugins.configured import configured
from grpo_core.plugins.host import PluginHost
from grpo_core.storage.run_directory import RunDirectory
from grpo_core.testing import prompts
from grpo_core.validation.results import shown
from grpo_plugin_curriculum.curriculum import Curriculum

TASK = {"env": "math:sort"}


def contents(directory: Path) -> dict[str, tuple[bytes, float]]:
    """The bytes and the time of each file."""
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def of_the_main_process(run: Path) -> dict[str, tuple[bytes, float]]:
    """The same without what the children of a run may be writing."""
    theirs = (str(run / "logs"), str(run / "checkpoints"))
    return {path: found for path, found in contents(run).items() if not path.startswith(theirs)}


@pytest.fixture
def here(tmp_path):
    (tmp_path / "envs.py").write_text(ENVIRONMENTS)
    return tmp_path


# ---------------------------------------------------------------------------------- one process at a time

HOLDER = """
import sys
from pathlib import Path
from grpo_core.config import build
from grpo_core.storage.run_directory import RunDirectory
run = RunDirectory.create(Path(sys.argv[1]), build([{"tasks": {"sort": {"env": "math:sort"}}}]))
print("held", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def holder(path):
    """A process that has made the run and holds it."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.long
def test_a_second_process_is_refused_in_one_line_that_names_the_first_and_touches_nothing(tmp_path):
    run = tmp_path / "run"
    with holder(run) as first:
        before = contents(run)
        for arguments in (["--resume", run], ["--env", "math:sort", "--output", run]):
            done = grpo(tmp_path, "train", *arguments)
            assert done.returncode == 2
            assert done.stdout == ""
            (line,) = done.stderr.splitlines()
            holder_of_it = f"process {first.pid} on {socket.gethostname()}"
            assert line == (
                f"grpo-core: {run}: {holder_of_it} is running in it; wait until it ends, or give another "
                "directory"
            )
        assert contents(run) == before
        assert {path.name for path in run.iterdir()} == {".lock", "config.toml", "logs"}


@pytest.mark.long
def test_the_lock_dies_with_its_owner(tmp_path):
    with holder(tmp_path / "run") as first:
        with pytest.raises(ConfigError, match=f"process {first.pid} on"):
            RunDirectory(tmp_path / "run").lock()
        first.send_signal(signal.SIGKILL)
        first.wait()
        run = RunDirectory(tmp_path / "run")
        run.lock()
        assert (run.path / ".lock").read_text() == f"process {os.getpid()} on {socket.gethostname()}\n"
        with pytest.raises(ConfigError, match=f"process {os.getpid()} on"):
            RunDirectory(tmp_path / "run").lock()
        del run
        RunDirectory(tmp_path / "run").lock()


@pytest.mark.nightly
def test_a_running_run_can_be_looked_at_and_is_not_started_twice(here):
    """Its main process is stopped for a moment, so that it does not change its files itself."""
    arguments = ["--env", "./envs.py:Words", *QUICK, "--set", "trainer.steps=30"]
    process = start(here, *arguments, "--set", "checkpoint.every=1", "--output", "run")
    wait_for(lambda: steps_done(here / "run") >= 2, process)
    process.send_signal(signal.SIGSTOP)
    before = of_the_main_process(here / "run")
    text = refused(here, "train", "--resume", "run")
    assert f"process {process.pid} on" in text
    assert of_the_main_process(here / "run") == before
    for command in (["verify", "run"], ["report", "run"], ["validate", "run"]):
        assert grpo(here, *command).returncode == 0, command
    process.kill()
    process.communicate()
    done = grpo(here, "train", "--resume", "run", "--set", "trainer.steps=4")
    assert done.returncode == 0, done.stderr
    assert "is running in it" not in done.stderr


# ---------------------------------------------------------------------------------- a start that fails


@pytest.mark.long
def test_a_failed_start_does_not_block_the_same_command(here):
    (here / "late.py").write_text(ENVIRONMENTS + "\nWords.prompts = None\n")
    command = ["train", "--env", "./late.py:Words", "--output", "run"]
    first = refused(here, *command)
    assert "has no method 'prompts'" in first
    (here / "run" / "notes.txt").write_text("mine")
    assert refused(here, *command) == first
    assert len(events(here / "run", "RunEnded")) == 1, "the events of the first start are gone"
    assert (here / "run" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("trained", ["rollouts/step-000001.jsonl", "checkpoints/step-000001/manifest.json"])
def test_a_run_that_has_trained_is_never_removed(tmp_path, trained):
    config = build([{"tasks": {"sort": TASK}}])
    RunDirectory.create(tmp_path / "run", config)
    file = tmp_path / "run" / trained
    file.parent.mkdir(parents=True)
    file.write_text("{}")
    before = contents(tmp_path / "run")
    with pytest.raises(ConfigError, match="holds another run"):
        RunDirectory.create(tmp_path / "run", config)
    assert contents(tmp_path / "run") == before


@pytest.mark.long
def test_a_file_is_not_a_directory(here):
    text = refused(here, "train", "--env", "math:sort", "--output", "envs.py")
    assert text == "grpo-core: --output envs.py is a file; give a directory for the run"


# ---------------------------------------------------------------------------------- a failing disk

LINES = [{"step": step, "loss": 0.5} for step in range(40)]


def with_metrics(path):
    run = RunDirectory.create(path, build([{"tasks": {"sort": TASK}}]))
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return run


def read_metrics(run):
    return [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]


def test_a_resume_that_meets_a_full_disk_keeps_all_metrics(tmp_path):
    run = with_metrics(tmp_path / "run")
    size = (run.path / "metrics.jsonl").stat().st_size
    for room in range(0, size // 2, 50):
        with pytest.raises(OSError, match="No space left"):
            run.forget_after(30, 30, FaultyDisk(run.path, room=room))
        assert read_metrics(run) == LINES
    run.forget_after(30, 30, FaultyDisk(run.path))
    assert read_metrics(run) == LINES[:31]


@pytest.mark.long
@pytest.mark.parametrize("change", ["metrics", "config"])
def test_a_death_or_a_power_cut_in_a_resume_leaves_the_old_file_or_the_new_one(tmp_path, change):
    old, _ = configured([{"tasks": {"sort": TASK}}])
    new, _ = configured([{"tasks": {"sort": TASK}, "trainer": {"steps": 7}}])
    for at in range(1, 20):
        for seed in (None, 0, 1, 2):
            run = with_metrics(tmp_path / f"{at} {seed}")
            run.forget_after(40, 40)
            disk = FaultyDisk(run.path, dies_at=at)
            try:
                run.forget_after(30, 30, disk) if change == "metrics" else run.replace_config(new, disk)
            except Dead:
                if seed is not None:
                    disk.cut_power(random.Random(seed))
            else:
                return
            assert read_metrics(run) in (LINES, LINES[:31])
            assert RunDirectory.open(run.path)[1] in (old, new)
    raise AssertionError("it never ended")


def test_metrics_are_written_only_if_something_is_dropped(tmp_path):
    run = with_metrics(tmp_path / "run")
    before = contents(run.path)
    run.forget_after(39, 39)
    assert contents(run.path) == before


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("[]", "it is []; expected a table"),
        ("{", "Expecting property name"),
        ('{"loss": 0.5}', "step is null; expected a whole number"),
        ('{"step": "7"}', 'step is "7"; expected a number or null'),
        ('{"step": 7.5}', "step is 7.5; expected a whole number"),
        ('{"step": 1e999}', "step is Infinity; expected a whole number of"),
        (
            '{"step": 2, "validation/sort/accuracy": [1]}',
            "validation/sort/accuracy is [1]; expected a number",
        ),
    ],
)
def test_a_line_of_metrics_of_another_type_is_one_error_that_names_file_and_key(tmp_path, line, wrong):
    run = with_metrics(tmp_path / "run")
    (run.path / "metrics.jsonl").write_text(line.replace("}", ', "validation/a/b": 1.0}') + "\n")
    for read in (lambda: run.forget_after(30, 30), run.scores if "}" in line else None):
        if read is not None:
            with pytest.raises(ConfigError, match=re.escape(wrong)) as said:
                read()
            assert "metrics.jsonl, line 1: " in str(said.value)


# ---------------------------------------------------------------------------------- what may change

SETTINGS = [
    "tasks.sort.env=math:sort",
    "trainer.steps=9",
    "trainer.prompts_per_step=2",
    "pipeline.max_staleness=2",
]


def table(*settings):
    found = {}
    for setting in settings:
        found = merge(found, parse_setting(setting))
    return found


async def save_trainer(directory):
    async def written():
        (directory / "trainer").mkdir(parents=True)
        (directory / "trainer" / "config.json").write_text("{}")
        (directory / "trainer" / "config.json").chmod(0o600)

    return written


def a_run(path, *, ready=0, settings=(), run=None):
    """A run with a checkpoint of step 0, in which some groups wait to be trained."""
    config = build([table(*SETTINGS, *settings)], PluginHost.discover().sections)
    directory = RunDirectory.create(path, config)
    loaders = {"sort": IndexedLoader("sort", prompts(20, "sort"), seed=0)}
    stream = PromptStream(sampler=RoundRobin(), loaders=loaders, name=config.sampler.name)
    buffer = Buffer(prompts_per_step=2, max_staleness=2, num_steps=9)
    for slot in buffer.assign(buffer.reserve(), loaders["sort"].take(6))[:ready]:
        buffer.complete(slot, a_group(slot))

    async def story():
        finish = await checkpoint.begin(
            directory.checkpoints,
            step=0,
            pipeline={
                **checkpoint.snapshot(buffer, stream),
                "run": run or identity(config, Path(config.model.path)),
            },
            loaders={task: loader.state_dict() for task, loader in loaders.items()},
            save_trainer=save_trainer,
            keep=1,
        )
        return await finish()

    return asyncio.run(story())


def a_group(slot):
    rollout = Rollout(
        segments=[Segment(prompt_ids=(1,), tokens=Tokens.generated([2, 3], [-0.5, -0.5], [0, 0]))],
        messages=({"role": "user", "content": "1="},),
        reward=1.0,
        turns=1,
        finish_reason="stop",
    )
    return Group(
        prompt=slot.prompt,
        rollouts=(rollout,) * 2,
        generation_version=slot.generation_version,
        target_version=slot.target_version,
        slot=slot.id,
    )


def resumed(path, *settings):
    """Prepare to continue the run as ``train --resume`` does; its lock ends with the result."""
    return continued(path, table(*settings))


def changed(path, *settings):
    """Begin to resume with these settings; return the messages to the user."""
    return resumed(path, *settings).notes


@pytest.mark.long
@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "trainer.prompts_per_step=4",
            "trainer.prompts_per_step is 2 in its checkpoint and 4 now; it cannot",
        ),
        ("rollout.group_size=4", "rollout.group_size is 8 in its checkpoint and 4 now; it cannot change"),
        ("model.options.width=32", 'model.options is {} in its checkpoint and {"width": 32} now; it cannot'),
        ("model.path=other/model", 'model.path is "tiny" in its checkpoint and "other/model" now; it cannot'),
        ("optimizer.name=muon", 'optimizer.name is "adamw" in its checkpoint and "muon" now; it cannot'),
        ("model.lora.rank=4", "model.lora.rank is (not set) in its checkpoint and 4 now; it cannot change"),
        ("seed=5", "seed is 0 in its checkpoint and 5 now; it cannot change"),
        (
            "pipeline.max_staleness=1",
            "pipeline.max_staleness is 1 now, and 3 finished groups of its checkpoint",
        ),
    ],
)
def test_a_change_that_cannot_be_right_is_refused_with_both_values(tmp_path, setting, message):
    a_run(tmp_path / "run", ready=3)
    before = contents(tmp_path / "run")
    before = {path: found for path, found in before.items() if not path.endswith(".lock")}
    done = grpo(tmp_path, "train", "--resume", "run", "--set", setting)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    after = {path: found for path, found in contents(tmp_path / "run").items() if not path.endswith(".lock")}
    assert after == before


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ("model.lora.rank=4", "to which its adapters belong"),
        ("loss.options.kl.coefficient=0.1", "with which its loss compares the policy"),
        ("trainer.steps=9", ""),
    ],
)
def test_a_run_that_needs_the_weights_it_started_from_is_not_continued_with_others(tmp_path, setting, why):
    """A checkpoint has adapters alone, and no reference; one of all weights needs no others."""
    model = tmp_path / "model"
    make_tiny_model(model, (), width=16, layers=1, warm_start_steps=0)
    a_run(tmp_path / "run", settings=[f"model.path={model}", setting])
    assert resumed(tmp_path / "run")
    shutil.rmtree(model)
    make_tiny_model(model, (), width=16, layers=1, warm_start_steps=0, seed=1)
    if why:
        with pytest.raises(
            ConfigError, match=f"are not the ones that the run started from, {why}; put them back"
        ):
            resumed(tmp_path / "run")
    else:
        assert resumed(tmp_path / "run")


def test_the_checkpoint_counts_and_not_an_edited_configuration(tmp_path):
    a_run(tmp_path / "run")
    file = tmp_path / "run" / "config.toml"
    file.write_text(file.read_text().replace("prompts_per_step = 2", "prompts_per_step = 3"))
    with pytest.raises(ConfigError, match=r"prompts_per_step is 2 in its checkpoint and 3 now"):
        resumed(tmp_path / "run")


@pytest.mark.long
@pytest.mark.parametrize(
    "setting",
    [
        "pipeline.max_staleness=3",
        "trainer.steps=20",
        "trainer.lr=1e-3",
        "trainer.updates_per_step=3",
        "sampler.name=round_robin",
        "pipeline.policy=in_order",
    ],
)
def test_other_changes_are_made_and_kept(tmp_path, setting):
    a_run(tmp_path / "run", ready=3, settings=["sampler.options.seed=3"])
    resumed(tmp_path / "run", setting)
    ((section, (key, value)),) = ((name, *part.items()) for name, part in parse_setting(setting).items())
    kept = RunDirectory.open(tmp_path / "run")[1]
    assert as_table(kept)[section][key] == value
    again = resumed(tmp_path / "run")
    assert again.setup.config == kept


def test_a_lower_staleness_is_right_where_nothing_waits(tmp_path):
    a_run(tmp_path / "run", ready=0)
    assert resumed(tmp_path / "run", "pipeline.max_staleness=0").setup.config.pipeline.max_staleness == 0


def test_a_new_task_is_printed_as_it_was_given(tmp_path):
    a_run(tmp_path / "run")
    added = changed(tmp_path / "run", "tasks.copy.env=math:copy", "tasks.copy.weight=2.0")
    assert 'tasks.copy: (not set) -> {"env": "math:copy", "weight": 2.0}' in added


def test_differences_are_printed_and_earlier_configurations_kept(tmp_path):
    run = tmp_path / "run"
    a_run(run, settings=["trainer.lr=5e-4"])
    before = (run / "config.toml").read_bytes()
    for lr, line in [("1e-5", "trainer.lr: 0.0005 -> 1e-05"), ("2e-5", "trainer.lr: 1e-05 -> 2e-05")]:
        assert line in changed(run, f"trainer.lr={lr}")
    assert changed(run) == (f"continuing {run} after step 0",)
    assert (run / "config-1.toml").read_bytes() == before
    assert read_toml(run / "config-2.toml")["trainer"]["lr"] == 1e-5
    assert not (run / "config-3.toml").exists()
    assert RunDirectory.open(run)[1].trainer.lr == 2e-5


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        (0, ""),
        (1, "; 1 step (100 s) is lost, and trained again"),
        (6, "; 6 steps (10 minutes) are lost, and"),
    ],
)
def test_a_resume_says_how_much_is_trained_again(tmp_path, steps, told):
    run = tmp_path / "run"
    a_run(run)
    rows = [{"step": step, "time/step": 100.0} for step in range(1, steps + 1)]
    lines = [json.dumps(row) + "\n" for row in [{"step": 0, "validation/sort/accuracy": 0.5}, *rows]]
    (run / "metrics.jsonl").write_text("".join(lines) + '{"step": 99, "time/step": 1')
    (said,) = resumed(run).notes
    assert said.startswith(f"continuing {run} after step 0{told}")


def test_options_of_a_part_that_is_replaced_are_dropped(tmp_path):
    a_run(tmp_path / "run", settings=["sampler.options.weights.sort=2.0"])
    assert resumed(tmp_path / "run", "sampler.name=mix").setup.config.sampler.options == {
        "weights": {"sort": 2.0}
    }
    assert resumed(tmp_path / "run", "sampler.name=round_robin").setup.config.sampler.options == {}


@pytest.mark.long
def test_a_resume_refuses_env(tmp_path):
    a_run(tmp_path / "run")
    text = refused(tmp_path, "train", "--resume", "run", "--env", "math:copy")
    assert text == (
        "grpo-core: --resume continues a run as it was configured: leave out CONFIG.toml, --output and --env "
        "(--set tasks.NAME.env=... adds a task)"
    )


def test_another_version_and_an_edited_file_are_noted(here):
    file = here / "envs.py"
    config = build([table(*SETTINGS, f"tasks.sort.env={file}:Words")])
    a_run(
        here / "run",
        settings=[f"tasks.sort.env={file}:Words"],
        run={**identity(config, Path(config.model.path)), "grpo_core": "0.0.9"},
    )
    (version, where) = resumed(here / "run").notes
    assert "run was written by grpo-core 0.0.9, this is " in version
    assert where.endswith("after step 0")
    file.write_text(ENVIRONMENTS + "\n# edited\n")
    assert f"warning: {file} has changed since the checkpoint was written" in resumed(here / "run").notes


def test_files_of_a_checkpoint_can_be_read_by_the_same_people(tmp_path):
    directory = a_run(tmp_path / "run")
    modes = {path.stat().st_mode & 0o777 for path in directory.rglob("*") if path.is_file()}
    assert modes == {(tmp_path / "run" / "config.toml").stat().st_mode & 0o777}


def resealed(file, value):
    """Write other contents into a file of a checkpoint, with a manifest that fits."""
    file.write_text(json.dumps(value))
    if file.name != "manifest.json":
        manifest = json.loads((file.parent / "manifest.json").read_text())
        manifest["files"][file.name] = checkpoint.fingerprint(file)
        (file.parent / "manifest.json").write_text(json.dumps(manifest))


WRONG = {dict: 3, list: "text", str: 3, bool: "text", int: "text", float: [], type(None): []}
"""For each type a value of another one."""


def wrong_values(value, where=""):
    """Yield the key of each value inside, and the whole with a value of another type in its place."""
    yield where, WRONG[type(value)]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        place = f"{where}[{key}]" if isinstance(value, list) else f"{where}.{key}" if where else key
        for name, changed in wrong_values(item, place):
            whole = value.copy()
            whole[key] = changed
            yield name, whole


def with_all_there_is(state):
    quotas = {"owed": {"sort": 0.5}, "lost": [["sort", 1]]}
    standard = {"version": 0, "scores": {"1": {"reward": 1.0}}, "missing": {"1": 0.5}}
    return {
        **state,
        "sampler": {"drawn": 3, "rates": {"sort": [[0, 0.5]]}, "quotas": quotas},
        "validation": {"": ["paired", {"sort": standard}]},
        "goal": {"reward/sort": 0.5},
        "validated": 0,
    }


FREE = ("run.fixed.", "messages[0].")
"""Parts of keys whose values may have any type: a configuration's, and an environment's."""


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["pipeline.json", "train_dataloader_sort.json", "manifest.json"])
def test_a_value_of_another_type_in_a_checkpoint_is_one_error_that_names_file_and_key(tmp_path, name):
    settings = ["sampler.name=curriculum", "sampler.options.shares=drawn", "validation.name=paired"]
    directory = a_run(tmp_path / "run", ready=1, settings=settings)
    whole = with_all_there_is(json.loads((directory / "pipeline.json").read_text()))
    resealed(directory / "pipeline.json", whole)
    assert resumed(tmp_path / "run")
    right = json.loads((directory / name).read_text())
    for key, value in wrong_values(right):
        resealed(directory / name, value)
        if any(part in key for part in FREE):
            continue
        with pytest.raises(CheckpointError) as wrong:
            continued(tmp_path / "run", {})
        assert wrong.value.exit_status == 2
        assert name in str(wrong.value)
        assert key.partition("sampler.")[2] in str(wrong.value), "a plugin knows its own keys"
        if not key.startswith(("sampler", "validation.[1]")):
            assert f"{name}: {key or 'it'} is " in str(wrong.value)
    resealed(directory / name, right)
    assert resumed(tmp_path / "run")


@pytest.mark.parametrize(
    "change",
    [
        lambda state: {**state, "sampler": 3},
        lambda state: {**state, "buffer": {**state["buffer"], "step": "x", "retrying": [3]}},
        lambda state: {**state, "buffer": {k: v for k, v in state["buffer"].items() if k != "skipped"}},
    ],
)
def test_a_changed_state_with_a_right_checksum_is_one_error(tmp_path, change):
    directory = a_run(tmp_path / "run", ready=1)
    resealed(directory / "pipeline.json", change(json.loads((directory / "pipeline.json").read_text())))
    loaders = {"sort": IndexedLoader("sort", prompts(20, "sort"), seed=0)}
    stream = PromptStream(sampler=RoundRobin(), loaders=loaders, name="mix")
    buffer = Buffer(prompts_per_step=2, max_staleness=2, num_steps=9)
    with pytest.raises(CheckpointError):
        checkpoint.restore(directory, buffer, loaders, stream)


MISSING = "null; expected a value; the key is missing"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda state: state["run"]["schedule"].update(lr=-1), "'lr' must be > 0: -1.0 @ $.run.schedule"),
        (lambda state: state["run"]["schedule"].pop("lr"), f"run.schedule.lr is {MISSING}"),
        (
            lambda state: state["buffer"]["ready"][0][1][0].pop("turns"),
            f"buffer.ready[0][1][0].turns is {MISSING}",
        ),
    ],
)
def test_a_saved_value_that_its_record_refuses_is_one_error_that_names_file_key_and_value(
    tmp_path, change, said
):
    directory = a_run(tmp_path / "run", ready=1)
    state = json.loads((directory / "pipeline.json").read_text())
    change(state)
    resealed(directory / "pipeline.json", state)
    with pytest.raises(CheckpointError) as resuming:
        resumed(tmp_path / "run")
    with pytest.raises(CheckpointError) as wrong:
        check_adapters(tmp_path / "run", directory, directory)
    assert str(wrong.value) == str(resuming.value)
    assert wrong.value.exit_status == 2
    assert f"pipeline.json: {said}. Another program" in str(wrong.value)


# ---------------------------------------------------------------------------------- samplers


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ([], ""),
        (["trainer.deadline=60"], ""),
        (
            ["trainer.steps=20"],
            "the schedule of the learning rate has changed (trainer.steps: 9 -> 20): step 7 has 0.000407 "
            "instead of 0.000163; step 6 had 0.000236",
        ),
        (["trainer.updates_per_step=2", "trainer.warmup_updates=100"], "trainer.updates_per_step: 1 -> 2, "),
        (
            ["trainer.lr_schedule=constant"],
            "step 7 has 0.0005 instead of 0.000163;",
        ),
        (["trainer.lr=1e-3"], "(trainer.lr: 0.0005 -> 0.001)"),
        (["trainer.warmup_updates=5"], "(trainer.warmup_updates: 0 -> 5)"),
    ],
)
def test_a_learning_rate_that_a_resume_changes_is_said_with_both_values(tmp_path, settings, said):
    given = [
        "trainer.lr=5e-4",
        "trainer.updates_per_step=1",
        "trainer.lr_schedule=cosine",
        "trainer.warmup_updates=0",
    ]
    a_run(tmp_path / "run", settings=given)
    run = resumed(tmp_path / "run", *settings)
    message = launching.changed_schedule(6, run.resume.saved.run.schedule, run.setup.config.trainer)
    assert said in message
    assert bool(message) == bool(said)


@pytest.mark.parametrize("file", ["tokenizer_config.json", "template.jinja"])
def test_a_tokenizer_or_a_chat_template_that_has_changed_is_said(tmp_path, file):
    model, template = tmp_path / "model", tmp_path / "template.jinja"
    make_tiny_model(model, (), width=16, layers=1, warm_start_steps=0)
    template.write_text("{{ messages[0]['content'] }}")
    settings = [f"model.path={model}", f"model.chat_template={template}"]
    a_run(tmp_path / "run", settings=settings)
    assert len(resumed(tmp_path / "run").notes) == 1
    changed = (model if "json" in file else tmp_path) / file
    changed.write_text(changed.read_text() + " ")
    assert (
        f"warning: {changed} has changed since the checkpoint was written" in resumed(tmp_path / "run").notes
    )


def test_a_teacher_with_other_weights_is_said(tmp_path):
    teacher = tmp_path / "teacher"
    make_tiny_model(teacher, (), width=16, layers=1, warm_start_steps=0)
    a_run(tmp_path / "run", settings=["loss.name=distillation", f"scores.teacher.weights={teacher}"])
    assert len(resumed(tmp_path / "run").notes) == 1
    shutil.rmtree(teacher)
    make_tiny_model(teacher, (), width=16, layers=1, warm_start_steps=0, seed=1)
    notes = resumed(tmp_path / "run").notes
    assert f"warning: the weights {teacher} of scores.teacher have changed since the checkpoint" in notes


def test_a_time_limit_that_acts_otherwise_than_before_is_said(tmp_path):
    a_run(tmp_path / "run", settings=["trainer.time_limit=60"])
    notes = resumed(tmp_path / "run").notes
    assert any(note.startswith("this start ends within 60 s as well") for note in notes)
    assert not any("this start" in note for note in resumed(tmp_path / "run", "trainer.time_limit=30").notes)


SAMPLERS = (
    ENVIRONMENTS
    + """
class NotJson:
    def sample(self, loaders, request):
        return loaders["words"].take(request.expected_prompts)
    def state_dict(self):
        return {"seen": {1, 2}}

class Fails(NotJson):
    def state_dict(self):
        return {}["seen"]
"""
)


@pytest.mark.long
@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        ("NotJson", "its state_dict() cannot be saved as JSON: Object of type set is not JSON serializable"),
        ("Fails", "in state_dict: KeyError: 'seen'"),
    ],
)
def test_a_sampler_whose_state_is_not_json_fails_at_once(here, sampler, message):
    (here / "mine.py").write_text(SAMPLERS)
    done = grpo(here, "train", "--env", "./envs.py:Words", "--sampler", f"./mine.py:{sampler}")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"grpo-core: sampler './mine.py:{sampler}'")
    assert message in line
    assert not (here / "runs").exists()


class Throws(RoundRobin):
    """Takes a prompt more than it returns."""

    def sample(self, loaders, request):
        loaders["sort"].take(1)
        return super().sample(loaders, request)


class Remembers(RoundRobin):
    """Its state cannot be saved once something was drawn."""

    def state_dict(self):
        return {("sort", "1"): self.drawn} if self.drawn else {}


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        (Throws(), "sampler 'mine' took prompt .* of task 'sort' from a loader and did not return it"),
        (Remembers(), r"sampler 'mine': its state_dict\(\) cannot be saved as JSON: keys must be str"),
    ],
)
def test_a_sampler_that_breaks_its_contract_is_named_at_its_first_draw(sampler, message):
    loaders = {"sort": IndexedLoader("sort", prompts(20, "sort"), seed=0)}
    stream = PromptStream(sampler=sampler, loaders=loaders, name="mine")
    request = SampleRequest(generation_version=0, target_version=1, current_version=0, expected_prompts=3)
    with pytest.raises(PluginError, match=message):
        stream.draw(request)


class Counts(RoundRobin):
    """Counts how often it continues from a state."""

    loads = 0

    def load_state_dict(self, state):
        self.loads += 1
        super().load_state_dict(state)


def test_a_sampler_that_was_checked_before_the_start_continues_from_its_state_once(tmp_path):
    directory = a_run(tmp_path / "run")
    loaders = {"sort": IndexedLoader("sort", prompts(20, "sort"), seed=0)}
    sampler = Counts()
    sampler.drawn = 5
    stream = PromptStream(sampler=sampler, loaders=loaders, name="mix")
    load_plugin_state(sampler, "sampler 'mix'", checkpoint.read_pipeline(directory).sampler)
    checkpoint.restore(directory, Buffer(prompts_per_step=2, max_staleness=2, num_steps=9), loaders, stream)
    assert sampler.loads == 1
    assert sampler.state_dict() == checkpoint.read_pipeline(directory).sampler


def test_a_sampler_that_replaces_another_starts_without_its_state(tmp_path):
    directory = a_run(tmp_path / "run")
    loaders = {"sort": IndexedLoader("sort", prompts(20, "sort"), seed=0)}
    stream = PromptStream(sampler=Curriculum(), loaders=loaders, name="curriculum")
    buffer = Buffer(prompts_per_step=2, max_staleness=2, num_steps=9)
    told = checkpoint.restore(directory, buffer, loaders, stream)
    assert told == ["sampler 'curriculum' is new since the checkpoint, which is of 'mix'"]


# ---------------------------------------------------------------------------------- a whole run, moved


def options(*settings):
    return [part for setting in settings for part in ("--set", setting)]


QUICK = options(
    "trainer.prompts_per_step=2",
    "trainer.updates_per_step=1",
    "trainer.lr_schedule=constant",
    "rollout.group_size=2",
    "rollout.max_tokens=6",
    "validation.prompts=2",
    "validation.every=2",
    "model.options.warm_start_steps=2",
)
EXACT = options("pipeline.policy=in_order", "pipeline.max_staleness=0", "engine.options.max_rows=1")
"""One row at a time: the last bits of logits depend on the rows that are decoded together."""


FROM_A_FILE = """
from pathlib import Path

class FromAFile(Digits):
    def __init__(self, path: Path):
        self.digits = path.read_text().split()

    def prompts(self, split):
        return [grpo.Prompt(messages=f"{digit}=", answer=digit) for digit in self.digits]
"""


@pytest.mark.nightly
def test_a_run_that_is_moved_and_resumed_from_elsewhere_is_the_unbroken_run(here):
    """Relative paths, settings and hints hold in any directory, and the weights are the same bit for bit."""
    for name in ("b", "c"):
        (here / name).mkdir()
    (here / "envs.py").write_text(ENVIRONMENTS + FROM_A_FILE)
    (here / "digits.txt").write_text("0 1 2 3 4 5 6 7")
    env = ["--env", "./envs.py:FromAFile", *options("tasks.fromafile.options.path=digits.txt")]
    command = ["train", *env, *QUICK, *EXACT]
    whole = grpo(here, *command, "--set", "trainer.steps=4", "--output", "whole", timeout=250)
    assert whole.returncode == 0, whole.stderr
    part = grpo(here, *command, "--set", "trainer.steps=2", "--output", "part", timeout=250)
    assert part.returncode == 0, part.stderr
    shutil.move(here / "part", here / "b" / "moved run")
    elsewhere, run = here / "c", here / "b" / "moved run"
    done = grpo(elsewhere, "train", "--resume", "../b/moved run", "--set", "trainer.steps=4")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[:2] == ["trainer.steps: 2 -> 4", "continuing ../b/moved run after step 2"]
    weights = [
        path / "checkpoints" / "step-000004" / "trainer" / "model.safetensors"
        for path in (here / "whole", run)
    ]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    for step in range(1, 5):
        rollouts = [path / "rollouts" / f"step-{step:06d}.jsonl.gz" for path in (here / "whole", run)]
        assert rollouts[0].read_bytes() == rollouts[1].read_bytes()
    first = next(row["results"]["fromafile"]["reward"] for row in events(run, "Validated"))
    assert f"fromafile: validation reward {shown('reward', first)} -> " in done.stdout.splitlines()[-3]
    for command in (["verify"], ["report"], ["validate"]):
        looked = grpo(elsewhere, *command, "../b/moved run")
        assert looked.returncode == 0, looked.stderr
    done = grpo(elsewhere, "train", "--resume", "../b/moved run")
    assert (done.returncode, done.stderr) == (0, "")
    assert "finished all of its 4 steps" in done.stdout


@pytest.mark.nightly
def test_a_change_with_which_a_run_cannot_start_is_not_kept(here):
    (here / "envs.py").write_text(ENVIRONMENTS + FROM_A_FILE)
    (here / "digits.txt").write_text("0 1 2 3 4 5 6 7")
    (here / "others.txt").write_text("9")
    env = ["--env", "./envs.py:FromAFile", *options("tasks.fromafile.options.path=digits.txt")]
    done = grpo(here, "train", *env, *QUICK, *EXACT, "--set", "trainer.steps=2", "--output", "run")
    assert done.returncode == 0, done.stderr
    before = (here / "run" / "config.toml").read_bytes()
    changes = options("trainer.steps=3", "tasks.fromafile.options.path=others.txt")
    assert "differ from the checkpoint's" in refused(here, "train", "--resume", "run", *changes)
    assert (here / "run" / "config.toml").read_bytes() == before
    assert not [*(here / "run").glob("config-*.toml")]
    done = grpo(here, "train", "--resume", "run", "--set", "trainer.steps=3")
    assert done.returncode == 0, done.stderr


@pytest.mark.nightly
def test_the_printed_hint_works_as_printed_and_keeps_what_was_set(here):
    process = start(
        here, "--env", "./envs.py:Digits", *QUICK, "--set", "trainer.steps=10000", "--output", "my run"
    )
    wait_for(lambda: steps_done(here / "my run") >= 1, process)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 130
    hint = out.splitlines()[-1].removeprefix("next: grpo-core ")
    assert hint == "train --resume 'my run'"
    process = subprocess.Popen(
        f"exec {GRPO} {hint} --set trainer.lr=1e-5", shell=True, cwd=here, stdout=subprocess.PIPE, text=True
    )
    before = steps_done(here / "my run")
    wait_for(lambda: steps_done(here / "my run") > before, process)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=120)
    assert "trainer.lr: 0.0005 -> 1e-05" in out
    assert process.returncode == 130
    hint = out.splitlines()[-1].removeprefix("next: grpo-core ")
    done = subprocess.run(
        f"{GRPO} {hint} --set trainer.steps={steps_done(here / 'my run') + 1}",
        shell=True, cwd=here, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [row["config"]["trainer"]["lr"] for row in events(here / "my run", "RunStarted")] == [
        5e-4,
        1e-5,
        1e-5,
    ]


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_the_start_is_one_line(here, how):
    process = start(
        here, "--env", "./envs.py:Digits", "--set", "model.options.warm_start_steps=100000", "--output", "run"
    )
    wait_for(lambda: (here / "run" / "logs" / "trainer.log").exists(), process)
    process.send_signal(how)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == ""
    assert out.splitlines()[-2:] == ["interrupted at once; run: run", "next: grpo-core train --resume run"]
    assert [event["reason"] for event in events(here / "run", "RunEnded")] == ["interrupted"]


# ---------------------------------------------------------------------------------- after the last step

KILLERS = """
import os, signal
import grpo_core as grpo

class AfterTheCheckpoint(grpo.Tracker):
    def __init__(self, run): ...
    def event(self, event):
        if isinstance(event, grpo.events.Saved):
            os.kill(os.getpid(), signal.SIGKILL)

class InTheLastStep(AfterTheCheckpoint):
    # its version is validated after its checkpoint then
    def event(self, event):
        if isinstance(event, grpo.events.GroupsReady) and event.step == 1:
            os.kill(os.getpid(), signal.SIGINT)
        super().event(event)

class AtTheClose(grpo.Tracker):
    def __init__(self, run): ...
    def close(self):
        os.kill(os.getpid(), signal.SIGKILL)
"""
TRACKERS = ["files", "terminal", "*"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "killer", ["AfterTheCheckpoint", pytest.param("AtTheClose", marks=pytest.mark.nightly)]
)
def test_a_run_that_was_killed_after_its_last_step_ends_as_if_it_had_not_been(here, killer):
    """Its page and the end of its records are made, without a process for that; a repeat does nothing."""
    (here / "killers.py").write_text(KILLERS)
    trackers = json.dumps([f"./killers.py:{killer}", *TRACKERS])
    settings = options("trainer.steps=2", "checkpoint.every=0", f"tracking.trackers={trackers}")
    done = grpo(here, "train", "--env", "./envs.py:Digits", *QUICK, *settings, "--output", "run")
    assert done.returncode == -signal.SIGKILL, done.stderr
    run = here / "run"
    log, saved = run / "logs" / "trainer.log", run / "checkpoints" / "step-000002"
    before = contents(saved), log.stat().st_mtime_ns
    assert not (run / "report.html").exists()
    again = ["train", "--resume", "run", *options(f"tracking.trackers={json.dumps(TRACKERS)}")]
    done = grpo(here, *again)
    assert done.returncode == 0, done.stderr
    assert "finished all of its 2 steps" in done.stdout
    assert (run / "report.html").exists()
    assert events(run, "RunEnded")[-1]["reason"] == "finished"
    assert (contents(saved), log.stat().st_mtime_ns) == before
    assert grpo(here, "verify", "run").returncode == 0
    before = of_the_main_process(run)
    del before[str(run / ".lock")]
    done = grpo(here, *again)
    assert done.returncode == 0, done.stderr
    assert "run: finished all of its 2 steps; for more, add --set trainer.steps=4" in done.stdout
    after = of_the_main_process(run)
    del after[str(run / ".lock")]
    assert after == before


@pytest.mark.nightly
def test_a_last_validation_that_a_kill_has_prevented_is_made_and_nothing_is_trained(here):
    (here / "killers.py").write_text(KILLERS)
    trackers = json.dumps(["./killers.py:InTheLastStep", *TRACKERS])
    settings = options("trainer.steps=2", "checkpoint.every=0", f"tracking.trackers={trackers}")
    done = grpo(here, "train", "--env", "./envs.py:Digits", *QUICK, *settings, "--output", "run")
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert [event["version"] for event in events(here / "run", "Validated")] == [0]
    done = grpo(here, "train", "--resume", "run", *options(f"tracking.trackers={json.dumps(TRACKERS)}"))
    assert done.returncode == 0, done.stderr
    assert [event["version"] for event in events(here / "run", "Validated")] == [0, 2]
    assert [event["step"] for event in events(here / "run", "StepEnded")] == [1, 2]
    assert grpo(here, "verify", "run").returncode == 0


@pytest.mark.nightly
def test_a_run_that_has_reached_its_goal_trains_nothing_when_it_is_resumed(here):
    settings = options(
        "trainer.steps=9", "trainer.stop_when=reward/digits >= 0", "trainer.lr_schedule=cosine"
    )
    done = grpo(here, "train", "--env", "./envs.py:Digits", *QUICK, *settings, "--output", "run")
    assert done.returncode == 0, done.stderr
    run = here / "run"
    assert [event["reason"] for event in events(run, "RunEnded")] == ["goal reached"]
    trained = [event["step"] for event in events(run, "StepEnded")]
    for more in ([], options("trainer.steps=12"), options("trainer.stop_when=reward/digits >= -1")):
        done = grpo(here, "train", "--resume", "run", *more)
        assert done.returncode == 0, done.stderr
        assert (
            f"run: reached its goal reward/digits >= {'-1' if '-1' in str(more) else '0'} with "
            in done.stdout
        )
        assert [event["step"] for event in events(run, "StepEnded")] == trained
    done = grpo(here, "train", "--resume", "run", *options("trainer.steps=2", "trainer.stop_when="))
    assert done.returncode == 0, done.stderr
    assert [event["step"] for event in events(run, "StepEnded")] == [1, 2]
    said = (
        "warning, step 1: the schedule of the learning rate has changed (trainer.steps: 9 -> 2): step 2 has "
    )
    assert said in done.stdout


STOPPED = """
import asyncio, os, signal
from pathlib import Path
from grpo_core.validation.strategies import Greedy

class Stopped(Greedy):
    \"\"\"The run gets a signal after the first validation has been played.\"\"\"
    async def validate(self, context):
        results = await super().validate(context)
        if not Path("signalled").exists():
            Path("signalled").touch()
            os.kill(os.getpid(), signal.SIGTERM)
        return results
"""


@pytest.mark.nightly
def test_an_interrupted_first_validation_leaves_one_line_of_version_0(here):
    (here / "stopped.py").write_text(STOPPED)
    arguments = ["--env", "./envs.py:Digits", "--validation", "./stopped.py:Stopped", *QUICK, *EXACT]
    done = grpo(here, "train", *arguments, "--set", "trainer.steps=2", "--output", "run")
    assert done.returncode == 130, done.stderr
    assert (here / "run" / "checkpoints" / "step-000000").is_dir()
    done = grpo(here, "train", "--resume", "run")
    assert done.returncode == 0, done.stderr
    measured = [row["step"] for row in metrics(here / "run") if "validation/digits/reward" in row]
    assert measured == [0, 2]
    assert grpo(here, "verify", "run").returncode == 0
