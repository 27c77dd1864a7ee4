"""Recomputation of a run's steps from its files, without engines and environments."""

from __future__ import annotations

from pathlib import Path

from attrs import evolve

from grpo_core import Run, Trainer, errors
from grpo_core.app import making
from grpo_core.app.model_sources import started_from
from grpo_core.config import TrainerConfig
from grpo_core.config.run import needed_scores
from grpo_core.kit import Config, PluginHost, files
from grpo_core.loop.checkpoint import fault
from grpo_core.storage.run_directory import RunDirectory


def saved_before(run: Path, step: int) -> tuple[int, Path | None]:
    """Return step and path of the newest checkpoint before a step; (0, None) is the initial model.

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
    """Start the run's trainer on this machine; a trainer in a cluster gets the same number of ranks here.

    Args:
        run: directory of the run.
        saved: saved state to continue from; None is the initial model.
        threads: number of torch threads; 0 takes the configuration's.
        log: file for the output of the trainer's process.
    """
    chosen = config.trainer
    start = str(started_from(RunDirectory(run), config))
    scores = {
        name: evolve(score, weights=files.local_directory(score.model)) if score.model else score
        for name, score in needed_scores(config.scores, making.loss(config.loss, host).needs).items()
    }
    setup = evolve(
        making.trainer_setup(config, host, start, scores=scores),
        trainer=evolve(chosen, threads=threads or chosen.threads, profile=0),
        resume_from=str(saved) if saved else None,
        async_save=False,
        engine_dtype="auto",
        log=str(log),
    )
    if making.place_of_trainer(chosen, host):
        chosen = TrainerConfig()
    trainer: Trainer = host.make("trainer", chosen.name, setup, **chosen.options)
    await trainer.started()
    return trainer
