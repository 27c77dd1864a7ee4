"""Parts that compute steps of a run again from what it stored, without engines and environments."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from attrs import evolve

from grpo_core.app.parts import make_advantages, make_shaping, trainer_here
from grpo_core.config import Config, TrainerConfig
from grpo_core.errors import CheckpointError
from grpo_core.loop import checkpoint
from grpo_core.loop.rows import with_advantages
from grpo_core.loss import needs_of
from grpo_core.models import local_directory
from grpo_core.plugins.host import PluginHost
from grpo_core.protocols import Trainer
from grpo_core.records import Group
from grpo_core.run_directory import RunDirectory
from grpo_core.training.setup import TrainerSetup
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
    teacher, chosen = config.teacher, config.trainer
    setup = TrainerSetup(
        sections=config.sections,
        model=evolve(config.model, path=str(started_from(RunDirectory(run), config))),
        trainer=evolve(chosen, threads=threads or chosen.threads, profile=0),
        loss=config.loss,
        teacher=evolve(teacher, path=local_directory(teacher.path)) if teacher.path else teacher,
        optimizer=config.optimizer,
        seed=config.seed,
        colocated=config.pipeline.max_staleness > 0,
        resume_from=str(saved) if saved else None,
        async_save=False,
        max_non_finite=config.health.max_non_finite,
        plugins=host.selection.allow,
        block=host.selection.block,
        log=str(log),
    )
    if trainer_here(chosen, host) is None:
        chosen = TrainerConfig()
    trainer: Trainer = host.make("trainer", chosen.name, setup, **chosen.options)
    await trainer.started()
    return trainer


def advantages_again(groups: Sequence[Group], config: Config, host: PluginHost) -> list[Group]:
    """Return the groups of a step with the advantages that a configuration gives them."""
    return with_advantages(
        groups,
        make_advantages(config.advantage, host),
        shaping=make_shaping(config.shaping, max_tokens=config.rollout.max_tokens),
        all_rows=trains_all_rows(config, host),
    )


def trains_all_rows(config: Config, host: PluginHost) -> bool:
    """Return whether rows whose advantage is 0 are trained: the configuration says so, or the loss."""
    loss = host.function("loss", config.loss.name, **config.loss.options)
    return config.loss.all_rows or "all_rows" in needs_of(loss.function, loss.options)
