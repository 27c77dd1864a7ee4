"""An engine that writes down what it holds: the checksum of each tensor of the whole model, in its dtype.

And an environment whose rewards differ, so that a model learns before it knows anything.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from grpo_core import EngineSetup, Environment, Prompt, Weights
from grpo_core.engines.local.engine import LocalEngine
from grpo_core.kit import read_weights
from grpo_core.weights import layout


def write_down(log: str, weights: Weights, held: str) -> None:
    """Add a line to the log of an engine; ``held`` is its dtype, or "auto"."""
    dtype = getattr(torch, weights.tensors[0].dtype if held == "auto" else held)
    sums = {name: layout.checksum(each.to(dtype)) for name, each in read_weights(weights).items()}
    with Path(log).open("a") as file:
        file.write(json.dumps({"version": weights.version, "sums": sums, "dtype": str(dtype)}) + "\n")


class Recorded(LocalEngine):
    """The engine ``local``, with a log.

    Args:
        log: file of one line for each update.
        dtype: as for ``local``.
    """

    def __init__(self, setup: EngineSetup, *, log: str, dtype: str = "auto") -> None:
        super().__init__(setup, dtype=dtype)
        self.log, self.held = log, dtype

    async def update_weights(self, weights: Weights) -> None:
        await super().update_weights(weights)
        write_down(self.log, weights, self.held)


class Varied(Environment):
    def prompts(self, split):
        return [Prompt(id=f"{split}-{number}", messages=f"{split} {number}") for number in range(8)]

    def evaluate(self, episodes):
        return [len(set(episode.reply)) / 8 for episode in episodes]
