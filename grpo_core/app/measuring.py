"""Measures a model, or a run's newest checkpoint, and stores the results with the rollouts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from attrs import frozen

from grpo_core.app import provenance, run
from grpo_core.app.launch import RUNS, check_config, configure, new_directory, unused
from grpo_core.config import Config
from grpo_core.errors import ConfigError, wrong_input
from grpo_core.events import Event, ValidationPlayed, WarningRaised
from grpo_core.model_files import check_files
from grpo_core.models import chat_template
from grpo_core.plugins.host import NO_OFFERS, Offers, PluginHost
from grpo_core.reporting.stored import write_validation
from grpo_core.run_directory import CONFIG
from grpo_core.validation.target import EvalTarget, drop_overridden, find_target

Results = Mapping[str, Mapping[str, float]]


@frozen(kw_only=True)
class Measurement:
    """A validation that is ready to be played."""

    config: Config
    host: PluginHost
    target: EvalTarget
    only: Sequence[str]
    directory: Path
    """New directory of the results."""

    async def play(self, status: Callable[[str], None]) -> dict[str, Any]:
        """Play the rollouts; return the results with what was measured, which are written, too.

        The rollouts are written also if the strategy fails.
        """
        played: list[ValidationPlayed] = []

        def receive(event: Event) -> None:
            if isinstance(event, ValidationPlayed):
                played.append(event)
            elif isinstance(event, WarningRaised):
                status(f"warning: {event.message}")

        try:
            results = await run.validate(
                self.config,
                self.target.model,
                adapters=self.target.adapters,
                version=self.target.version,
                host=self.host,
                only=self.only,
                status=status,
                emit=receive,
            )
        finally:
            for event in played:
                write_validation(self.directory, event.version, event.groups)
            if not played:
                self.directory.rmdir()  # it ended before its results
        report = self._report(results)
        provenance.write(self.directory, self.config, self.host)
        text = json.dumps(report, indent=2)
        (self.directory / "results.json").write_text(text + "\n", encoding="utf-8")
        return report

    def _report(self, results: Results) -> dict[str, Any]:
        validation = self.config.validation
        resolved = {name: validation.of_set(name) for name in validation.sets if name in results}
        return {
            "model": self.target.name,
            "version": self.target.version,
            "validation": validation.name,
            "options": validation.options,
            "sets": {
                name: {"validation": one.name, "options": one.options} for name, one in resolved.items()
            },
            "seed": self.config.seed,
            "results": results,
        }


def prepare(
    target: str,
    changes: Mapping[str, Any],
    *,
    tasks: bool,
    only: Sequence[str] = (),
    output: Path | None,
    block: Sequence[str] = (),
    offers: Offers = NO_OFFERS,
) -> Measurement:
    """Prepare to measure a target; raises GrpoError for wrong input.

    Args:
        target: directory of a run or of a model, or a hub id.
        changes: a configuration's table that lies above that of the target.
        tasks: whether the changes have tasks of their own.
        only: names of the tasks and sets that are measured; without names all are.
        output: directory for the results; None makes one beside the run, or in runs/.
        block: plugins that are not loaded.
        offers: objects of the program that calls this.
    """

    def offered(name: str) -> bool:
        return PluginHost.discover(changes.get("plugins"), block).offers("model", name)

    with wrong_input():
        measured = drop_overridden(find_target(target, offered), changes, tasks=tasks)
    config, host = configure([measured.table], changes, block, offers)
    _check_only(only, config)
    check_config(config, host, trains=False)
    if measured.model is not None:
        check_files(measured.model, chat_template(config.model.chat_template))
    directory = new_directory(output or _name(Path(target), config))
    return Measurement(config=config, host=host, target=measured, only=only, directory=directory)


def _check_only(only: Sequence[str], config: Config) -> None:
    known = [*config.tasks, *config.validation.sets]
    if unknown := [name for name in only if name not in known]:
        raise ConfigError(
            f"--only {unknown[0]}: is no task and no validation set; there are {', '.join(known)}"
        )


def _name(target: Path, config: Config) -> Path:
    """Return RUN/validated/DATE for a run, and runs/TASKS-validated-DATE for a model."""
    now = datetime.now().strftime("%Y%m%d-%H%M%S")
    a_run = (target / CONFIG).is_file()
    first = (
        target / "validated" / now
        if a_run
        else RUNS / f"{'+'.join(config.tasks or config.validation.sets)}-validated-{now}"
    )
    return unused(first)
