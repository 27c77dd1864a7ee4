"""``grpo-core fork``: recomputes a step of a run with the original and with a changed configuration."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import evolve, field, fields_dict, frozen
from rich.console import Console
from rich.table import Table

from grpo_core import ConfigError, Group, Rollout, StepResult
from grpo_core.app import making
from grpo_core.commands.complaints import say
from grpo_core.config import check_settings, parse_settings
from grpo_core.kit import Config, PluginHost, aio, as_table, typed
from grpo_core.plugins.configured import changed, host_of
from grpo_core.plugins.options import Settings, Words
from grpo_core.reporting.stored import OF_ROLLOUT
from grpo_plugin_replay.history import StepRecord, compared, read
from grpo_plugin_replay.replay import Replayer, batch_of

CHANGEABLE = (
    "trainer.*",
    "loss.*",
    "optimizer.*",
    "scores.*",
    "advantage.*",
    "shaping.*",
    "health.max_non_finite",
)
"""Patterns of keys that a fork may change; other keys affect rollouts, which are stored."""
FIXED = tuple(
    f"trainer.{name}"
    for name in (
        "name",
        "steps",
        "epochs",
        "time_limit",
        "stop_when",
        "prompts_per_step",
        "fingerprints",
        "profile",
    )
)
"""Keys of these sections that do not affect a step, or that belong to the rollouts."""
WHY = (
    "a fork computes a step again from its stored rollouts, and this key changes how they were made, or has "
    "no effect"
)


@frozen(kw_only=True)
class Side:
    """One of the two computations of a step."""

    groups: Sequence[Group]
    result: StepResult
    saved: Path


def fork(
    run: Path,
    /,
    *,
    step: int,
    settings: Settings = None,
    scored: Path | None = None,
    no_plugin: Words = None,
) -> int:
    """Compute a step of a run again with another loss, learning rate or advantage, and show what differs.

    Parameters
    ----------
    run
        Directory of the run.
    step
        Step that is computed twice from the same weights and rollouts: as it was, and with the changes.
    settings
        Set a configuration key for this step, as in "trainer.lr=1e-4"; may be repeated.
    scored
        Directory that grpo-core score has written: the step has the rewards in it.
    no_plugin
        Do not load this installed plugin; may be repeated.
    """
    if not settings and scored is None:
        raise ConfigError(
            "fork needs something that changes: --set, as in --set loss.options.clip_low=0.1, or --scored"
        )
    return aio.to_the_end(_fork(run, step, parse_settings(settings or ()), scored, no_plugin or ()))


async def _fork(
    directory: Path, step: int, changes: Mapping[str, Any], scored: Path | None, block: Sequence[str]
) -> int:
    history = read(directory)
    recorded = history.step(step)
    groups = history.groups(step)
    given = groups if scored is None else rewarded(groups, read_rewards(scored, step), scored)
    check_settings(changes, CHANGEABLE, WHY, but=FIXED)
    host = host_of(recorded.config, block)
    config = changed(recorded.config, changes, host)
    others = reconsidered(groups, given, recorded.config, config, host)
    if scored is None and config == recorded.config:
        say("note: the run had these values already")
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
        base = Side(groups=groups, result=was.result, saved=await replayer.save("as it was"))
        threads = 0 if "threads" in changes.get("trainer", {}) else recorded.threads
        await replayer.make(config, before, threads=threads)
        result = await replayer.step(batch_of(others, recorded))
        forked = Side(groups=others, result=result, saved=await replayer.save("forked"))
        say(f"the first number that differs: {first_number(base, forked) or 'there is none'}")
        _show(recorded, base, forked)
    return 0


# ---------------------------------------------------------------------------------- other rewards


Rewards = Mapping[tuple[int, int], Mapping[str, Any]]
"""Lines of rewards by index of the group in its step and seed of the rollout."""


def read_rewards(scored: Path, step: int) -> Rewards:
    """Read the rewards that ``grpo-core score`` wrote for a step.  Raises ConfigError."""
    path = scored / "rollouts.jsonl" if scored.is_dir() else scored
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        of_step = [line for line in lines if line["step"] == step]
        found = {(line["group"], line["seed"]): line for line in of_step}
    except OSError as error:
        raise ConfigError(f"--scored {path}: cannot be read: {error.strerror}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"--scored {path}: is not a file of rewards as `grpo-core score` writes it: {error}"
        ) from error
    if not found:
        raise ConfigError(f"--scored {path}: none of its {len(lines):,} lines is of step {step}")
    if len(found) < len(of_step):
        raise ConfigError(f"--scored {path}: has two lines of the same rollout of step {step}")
    return found


def rewarded(groups: Sequence[Group], rewards: Rewards, scored: Path) -> list[Group]:
    """Return the groups with new rewards; rollouts without one keep their reward, with a message.

    Raises ConfigError if no rollout has a new reward.
    """
    rollouts = [(index, group, each) for index, group in enumerate(groups) for each in group.rollouts]
    fitting = {
        (index, rollout.seed): line
        for index, group, rollout in rollouts
        if (line := rewards.get((index, rollout.seed))) is not None and _fits(line, group, rollout)
    }
    judged = {key: line for key, line in fitting.items() if line.get("reward", 0) is not None}
    fits = f"{len(fitting)} of its {len(rewards)} lines of this step fit one of the {len(rollouts)} rollouts"
    if not judged:
        why = "none of them has a reward" if fitting else "it is of other rollouts"
        raise ConfigError(f"--scored {scored}: {fits}: {why}")
    kept = len(rollouts) - len(judged)
    say(f"rewards of {scored}: {fits}" + (f"; {kept} rollouts keep their rewards" if kept else ""))

    def other(index: int, rollout: Rollout) -> Rollout:
        if (line := judged.get((index, rollout.seed))) is None:
            return rollout
        where = f"--scored {scored}: group {index}, seed {rollout.seed}"
        return evolve(rollout, **_judgement(line, rollout, where))

    return [
        evolve(group, rollouts=tuple(other(index, rollout) for rollout in group.rollouts))
        for index, group in enumerate(groups)
    ]


def _fits(line: Mapping[str, Any], group: Group, rollout: Rollout) -> bool:
    """Whether prompt and original reward in a line, if present, match the rollout."""
    its = {"task": group.prompt.environment, "prompt": group.prompt.id, "stored_reward": rollout.reward}
    return all(line.get(name, value) == value for name, value in its.items())


@frozen(kw_only=True)
class _Judged:
    """A line of rewards; a key that it does not have leaves the rollout's value."""

    reward: float
    success: bool | None
    turn_rewards: tuple[float, ...]
    metrics: Mapping[str, float] = field(factory=dict)
    turn_states: tuple[str, ...] = ()
    reply_answer: str | None = None
    train: bool = True


def _judgement(line: Mapping[str, Any], rollout: Rollout, where: str) -> dict[str, Any]:
    """Return the fields of a rollout that a line replaces.  Raises ConfigError."""
    given = {**line}
    if rollout.turns <= 1:
        given.setdefault("turn_rewards", [line.get("reward")])
    try:
        judged = typed.checked(given, _Judged)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None
    turns, count = judged.turn_rewards, max(1, rollout.turns)
    if len(turns) != count or not math.isclose(sum(turns), judged.reward, abs_tol=1e-6):
        raise ConfigError(
            f"{where}: turn_rewards is {[*turns]!r:.80}; expected numbers of {count} turns, which add up to "
            f"the reward {judged.reward!r}"
        )
    replaced = given.keys() & fields_dict(_Judged).keys()
    return {name: getattr(judged, key) for name, key in OF_ROLLOUT.items() if key in replaced}


def reconsidered(
    groups: Sequence[Group], given: Sequence[Group], was: Config, now: Config, host: PluginHost
) -> Sequence[Group]:
    """Return the given groups, possibly with new rewards, with the advantages of another configuration."""
    learnt = [making.learning(each, making.loss(each.loss, host), host) for each in (was, now)]
    before, after = (
        (each.advantage, as_table(each).get("shaping"), learning.all_rows)
        for each, learning in zip((was, now), learnt, strict=True)
    )
    return groups if before == after and given is groups else learnt[1].with_advantages(given)


# ---------------------------------------------------------------------------------- what differs


def first_number(base: Side, fork: Side) -> str:
    """Describe the first difference in the order of the data flow: an advantage, a metric, a weight."""
    for one, other in zip(base.groups, fork.groups, strict=True):
        for index, (mine, its) in enumerate(zip(one.rollouts, other.rollouts, strict=True)):
            if mine.advantage != its.advantage or mine.trained != its.trained:
                shown = [
                    "masked" if each.advantage is None else f"{each.advantage!r}" for each in (mine, its)
                ]
                return f"the advantage of slot {one.slot}, rollout {index}: {shown[0]} -> {shown[1]}"
    for name, a, b in _metrics(base, fork):
        if a != b:
            return f"the metric {name}: {a!r} -> {b!r}"
    from safetensors.torch import load_file

    for path in sorted(base.saved.rglob("*.safetensors"), reverse=True):  # trainer/ before optimizer/
        theirs = load_file(fork.saved / path.relative_to(base.saved))
        for name, tensor in sorted(load_file(path).items()):
            if name in theirs and len(different := (tensor != theirs[name]).nonzero()):
                at = tuple(different[0].tolist())
                return f"{name}{[*at]}: {tensor[at].item()!r} -> {theirs[name][at].item()!r}"
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
