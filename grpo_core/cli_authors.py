"""The commands for authors of plugins: ``grpo-core check``, ``try`` and ``new``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter


def try_(
    name: str,
    /,
    *,
    model: str | None = None,
    run: Path | None = None,
    prompt: str | None = None,
    prompts: int = 1,
    split: Literal["train", "validation"] = "train",
    seed: int = 0,
    temperature: float | None = None,
    engine: str | None = None,
    set_: Annotated[list[str] | None, Parameter(name="--set", negative="")] = None,
    no_plugin: Annotated[list[str] | None, Parameter(name="--no-plugin", negative="")] = None,
) -> int:
    """Play against an environment in the terminal, or let a model play and show all that happens.

    Replies are typed, or are the lines of standard input.

    Parameters
    ----------
    name
        Name of the environment, as "math:sort" or "./file.py:Class"; with --run also a task of the run.
    model
        Directory, hub id or name of a model that plays, as in "tiny".
    run
        Directory of a run whose newest checkpoint plays.
    prompt
        Id of the prompt.  Default: the first one.
    prompts
        Number of prompts that are played one after another.
    split
        Prompts to play: those for training, or those for validation.
    seed
        Seed of a model that plays.
    temperature
        Sampling temperature of a model that plays.  Default: as in training.
    engine
        Engine of a model that plays.
    set_
        Set an option of the environment, as in "length=3", or the source of its prompts, as in
        "source.path=train.jsonl"; may be repeated.
    no_plugin
        Do not load this installed plugin; may be repeated.
    """
    from grpo_core.commands import trying
    from grpo_core.errors import ConfigError
    from grpo_core.run_directory import RunDirectory

    if model is not None and run is not None:
        raise ConfigError("--model and --run: one of them plays; leave the other one out")
    choice = trying.Choice(split=split, prompt=prompt, prompts=prompts, seed=seed, temperature=temperature)
    return trying.main(
        name,
        target=model if run is None else str(RunDirectory.existing(run).path),
        engine=engine,
        choice=choice,
        settings=set_ or [],
        block=no_plugin or [],
    )
