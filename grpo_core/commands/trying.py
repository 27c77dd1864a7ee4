"""``grpo-core try``: a person, or a model, plays against an environment in the terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from attrs import evolve, frozen
from rich.console import Console

from grpo_core.aio import to_the_end
from grpo_core.app import preflight
from grpo_core.app.launch import check, configure, task_name
from grpo_core.app.parts import make_placement, sampling_params
from grpo_core.app.placement import LocalPlacement
from grpo_core.app.run import lines_of_incidents, start_engine, started_tasks
from grpo_core.app.tasks import Tasks
from grpo_core.commands.person import InputEnded, Person, Replies, TextRenderer
from grpo_core.commands.transcript import ShownEnvironment, Transcript
from grpo_core.config import Config, merge, parse_settings
from grpo_core.environments.sourced import has_source
from grpo_core.errors import ConfigError, wrong_input
from grpo_core.incidents import reported_to
from grpo_core.loop.rollout import RolloutRequest, SamplingParams, derive_seed, play
from grpo_core.plugins.host import PluginHost
from grpo_core.protocols import Engine, Renderer
from grpo_core.records import Prompt
from grpo_core.validation.target import EvalTarget, drop_overridden, find

LONGEST = 1_000_000
"""Largest number of characters of a person's reply."""
NAMED = 5
"""Number of ids that an error names."""


@frozen(kw_only=True)
class Choice:
    """The prompts that are played, and how a model plays them."""

    split: str
    prompt: str | None = None
    """Id of the prompt; None: the first ones."""
    prompts: int = 1
    """Number of prompts that are played in turn."""
    seed: int = 0
    temperature: float | None = None
    """Sampling temperature of a model; None: as in training."""


def main(
    name: str,
    *,
    target: str | None,
    engine: str | None,
    choice: Choice,
    settings: Sequence[str],
    block: Sequence[str],
    source: TextIO | None = None,
) -> int:
    """Run ``grpo-core try``; return the exit status."""
    if choice.prompts < 1:
        raise ConfigError(f"--prompts is {choice.prompts}; expected a number of at least 1")
    options = parse_settings(settings)
    console = Console(highlight=False)
    if target is None:
        if engine is not None:
            raise ConfigError("--engine is for a model that plays: add --model DIR or --run RUN")
        to_the_end(_by_hand(name, options, choice, block, source or sys.stdin, console))
    else:
        to_the_end(_by_model(name, target, engine, options, choice, block, console))
    return 0


# ---------------------------------------------------------------------------------- a person


async def _by_hand(
    name: str,
    options: dict[str, Any],
    choice: Choice,
    block: Sequence[str],
    source: TextIO,
    console: Console,
) -> None:
    task = task_name(name)
    with wrong_input():
        config, host = configure([], _changes({}, task, name, options), block)
        preflight.check_task(task, config.tasks[task], config, host)
    transcript = Transcript(console, echo=not source.isatty())

    def tell(text: str) -> None:
        transcript.line(text, "dim")

    around = Tasks.start(
        config.tasks, config.environment, LocalPlacement(host), sets={}, logs=None, host=host
    )
    with reported_to(lines_of_incidents(tell)):
        async with around as tasks:
            environment = tasks.environments[task]
            if environment.runs_agents:
                raise ConfigError(
                    f"{name} is an agent, which plays by itself: let a model play, with --model tiny or "
                    "--run RUN"
                )
            shown = ShownEnvironment(environment, transcript)

            async def solve() -> str | None:
                if shown.prompt is None:
                    return None
                (solution,) = await environment.solve([evolve(shown.prompt, messages=shown.conversation)])
                return solution

            replies = Replies(source, tell, lambda: shown.has_tools)
            person = Person(replies, solve, tell)
            if replies.typed:
                tell("/help lists the commands, /quit ends")
            params = SamplingParams(temperature=1.0, max_tokens=LONGEST)
            try:
                await _play(tasks, task, choice, shown, person, TextRenderer(), params, transcript)
            except InputEnded as end:
                tell(f"{end}: this rollout has no reward")


# ---------------------------------------------------------------------------------- a model


async def _by_model(
    name: str,
    target: str,
    engine: str | None,
    options: dict[str, Any],
    choice: Choice,
    block: Sequence[str],
    console: Console,
) -> None:
    with wrong_input():
        config, host, measured, task = measured_task(name, target, engine, options, block)
    check(config, host, trains=False)
    transcript = Transcript(console, echo=True)
    errors = Console(stderr=True)

    def tell(text: str) -> None:
        errors.print(text, style="dim", markup=False, soft_wrap=True)

    for note in measured.notes:
        tell(note)
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(reported_to(lines_of_incidents(tell)))
        placement = make_placement(config.placement, host)
        tell("starting the environment")
        tasks = await stack.enter_async_context(started_tasks(config, placement, host, sets=[], logs=None))
        decoder, renderer = await start_engine(
            config,
            measured.model,
            adapters=measured.adapters,
            version=measured.version,
            host=host,
            tasks=tasks,
            placement=placement,
            stack=stack,
            status=tell,
        )
        params = sampling_params(config.rollout)
        if choice.temperature is not None:
            params = evolve(params, temperature=choice.temperature)
        shown = ShownEnvironment(tasks.environments[task], transcript)
        await _play(tasks, task, choice, shown, decoder, renderer, params, transcript)


def measured_task(
    name: str, target: str, engine: str | None, options: dict[str, Any], block: Sequence[str]
) -> tuple[Config, PluginHost, EvalTarget, str]:
    """Return the configuration of a model's target with one task, and the task's name."""
    found = find(target, lambda model: PluginHost.discover(block=block).offers("model", model))
    of_run = found.table.get("tasks", {})
    task = name if name in of_run else task_name(name)
    changes = _changes(of_run, task, name, options)
    if engine is not None:
        changes["engine"] = {"name": engine}
    measured = drop_overridden(found, changes, tasks=True)
    config, host = configure([measured.table], changes, block)
    return config, host, measured, task


# ---------------------------------------------------------------------------------- both


def _changes(of_run: Mapping[str, Any], task: str, name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration's table for one task: an environment, or a task of a run.

    Args:
        options: options of the environment, with the section ``environment``, and ``source`` of the task.
    """
    of_task = {"source"} if has_source(options) else set()
    own = {key: value for key, value in options.items() if key not in of_task | {"environment"}}
    changed = {"options": own, **{key: options[key] for key in of_task}}
    chosen = merge(of_run[task] if name in of_run else {"env": name}, changed)
    section = {"environment": options["environment"]} if "environment" in options else {}
    return {"tasks": {task: chosen}, **section}


async def _play(
    tasks: Tasks,
    task: str,
    choice: Choice,
    shown: ShownEnvironment,
    engine: Engine,
    renderer: Renderer,
    params: SamplingParams,
    transcript: Transcript,
) -> None:
    """Play some prompts one after another."""
    chosen = _chosen(await tasks.prompts_of(task, choice.split), choice, task)
    for number, prompt in enumerate(chosen):
        if number:
            transcript.line("")
        transcript.line(f"{task}: prompt {prompt.id} of {choice.split}", "bold")
        seed = derive_seed(choice.seed, prompt.id)
        (rollout,) = await play(
            [RolloutRequest(prompt=prompt, seed=seed, group="try")],
            engine=engine,
            environments={task: shown},
            renderer=renderer,
            sampling=params,
        )
        if shown.player is not None:
            for message in rollout.messages:
                transcript.message(message)
        transcript.end(rollout)
        if isinstance(prompt.answer, str):
            transcript.line(f"  the answer of the prompt: {prompt.answer}", "dim")


def _chosen(prompts: Sequence[Prompt], choice: Choice, task: str) -> Sequence[Prompt]:
    """Return the prompts that are played.  Raises ConfigError if there is no such prompt."""
    if not len(prompts):
        raise ConfigError(f"{task} has no prompts of the split {choice.split!r}")
    if choice.prompt is None:
        return [prompts[place] for place in range(min(choice.prompts, len(prompts)))]
    for place in range(len(prompts)):
        if (prompt := prompts[place]).id == choice.prompt:
            return [prompt]
    some = ", ".join(prompts[place].id for place in range(min(NAMED, len(prompts))))
    raise ConfigError(
        f"--prompt {choice.prompt}: {task} has no such prompt in the split {choice.split!r}; the ids begin "
        f"with {some}"
    )
