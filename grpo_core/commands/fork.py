"""``grpo-core fork``: computes a step of a run twice, as it was and with another configuration."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import evolve, frozen
from rich.console import Console
from rich.table import Table

from grpo_core.aio import to_the_end
from grpo_core.app.parts import make_advantages, make_shaping
from grpo_core.app.paths import with_absolute_paths
from grpo_core.checks import differing_element
from grpo_core.commands.history import StepRecord, compared, read
from grpo_core.commands.replay import Replayer, batch_of
from grpo_core.complaints import say
from grpo_core.config import Config, as_table, build, parse_settings, replace_parts
from grpo_core.errors import ConfigError
from grpo_core.loop.rows import with_advantages
from grpo_core.loss import needs_of
from grpo_core.plugins.host import PluginHost
from grpo_core.records import Group, Rollout, StepResult

CHANGEABLE = ("trainer", "loss", "optimizer", "teacher", "advantage", "shaping", "health")
"""Sections that a fork may change: the others say how rollouts are made, and these are stored."""
FIXED = ("trainer.steps", "trainer.prompts_per_step", "trainer.name", "trainer.profile")
"""Keys of these sections that a step does not depend on, or that belong to the rollouts."""


@frozen(kw_only=True)
class Side:
    """One of the two computations of a step."""

    groups: Sequence[Group]
    result: StepResult
    saved: Path


def main(
    directory: Path,
    *,
    step: int,
    settings: Sequence[str],
    scored: Path | None = None,
    block: Sequence[str] = (),
) -> int:
    """Run ``grpo-core fork``; return the exit status."""
    if not settings and scored is None:
        raise ConfigError(
            "fork needs something that changes: --set, as in --set loss.options.clip_low=0.1, or --scored"
        )
    changes = parse_settings(settings)
    return to_the_end(_main(directory, step, changes, scored, block))


async def _main(
    directory: Path, step: int, changes: Mapping[str, Any], scored: Path | None, block: Sequence[str]
) -> int:
    history = read(directory)
    recorded = history.step(step)
    rewards = None if scored is None else read_rewards(scored, step)
    config, host = forked(recorded.config, changes, block)
    async with Replayer(history, block=block) as replayer:
        say(f"step {step} of {directory}, from {await replayer.begin(step)}")
        async for earlier in replayer.until(step - 1):
            if earlier.difference:
                say(f"step {earlier.step}: differs from the run: {earlier.difference}")
                return 1
        before = await replayer.save("before")
        was = await replayer.next()
        if was.difference:
            say(f"step {step}, as it was: differs from the run: {was.difference}")
            return 1
        groups = history.groups(step)
        base = Side(groups=groups, result=was.result, saved=await replayer.save("as it was"))
        await replayer.make(config, before, threads=threads_of(recorded, changes))
        changed = reconsidered(groups, recorded.config, config, host, rewards)
        result = await replayer.step(batch_of(changed, recorded))
        fork = Side(groups=changed, result=result, saved=await replayer.save("forked"))
        say(f"the first number that differs: {first_number(base, fork) or 'there is none'}")
        _show(recorded, base, fork)
    return 0


def forked(config: Config, changes: Mapping[str, Any], block: Sequence[str]) -> tuple[Config, PluginHost]:
    """Return a changed configuration, and its plugins.  Raises ConfigError if rollouts would be others."""
    for section, value in changes.items():
        keys = [f"{section}.{key}" for key in value] if isinstance(value, Mapping) else [section]
        for key in keys:
            if section not in CHANGEABLE or key in FIXED:
                raise ConfigError(
                    f"--set {key}: a fork computes a step again from its stored rollouts, and this key "
                    "changes how they were made, or nothing at all; keys of these sections can change: "
                    f"{', '.join(CHANGEABLE)}"
                )
    host = PluginHost.discover(config.plugins, block)
    table = replace_parts(as_table(config), changes)  # the options of another loss are its own
    return with_absolute_paths(build([table, changes]), host), host


def threads_of(recorded: StepRecord, changes: Mapping[str, Any]) -> int:
    """Return the number of torch threads of the fork: those of the run, or 0 if a change gives the number."""
    return (
        0 if recorded.digest is None or "threads" in changes.get("trainer", {}) else recorded.digest.threads
    )


Rewards = Mapping[tuple[int, int | None], Mapping[str, Any]]
"""Lines of rewards by the place of a group in its step, and the seed of a rollout."""


def read_rewards(scored: Path, step: int) -> Rewards:
    """Read the rewards that ``grpo-core score`` has written for a step.  Raises ConfigError."""
    path = scored / "rollouts.jsonl" if scored.is_dir() else scored
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        found = {(line["group"], line["seed"]): line for line in lines if line["step"] == step}
    except OSError as error:
        raise ConfigError(f"--scored {path}: cannot be read: {error.strerror}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"--scored {path}: is no file of rewards as `grpo-core score` writes it: {error}"
        ) from error
    if not found:
        raise ConfigError(f"--scored {path}: has no rewards of step {step}")
    return found


def rewarded(groups: Sequence[Group], rewards: Rewards) -> list[Group]:
    """Return the groups with other rewards; a rollout without one there keeps its own."""

    def other(place: int, rollout: Rollout) -> Rollout:
        line = rewards.get((place, rollout.seed), {})
        if line.get("reward") is None:
            return rollout
        return evolve(rollout, reward=float(line["reward"]), success=line["success"])

    return [
        evolve(group, rollouts=tuple(other(place, rollout) for rollout in group.rollouts))
        for place, group in enumerate(groups)
    ]


def reconsidered(
    groups: Sequence[Group], was: Config, now: Config, host: PluginHost, rewards: Rewards | None = None
) -> Sequence[Group]:
    """Return the groups with other rewards, and with the advantages of another configuration."""

    def all_rows(config: Config) -> bool:
        loss = host.function("loss", config.loss.name, **config.loss.options)
        return config.loss.all_rows or "all_rows" in needs_of(loss.function, loss.options)

    before, after = ((each.advantage, each.shaping, all_rows(each)) for each in (was, now))
    if before == after and rewards is None:
        return groups
    return with_advantages(
        groups if rewards is None else rewarded(groups, rewards),
        make_advantages(now.advantage, host),
        shaping=make_shaping(now.shaping, max_tokens=now.rollout.max_tokens),
        all_rows=all_rows(now),
    )


# ---------------------------------------------------------------------------------- what differs


def first_number(base: Side, fork: Side) -> str:
    """Name the first number that differs on the way of the data: an advantage, a metric, a weight."""
    for one, other in zip(base.groups, fork.groups, strict=True):
        for place, (mine, its) in enumerate(zip(one.rollouts, other.rollouts, strict=True)):
            if mine.advantage != its.advantage or mine.trained != its.trained:
                shown = [
                    "masked" if each.advantage is None else f"{each.advantage!r}" for each in (mine, its)
                ]
                return f"the advantage of slot {one.slot}, rollout {place}: {shown[0]} -> {shown[1]}"
    for name, a, b in _metrics(base, fork):
        if a != b:
            return f"the metric {name}: {a!r} -> {b!r}"
    for path in sorted(base.saved.rglob("*.safetensors"), reverse=True):  # trainer/ before optimizer/
        if told := differing_element(path, fork.saved / path.relative_to(base.saved)):
            return told
    return ""


def _metrics(base: Side, fork: Side) -> Iterator[tuple[str, float | None, float | None]]:
    a, b = compared(base.result.metrics), compared(fork.result.metrics)
    for name in dict.fromkeys([*a, *b]):
        yield name, a.get(name), b.get(name)


def _show(recorded: StepRecord, base: Side, fork: Side) -> None:
    one, other = (side.result.digest.threads if side.result.digest else 0 for side in (base, fork))
    if one != other and one and other:
        say(f"torch threads: {one} as it was, {other} forked")
    table = Table(box=None, pad_edge=False)
    for title in ("metric", "as it was", "forked", "difference"):
        table.add_column(title, justify="left" if title == "metric" else "right", no_wrap=True)
    same = 0
    for name, a, b in _metrics(base, fork):
        if a == b or (a is not None and b is not None and math.isnan(a) and math.isnan(b)):
            same += 1
            continue
        difference = "" if a is None or b is None else f"{b - a:+.3g}"
        table.add_row(name, *("" if value is None else f"{value:.6g}" for value in (a, b)), difference)
    if table.row_count:
        Console(width=110).print(table)
    say(f"{same} metrics of step {recorded.step} are the same")
