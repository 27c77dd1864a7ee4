"""``examples/nano.py`` is the same algorithm as a run: equal seeds train equal weights."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

import grpo_core as grpo
from grpo_core.processes import cpu

pytestmark = pytest.mark.long

NANO = Path(__file__).parents[1] / "examples/nano.py"
STREAM = """
import itertools

from nano import SEED, shuffled, sort


class Shuffled:
    '''The prompts of nano.py, as a stream with a state.'''

    def __init__(self, split):
        self.drawn = 0

    def __iter__(self):
        for prompt in itertools.islice(shuffled(sort().prompts("train"), SEED), self.drawn, None):
            self.drawn += 1
            yield prompt

    def state_dict(self):
        return {"drawn": self.drawn}

    def load_state_dict(self, state):
        self.drawn = state["drawn"]


def prompts(split):
    return Shuffled(split) if split == "train" else None
"""


STEPS = 20


def _trained(model: Path, staleness: int) -> tuple[dict[str, Any], Any, list[list[int]]]:
    """Run nano.py on a new tiny model; return its names, its trainer, and the sampled tokens of each step."""
    nano = runpy.run_path(str(NANO))["main"].__globals__
    nano |= {"STEPS": STEPS, "PROMPTS_PER_STEP": 16, "UPDATES_PER_STEP": 2, "MAX_STALENESS": staleness}
    nano["LEARNING_RATE"] = 1e-4  # a larger one lets rounding errors grow until another token is sampled
    nano["MAX_TOKENS"] = 8  # rows of about one length, which the trainer does not divide
    sampled: list[list[int]] = []

    class Watched(nano["Trainer"]):  # type: ignore[misc]
        def step(self, groups: Any) -> None:
            sampled.append(
                [int(id) for group in groups for each in group for id in each.completion.token_ids]
            )
            super().step(groups)

    nano["Trainer"] = Watched
    return nano, nano["main"](model), sampled


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 2])
def test_a_run_trains_the_weights_of_nano(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, staleness: int
) -> None:
    cpu.prepare(threads=1)  # the same products of matrices as in the trainer's process,
    torch.backends.cuda.enable_flash_sdp(False)  # and the same attention as it computes for short rows
    nano, trainer, sampled = _trained(tmp_path / "model", staleness)
    (tmp_path / "stream.py").write_text(STREAM)
    monkeypatch.syspath_prepend(str(NANO.parent))
    run = grpo.train(
        {
            "seed": nano["SEED"],
            "model": {"path": str(tmp_path / "model")},
            "tasks": {"sort": {"env": "math:sort", "data": f"{tmp_path}/stream.py:prompts"}},
            "trainer": {
                "steps": STEPS,
                "prompts_per_step": nano["PROMPTS_PER_STEP"],
                "updates_per_step": nano["UPDATES_PER_STEP"],
                "lr": nano["LEARNING_RATE"],
                "warmup_updates": 0,
                "max_grad_norm": nano["MAX_GRAD_NORM"],
                "packing": False,
                "tokens_per_microbatch": 100_000,
                "threads": 1,
            },
            "rollout": {"group_size": nano["GROUP_SIZE"], "max_tokens": nano["MAX_TOKENS"]},
            "pipeline": {
                "max_staleness": nano["MAX_STALENESS"],
                "policy": "in_order",
                "in_flight_updates": False,
            },
            "checkpoint": {"every": STEPS},
        },
        output=tmp_path / "run",
    )
    for step, tokens in enumerate(sampled, 1):
        groups = sorted(run.rollouts(step), key=lambda group: group.slot)
        found = [
            int(id)
            for group in groups
            for each in group.rollouts
            for segment in each.segments
            for id in segment.tokens.ids
        ]
        assert found == tokens, f"step {step}"
    mine = run.model().state_dict()
    for name, weight in trainer.model.state_dict().items():
        # each update moves a weight by 1e-4; what rounds differently by CPU has been 1.2e-6 after forty
        torch.testing.assert_close(mine[name], weight, rtol=0.0, atol=3e-6)


def test_nano_stays_on_a_page_and_brings_the_algorithm_itself() -> None:
    text = NANO.read_text()
    assert len(text.splitlines()) <= 300
    imported = {
        alias.name
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("grpo_core")
        for alias in node.names
    }
    assert not imported & {"Buffer", "Pipeline", "TorchTrainer", "advantages", "loss"}
