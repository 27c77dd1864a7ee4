"""Continues a run: what may change between its starts, and what may not."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

import grpo_core
from grpo_core.app.paths import plugin_files, with_absolute_paths
from grpo_core.config import Config, as_table, build, replace_parts
from grpo_core.disk import fingerprint
from grpo_core.errors import ConfigError
from grpo_core.loop import checkpoint
from grpo_core.loss import needs_of
from grpo_core.models import directory_here
from grpo_core.plugins.host import NO_OFFERS, Offers, PluginHost
from grpo_core.run_directory import RunDirectory
from grpo_core.validation.target import check_start, start_digest

FIXED = (
    "seed",
    "trainer.prompts_per_step",
    "rollout.group_size",
    "rollout.max_prompt_tokens",
    "model.path",
    "model.options",
    "optimizer.name",
    "optimizer.options.moments",
    "model.lora.rank",
    "model.lora.alpha",
    "model.lora.targets",
)
"""Keys that keep their values in all starts of a run with a checkpoint."""
IMPLIED = {"optimizer.options.moments": "float32"}
"""Values of optional ones that are not set."""


@frozen(kw_only=True)
class Resumed:
    """A run that continues."""

    directory: RunDirectory
    config: Config
    changed: bool
    """Whether the configuration differs from the one of the start before."""
    found: checkpoint.Found | None
    notes: tuple[str, ...]
    """Messages to the user: where the run continues, and what is different now."""


def find(
    path: Path, changes: Mapping[str, Any], block: Sequence[str], offers: Offers = NO_OFFERS
) -> tuple[Resumed, PluginHost]:
    """Open a run to continue it, with its directory locked; change nothing.

    ``offers`` are objects of the program that continues it.

    Raises ConfigError if the run has finished, another process uses it, or a change cannot be made, and
    CheckpointError if no checkpoint can be used.
    """
    directory, before = RunDirectory.open(path)
    directory.lock()
    try:
        return _found(path, directory, before, changes, block, offers)
    except BaseException:
        directory.unlock()  # the error may be kept, and with it the lock
        raise


def _found(
    path: Path,
    directory: RunDirectory,
    before: Config,
    changes: Mapping[str, Any],
    block: Sequence[str],
    offers: Offers,
) -> tuple[Resumed, PluginHost]:
    config = build([replace_parts(as_table(before), changes), changes])
    found = checkpoint.newest(directory.checkpoints)
    if found is not None and found.step >= config.trainer.steps and not config.trainer.epochs:
        all_of = "all of its " if found.step == config.trainer.steps else ""
        raise ConfigError(
            f"{path}: finished {all_of}{found.step} steps; for more, add --set trainer.steps={2 * found.step}"
        )
    host = PluginHost.discover(config.plugins, block)
    host.add(offers)
    config = with_absolute_paths(config, host)
    edits = differences(as_table(before), as_table(config))
    notes = [f"{key}: {shown(old)} -> {shown(new)}" for key, old, new in edits]
    if found is None:
        notes.append(f"{path} has no checkpoint yet: starting from the beginning")
    else:
        with checkpoint.reading(found.directory):
            state = checkpoint.read_pipeline(found.directory)
            saved = state.get("run", {})
            fixed = {**_fixed(with_absolute_paths(before, host)), **saved.get("fixed", {})}
            _check_fixed(path, fixed, config)
            _check_start(path, saved.get("start", ""), config, host)
            _check_staleness(path, state["buffer"]["ready"], config.pipeline.max_staleness)
            notes += _warnings(path, saved, config)
        notes.append(f"continuing {path} after step {found.step}")
    resumed = Resumed(
        directory=directory, config=config, changed=config != before, found=found, notes=tuple(notes)
    )
    return resumed, host


def begin(resumed: Resumed) -> None:
    """Write the configuration if it has changed."""
    if resumed.changed:
        resumed.directory.replace_config(resumed.config)
        if resumed.found is None:
            resumed.directory.remove_model()  # it was made for the configuration before


def identity(config: Config) -> dict[str, Any]:
    """Return what a later start of the run compares itself with; each checkpoint contains it."""
    return {
        "grpo_core": grpo_core.__version__,
        "fixed": _fixed(config),
        "start": start_digest(directory_here(config.model.path)),
        "files": _hashes(config),
    }


def _fixed(config: Config) -> dict[str, Any]:
    return {key: _value(config, key) for key in FIXED}


def _check_fixed(path: Path, fixed: Mapping[str, Any], config: Config) -> None:
    for key in FIXED:
        now, usual = _value(config, key), IMPLIED.get(key)
        if (fixed.get(key) or usual) != (now or usual):
            raise ConfigError(
                f"{path}: {key} is {shown(fixed.get(key))} in its checkpoint and {shown(now)} now; it "
                "cannot change within a run: keep it, or start a new run"
            )


def _check_start(path: Path, before: str, config: Config, host: PluginHost) -> None:
    """Refuse other weights below adapters, or as the reference of a loss."""
    loss = host.function("loss", config.loss.name, **config.loss.options)
    if config.model.lora is not None:
        why = "to which its adapters belong"
    elif "reference" in needs_of(loss.function, loss.options) and not config.trainer.reference_every:
        why = "with which its loss compares the policy"
    else:
        return
    check_start(path, before, directory_here(config.model.path), why)


def _check_staleness(path: Path, ready: Any, bound: int) -> None:
    """Refuse a bound that groups of the checkpoint, which were generated for a larger one, would break."""
    allowed = [slot["target_version"] - slot["generation_version"] for slot, _ in ready]
    broken = [staleness for staleness in allowed if staleness > bound]
    if broken:
        raise ConfigError(
            f"{path}: pipeline.max_staleness is {bound} now, and {len(broken)} finished groups of its "
            f"checkpoint were generated for {max(broken)}; keep it at {max(broken)}, or start a new run"
        )


def _warnings(path: Path, saved: Mapping[str, Any], config: Config) -> Iterator[str]:
    version = saved.get("grpo_core", grpo_core.__version__)
    if version != grpo_core.__version__:
        yield (
            f"warning: {path} was written by grpo-core {version}, this is {grpo_core.__version__}: its next "
            "steps may differ from those of an unbroken run"
        )
    was, now = saved.get("files", {}), _hashes(config)
    for file in sorted(was.keys() & now.keys()):
        if was[file] != now[file]:
            yield f"warning: {file} has changed since the checkpoint was written"


def _value(config: Config, key: str) -> Any:
    value: Any = as_table(config)
    for name in key.split("."):
        if name not in value:  # of a section that is not there
            return None
        value = value[name]
    return value


def _hashes(config: Config) -> dict[str, str]:
    return {str(path): fingerprint(path)["sha256"] for path in plugin_files(config) if path.is_file()}


def differences(old: Any, new: Any, where: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the keys of two tables that differ, with both values."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in sorted(old.keys() | new.keys()):
            yield from differences(old.get(key), new.get(key), f"{where}.{key}" if where else key)
    elif old != new:
        yield where, old, new


def shown(value: Any) -> str:
    """Return a value of a configuration as a user reads it."""
    return "(not set)" if value is None else json.dumps(value, default=str)
