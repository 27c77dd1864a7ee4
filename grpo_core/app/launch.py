"""Prepares a run: builds and checks its configuration, makes or opens its directory, and resumes it."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from math import isclose
from pathlib import Path
from typing import Any

from attrs import asdict, define, evolve, field, frozen

from grpo_core._version import __version__
from grpo_core.app import making, model_sources
from grpo_core.app.make import make, preflight
from grpo_core.app.making import RunSetup
from grpo_core.app.provenance import file_hashes, with_absolute_paths
from grpo_core.config import (
    Config,
    ScoreConfig,
    TrainerConfig,
    ValidationConfig,
    as_table,
    build,
    merge,
    parse_settings,
    replace_parts,
)
from grpo_core.contracts.errors import ConfigError, one_line, wrong_input
from grpo_core.contracts.events import Event
from grpo_core.data.samplers import load_plugin_state
from grpo_core.loop import checkpoint
from grpo_core.loop.buffer import BufferStatistics
from grpo_core.loop.checkpoint import IntactCheckpoint, SavedPipeline, SavedRun
from grpo_core.loop.endings import GOAL_REACHED, Goal
from grpo_core.loop.retention import Retention
from grpo_core.loop.schedule import KEYS as SCHEDULE
from grpo_core.loop.schedule import rate
from grpo_core.models.files import directory_here, published_dtype
from grpo_core.plugins.configured import changed, configured, model_section
from grpo_core.plugins.host import NO_OFFERS, Offers, PluginHost
from grpo_core.processes import secrets
from grpo_core.processes.aio import in_own_loop
from grpo_core.reporting.trackers import Trackers
from grpo_core.storage.published import Published
from grpo_core.storage.run_directory import RunDirectory, lost


def new_run(
    layers: Sequence[Mapping[str, Any]],
    changes: Mapping[str, Any],
    block: Sequence[str] = (),
    *,
    output: Path | None,
    offers: Offers = NO_OFFERS,
) -> TrainingRun:
    """Prepare a new run.  The arguments are those of ``configure``.  Raises GrpoError for wrong input."""
    config, host, model = _configured([*layers, changes], block, offers)
    setup = make(config, host, model=model)
    try:
        warnings = _checked(config, host)
        config = with_absolute_paths(config, host, config.directory)
        setup.config = config = evolve(config, directory=host.selection.directory)
        if output is None:
            name = "+".join(config.tasks) + datetime.now().strftime("-%Y%m%d-%H%M%S")
            output = unused(model_sources.RUNS / name)
        directory = RunDirectory.create(output, config)
    except BaseException:
        in_own_loop(setup.aclose())
        raise
    chosen, path = config.trainer, config.model.path
    length = f"{chosen.epochs:g} epochs" if chosen.epochs else f"{chosen.steps} steps"
    tasks = ", ".join(task.env for task in config.tasks.values())
    about = getattr(setup.model, "about", lambda steps: "")(0 if chosen.epochs else chosen.steps)
    opening = f"training {path or config.engine.name} on {tasks}, {length}{path and about and f': {about}'}"
    return TrainingRun(setup=setup, directory=directory, warnings=warnings, notes=(opening,))


def continued(
    path: Path, changes: Mapping[str, Any], block: Sequence[str] = (), *, offers: Offers = NO_OFFERS
) -> TrainingRun:
    """Prepare to continue a run with some changes; lock its directory.  Raises GrpoError for wrong input.

    If another process uses the run, a change is not allowed, or no checkpoint is usable, nothing is changed.
    """
    with wrong_input():
        directory, before = RunDirectory.open(path, block)
        directory.lock()
    with contextlib.ExitStack() as undo:
        undo.callback(directory.unlock)  # a stored error would keep the lock
        with wrong_input():
            run = _resumed(directory, before, changes, block, offers)
        undo.callback(lambda: in_own_loop(run.setup.aclose()))
        if run.finished is None:  # otherwise no part starts
            if run.resume is not None:
                _check_saved(run, run.resume)
            run.warnings = _checked(run.setup.config, run.setup.plugins)
        if before != run.setup.config:
            directory.replace_config(run.setup.config)
            if run.resume is None:
                directory.remove_model()  # it was made for the previous configuration
        undo.pop_all()
    return run


def configure(
    layers: Sequence[Mapping[str, Any]],
    changes: Mapping[str, Any],
    block: Sequence[str] = (),
    offers: Offers = NO_OFFERS,
) -> tuple[Config, PluginHost]:
    """Build the configuration from the preset, the tables and the changes; return it and the plugins.

    Args:
        layers: tables, as of a configuration's file.
        changes: a table that overrides them.
        block: plugins that are not to be loaded.
        offers: objects of the calling program.
    """
    config, host, _ = _configured([*layers, changes], block, offers)
    return config, host


def _configured(
    tables: Iterable[Mapping[str, Any]], block: Sequence[str], offers: Offers, *, trains: bool = True
) -> tuple[Config, PluginHost, model_sources.StartModelSource | None]:
    """Return the source of the model as well if it was made, since it has the preset."""
    given: dict[str, Any] = functools.reduce(merge, tables, {})
    secrets.learn(given)
    config, host = configured([given], block, offers)
    with wrong_input():
        if making.text_engine_of(making.engines_of(config, trains=trains), host):
            return config, host, None
        model = model_sources.model_source(config.model, host)
        if model.preset:
            config = build([replace_parts(model.preset, given), given], host.sections)
    return config, host, model


def configure_target(
    found: model_sources.EvalTarget,
    changes: Mapping[str, Any],
    block: Sequence[str] = (),
    offers: Offers = NO_OFFERS,
    *,
    tasks: bool,
    below: Sequence[Mapping[str, Any]] = (),
) -> RunSetup:
    """Make the components to play a target, whose configuration is its own with changes.

    Args:
        tasks: whether the changes define tasks.
        below: tables that the target's override.

    The other arguments are those of ``configure``.  Raises GrpoError for wrong input.
    """
    own = model_sources.without_overridden(found.table, changes, tasks=tasks)
    if "directory" in own:  # a run's own paths count from it, and the given ones from here
        own = as_table(with_absolute_paths(*configured([own], block, offers, stored=True), own["directory"]))
    config, host, model = _configured([*below, own, changes], block, offers, trains=False)
    config = with_absolute_paths(config, host, "" if "directory" in own else config.directory)
    return make(config, host, trains=False, model=model)


def _checked(config: Config, host: PluginHost) -> list[tuple[str, str]]:
    """Check the model's files; return causes and messages of the plugins' warnings."""
    check_model(config, host)
    with wrong_input():
        return in_own_loop(preflight(config, host))


def check_model(config: Config, host: PluginHost) -> list[str]:
    """Return warnings about the files of a local model.

    Raises ModelError if they contradict each other.
    """
    path = config.model.path
    directory = None if host.offers("model", path) else directory_here(path)
    found = [] if directory is None else in_own_loop(preflight(config, host, model=directory))
    return [message for _, message in found]


def changes_of(
    envs: Sequence[str] | None,
    chosen: Mapping[str, str | None],
    settings: Sequence[str] | None,
    model: str | None = None,
) -> dict[str, Any]:
    """Return the table of the options of a command, such as ``--env`` and ``--engine``."""
    changes: dict[str, Any] = {
        section: {"name": name} for section, name in chosen.items() if name is not None
    }
    if model is not None:
        changes["model"] = {"path": model}
    if envs:
        changes["tasks"] = tasks_of(envs)
    return parse_settings(settings or [], changes)


def tasks_of(envs: Sequence[str]) -> dict[str, Any]:
    """Return the table of a task for each environment, named after the last part of its name."""
    tasks: dict[str, Any] = {}
    for env in envs:
        name = task_name(env)
        if name in tasks:
            raise ConfigError(f"--env {env}: task {name!r} already exists; name your tasks in a CONFIG.toml")
        tasks[name] = {"env": env}
    return tasks


def task_name(env: str) -> str:
    """Return a valid task name from the last part of an environment's name."""
    name = env.rsplit(":", 1)[-1].rsplit("/", 1)[-1].removesuffix(".py")
    return re.sub(r"[^a-z0-9_.-]", "_", name.lower())[:64]


def unused(path: Path) -> Path:
    """Return the path, with a number if it exists."""
    candidates = [path, *(path.with_name(f"{path.name}-{i}") for i in range(2, 1000))]
    return next(candidate for candidate in candidates if not candidate.exists())


def new_directory(path: Path) -> Path:
    """Make a directory before costly work starts.  Raises ConfigError if it is not empty."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        if any(path.iterdir()):
            raise ConfigError(f"--output {path} is not empty; give another directory")
    except OSError as error:
        raise ConfigError(f"--output {path}: cannot be written: {error.strerror}") from error
    return path


FIXED = (
    "seed",
    "trainer.prompts_per_step",
    "rollout.group_size",
    "rollout.max_prompt_tokens",
    "model.path",
    "model.options",
    "optimizer.name",
)
"""Keys that keep their values in all starts of a run with a checkpoint."""
ENDS = ("trainer.steps", "trainer.epochs", "trainer.stop_when")
"""Keys that say when a run ends."""
LONGEST_NOTE = 300
"""Largest number of characters of an error in a note."""


@frozen(kw_only=True)
class Finished:
    """The end of a run that has nothing left to train."""

    reason: str
    """As in ``RunEnded``."""
    steps: int
    """Number of steps of the whole run."""
    buffer: BufferStatistics
    """The buffer in the checkpoint."""
    message: str
    """Tells the user what ended the run, and what continues it."""
    complete: bool
    """Whether the run ended completely."""


@frozen(kw_only=True)
class Resume(IntactCheckpoint):
    """The checkpoint from which a run continues."""

    saved: SavedPipeline
    """The state of the loop in it."""
    finished: Finished | None
    """Set if nothing is left to train."""


@define(kw_only=True, eq=False)
class TrainingRun:
    """A run that starts or resumes; its directory is locked."""

    setup: RunSetup
    directory: RunDirectory
    resume: Resume | None = None
    """None without a checkpoint."""
    notes: tuple[str, ...] = ()
    """Messages to the user: where the run continues, and what changed."""
    warnings: list[tuple[str, str]] = field(factory=list)
    """Causes and messages from ``grpo_preflight`` and from the start; emitted after it."""
    trackers: Trackers = field(init=False)
    retention: Retention = field(init=False)
    began: float = field(init=False, factory=time.monotonic)
    """Start of the program, and of a time limit, on the clock of the event loop."""
    after: list[Callable[[Event], None]] = field(init=False, factory=list)
    """Called with each event after the trackers received it."""
    goal: dict[str, float] = field(init=False, factory=dict)
    """Value of the metric in ``trainer.stop_when``, by name; saved in each checkpoint."""

    @property
    def step(self) -> int:
        """The step that the run continues from; 0 for a new run."""
        return self.resume.step if self.resume else 0

    @property
    def validated(self) -> int:
        """The newest version validated before, or a newer number."""
        return self.resume.saved.validated if self.resume else -1

    @property
    def finished(self) -> Finished | None:
        """Set if nothing is left to train."""
        return self.resume.finished if self.resume else None

    def emit(self, event: Event) -> None:
        """Send an event to all trackers."""
        self.trackers.emit(event)
        for receive in self.after:
            receive(event)

    def again(self, block: Sequence[str]) -> str:
        """Return the command that continues the run."""
        command = shlex.join(["grpo-core", "train", "--resume", str(self.directory.path)])
        return command + "".join(f" --no-plugin {shlex.quote(name)}" for name in block)


def _resumed(
    directory: RunDirectory, before: Config, changes: Mapping[str, Any], block: Sequence[str], offers: Offers
) -> TrainingRun:
    path = directory.path
    secrets.learn(merge(as_table(before), changes))
    config, host = configured([replace_parts(as_table(before), changes), changes], block, offers)
    run = TrainingRun(setup=RunSetup(before, host), directory=directory)
    if (found := checkpoint.newest(directory.checkpoints)) is not None:
        with checkpoint.reading(found.directory):
            saved = checkpoint.read_pipeline(found.directory)
        end = _finished(directory, found.step, saved, config.trainer, config.validation)
        run.resume = Resume(**asdict(found), saved=saved, finished=end)
    if (finished := run.finished) is not None:
        run.notes = (finished.message,)
        if finished.complete and not changes:
            return run
    stored = with_absolute_paths(before, host, before.directory)
    config = with_absolute_paths(changed(stored, changes, host), host)
    edits = list(differences(as_table(before), as_table(config)))
    notes = [  # of a new table the given keys alone
        f"{key}: {shown(old)} -> {shown((isinstance(new, Mapping) and _at(changes, key)) or new)}"
        for key, old, new in edits
    ]
    if found is None:
        notes.append(f"{path} has no checkpoint yet: starting from the beginning")
    else:
        fixed = {**_fixed(stored), **saved.run.fixed}
        for key in {**fixed, **_fixed(config)}:
            if fixed.get(key) != (now := _at(as_table(config), key)):
                raise ConfigError(
                    f"{path}: {key} is {shown(fixed.get(key))} in its checkpoint and {shown(now)} now; "
                    "it cannot change within a run: keep it, or start a new run"
                )
        if finished is not None and finished.complete:
            _check_nothing_is_ignored(edits, finished.message)
            return run
        was, now = ((each.model.dtype, making.engine_dtype(each.engine)) for each in (before, config))
        held = Published.read(found.directory / "trainer")
        if held is not None and was != now and now[0] != "auto":  # what "auto" means is known later
            check_held(path, held, evolve(held, sent=published_dtype(*now)))
        _check_staleness(path, saved.buffer.ready, config.pipeline.max_staleness)
        notes += _warnings(path, saved.run, config.scores, file_hashes(config))
        if (failure := saved.failure) is not None:
            error = one_line(failure.error, LONGEST_NOTE)
            proved = f"the engine's weights up to version {failure.proved}"
            proved = "no weight sync" if failure.proved is None else proved
            notes.append(
                f"the run ended after step {found.step} by an error: {error} (the canary had proved {proved})"
            )
        if finished is None:
            limit = config.trainer.time_limit
            if limit and "time_limit" not in changes.get("trainer", {}):
                notes.append(
                    f"this start ends within {limit:g} s as well: trainer.time_limit still applies; --set "
                    "trainer.time_limit=0 removes it"
                )
            steps, seconds = directory.work_after(found.step)
            again = f"; {lost(steps, seconds)}, and trained again" if steps else ""
            notes.append(f"continuing {path} after step {found.step}{again}")
        else:
            notes += [finished.message, "writing what its trackers write at the end, such as its page"]
    run.setup = RunSetup(config, host) if finished is not None else make(config, host)
    run.notes = tuple(notes)
    return run


def _check_nothing_is_ignored(edits: Iterable[tuple[str, Any, Any]], message: str) -> None:
    """Raise ConfigError for changes of a run that has nothing left to train."""
    for key, old, new in edits:
        if key not in ENDS and not key.startswith("tracking."):
            raise ConfigError(
                f"{message}, or leave out {key} = {shown(new)}, which was {shown(old)}: nothing is left to "
                "train with it"
            )


def _finished(
    directory: RunDirectory,
    step: int,
    saved: SavedPipeline,
    chosen: TrainerConfig,
    validation: ValidationConfig,
) -> Finished | None:
    """Return the end of a run if nothing is left to train and validate after its checkpoint."""
    planned, epochs = saved.run.schedule.steps, saved.run.schedule.epochs
    if chosen.epochs and chosen.epochs != epochs:
        steps = sys.maxsize  # known once the environments have started and their prompts are counted
    else:
        steps = planned if chosen.epochs else chosen.steps
    last = step == planned == steps
    due = any(each.due(step, last=steps) for each in making.intervals(validation))
    if last and (saved.failure or (due and saved.validated < step)):  # perhaps before the last weight sync
        return None
    if step >= steps:
        reason, did = "finished", f"{'all of its ' if step == steps else ''}{step} steps"
        message = f"finished {did}; for more, add --set trainer.steps={2 * step}"
    elif (goal := chosen.stop_when) and Goal.parse(goal).reached(saved.goal):
        (value,) = saved.goal.values()
        reason, last = GOAL_REACHED, True
        message = (
            f"reached its goal {goal} with {value:.6g} before step {step + 1}; for more steps, change "
            "the goal, or add --set trainer.stop_when='' to train without one"
        )
    else:
        return None
    return Finished(
        reason=reason,
        steps=steps,
        buffer=checkpoint.statistics(saved.buffer, chosen.prompts_per_step),
        message=f"{directory.path}: {message}",
        complete=not last or directory.has_ended(reason, step),
    )


def identity(config: Config, start: Path) -> dict[str, Any]:
    """Return the values that later starts of the run compare; each checkpoint contains them.

    ``start`` is the directory of the model that the run started from.
    """
    return {
        "grpo_core": __version__,
        "fixed": _fixed(config),
        "schedule": _schedule(config.trainer),
        "start": model_sources.start_digest(start),
        "scores": _score_digests(config.scores),
        "files": file_hashes(config),
    }


def changed_schedule(step: int, before: TrainerConfig, trainer: TrainerConfig) -> str:
    """Return a message if the resume changes the learning rates of later steps, or "".

    Args:
        step: the step of the checkpoint.
        before: the saved schedule.
        trainer: the section with the number of steps, which may depend on the number of prompts.
    """
    saved = _schedule(before)
    before = evolve(trainer, **saved)
    later = range(step, max(before.steps, trainer.steps)) if before != trainer else ()
    if all(isclose(rate(before, each), rate(trainer, each)) for each in later):
        return ""
    last, old, new = rate(before, step - 1), rate(before, step), rate(trainer, step)
    keys = [
        f"trainer.{key}: {shown(a)} -> {shown(b)}" for key, a, b in differences(saved, _schedule(trainer))
    ]
    return (
        f"the schedule of the learning rate has changed ({', '.join(keys)}): step {step + 1} has {new:.3g} "
        f"instead of {old:.3g}; step {step} had {last:.3g}"
    )


def _schedule(trainer: TrainerConfig) -> dict[str, Any]:
    return {key: getattr(trainer, key) for key in SCHEDULE}


def _fixed(config: Config) -> dict[str, Any]:
    section, table = model_section(config), as_table(config)
    return {key: _at(table, key) for key in (*FIXED, *(section.fixed if section else ()))}


def check_held(path: Path, before: Published | None, now: Published | None) -> None:
    """Raise ConfigError if the engine of training would hold other weights than before the resume."""
    if before is None or now is None:
        return
    for was, found in (
        (before.sent, now.sent),
        (before.dtype, now.dtype),
        (before.merged or "float32", now.merged or "float32"),
    ):
        if was != found:
            raise ConfigError(
                f"{path}: its engine held weights in {was}, and would hold them in {found} now; this cannot "
                f'change within a run: set model.dtype = "{before.sent}" and the dtype of the engine as it '
                "was, or start a new run"
            )
    if before.version == now.version:
        known = ((name, *each) for name, each in now.tensors.items())
        before.check((name, dtype, total) for name, dtype, total in known if total is not None)


def _check_saved(run: TrainingRun, resume: Resume) -> None:
    """Reject other base weights under adapters, or as a score of a loss.

    Raises CheckpointError for a state of a loader, a sampler or a strategy with wrong types.
    """
    setup, config, state = run.setup, run.setup.config, resume.saved
    of_loss = any(score.weights == "start" for score in setup.scores.values())
    if (adapters := model_section(config) is not None) or of_loss:
        why = "to which its adapters belong" if adapters else "with which its loss compares the policy"
        made = (run.directory.model / "config.json").exists()
        start = run.directory.model if made else directory_here(config.model.path)
        model_sources.check_start(run.directory.path, state.run.start, start, why)
    with checkpoint.reading(resume.directory):
        checkpoint.read_loaders(resume.directory)
        if state.sampler_name == config.sampler.name:
            load_plugin_state(setup.sampler, f"sampler {config.sampler.name!r}", state.sampler)
        for name, (strategy, saved) in state.validation.items():
            own = config.validation
            chosen = own.of_set(name) if name in own.sets else None if name else own
            if chosen is not None and chosen.name == strategy:
                who = f"validation strategy {chosen.name!r}"
                load_plugin_state(setup.strategies[name], who, saved)


def _check_staleness(path: Path, ready: Any, bound: int) -> None:
    """Reject a bound that groups of the checkpoint, generated under a larger one, would break."""
    allowed = [slot.target_version - slot.generation_version for slot, _ in ready]
    broken = [staleness for staleness in allowed if staleness > bound]
    if broken:
        raise ConfigError(
            f"{path}: pipeline.max_staleness is {bound} now, and {len(broken)} finished groups of its "
            f"checkpoint were generated for {max(broken)}; keep it at {max(broken)}, or start a new run"
        )


def _warnings(
    path: Path, saved: SavedRun, scores: Mapping[str, ScoreConfig], files: Mapping[str, str]
) -> Iterator[str]:
    if saved.grpo_core != __version__:
        yield (
            f"warning: {path} was written by grpo-core {saved.grpo_core}, this is {__version__}: its next "
            "steps may differ from an uninterrupted run"
        )
    was, now = saved.scores, _score_digests(scores)
    for name in sorted(was.keys() & now.keys()):
        if was[name] != now[name]:
            model = f"{scores[name].weights} of scores.{name}"
            yield f"warning: the weights {model} have changed since the checkpoint"
    for file in sorted(saved.files.keys() & files.keys()):
        if saved.files[file] != files[file]:
            yield f"warning: {file} has changed since the checkpoint was written"


def _at(table: Any, key: str) -> Any:
    """Return the value of a key, as in "trainer.lr", in nested tables; None without one."""
    for name in key.split("."):
        table = table.get(name) if isinstance(table, Mapping) else None
    return table


def _score_digests(scores: Mapping[str, ScoreConfig]) -> dict[str, str]:
    """Return the digests of the models that score, by the names of the scores."""
    return {
        name: model_sources.start_digest(directory_here(score.model))
        for name, score in scores.items()
        if score.model
    }


def differences(old: Any, new: Any, where: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the keys of two tables that differ, with both values."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in sorted(old.keys() | new.keys()):
            yield from differences(old.get(key), new.get(key), f"{where}.{key}" if where else key)
    elif old != new:
        yield where, old, new


def shown(value: Any) -> str:
    """Format a configuration value for a user."""
    return "(not set)" if value is None else json.dumps(value, default=str)
