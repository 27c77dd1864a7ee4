"""Trainers are plugins: the core makes the one that is named, and calls its protocol alone."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import forks
import pytest

import grpo_core as grpo
from grpo_core.plugins.host import PluginHost
from grpo_core.testing import FakeTrainer
from grpo_core.training.process import ProcessTrainer

ROOT = Path(__file__).parent.parent
SMALL = [
    "--set", "trainer.steps=3", "--set", "trainer.prompts_per_step=4", "--set", "trainer.updates_per_step=1",
    "--set", "rollout.group_size=4", "--set", "validation.every=0", "--set", "checkpoint.every=2",
    "--set", "model.options.warm_start_steps=5", "--output", "run",
]  # fmt: skip

TRAINERS = '''
import asyncio
import json
import shutil
from pathlib import Path

import grpo_core as grpo
from grpo_core.training.process import ProcessTrainer
from grpo_core.weights.layout import load_tensors
from grpo_core.weights.shm import SharedMemoryWriter


class Noted(ProcessTrainer):
    """The built-in trainer, which also notes the advantages of each step."""

    def __init__(self, setup, *, file: str = "noted.json"):
        super().__init__(setup)
        self.file, self.noted = Path(file), []

    async def step(self, batch):
        result = await super().step(batch)
        self.noted.append([batch.step, result.version, [row.advantage for row in batch.rows]])
        self.file.write_text(json.dumps(self.noted))
        return result


class Minimal(grpo.Trainer):
    """Nothing but the protocol: it publishes the start weights under each version."""

    def __init__(self, setup, *, speed: float = 1.0):
        self.setup, self.version, self.writer = setup, 0, SharedMemoryWriter()

    async def started(self):
        if self.setup.prepare is not None:
            await asyncio.to_thread(self.setup.prepare)
        self.start = Path(self.setup.model.path)
        self.tensors = load_tensors(self.start)
        if self.setup.resume_from:
            self.version = json.loads((Path(self.setup.resume_from) / "trainer" / "version.json").read_text())

    async def step(self, batch):
        self.version += 1
        metrics = {"loss": 0.5, "mine/rows": float(len(batch.rows))}
        return grpo.StepResult(version=self.version, metrics=metrics)

    async def publish(self, canary=()):
        return self.writer.write(self.version, self.tensors)

    async def save(self, directory):
        shutil.copytree(self.start, directory / "trainer")
        (directory / "trainer" / "version.json").write_text(json.dumps(self.version))

        async def written():
            return None

        return written


class Dies(Minimal):
    async def watch(self):
        await asyncio.sleep(0.1)
        raise grpo.errors.TrainerError("the machine of the trainer is gone")

    async def step(self, batch):
        await asyncio.sleep(3600)


class Length(grpo.Environment):
    """Longer replies have higher rewards."""

    def prompts(self, split):
        return [grpo.Prompt(messages=f"{split[0]}{i}=", answer=str(i)) for i in range(40)]

    def evaluate(self, episodes):
        return [len(episode.reply) / 8 for episode in episodes]


class Same(Length):
    """Every reply has the same reward."""

    def evaluate(self, episodes):
        return [1.0] * len(episodes)
'''


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "my.py").write_text(TRAINERS)
    return tmp_path


def train(here: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return forks.grpo(here, "train", *arguments, timeout=300)


def steps(here: Path) -> list[dict]:
    rows = [json.loads(line) for line in (here / "run" / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "loss" in row]


SORT = ["--env", "math:sort", "--set", "tasks.sort.options.length=3"]


@pytest.mark.slow
def test_a_trainer_that_extends_the_built_in_one_trains_a_run(here: Path) -> None:
    done = train(here, "--env", "./my.py:Length", *SMALL, "--set", "trainer.name=./my.py:Noted",
                 "--set", "trainer.options.file=seen.json")  # fmt: skip
    assert done.returncode == 0, done.stderr
    seen = json.loads((here / "seen.json").read_text())
    assert [each[:2] for each in seen] == [[0, 1], [1, 2], [2, 3]]
    assert any(advantage for *_, advantages in seen for advantage in advantages)
    assert (here / "run" / "logs" / "trainer.log").exists(), "what its child prints is a log of the run"


@pytest.mark.nightly
def test_a_trainer_of_nothing_but_the_protocol_trains_a_run_and_is_resumed(here: Path) -> None:
    chosen = ["--set", "trainer.name=./my.py:Minimal", "--set", "trainer.options.speed=2"]
    done = train(here, *SORT, *SMALL, *chosen)
    assert done.returncode == 0, done.stderr
    assert [row["step"] for row in steps(here)] == [1, 2, 3]
    assert all("mine/rows" in row for row in steps(here)), "its metrics are those of the run"
    done = train(here, "--resume", "run", "--set", "trainer.steps=5")
    assert done.returncode == 0, done.stderr
    assert [row["step"] for row in steps(here)] == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_the_trainer_of_the_examples_trains_a_run_and_is_resumed(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows have their tokens in a data plane; those of tests/test_public_api.py have them themselves."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))  # the trainer's process imports the plane's reader
    (here / "plane.py").write_text("from file_plane import FilePlane\n")
    example = ["--set", f"trainer.name={ROOT / 'examples' / 'custom_trainer.py'}:accelerated"]
    plane = ["--set", "data_plane.name=./plane.py:FilePlane"]
    plane += ["--set", f"data_plane.options.directory={here / 'plane'}"]
    done = train(here, "--env", "./my.py:Length", *SMALL, *example, *plane)
    assert done.returncode == 0, done.stderr
    assert [row["step"] for row in steps(here)] == [1, 2, 3]
    assert all(row["tokens/trained"] > 0 and row["time/train"] > 0 for row in steps(here))
    assert (here / "plane" / "fetched").exists()
    done = train(here, "--resume", "run", "--set", "trainer.steps=5")
    assert done.returncode == 0, done.stderr
    assert [row["step"] for row in steps(here)] == [1, 2, 3, 4, 5]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("trainer.updates_per_step=4", "does not know trainer.updates_per_step = 4"),
        ("model.lora.rank=4", "leave out [model.lora]"),
        ("loss.options.kl.coefficient=0.1", "needs scores.reference"),
    ],
)
def test_the_trainer_of_the_examples_refuses_what_it_does_not_do(
    here: Path, setting: str, message: str
) -> None:
    example = ["--set", f"trainer.name={ROOT / 'examples' / 'custom_trainer.py'}:accelerated"]
    done = train(here, *SORT, *SMALL, *example, "--set", setting)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_trainer_that_dies_ends_the_run_with_what_it_said(here: Path) -> None:
    done = train(here, *SORT, *SMALL, "--set", "trainer.name=./my.py:Dies")
    assert done.returncode == 1
    assert "the machine of the trainer is gone" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("coefficient", [pytest.param(0.0, marks=pytest.mark.nightly), 0.1])
def test_a_run_trains_on_equal_rewards_if_its_loss_needs_all_rows(here: Path, coefficient: float) -> None:
    done = train(here, "--env", "./my.py:Same", *SMALL, "--set", f"loss.options.kl.coefficient={coefficient}")
    assert done.returncode == 0, done.stderr
    trained = [
        json.loads(line).get("tokens/trained")
        for line in (here / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    trained = [tokens for tokens in trained if tokens is not None]
    assert len(trained) == 3
    assert all((tokens > 0) is (coefficient > 0) for tokens in trained)


@pytest.mark.long
@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("trainer.name=torhc", "there is no trainer 'torhc'. Did you mean 'torch'"),
        ("trainer.name=./my.py:Minimall", "has no 'Minimall'. Did you mean 'Minimal'"),
    ],
)
def test_a_trainer_that_is_not_there_is_named_before_any_work(here: Path, setting: str, message: str) -> None:
    done = train(here, *SORT, *SMALL, "--set", setting)
    assert done.returncode != 0
    assert message in done.stderr
    assert not (here / "run").exists()


def test_an_offer_that_extends_the_core_takes_its_place_where_its_plugin_is_installed() -> None:
    both, alone = PluginHost.discover(), PluginHost.discover(block=["scale"])
    assert both.find("trainer", "torch").plugin.name == "scale"
    assert both.find("trainer", "core:torch").plugin.name == "core"
    assert alone.find("trainer", "torch").plugin.name == "core"
    both.add({"trainer": {"torch": grpo.TrainerOffer(FakeTrainer, extends_core=True)}})
    with pytest.raises(grpo.PluginError, match=r"write 'scale:torch' or 'program:torch'"):
        both.find("trainer", "torch")


def test_the_trainers_of_the_core_and_the_fakes_keep_the_protocol() -> None:
    assert PluginHost.discover(()).factory("trainer", "torch") is ProcessTrainer
    assert issubclass(ProcessTrainer, grpo.Trainer)
    assert isinstance(FakeTrainer(), grpo.Trainer)
