"""Models that a user names: for the start of a run, for ``grpo-core validate``, and for scores."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

from attrs import evolve, frozen

from grpo_core.config import Config, ModelConfig, as_table, replace_parts
from grpo_core.contracts.errors import ConfigError, ModelError, did_you_mean
from grpo_core.contracts.playing import EnvironmentClient
from grpo_core.contracts.records import Prompt
from grpo_core.loop import checkpoint
from grpo_core.models.files import ADAPTERS, check_path, hub_cache, local_directory, size_of, weights_digest
from grpo_core.plugins.configured import configured
from grpo_core.plugins.host import PluginHost
from grpo_core.plugins.installed import install_command
from grpo_core.plugins.values import absolute
from grpo_core.processes.aio import in_own_loop
from grpo_core.storage.published import FILE
from grpo_core.storage.run_directory import CONFIG, RunDirectory

T = TypeVar("T")
RUNS = Path("runs")
"""The default parent directory of runs."""
PACE = 1.0
"""Seconds between two looks at a download."""
LEAST = 5_000_000
"""Bytes of a download that are worth another message."""


class Status(Protocol):
    """Shows an activity, and the share of it that is done, if that is known."""

    def __call__(self, message: str, part: float | None = None) -> None: ...


def silent(message: str, part: float | None = None) -> None:
    """Show nothing."""


class SolvingEnvironment(EnvironmentClient, Protocol):
    """An environment that may know replies with a full reward."""

    async def solve(self, prompts: Sequence[Prompt]) -> list[str | None]: ...


@frozen(kw_only=True)
class StartModel:
    """The model that a run starts from."""

    path: str
    """Directory of the model."""
    prepare: Callable[[], None] | None = None
    """Makes the directory unless it exists; called once, in a process with torch, so it must be picklable.
    None means that the directory exists."""
    positions: int = 2**31
    """Largest number of tokens of prompt and completions."""
    max_tokens: int = 0
    """Replaces ``rollout.max_tokens = 0``.  0: the model does not know."""
    doing: str = "loading the model"
    """Status message while the model is loaded or made."""


@frozen(kw_only=True, eq=False)
class ModelRequest:
    """Resources of a source that makes a model."""

    directory: Path
    """Directory for the model; empty, or with the model from an earlier start of the run."""
    prompts: Callable[[], Awaitable[Mapping[str, Sequence[Prompt]]]]
    """The training prompts by task."""
    environments: Mapping[str, SolvingEnvironment]
    seed: int
    status: Status = silent
    """Shows an activity, and the share of it that is done; call it on the event loop."""
    check: Callable[[str], None] | None = None
    """Raises GrpoError if the model of a directory, perhaps still without weights, does not fit the run that
    trains it.  Slow: call it on a thread."""


def with_max_tokens(config: Config, proposed: int) -> Config:
    """Return the configuration with the model's ``max_tokens`` if it has none.  Raises ConfigError."""
    if config.rollout.max_tokens:
        return config
    if not proposed:
        raise ConfigError(
            f"rollout.max_tokens is 0, and the model {config.model.path!r} does not know how long replies "
            "are: set it to the largest number of tokens of one"
        )
    return evolve(config, rollout=evolve(config.rollout, max_tokens=proposed))


class StartModelSource(Protocol):
    """A source of models, which finds a model or makes it.

    A plugin offers sources by the hook ``grpo_models``, and ``model.path`` selects one by name.  Optional:
    ``configuration() -> Mapping``, the contents of the config.json that the model will have, for an estimate
    of the run's memory; ``about(steps) -> str``, what it is and how long a run takes, for its first line.
    """

    @property
    def preset(self) -> Mapping[str, Any]:
        """Default tables of the configuration for this model."""

    def check(self) -> None:
        """Raise ModelError if the model cannot exist; load nothing."""

    async def start_model(self, request: ModelRequest) -> StartModel:
        """Return the model.  Raises ModelError if there is no such model."""


class Pretrained:
    """A ``StartModelSource`` for a directory or a hub id."""

    preset: Mapping[str, Any] = {}

    def __init__(self, path: str, hint: str = "") -> None:
        self._path, self._hint = path, hint

    def check(self) -> None:
        check_path(self._path, self._hint)

    async def start_model(self, request: ModelRequest) -> StartModel:
        path = absolute(await fetched(self._path, request.status, request.check))
        positions = await asyncio.to_thread(size_of, path, "max_position_embeddings")
        if not (Path(path) / FILE).is_file():
            return StartModel(path=path, positions=positions)
        # a checkpoint's: others read its masters, which are not the weights that were trained
        copy = partial(_write_held, Path(path), request.directory)
        return StartModel(path=str(request.directory), prepare=copy, positions=positions)


def _write_held(directory: Path, target: Path) -> None:
    from grpo_core.weights.layout import write_held  # imports torch

    write_held(directory, target)


async def fetched(path: str, status: Status, check: Callable[[str], None] | None = None) -> str:
    """Return the directory of a model, as ``local_directory`` does."""
    return await watched(lambda: local_directory(path, check), hub_cache(path), status, path)


async def watched(
    work: Callable[[], T],
    directory: Path,
    status: Status,
    name: str,
    *,
    total: int | None = None,
    files: str = "*",
) -> T:
    """Download something on a thread; show how much the files below a directory have grown meanwhile.

    Args:
        name: what is downloaded.
        total: its size, if it is known.
        files: pattern of the files.
    """
    begin = shown = await asyncio.to_thread(_size, directory, files)
    task = asyncio.ensure_future(asyncio.to_thread(work))
    while not (await asyncio.wait([task], timeout=PACE))[0]:
        now = await asyncio.to_thread(_size, directory, files)
        if now - shown >= max(LEAST, (now - begin) / 10):
            shown, done = now, min(now - begin, total or now)
            of = f" of {total / 1e6:,.0f}" if total else ""
            status(f"fetching {name}, {done / 1e6:,.0f}{of} MB", done / total if total else None)
    return task.result()


def _size(directory: Path, files: str) -> int:
    """Return the bytes of some files below a directory that is changing."""
    found = 0
    for path in directory.rglob(files):
        with suppress(OSError):  # renamed meanwhile
            found += 0 if path.is_symlink() else path.stat().st_size
    return found


def model_source(config: ModelConfig, plugins: PluginHost) -> StartModelSource:
    """Return the plugin's source named by ``model.path``, or the source of that path or hub id.

    Raises ConfigError for options of a path, PluginError for unknown options of a source or for a known
    source that is not installed.
    """
    known = install_command("model", config.path) and not Path(config.path).is_dir()
    if known or plugins.offers("model", config.path):
        return cast(StartModelSource, plugins.make("model", config.path, **config.options))
    if config.options:
        raise ConfigError(
            f"model.options: model {config.path!r} is a directory or hub id, which has no options"
        )
    names = {name for plugin in plugins.plugins for name in plugin.offers.get("model", {})}
    return Pretrained(config.path, did_you_mean(config.path, names))


def started_from(run: RunDirectory, config: Config, block: Sequence[str] = ()) -> Path:
    """Return the directory of the model that a run started from, by the source that ``model.path`` names.

    ``block`` are plugins that are not loaded.  Raises ModelError if the model is missing.
    """
    if (run.model / "config.json").exists():
        return run.model

    _, plugins = configured([as_table(config)], block, stored=True)

    async def gone() -> Mapping[str, Sequence[Prompt]]:
        raise ModelError(f"model {config.model.path!r}: was made in {run.model}, and is not there any more")

    async def find() -> Path:
        request = ModelRequest(directory=run.model, prompts=gone, environments={}, seed=config.seed)
        start = await model_source(config.model, plugins).start_model(request)
        if start.prepare is not None:
            await gone()
        return Path(start.path)

    try:
        return in_own_loop(find())
    except ModelError as error:
        raise ModelError(f"{run.path}: the model that it started from is missing: {error}") from None


@frozen(kw_only=True)
class EvalTarget:
    """Weights, and the configuration that comes with them."""

    name: str
    """The user's spelling."""
    model: Path | None
    """Directory of the model; None: that of ``hub``, or else the model that training would start from."""
    hub: str = ""
    """Id of a model that is fetched when its engine starts."""
    adapters: Path | None = None
    """Directory of adapters that belong to the model."""
    version: int
    table: Mapping[str, Any]
    """Configuration that lies beneath the command line."""
    notes: tuple[str, ...] = ()
    """Messages to the user about the choice."""


def find_target(
    target: str | None, allow: Any = None, block: Sequence[str] = (), step: int | None = None
) -> EvalTarget:
    """Find a run (its newest complete checkpoint, or the model that it starts from) or a model.

    Args:
        target: None is the model that training would start from, if the engine needs one.
        allow: plugins that may be loaded and make a model of that name; None: all.
        block: plugins that are not loaded.
        step: of the run's checkpoint; None is the newest one.

    Raises ConfigError if ``target`` is neither, ModelError if a model lacks a part, CheckpointError if a run
    has checkpoints and none is intact.
    """
    if step is not None and not (target and Path(target, CONFIG).is_file()):
        raise ConfigError(f"--step {step} is for the checkpoints of a run, and {target} is not a run")
    if target is None:
        return EvalTarget(name="the model", model=None, version=0, table={})
    path = Path(os.path.expanduser(target))
    if (path / CONFIG).is_file():
        return _of_run(target, path, block, step)
    if PluginHost.discover(allow, block).offers("model", target):
        return EvalTarget(name=target, model=None, version=0, table={"model": {"path": target}})
    if path.is_dir() and not (path / "config.json").exists():
        inner = path / "trainer"
        hint = f"; this checkpoint's model is {inner}" if (inner / "config.json").exists() else ""
        if (path / ADAPTERS).exists() or (inner / ADAPTERS).exists():
            hint = "; it holds adapters, which belong to a model: give the run instead"
        raise ConfigError(
            f"{target} is neither a run (there is no {CONFIG} in it) nor a model (there is no config.json)"
            f"{hint}"
        )
    beside = {each.parent.name for each in path.parent.glob(f"*/{CONFIG}")} if path.parent.name else set()
    if not path.exists() and (beside or path.parent == RUNS):
        there = ", ".join(sorted(beside)) or "none"
        raise ConfigError(f"there is no run {target}.{did_you_mean(path.name, beside)} Runs there: {there}")
    check_path(target)
    here = path if path.is_dir() else None
    table = {"model": {"path": str(here or target)}}
    return EvalTarget(name=target, model=here, hub="" if here else target, version=0, table=table)


def without_overridden(
    configured: Mapping[str, Any], changes: Mapping[str, Any], *, tasks: bool
) -> dict[str, Any]:
    """Return a target's configuration without the settings of parts that ``changes`` replace.

    They are the options of another strategy or engine, and ``tasks`` and validation sets, if there are other
    tasks.
    """
    table = replace_parts(configured, changes)
    if tasks:
        table.pop("tasks", None)
        table["validation"] = {k: v for k, v in table.get("validation", {}).items() if k != "sets"}
    if "name" in changes.get("engine", {}):
        table["validation"] = {k: v for k, v in table.get("validation", {}).items() if k != "engine"}
    return table


def _of_run(target: str, path: Path, block: Sequence[str], step: int | None) -> EvalTarget:
    run, config = RunDirectory.open(path, block)
    table = as_table(config)
    found = checkpoint.newest(run.checkpoints) if step is None else checkpoint.choose_checkpoint(path, step)
    if found is not None:
        notes = tuple(f"passed over {reason}" for reason in found.passed_over)
        saved = found.directory / "trainer"
        measured = EvalTarget(name=target, model=saved, version=found.step, table=table, notes=notes)
        if not (saved / ADAPTERS).exists():
            return measured
        start = started_from(run, config, block)
        check_adapters(path, found.directory, start)
        return evolve(measured, model=start, adapters=saved)
    return EvalTarget(
        name=target,
        model=run.model if (run.model / "config.json").exists() else None,
        version=0,
        table=table,
        notes=(f"{target} has no checkpoint yet: measuring the model that it starts from",),
    )


def scoring_model(name: str, path: str) -> str:
    """Return the directory or hub id of a model that scores; for a run, the model of its newest checkpoint.

    Raises ConfigError for a run without a checkpoint.
    """
    directory = Path(os.path.expanduser(path))
    if not (directory / CONFIG).is_file():
        return path
    found = checkpoint.newest(RunDirectory(directory).checkpoints)
    if found is None:
        raise ConfigError(
            f"scores.{name}.weights is {path!r}, a run that has no checkpoint yet: train it first"
        )
    return str(found.directory / "trainer")


def start_digest(directory: Path | None) -> str:
    """Return the digest of the weights that a run starts from; "" if they are not here."""
    try:
        return "" if directory is None else weights_digest(directory)
    except OSError:
        return ""


def check_start(path: Path, before: str, directory: Path | None, why: str) -> None:
    """Raise ConfigError if the weights that a run started from have changed."""
    now = start_digest(directory)
    if before and now and before != now:
        raise ConfigError(
            f"{path}: the weights in {directory} are not the ones that the run started from, {why}; put "
            "them back, or start a new run"
        )


def check_adapters(path: Path, saved: Path, start: Path) -> None:
    """Raise ConfigError if the adapters of a checkpoint do not belong to the weights in ``start``."""
    with checkpoint.reading(saved):
        before = checkpoint.read_pipeline(saved).run.start
    check_start(path, before, start, "to which its adapters belong")
