"""The model source ``tiny``: a model of 90,000 parameters, warmed up on the environments' own solutions."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cached_property, partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from grpo_core.app.model_sources import ModelRequest, StartModel
from grpo_core.contracts.errors import ConfigError
from grpo_core.demo.demonstrations import POSITIONS, demonstrations, lengths
from grpo_core.models.files import size_of

SECONDS = 0.6
"""Seconds of a step of math:sort on two cores, start and validation included."""


class TinyModel:
    """The ``StartModelSource`` of the tiny model.

    Args:
        width: width of the hidden states.
        layers: number of layers.
        warm_start_steps: number of supervised steps on the environments' solutions before reinforcement
            learning; None: from 40 to 200, until the model samples 1 of 20 solutions.
    """

    def __init__(self, *, width: int = 64, layers: int = 2, warm_start_steps: int | None = None) -> None:
        for name, value, least in (
            ("width", width, 8),
            ("layers", layers, 1),
            ("warm_start_steps", 0 if warm_start_steps is None else warm_start_steps, 0),
        ):
            if not isinstance(value, int) or value < least:
                raise ConfigError(f"{name} is {value!r}, expected a whole number of at least {least}")
        self._width, self._layers, self._warm_start_steps = width, layers, warm_start_steps

    @cached_property
    def preset(self) -> Mapping[str, Any]:
        return tomllib.loads((files(__package__) / "tiny.toml").read_text(encoding="utf-8"))

    def check(self) -> None:
        """Do nothing: the model needs no files."""

    def configuration(self) -> Mapping[str, Any]:
        """Return the config.json of the model to be made."""
        from grpo_core.demo.tiny import tiny_config

        return tiny_config(width=self._width, layers=self._layers, positions=POSITIONS)

    def about(self, steps: int) -> str:
        """Describe the model and the time of a run."""
        minutes = steps * SECONDS / 60
        return "a toy model" + (f", about {minutes:.0f} minutes on two cores" if minutes >= 2 else "")

    async def start_model(self, request: ModelRequest) -> StartModel:
        """Return a model in the run's directory, or the one that an earlier start made there."""
        path = str(request.directory)
        if _complete(request.directory):
            return StartModel(path=path, positions=size_of(path, "max_position_embeddings"))
        prompts = await request.prompts()
        solved = await demonstrations(request.environments, prompts) if self._warm_start_steps != 0 else ()
        turns = max((each.about.max_turns for each in request.environments.values()), default=1)
        positions, max_tokens = lengths(solved, turns)
        make = partial(
            _make,
            request.directory,
            solved,
            positions=positions,
            width=self._width,
            layers=self._layers,
            warm_start_steps=self._warm_start_steps,
            seed=request.seed,
        )
        return StartModel(
            path=path,
            prepare=make,
            positions=positions,
            max_tokens=max_tokens,
            doing="making a tiny model and warming it up",
        )


def _make(directory: Path, *given: Any, **options: Any) -> None:
    """Make the model unless an earlier start made it; another process may call it."""
    if not _complete(directory):
        from grpo_core.demo.tiny import make_tiny_model

        make_tiny_model(directory, *given, **options)


def _complete(directory: Path) -> bool:
    return (directory / "config.json").exists()
