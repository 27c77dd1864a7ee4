"""Runs whose prompts come from dataloaders are killed and resumed: they draw what an unharmed run draws."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from killing import Run, left_after

pytestmark = pytest.mark.slow

STEPS, PER_STEP = 12, 24
PARTS = """
import asyncio
import pathlib
import numpy as np
import grpo_core as grpo
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

def row(kind, i):
    return {"id": f"{kind}{i}", "prompt": f"{i % 100:02}=", "answer": str(i % 10)}

class Words(grpo.Environment):
    async def evaluate(self, episodes):
        await asyncio.sleep(0.02)
        return [float(e.reply == e.prompt.answer) for e in episodes]
    def solve(self, prompt):
        return prompt.answer

class Drawn:
    "A stream that is shuffled by a generator, whose state is arrays and large numbers."
    def __init__(self, split):
        self.rng, self.read = np.random.Generator(np.random.MT19937(5)), 0
    def __iter__(self):
        while True:
            number, self.read = int(self.rng.integers(10**6)), self.read + 1
            yield row(f"own{self.read}.", number)
    def state_dict(self):
        return {"rng": self.rng.bit_generator.state, "read": self.read}
    def load_state_dict(self, state):
        self.rng.bit_generator.state, self.read = state["rng"], state["read"]

class Finite(IterableDataset):
    def __iter__(self):
        return (row("finite", i) for i in range(11))

def finite(split):
    return StatefulDataLoader(Finite(), batch_size=None)

class Billion:
    def __init__(self, split, rows: int = 10**9):
        self.rows = rows
    def __len__(self):
        return self.rows
    def __getitem__(self, i):
        with open("rows_read", "a") as file:
            file.write(f"{i}\\n")
        return row("lazy", i)

class Turns:
    "Takes from all tasks in turn, two of a task at a time."
    def __init__(self):
        self.drawn = 0
    def sample(self, loaders, request):
        tasks, places = sorted(loaders), range(self.drawn, self.drawn + request.expected_prompts)
        self.drawn += request.expected_prompts
        return grpo.take_prompts(loaders, [tasks[place // 2 % len(tasks)] for place in places])
    def state_dict(self):
        return {"drawn": self.drawn}
    def load_state_dict(self, state):
        self.drawn = state["drawn"]
"""
SETTINGS = {
    "trainer.steps": STEPS, "trainer.prompts_per_step": PER_STEP, "trainer.updates_per_step": 1,
    "rollout.group_size": 2, "validation.every": 0, "checkpoint.every": 1, "pipeline.policy": "in_order",
    "model.options.warm_start_steps": 0, "sampler.name": "./words.py:Turns",
    "tasks.words.data": "./words.py:Drawn",
    "tasks.finite.env": "./words.py:Words", "tasks.finite.data": "./words.py:finite",
    "tasks.lazy.env": "./words.py:Words", "tasks.lazy.data": "./words.py:Billion",
}  # fmt: skip


def trained(run):
    """Task and prompt of each group by step; of a step that was trained twice, the last time counts."""
    found = {}
    for line in (run / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "GroupsReady":
            found[event["step"]] = [(group["task"], group["prompt"]) for group in event["groups"]]
    return found


@pytest.fixture(scope="module")
def unharmed(tmp_path_factory):
    run = Run(tmp_path_factory.mktemp("unharmed"), environment=PARTS, settings=SETTINGS)
    said = run.end(300)
    assert run.finished, said
    return run


def test_two_streams_and_lazy_rows_under_a_custom_sampler_are_drawn_in_turn(unharmed):
    drawn = trained(unharmed.directory)
    assert sorted(drawn) == list(range(STEPS))
    by_task = Counter(task for step in drawn.values() for task, _ in step)
    assert set(by_task.values()) == {STEPS * PER_STEP // 3}
    finite = [id for step in drawn.values() for task, id in step if task == "finite"]
    assert finite == [f"finite{i % 11}" for i in range(len(finite))], "it is made anew when it ends"


def test_of_a_billion_rows_no_more_are_read_than_are_needed(unharmed):
    read = (unharmed.cwd / "rows_read").read_text().splitlines()
    # with a request of six prompts: what was drawn, what is ready for the next one, what a worker reads ahead
    assert len(read) <= STEPS * PER_STEP // 3 + 2 * 2 * PER_STEP + 4


@pytest.mark.nightly
@pytest.mark.parametrize("kills", [(9,), (2, 9)])
def test_a_killed_run_draws_what_the_unharmed_one_draws(unharmed, tmp_path, kills):
    run = Run(tmp_path, environment=PARTS, settings=SETTINGS)
    for steps in kills:
        saved = run.directory / "checkpoints" / f"step-{steps:06d}"
        run.wait(lambda saved=saved: saved.is_dir(), 200)
        run.kill("all")
        run.end()
        run.resume()
    said = run.end(300)
    assert run.finished, said
    assert "continuing run after step" in said
    assert trained(run.directory) == trained(unharmed.directory)
    saved = run.directory / "checkpoints" / f"step-{STEPS:06d}" / "train_dataloader_words.json"
    key = json.loads(saved.read_bytes())["position"]["mark"]["own"]["rng"]["state"]["key"]
    assert (key["$"], key["shape"]) == ("array", [624]), "the state of the stream is in it, as JSON"
    assert b"pickle" not in saved.read_bytes()


COUNTED = """
from torch.utils.data import Dataset

class Counted(Dataset):
    def __len__(self):
        return 50
    def __getitem__(self, i):
        return {"id": f"counted{i}", "prompt": f"{i:02}=", "answer": str(i % 10)}
"""
WITH_WORKERS = """
import asyncio
import grpo_core as grpo
import torch
from counted import Counted
from torchdata.stateful_dataloader import StatefulDataLoader

class Words(grpo.Environment):
    async def evaluate(self, episodes):
        await asyncio.sleep(0.1)
        return [float(e.reply == e.prompt.answer) for e in episodes]

def counted(split):
    if split == "train":
        seeded = torch.Generator().manual_seed(3)
        return StatefulDataLoader(Counted(), batch_size=None, shuffle=True, generator=seeded, num_workers=2)
"""


class RunWithWorkers(Run):
    """A run whose dataloader has workers."""

    def environ(self):
        """Return nothing: below the test's folder, the name of the workers' socket would be too long."""
        return {}


def started_with_workers(cwd):
    cwd.mkdir(exist_ok=True)
    (cwd / "counted.py").write_text(COUNTED)
    settings = {
        **{key: value for key, value in SETTINGS.items() if not key.startswith(("tasks.", "sampler."))},
        "tasks.words.data": "./words.py:counted",
    }
    return RunWithWorkers(cwd, environment=WITH_WORKERS, settings=settings)


@pytest.mark.nightly
def test_workers_of_a_loader_end_with_a_run_that_is_killed_and_it_draws_what_an_unharmed_one_draws(tmp_path):
    calm = started_with_workers(tmp_path / "calm")
    said = calm.end(300)
    assert calm.finished, said
    run = started_with_workers(tmp_path / "killed")
    run.wait(lambda: run.steps >= 3, 200)
    everybody = run.everything()
    run.kill("main")
    assert left_after(everybody, 20.0) == []
    run.end()
    run.resume()
    said = run.end(300)
    assert run.finished, said
    assert "continuing run after step" in said
    assert trained(run.directory) == trained(calm.directory)
