"""A real service: SkyRL 0.3.0 with JAX on this machine's CPU, which serves the tiny model.

``GRPO_TINKER_PYTHON`` is the Python 3.11 of a virtual environment that was made by

    pip install "skyrl[tinker,jax]==0.3.0" "torch==2.13.0"
    echo 'import typing, typing_extensions; typing.TypedDict = typing_extensions.TypedDict' \\
        > .../site-packages/sitecustomize.py        # pydantic asks for it below Python 3.12
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

import grpo_core as grpo
from grpo_core.testing import make_tiny_model

PYTHON = os.environ.get("GRPO_TINKER_PYTHON", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not PYTHON, reason="needs GRPO_TINKER_PYTHON: a virtual environment with SkyRL's server"
    ),
]
GRPO = str(Path(sys.executable).parent / "grpo-core")
UV = """#!{python}
import subprocess, sys
arguments = sys.argv[1:]
sys.exit(subprocess.call([{python!r}, *arguments[arguments.index("-m"):]]))
"""
"""Stands in for `uv run ... -m MODULE ARGUMENTS`, by which the server starts, and starts its engine."""
BACKEND = {
    "max_lora_adapters": 8,
    "max_lora_rank": 8,
    "train_micro_batch_size": 32,
    "sample_max_num_sequences": 64,
}


class Server:
    """The server's processes, which share a directory: a new one finds the checkpoints of the one before."""

    def __init__(self, directory, model):
        self.directory, self.model, self.log = directory, model, directory / "server.log"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        uv = directory / "uv"
        uv.write_text(UV.format(python=PYTHON))
        uv.chmod(0o755)

    def start(self):
        arguments = {
            "host": "127.0.0.1",
            "port": self.port,
            "base-model": self.model,
            "backend": "jax",
            "backend-config": json.dumps(BACKEND),
            "checkpoints-base": self.directory / "checkpoints",
            "database-url": "sqlite:///./server.db",
        }
        given = [str(part) for name, value in arguments.items() for part in (f"--{name}", value)]
        variables = {
            "PATH": f"{self.directory}:{os.environ['PATH']}",
            "JAX_PLATFORMS": "cpu",
            "HF_HUB_OFFLINE": "1",
        }
        with self.log.open("ab") as log:
            program = [PYTHON, str(self.directory / "uv"), "run", "--", "python", "-m", "skyrl.tinker.api"]
            self.process = subprocess.Popen(
                [*program, *given],
                cwd=self.directory,
                env=os.environ | variables,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        end = time.monotonic() + 120
        while time.monotonic() < end and self.process.poll() is None:
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(f"{self.url}/api/v1/healthz", timeout=5),
            ):
                return
            time.sleep(0.2)
        raise AssertionError(self.log.read_text()[-3000:])

    def signal(self, number):
        os.killpg(self.process.pid, number)

    def end(self):
        self.signal(signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    directory = tmp_path_factory.mktemp("service")
    environment = grpo.make_environment("math:sort")
    prompts = environment.prompts("train")[:500]
    solved = [(prompt.messages[0]["content"], environment.solve(prompt)) for prompt in prompts]
    make_tiny_model(directory / "tiny", solved, warm_start_steps=65)
    found = Server(directory, directory / "tiny")
    found.start()
    yield found
    found.end()


def command(server, run, *settings, steps=4):
    given = {
        "tinker.base_url": server.url,
        "tinker.server": "skyrl-jax",
        "trainer.options.rank": 8,
        "trainer.steps": steps,
        "trainer.prompts_per_step": 8,
        "trainer.lr": 2e-3,
        "rollout.group_size": 4,
        "rollout.max_tokens": 12,
        "validation.every": 0,
        "checkpoint.every": 1,
    }
    named = [f"{name}={value}" for name, value in given.items()] + list(settings)
    chosen = ["--env", "math:sort", "--model", f"tinker:{server.model}", "--output", str(run)]
    return [GRPO, "train", *chosen, *(part for each in named for part in ("--set", each))]


def done(arguments, seconds=600):
    return subprocess.run(arguments, capture_output=True, text=True, timeout=seconds)


def verified(run, steps):
    """Check the run's laws by its account, and that it has made so many steps."""
    account = done([GRPO, "verify", str(run)])
    assert account.returncode == 0, account.stdout + account.stderr
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    made = [each for each in metrics if "rows" in each]
    assert [each["step"] for each in made] == list(range(1, steps + 1))
    return made


def wait_for_steps(run, steps, process):
    end = time.monotonic() + 400
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(OSError):
            if any(path.name >= f"step-{steps:06}" for path in (run / "checkpoints").iterdir()):
                return
        time.sleep(0.2)
    raise AssertionError(f"no {steps} steps; exit status {process.poll()}")


def test_it_trains_and_the_canary_finds_the_service_in_agreement(server, tmp_path):
    trained = done(command(server, tmp_path / "run"))
    assert trained.returncode == 0, trained.stderr
    made = verified(tmp_path / "run", 4)
    assert all(each["canary/difference_max"] < 1e-3 for each in made[1:])
    first = next(each for each in made if "logprob_diff_mean" in each)
    assert first["logprob_diff_mean"] < 1e-3, "it is trained by the weights that sampled it"
    (newest,) = sorted((tmp_path / "run" / "checkpoints").glob("step-000004"))
    saved = json.loads((newest / "trainer" / "tinker.json").read_text())
    assert saved["state"].startswith("tinker://")
    assert server.log.read_text().count("Unloaded model") >= 2, "its adapters are given back"
    measured = done([GRPO, "validate", str(tmp_path / "run")])
    assert measured.returncode == 2
    assert "its weights are at the service: such a run is validated while it trains" in measured.stderr


def test_a_killed_run_continues_where_it_was(server, tmp_path):
    run = tmp_path / "run"
    process = subprocess.Popen(command(server, run, steps=5), stderr=subprocess.DEVNULL)
    wait_for_steps(run, 2, process)
    process.kill()
    process.wait()
    resumed = done([GRPO, "train", "--resume", str(run)])
    assert resumed.returncode == 0, resumed.stderr
    verified(run, 5)


def test_a_service_that_is_away_is_waited_for(server, tmp_path):
    run = tmp_path / "run"
    process = subprocess.Popen(command(server, run, steps=5), stderr=subprocess.PIPE, text=True)
    wait_for_steps(run, 2, process)
    server.signal(signal.SIGSTOP)
    time.sleep(45)
    server.signal(signal.SIGCONT)
    _, printed = process.communicate(timeout=400)
    assert process.returncode == 0, printed
    verified(run, 5)
    events = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    told = {(each["component"], each["kind"]) for each in events if each["event"] == "IncidentReported"}
    assert told == {(who, kind) for who in ("engine", "trainer") for kind in ("unavailable", "available")}


def test_a_service_that_has_forgotten_the_model_ends_the_run_and_it_can_be_resumed(server, tmp_path):
    run = tmp_path / "run"
    process = subprocess.Popen(command(server, run, steps=5), stderr=subprocess.PIPE, text=True)
    wait_for_steps(run, 2, process)
    server.end()
    server.start()
    _, printed = process.communicate(timeout=400)
    assert process.returncode == 1, printed
    assert "Traceback" not in printed
    assert "--resume" in printed
    resumed = done([GRPO, "train", "--resume", str(run)])
    assert resumed.returncode == 0, resumed.stderr
    verified(run, 5)


def test_a_model_that_the_service_does_not_have_is_named_at_the_start(server, tmp_path):
    given = command(server, tmp_path / "run", "trainer.options.base_model=org/other")
    refused = done(given)
    assert refused.returncode == 2, refused.stderr
    assert f"the service trains {server.model}" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_a_service_that_is_not_there_is_named_at_the_start(server, tmp_path):
    refused = done(command(server, tmp_path / "run", "tinker.base_url=http://127.0.0.1:9"))
    assert refused.returncode == 2, refused.stderr
    assert "http://127.0.0.1:9 does not begin a session" in refused.stderr
    assert "Traceback" not in refused.stderr
