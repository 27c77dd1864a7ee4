"""Measures a model, or a run's checkpoint, and stores the results with the rollouts."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from attrs import evolve, frozen

from grpo_core.app import provenance
from grpo_core.app.first_look import conventions_of_validation
from grpo_core.app.launch import RUNS, configure_target, new_directory, unused
from grpo_core.app.lengths import RunPrompts
from grpo_core.app.parts import Parts
from grpo_core.app.session import start_session
from grpo_core.app.target import EvalTarget, find_target
from grpo_core.app.tasks import Tasks
from grpo_core.config import Config, ValidationConfig, as_toml
from grpo_core.contracts.errors import ConfigError, wrong_input
from grpo_core.contracts.events import Event, ValidationPlayed, WarningRaised
from grpo_core.contracts.records import Group
from grpo_core.engines.text import without_tokens
from grpo_core.loop.metrics import validation_metrics
from grpo_core.plugins.host import NO_OFFERS, Offers
from grpo_core.processes.secrets import masked
from grpo_core.reporting.files import metrics_line
from grpo_core.reporting.stored import write_validation
from grpo_core.storage.run_directory import CONFIG
from grpo_core.text.rendering import Renderer
from grpo_core.validation.runner import Results
from grpo_core.validation.sets import HeldOut


@frozen(kw_only=True)
class Measurement:
    """A validation that is ready to play."""

    config: Config
    """The configuration of all tasks."""
    parts: Parts
    """The parts of the tasks to measure."""
    target: EvalTarget
    only: Sequence[str]
    directory: Path
    """New directory of the results."""

    async def play(self, status: Callable[[str], None]) -> dict[str, Any]:
        """Play the rollouts; write and return the results.

        The rollouts are written also if the strategy fails.
        """
        played: list[ValidationPlayed] = []

        def receive(event: Event) -> None:
            if isinstance(event, ValidationPlayed):
                played.append(event)
            elif isinstance(event, WarningRaised):
                status(f"warning: {event.message}")

        try:
            results = await self._measured(status, receive)
        finally:
            for event in played:
                write_validation(self.directory, event.version, self._stored(event.groups))
            if not played:
                self.directory.rmdir()  # it ended before it had results
        validation = self.config.validation
        report = {
            "model": self.target.name,
            "version": self.target.version,
            "validation": {
                name: (validation.of_set(name) if name in validation.sets else validation).name
                for name in results
            },
            "results": results,
        }
        report = masked(report)
        provenance.write(self.directory, self.config, self.parts.plugins)
        line = metrics_line(self.target.version, time.time(), validation_metrics(results))
        text = json.dumps(report, indent=2)
        files = {CONFIG: as_toml(self.config), "metrics.jsonl": line, "results.json": f"{text}\n"}
        for name, text in files.items():
            (self.directory / name).write_text(text, encoding="utf-8")
        return report

    def _stored(self, groups: Sequence[Group]) -> Sequence[Group]:
        """Return groups as they are stored: a text engine has no tokens."""
        if not self.parts.text_engine:
            return groups
        return [
            evolve(group, rollouts=tuple(without_tokens(rollout) for rollout in group.rollouts))
            for group in groups
        ]

    async def _measured(self, status: Callable[[str], None], emit: Callable[[Event], None]) -> Results:
        """Measure with the configuration's strategies, tasks and sets; return the metrics by task.

        Args:
            emit: receives the rollouts, as an event, also if the strategy fails.
        """
        parts, only = self.parts, self.only
        config = parts.config
        sets = [name for name in config.validation.sets if name in only or not only]
        held_out: list[HeldOut] = []

        async def look(tasks: Tasks) -> None:
            held_out.extend(await _held_out(config, tasks, sets, only))

        async with start_session(parts, self.target, status, sets=sets, look=look) as session:
            renderer, found = session.renderer, RunPrompts(held_out=held_out)
            if isinstance(renderer, Renderer):  # a model's renderer
                found, messages = await found.short_enough(config.rollout.max_prompt_tokens, {}, renderer)
                messages |= await found.spelling({}, renderer)
                messages |= await conventions_of_validation(renderer, config.rollout.stop, found.held_out)
                for message in messages.values():
                    status(message)
            for part in found.held_out:
                there, wanted = max(map(len, part.prompts.values()), default=0), part.config.prompts
                if there < wanted != ValidationConfig().prompts:  # somebody has chosen it
                    status(f"validation.prompts = {wanted}: there are {there}, and all of them are measured")
            status("validating")
            validation = parts.validation(found.held_out, session.engine, renderer, parts.places(), emit=emit)
            return await validation.measure(self.target.version, validation.parts)


def prepare(
    target: str | None,
    changes: Mapping[str, Any],
    *,
    tasks: bool,
    only: Sequence[str] = (),
    step: int | None = None,
    output: Path | None,
    block: Sequence[str] = (),
    offers: Offers = NO_OFFERS,
) -> Measurement:
    """Prepare to measure a target; raises GrpoError for wrong input.

    Args:
        target: directory of a run or of a model, or a hub id; None: the engine needs no model.
        changes: a table that overrides the target's configuration.
        tasks: whether the changes define tasks.
        only: names of the tasks and sets to measure; empty for all.
        step: of the run's checkpoint; None is the newest one.
        output: directory for the results; None makes one next to the run, or in runs/.
        block: plugins that are not to be loaded.
        offers: objects of the calling program.
    """
    with wrong_input():
        measured = find_target(target, changes.get("plugins"), block, step)
    parts = configure_target(measured, changes, block, offers, tasks=tasks)
    config = parts.config
    engine = (config.validation.engine or config.engine).name
    if parts.text_engine:  # of a run only the tasks are used
        measured = evolve(measured, name=f"engine {engine}", model=None, version=0, notes=())
    elif target is None:
        raise ConfigError(
            f"MODEL is missing: the engine {engine!r} needs its weights; name a run, the directory of a "
            "model or a hub id"
        )
    known = [*config.tasks, *config.validation.sets]
    if unknown := [name for name in only if name not in known]:
        raise ConfigError(
            f"--only {unknown[0]}: is neither a task nor a validation set; expected one of {', '.join(known)}"
        )
    if measured.model is not None:
        parts.odd_files(measured.model)
    if output is None:
        now = datetime.now().strftime("%Y%m%d-%H%M%S")
        in_run = Path(target, "validated", now) if target and Path(target, CONFIG).is_file() else None
        of_model = RUNS / f"{'+'.join(config.tasks or config.validation.sets)}-validated-{now}"
        output = unused(in_run or of_model)
    if only and measured.model is not None:  # or the model may be made from the prompts of all tasks
        needed = {*only, *(one.task for name, one in config.validation.sets.items() if name in only)}
        tasks_of = {name: one for name, one in config.tasks.items() if name in needed}
        parts.config = evolve(config, tasks=tasks_of)
    directory = new_directory(output)
    return Measurement(config=config, parts=parts, target=measured, only=only, directory=directory)


async def _held_out(
    config: Config, tasks: Tasks, sets: Sequence[str], only: Collection[str]
) -> list[HeldOut]:
    """Return the held-out prompts to measure.  Raises ConfigError if a task has none."""
    wanted = [name for name in config.tasks if name in only or not only]
    held_out = await tasks.held_out(config.validation, sets, tasks=bool(wanted))
    if not wanted:
        return held_out
    plain, *of_sets = held_out
    prompts = {name: plain.prompts[name] for name in wanted}
    if empty := [name for name, own in prompts.items() if not own]:
        raise ConfigError(f"task {', '.join(map(repr, empty))}: there are no prompts for validation")
    return [evolve(plain, prompts=prompts), *of_sets]
