"""Parts that compute steps of a run again from what it stored, without engines and environments."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from attrs import evolve

from grpo_core.app.parts import Parts
from grpo_core.config import Config, TrainerConfig
from grpo_core.errors import CheckpointError
from grpo_core.loop import checkpoint
from grpo_core.models import local_directory
from grpo_core.plugins.host import PluginHost
from grpo_core.protocols import Trainer
from grpo_core.records import Group
from grpo_core.run_directory import RunDirectory
from grpo_core.validation.target import started_from


def saved_before(run: Path, step: int) -> tuple[int, Path | None]:
    """Return the newest checkpoint before a step, with its own step; 0 and None are the model of the start.

    Raises CheckpointError if it is damaged.
    """
    saved = dict(checkpoint.complete_names(RunDirectory(run).checkpoints))
    version = max((each for each in saved if each < step), default=0)
    directory = saved.get(version)
    if directory is not None and (fault := checkpoint.fault(directory)) is not None:
        raise CheckpointError(
            f"{directory}: {fault}; to replay from the checkpoint before, move this one away"
        )
    return version, directory


async def trainer_again(
    run: Path, config: Config, host: PluginHost, *, saved: Path | None, threads: int, log: Path
) -> Trainer:
    """Start a trainer as the run had it, on this machine; a trainer in a cluster has the same ranks here.

    Args:
        run: directory of the run.
        saved: what a trainer has saved, from which this one continues; None is the model of the start.
        threads: number of torch threads; 0 is that of the configuration.
        log: file for what the trainer's process prints.
    """
    teacher, chosen = config.teacher.path, config.trainer
    start, parts = str(started_from(RunDirectory(run), config)), Parts(config, host)
    setup = evolve(
        parts.trainer_setup(start, teacher and local_directory(teacher)),
        trainer=evolve(chosen, threads=threads or chosen.threads, profile=0),
        resume_from=str(saved) if saved else None,
        async_save=False,
        engine_dtype="auto",
        log=str(log),
    )
    if parts.trainer_here is None:
        chosen = TrainerConfig()
    trainer: Trainer = host.make("trainer", chosen.name, setup, **chosen.options)
    await trainer.started()
    return trainer


def advantages_again(groups: Sequence[Group], config: Config, host: PluginHost) -> list[Group]:
    """Return the groups of a step with the advantages that a configuration gives them."""
    return Parts(config, host).learning().with_advantages(groups)


def trains_all_rows(config: Config, host: PluginHost) -> bool:
    """Return whether rows whose advantage is 0 are trained."""
    return Parts(config, host).all_rows
