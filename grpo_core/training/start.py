"""The model that a run starts from."""

from __future__ import annotations

from pathlib import Path

from grpo_core.config import TINY
from grpo_core.errors import ModelError
from grpo_core.training.setup import TrainerSetup


def start_model(setup: TrainerSetup) -> str:
    """Return path or hub id of the model that starts the run; "tiny" is made unless its directory has it.

    Raises ModelError if the setup names no directory for "tiny".
    """
    model = setup.model
    if model.path != TINY:
        return model.path
    directory = Path(setup.model_directory)
    if not setup.model_directory:
        raise ModelError('model.path = "tiny" needs a directory to be made in')
    if not (directory / "config.json").exists():
        from grpo_core.training.tiny import make_tiny_model  # imports torch

        make_tiny_model(
            directory,
            setup.demonstrations,
            width=model.width,
            layers=model.layers,
            warm_start_steps=model.warm_start_steps,
            seed=setup.seed,
        )
    return str(directory)
