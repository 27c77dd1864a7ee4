"""Which process sees which GPU: the choice, its mistakes, and whole runs whose processes have it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from forks import grpo
from killing import Run

from grpo_core.app import placement
from grpo_core.config import EngineConfig, TrainerConfig, as_toml, build
from grpo_core.contracts.errors import ConfigError
from grpo_core.plugins.host import PluginHost

TRAINER = TrainerConfig()
HOST = PluginHost.discover()
SCALED, ALONE = (host.make("placement", "local", host) for host in (HOST, PluginHost.discover([])))
ONE, TWO, THREE = (EngineConfig(workers=n) for n in (1, 2, 3))


def seen(trainer, count, engine, validation=None, local=SCALED):
    """GPUs of the trainer, then of each worker: "0" or "1,2"; "" for a process whose variables are left.

    ``trainer``: its section, perhaps behind the number of its ranks.
    """
    ranks, trainer = trainer if isinstance(trainer, tuple) else (1, trainer)
    engines = {"engine": engine} | ({"validation.engine": validation} if validation else {})
    devices = local.choose(trainer, engines, count, ranks)
    workers = [worker for key in engines for worker in devices.engines.get(key, ())]
    return [of.get("CUDA_VISIBLE_DEVICES", "") for of in (devices.trainer, *workers)], bool(devices.shared)


@pytest.fixture(autouse=True)
def all_visible(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_a_trainer_on_a_gpu_needs_one():
    with pytest.raises(ConfigError, match=r'trainer.device = "cuda:1": this process sees no GPU'):
        ALONE.choose(TrainerConfig(device="cuda:1"), {}, 0)


@pytest.mark.parametrize(
    ("trainer", "engine", "count", "expected", "shared"),
    [
        (TRAINER, TWO, 0, [""], False),
        (TRAINER, TWO, 1, [""], True),
        (TRAINER, ONE, 2, ["0", "1"], False),
        (TRAINER, ONE, 4, ["0", "1,2,3"], False),
        (TRAINER, THREE, 8, ["0", "1,2", "3,4", "5,6"], False),
        (TRAINER, THREE, 3, ["0", "1", "2", "1"], False),
        (TrainerConfig(gpus=[7]), TWO, 8, ["7", "0,1,2", "3,4,5"], False),
        (TrainerConfig(device="cuda:7"), TWO, 8, ["", "0,1,2", "3,4,5"], False),
        (TrainerConfig(device="cpu"), TWO, 2, ["", "0", "1"], False),
        ((4, TRAINER), TWO, 8, ["0,1,2,3", "4,5", "6,7"], False),
        ((2, TrainerConfig(gpus=[7, 6])), ONE, 8, ["7,6", "0,1,2,3,4,5"], False),
        (None, TWO, 2, ["", "0", "1"], False),
        (TrainerConfig(gpus=[7]), EngineConfig(workers=2, gpus=[0, 1]), 8, ["7", "0", "1"], False),
        (TRAINER, EngineConfig(workers=2, gpus=[3, 0, 1, 2]), 8, ["4", "3,0", "1,2"], False),
        (TrainerConfig(gpus=[1]), EngineConfig(gpus=[1]), 2, ["1", "1"], True),
        (TRAINER, EngineConfig(gpus=[0]), 1, [""], True),
        (TRAINER, EngineConfig(options={"device": "cpu"}), 2, ["0", ""], False),
        (TRAINER, EngineConfig(options={"device": "cuda:0"}), 2, ["1", ""], False),
        (TRAINER, EngineConfig(transport="cuda_ipc"), 1, [""], True),
        (TRAINER, EngineConfig(transport="cuda_ipc"), 2, ["0", "1,0"], False),
        (TRAINER, EngineConfig(transport="cuda_ipc"), 4, ["0", "1,2,3,0"], False),
        (TRAINER, EngineConfig(transport="cuda_ipc", gpus=[2, 3]), 4, ["3", "2,3"], False),
        (TrainerConfig(gpus=[2]), EngineConfig(transport="cuda_ipc", gpus=[2, 3]), 4, ["2", "3,2"], False),
    ],
    ids=str,
)
def test_the_trainer_has_its_own_gpu_and_the_engines_share_the_others(
    trainer, engine, count, expected, shared
):
    assert seen(trainer, count, engine) == (expected, shared)


@pytest.mark.parametrize(
    ("trainer", "engine", "count", "expected", "shared"),
    [
        (TRAINER, ONE, 0, [""], False),
        (TRAINER, ONE, 1, [""], True),
        (TRAINER, ONE, 4, ["0", "1,2,3"], False),
        (TRAINER, EngineConfig(gpus=[0, 1]), 4, ["2", "0,1"], False),
        (TrainerConfig(device="cuda:3"), ONE, 4, ["", "0,1,2"], False),
        (TrainerConfig(device="cpu"), ONE, 2, ["", "0,1"], False),
        (TRAINER, EngineConfig(options={"device": "cpu"}), 2, ["0", ""], False),
        (TrainerConfig(gpus=[1]), EngineConfig(gpus=[1]), 2, ["1", "1"], True),
    ],
    ids=str,
)
def test_the_core_alone_gives_the_trainer_the_first_gpu_that_no_engine_names(
    trainer, engine, count, expected, shared
):
    assert seen(trainer, count, engine, local=ALONE) == (expected, shared)


def test_an_engine_for_validation_has_its_own_share():
    assert seen(TRAINER, 4, TWO, ONE)[0] == ["0", "1", "2", "3"]
    assert seen(TRAINER, 4, EngineConfig(workers=3, gpus=[0, 1, 2]), ONE)[0] == ["3", "0", "1", "2", "0,1,2"]
    assert seen(TRAINER, 4, TWO, EngineConfig(gpus=[0]))[0] == ["1", "2", "3", "0"]
    assert seen(TRAINER, 4, EngineConfig(transport="cuda_ipc"), ONE)[0] == ["0", "1,0", "2"]


def test_gpus_are_numbered_as_this_process_sees_them(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a, GPU-b,GPU-c")
    assert seen(TrainerConfig(gpus=[2]), 3, TWO)[0] == ["GPU-c", "GPU-a", "GPU-b"]


@pytest.mark.parametrize(
    ("visible", "order", "expected"),
    [
        ("", "", "PCI_BUS_ID"),
        ("", "FASTEST_FIRST", "FASTEST_FIRST"),
        ("1,0", "", None),
        ("1,0", "FASTEST_FIRST", None),
    ],
)
def test_numbers_mean_what_they_mean_to_nvidia_smi_unless_the_user_has_chosen_by_them(
    monkeypatch, visible, order, expected
):
    """A machine's GPUs may differ: CUDA counts the fastest first, and nvidia-smi by their places."""
    for name, value in (("CUDA_VISIBLE_DEVICES", visible), ("CUDA_DEVICE_ORDER", order)):
        monkeypatch.setenv(name, value)
        if not value:
            monkeypatch.delenv(name)
    variables = SCALED.choose(TRAINER, {"engine": ONE}, 2).trainer
    assert variables["CUDA_VISIBLE_DEVICES"] == (visible or "0,1").split(",")[0]
    assert variables.get("CUDA_DEVICE_ORDER") == expected


def test_the_choice_is_printed_unless_there_is_none():
    assert SCALED.choose(TRAINER, {"engine": THREE}, 8).summary == "GPUs: trainer 0; engine 1+2, 3+4, 5+6"
    assert SCALED.choose(TRAINER, {"engine": THREE}, 1).summary == ""


@pytest.mark.parametrize(
    ("trainer", "engine", "count", "message"),
    [
        (
            TrainerConfig(gpus=[7]),
            ONE,
            4,
            r"^trainer.gpus = \[7\]: this machine has no GPU 7; it has 4, .* to 3$",
        ),
        (TrainerConfig(gpus=[7]), ONE, 0, "no GPU 7; it has none that torch can use"),
        (
            TrainerConfig(gpus=[6, 7]),
            ONE,
            8,
            r"each of the 1 ranks \(trainer.ranks\) computes on one GPU; name 1",
        ),
        ((4, TRAINER), EngineConfig(gpus=[0]), 4, "3 of the 4 GPUs of this machine are free"),
        ((2, TrainerConfig(device="cuda:1")), ONE, 8, "is one GPU for 2 ranks"),
        (TrainerConfig(gpus=[1], device="cpu"), ONE, 8, 'trainer.device = "cpu" exclude each other'),
        (TrainerConfig(gpus=[1], device="cuda:1"), ONE, 8, 'trainer.device = "cuda:1" exclude each other'),
        (TRAINER, EngineConfig(gpus=[1, 1]), 8, r"engine.gpus = \[1, 1\]: GPU 1 is named twice"),
        (TRAINER, EngineConfig(gpus=[-1]), 8, "no GPU -1"),
        (TRAINER, EngineConfig(workers=2, gpus=[1, 2, 3]), 8, "3 GPUs for 2 workers .* name 4 or 2$"),
        (TRAINER, EngineConfig(workers=2, gpus=[1]), 8, "1 GPUs for 2 workers .* name 2$"),
        (
            TRAINER,
            EngineConfig(workers=2, gpus=[0, 1]),
            2,
            "all 2 GPUs of this machine: leave one for the tr",
        ),
        (TrainerConfig(gpus=[0]), EngineConfig(workers=2, gpus=[0, 1]), 8, "GPU 0 is the trainer's"),
        (
            TrainerConfig(gpus=[0]),
            EngineConfig(transport="cuda_ipc", gpus=[1]),
            8,
            r'engine.transport = "cuda_ipc": the engine must see the trainer\'s GPU 0',
        ),
    ],
    ids=str,
)
def test_gpus_that_cannot_be_meant_are_refused_in_one_line(trainer, engine, count, message):
    many = isinstance(trainer, tuple) or engine.workers > 1 or engine.transport != "auto"
    for local in (SCALED,) if many else (SCALED, ALONE):
        with pytest.raises(ConfigError, match=message) as refused:
            seen(trainer, count, engine, local=local)
        assert "\n" not in str(refused.value)


def test_the_driver_is_asked_before_torch_is_imported(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(placement, "DRIVERS", ("/nowhere",))
    assert placement.visible() == 0
    monkeypatch.setattr(placement, "DRIVERS", ("/",))
    assert placement.visible() == 3


# ---------------------------------------------------------------------------------- whole runs

FOUR = "import grpo_core.app.placement\ngrpo_core.app.placement.visible = lambda: 4\n"
"""A ``sitecustomize`` for a machine whose driver tells of four GPUs; torch still computes on the CPU."""


def with_four(directory: Path) -> dict[str, str]:
    (directory / "site").mkdir()
    (directory / "site" / "sitecustomize.py").write_text(FOUR)
    return {"PYTHONPATH": os.pathsep.join([str(directory / "site"), os.environ.get("PYTHONPATH", "")])}


class OnFour(Run):
    def environ(self):
        return super().environ() | with_four(self.cwd)

    def seen_by(self):
        """Return pid and GPUs of each of the run's processes, by where its output goes."""
        found = {}
        for pid in self.everything():
            try:
                log = Path(os.readlink(f"/proc/{pid}/fd/1")).relative_to(self.directory / "logs")
                environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            except (OSError, ValueError):
                continue
            variables = dict(line.split(b"=", 1) for line in environ if b"=" in line)
            found[str(log)] = pid, variables.get(b"CUDA_VISIBLE_DEVICES", b"all").decode()
        return found


@pytest.mark.nightly
def test_each_process_of_a_run_sees_its_own_gpus_and_one_that_replaces_it_the_same(tmp_path):
    settings = {
        "trainer.steps": 200,
        "trainer.gpus": "[3]",
        "engine.workers": 2,
        "engine.gpus": "[1, 0]",
        "validation.every": 0,
    }
    expected = {
        "trainer.log": "3",
        "engine-0/engine-local.log": "1",
        "engine-1/engine-local.log": "0",
        "environment-words.log": "",
    }
    run = OnFour(tmp_path, settings=settings)
    try:
        run.wait(lambda: run.steps >= 1)
        before = run.seen_by()
        assert {log: gpu for log, (_, gpu) in before.items()} == expected
        os.kill(before["engine-1/engine-local.log"][0], signal.SIGKILL)

        def replaced() -> bool:
            """Whether the new process has its variables; before ``exec`` it has those of its parent."""
            now = run.seen_by()
            is_new = now.get("engine-1/engine-local.log") not in (None, before["engine-1/engine-local.log"])
            return is_new and {log: gpu for log, (_, gpu) in now.items()} == expected

        run.wait(replaced)
    finally:
        os.kill(run.process.pid, signal.SIGINT)
        said = run.end()
    assert "GPUs: trainer 3; engine 1, 0" in said


@pytest.mark.long
@pytest.mark.parametrize("command", ["train", "validate"])
def test_gpus_that_are_not_there_end_a_command_before_anything_starts(tmp_path, command):
    target = ["tiny"] if command == "validate" else ["--output", "run"]
    chosen = ["--env", "math:sort", "--set", "engine.gpus=[4]"]
    done = grpo(tmp_path, command, *target, *chosen, **with_four(tmp_path))
    assert done.returncode == ConfigError.exit_status
    assert done.stderr.strip() == (
        "grpo-core: engine.gpus = [4]: this machine has no GPU 4; it has 4, numbered from 0 to 3"
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.nightly
def test_a_trainers_gpu_does_not_hinder_a_validation_elsewhere(tmp_path):
    (tmp_path / "run").mkdir()
    config = build([{"tasks": {"sort": {"env": "math:sort"}}, "trainer": {"gpus": [7]}}])
    (tmp_path / "run" / "config.toml").write_text(as_toml(config))
    chosen = ["--set", "validation.prompts=4", "--set", "rollout.max_tokens=9"]
    done = grpo(tmp_path, "validate", "run", *chosen)
    assert done.returncode == 0, done.stderr
