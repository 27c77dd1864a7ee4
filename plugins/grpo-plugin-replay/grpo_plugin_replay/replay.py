"""``grpo-core replay``: recomputes steps of a run from its files, without engines or environments.

The run's trainer starts from the newest checkpoint before the step and trains the stored rows of each step.
Its fingerprints are compared with the recorded ones.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Self

from attrs import define, evolve, field, frozen

from grpo_core import Batch, ConfigError, Group, Run, StepResult, Trainer, errors
from grpo_core.app import making
from grpo_core.app.model_sources import started_from
from grpo_core.commands.complaints import say
from grpo_core.config import TrainerConfig
from grpo_core.config.run import needed_scores
from grpo_core.kit import Config, PluginHost, aio, files, scratch_directory
from grpo_core.loop import rows
from grpo_core.loop.checkpoint import fault
from grpo_core.plugins.configured import host_of
from grpo_core.plugins.options import Words
from grpo_core.storage.run_directory import RunDirectory
from grpo_plugin_replay.history import History, StepRecord, first_metric, first_tensor, read

SECTIONS = ("seed", "model", "trainer", "loss", "scores", "optimizer", "health")
"""Sections of the configuration that a trainer depends on."""


@frozen(kw_only=True)
class Replayed:
    """A recomputed step."""

    step: int
    result: StepResult
    seconds: float
    """Seconds of the recomputation."""
    compared: bool
    """Whether both the run and the recomputation have fingerprints."""
    difference: str
    """Description of the first difference to the record; empty if there is none."""


def replay(run: Path, /, *, step: int, no_plugin: Words = None) -> int:
    """Compute a step of a run again from its files, and compare it bit for bit with what the run recorded.

    It needs no engine and no environment.  The exit status is 1 if something differs.

    Parameters
    ----------
    run
        Directory of the run.
    step
        Step that is computed again, from 1; the steps since the checkpoint before it are as well.
    no_plugin
        Do not load this installed plugin; may be repeated.
    """
    return aio.to_the_end(_replay(run, step, no_plugin or ()))


async def _replay(directory: Path, step: int, block: Sequence[str]) -> int:
    history = read(directory)
    if history.step(step).digest is None:
        raise ConfigError(
            f"the run has recorded no fingerprints of step {step}, so nothing could be compared; a run "
            "records them with trainer.fingerprints = true, the default"
        )
    async with Replayer(history, block=block) as replayer:
        say(f"step {step} of {directory}, from {await replayer.begin(step)}")
        replayed = None
        async for replayed in replayer.until(step):
            say(_summary(replayed, history.step(replayed.step)))
            if replayed.difference:
                return 1
    if replayed is None or not replayed.compared:
        name = history.step(step).config.trainer.name
        raise ConfigError(
            f"trainer {name!r} returned no fingerprints of step {step}, so nothing was compared"
        )
    return 0


def _summary(replayed: Replayed, recorded: StepRecord) -> str:
    took = recorded.metrics.get("time/train")
    times = f"{replayed.seconds:.2f} s" + (f", the run took {took:.2f} s" if took else "")
    if replayed.difference:
        return f"step {replayed.step}: differs from the run: {replayed.difference}"
    if not replayed.compared:
        nothing = "not compared, because there are no fingerprints"
        return f"step {replayed.step}: computed again, and {nothing} ({times})"
    return f"step {replayed.step}: the same weights and optimizer state, bit for bit ({times})"


@define
class Replayer:
    """Recomputes steps of a run, one after the other."""

    history: History
    block: Sequence[str] = ()
    """Plugins that are not loaded."""
    scratch: Path = field(init=False)
    """Temporary directory, removed at the end."""
    version: int = field(init=False, default=0)
    """Version of the trainer's weights."""
    _stack: contextlib.AsyncExitStack = field(init=False, factory=contextlib.AsyncExitStack)
    _trainer: Trainer | None = field(init=False, default=None)
    _made_for: Config | None = field(init=False, default=None)
    _names: tuple[str, ...] = field(init=False, default=())

    async def __aenter__(self) -> Self:
        self.scratch = Path(self._stack.enter_context(scratch_directory()))
        self._stack.push_async_callback(self.stop)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def begin(self, step: int) -> str:
        """Start a trainer with the newest saved version before a step; return its origin.

        Raises CheckpointError for a damaged checkpoint, and ConfigError for damaged rollouts.
        """
        version, directory = saved_before(self.history.run.path, step)
        for number in range(version + 1, step + 1):  # before starting anything costly
            self.history.check(number)
        recorded = self.history.step(version + 1)
        await self.make(recorded.config, directory, threads=recorded.threads)
        self.version = version
        return "the model that the run started from" if directory is None else f"checkpoint {directory.name}"

    async def until(self, step: int) -> AsyncIterator[Replayed]:
        """Recompute and compare all steps up to one."""
        while self.version < step:
            yield await self.next()

    async def next(self) -> Replayed:
        """Recompute the next step."""
        recorded = self.history.step(self.version + 1)
        assert self._made_for is not None
        if _parts(recorded.config) != _parts(self._made_for):  # the run was resumed here with other settings
            directory = await self.save(f"step-{self.version}")
            await self.make(recorded.config, directory, threads=recorded.threads)
        groups = self.history.groups(recorded.step)
        began = time.monotonic()
        result = await self.step(batch_of(groups, recorded))
        seconds = result.metrics.get("time/train", time.monotonic() - began)
        return Replayed(
            step=recorded.step,
            result=result,
            seconds=seconds,
            compared=recorded.digest is not None and result.digest is not None,
            difference=_difference(recorded, result),
        )

    async def step(self, batch: Batch) -> StepResult:
        """Train a batch with the current trainer."""
        assert self._trainer is not None
        result = await self._trainer.step(batch)
        self.version = result.version
        if result.digest is not None:
            self._names = result.digest.names or self._names
            result = evolve(result, digest=evolve(result.digest, names=self._names))
        return result

    async def save(self, name: str) -> Path:
        """Save the trainer's state to a temporary directory."""
        assert self._trainer is not None
        directory = self.scratch / name
        written = await self._trainer.save(directory)
        await written()
        return directory

    async def make(self, config: Config, directory: Path | None, *, threads: int) -> None:
        """Replace the trainer by one that continues from a saved state."""
        await self.stop()
        self._made_for, self._names = config, ()
        host = host_of(config, self.block)
        log = self.scratch / "trainer.log"
        self._trainer = await trainer_again(
            self.history.run.path, config, host, saved=directory, threads=threads, log=log
        )

    async def stop(self) -> None:
        """Close the current trainer."""
        if self._trainer is not None:
            trainer, self._trainer = self._trainer, None
            await trainer.aclose()


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


def batch_of(groups: Sequence[Group], recorded: StepRecord) -> Batch:
    """Return the batch of a step from groups with advantages."""
    return rows.make_batch(groups, step=recorded.step - 1, temperature=recorded.config.rollout.temperature)


def _parts(config: Config) -> list[object]:
    return [getattr(config, name) for name in SECTIONS]


def _difference(recorded: StepRecord, result: StepResult) -> str:
    """Describe the first difference between a step and its record; "" without a record to compare with."""
    if recorded.digest is None or result.digest is None:
        return ""
    if (tensor := first_tensor(recorded.digest, result.digest)) is None:
        return ""
    metric = first_metric(recorded.metrics, result.metrics)
    # other software or processors may round differently
    was, here = (f"{each.computed_by}, {each.threads} threads" for each in (recorded.digest, result.digest))
    by = f". The run was computed by {was}; this is {here}" if was != here else ""
    return f"the first tensor that differs is {tensor}{f'; {metric}' if metric else ''}{by}"
