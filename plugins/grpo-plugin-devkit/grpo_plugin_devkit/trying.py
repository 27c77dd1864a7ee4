"""``grpo-core try``: a person, or a model, plays against an environment in the terminal."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from attrs import frozen
from rich.console import Console

from grpo_core import ConfigError, EngineOffer, Prompt, Session
from grpo_core.app import launch, sourced
from grpo_core.app.model_sources import find_target
from grpo_core.app.session import start_session
from grpo_core.config import merge, parse_settings
from grpo_core.contracts.errors import wrong_input
from grpo_core.kit import PluginHost, aio
from grpo_core.plugins.host import PROGRAM
from grpo_core.plugins.options import Settings, Words
from grpo_core.storage.run_directory import RunDirectory
from grpo_plugin_devkit.person import InputEnded, Person
from grpo_plugin_devkit.transcript import ShownEnvironment, Transcript

BY_HAND = {"max_tokens": 1_000_000, "deadline": 1e9}
"""Settings that remove the limits for a person's replies."""
PAUSE = 0.2
"""Seconds between two looks at the tokens of a reply."""
NAMED = 5
"""Number of ids in an error message."""


@frozen(kw_only=True)
class Choice:
    """The prompts to play, and the sampling settings."""

    split: str
    prompt: str | None = None
    """Id of the prompt; None plays the first ones."""
    prompts: int = 1
    """Number of prompts to play."""
    seed: int = 0
    temperature: float | None = None
    """Sampling temperature of a model; None uses the one of training."""


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
    settings: Settings = None,
    no_plugin: Words = None,
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
        Engine of a model that plays; an engine of a hosted model needs no --model.
    settings
        Set an option of the environment, as in "length=3", the data of its prompts, as in
        "data=train.jsonl", or of the engine, as in "engine.options.model=gpt-5-mini"; may be repeated.
    no_plugin
        Do not load this installed plugin; may be repeated.
    """
    if model is not None and run is not None:
        raise ConfigError("use --model or --run, not both")
    if prompts < 1:
        raise ConfigError(f"--prompts is {prompts}; expected a number of at least 1")
    choice = Choice(split=split, prompt=prompt, prompts=prompts, seed=seed, temperature=temperature)
    options, block = parse_settings(settings or []), no_plugin or []
    target = model if run is None else str(RunDirectory.existing(run).path)
    found = None if engine is None else PluginHost.discover(block=block).find("engine", engine)
    if target is None and found is not None and found.offer.output != "text":
        raise ConfigError("--engine is for a model that plays: add --model DIR or --run RUN")
    aio.to_the_end(_played(name, target, engine, options, choice, block))
    return 0


async def _played(
    name: str,
    target: str | None,
    engine: str | None,
    options: dict[str, Any],
    choice: Choice,
    block: Sequence[str],
) -> None:
    """Let a model play, or the person at the terminal if neither a model nor an engine is named."""
    person, errors = None, Console(stderr=True)
    if target is None and engine is None:
        person = Person(sys.stdin, lambda text: transcript.line(text, "dim"))
    transcript = Transcript(Console(highlight=False), echo=person is None or not person.typed)

    def show(text: str) -> None:
        errors.print(text, style="dim", markup=False, soft_wrap=True)

    typed = EngineOffer(lambda setup: person, output="text")
    with wrong_input():
        found = find_target(target, block=block)
        of_run = found.table.get("tasks", {})
        task = name if name in of_run else launch.task_name(name)
        changes = _changes(of_run, task, name, options)
        if engine is not None:
            changes = merge({"engine": {"name": engine}}, changes)
        if person is not None:
            changes |= {"engine": {"name": f"{PROGRAM}:person"}, "rollout": BY_HAND}
        setup = launch.configure_target(found, changes, block, {"engine": {"person": typed}}, tasks=True)
    async with start_session(setup, found, show) as session:
        environment = session.environments[task]
        if person is not None and environment.about.runs_agents:
            raise ConfigError(
                f"{name} is an agent, which plays by itself: let a model play, with --model tiny or --run RUN"
            )
        shown = ShownEnvironment(environment, transcript)
        if person is not None:
            person.solve = shown.solve
        if person is not None and person.typed:
            transcript.line("/help lists the commands, /quit ends", "dim")
        streaming = asyncio.create_task(_stream(session, transcript))
        try:
            await _play(session, task, choice, shown, transcript)
        except InputEnded as end:
            transcript.line(f"{end}: this rollout has no reward", "dim")
        finally:
            await aio.cancel([streaming])


async def _stream(session: Session, transcript: Transcript) -> None:
    """Print each reply while it is sampled, if the engine can show it."""
    sampled: Callable[[], Awaitable[list[list[int]]]] | None = getattr(session.engine, "sampled", None)
    while sampled is not None:
        await asyncio.sleep(PAUSE)
        for text in session.renderer.texts(await sampled()):
            if whole := text.rstrip("\N{REPLACEMENT CHARACTER}"):  # of the first bytes of a character
                transcript.grow(whole)


def _changes(of_run: Mapping[str, Any], task: str, name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of one task: an environment, or a task of a run.

    Args:
        options: options of the environment, with the section ``environment``, and the task's data.
    """
    of_task = {key for key in sourced.DATA if key in options}
    sections = {
        key: options[key] for key in ("environment", "engine") if isinstance(options.get(key), Mapping)
    }
    own = {key: value for key, value in options.items() if key not in {*of_task, *sections}}
    changed = {"options": own, **{key: options[key] for key in of_task}}
    chosen = merge(of_run[task] if name in of_run else {"env": name}, changed)
    return {"tasks": {task: chosen}, **sections}


async def _play(
    session: Session, task: str, choice: Choice, shown: ShownEnvironment, transcript: Transcript
) -> None:
    """Play prompts one after another."""
    chosen = _chosen(await session.prompts(task, split=choice.split), choice, task)
    for number, prompt in enumerate(chosen):
        if number:
            transcript.line("")
        transcript.line(f"{task}: prompt {prompt.id} of {choice.split}", "bold")
        ((rollout,),) = await session.play(
            [prompt], seed=choice.seed, temperature=choice.temperature, environments={task: shown}
        )
        if shown.player is not None:
            for message in rollout.messages:
                transcript.message(message)
        transcript.end(rollout)
        if isinstance(prompt.answer, str):
            transcript.line(f"  the answer of the prompt: {prompt.answer}", "dim")


def _chosen(prompts: Sequence[Prompt], choice: Choice, task: str) -> Sequence[Prompt]:
    """Return the prompts to play.  Raises ConfigError for an unknown prompt."""
    if not len(prompts):
        raise ConfigError(f"{task} has no prompts of the split {choice.split!r}")
    if choice.prompt is None:
        return [prompts[index] for index in range(min(choice.prompts, len(prompts)))]
    for index in range(len(prompts)):
        if (prompt := prompts[index]).id == choice.prompt:
            return [prompt]
    some = ", ".join(prompts[index].id for index in range(min(NAMED, len(prompts))))
    raise ConfigError(
        f"--prompt {choice.prompt}: {task} has no such prompt in the split {choice.split!r}; the ids begin "
        f"with {some}"
    )
