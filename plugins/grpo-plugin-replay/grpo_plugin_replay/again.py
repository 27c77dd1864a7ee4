"""Parts that compute steps of a run again from what it stored, without engines and environments."""

from __future__ import annotations

from pathlib import Path

from attrs import evolve

from grpo_core import Run, Trainer, errors
from grpo_core.kit import (
    Config,
    Parts,
    PluginHost,
    RunDirectory,
    TrainerConfig,
    fault,
    local_directory,
    started_from,
)


def saved_before(run: Path, step: int) -> tuple[int, Path | None]:
    """Return the newest checkpoint before a step, with its own step; 0 and None are the model of the start.

    Raises CheckpointError if it is damaged.
    """
    saved = Run(run).checkpoints
    version = max((each for each in saved if each < step), default=0)
    directory = saved.get(version)
    if directory is not None and (found := fault(directory)) is not None:
        raise errors.CheckpointError(
            f"{directory}: {found}; to replay from the checkpoint before, move this one away"
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
