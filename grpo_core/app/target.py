"""Models that a user names: for ``grpo-core validate``, the start of a run, and a teacher."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import evolve, frozen

from grpo_core.app.model_sources import started_from
from grpo_core.config import as_table, replace_parts
from grpo_core.contracts.errors import ConfigError
from grpo_core.loop import checkpoint
from grpo_core.models.files import ADAPTERS, local_directory, weights_digest
from grpo_core.plugins.host import PluginHost
from grpo_core.storage.run_directory import CONFIG, RunDirectory


@frozen(kw_only=True)
class EvalTarget:
    """Weights, and the configuration that comes with them."""

    name: str
    """The user's spelling."""
    model: Path | None
    """Directory of the model; None: the model that training would start from."""
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
    path = Path(target).expanduser()
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
    directory = local_directory(target)
    return EvalTarget(name=target, model=Path(directory), version=0, table={"model": {"path": directory}})


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
    made = (run.model / "config.json").exists()
    return EvalTarget(
        name=target,
        model=run.model if made else None,
        version=0,
        table=table,
        notes=(f"{target} has no checkpoint yet: measuring the model that it starts from",),
    )


def teacher_model(path: str) -> str:
    """Return the directory or hub id of a teacher; for a run, the model of its newest checkpoint.

    Raises ConfigError for a run without a checkpoint.
    """
    directory = Path(path).expanduser()
    if not (directory / CONFIG).is_file():
        return path
    found = checkpoint.newest(RunDirectory(directory).checkpoints)
    if found is None:
        raise ConfigError(f"teacher.path is {path!r}, a run that has no checkpoint yet: train it first")
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
    before = checkpoint.read_pipeline(saved).get("run", {}).get("start", "")
    check_start(path, before, start, "to which its adapters belong")
