"""The share of groups of a model that have a training signal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from grpo_core import advantages, session
from grpo_core.app import sourced
from grpo_plugin_audit.records import TOLERANCE, Check, Finding, Rate, Severity, spread

FEW = 0.2
"""Share of groups with a training signal below which most of the generation is wasted."""


def training_signal(
    groups: Sequence[Sequence[float | None]], *, success: float | None, model: str
) -> Finding:
    """Judge the rewards of groups of a model; a group of equal rewards has no training signal.

    Args:
        groups: the rewards of each prompt's rollouts; None is unscored.
        success: reward of a success, if the environment declares it.
        model: name of the model.
    """
    check = Check("statistical.training_signal", f"groups that would teach {model}")
    scored = [[reward for reward in group if reward is not None] for group in groups]
    scored = [group for group in scored if len(group) > 1]
    if not scored:
        return check.not_applicable("no group has two rewards")
    rewards = [reward for group in scored for reward in group]
    rate = Rate(sum(spread(group) > TOLERANCE for group in scored), len(scored))
    top = max(rewards) if success is None else success
    hopeless = sum(not advantages.reaches(max(group), top) for group in scored)
    solved = sum(advantages.reaches(min(group), top) for group in scored)
    severity: Severity = "passed" if rate.share >= FEW else "noted"
    if not rate.successes:
        severity = "warned"
    what = "success" if success is not None else "best reward"
    result = f"{rate}; mean reward {fmean(rewards):.3g}; {hopeless} groups never reach the {what}, "
    result += f"{solved} always do"
    advice = "choose easier or harder prompts, larger groups, or partial credit"
    return check.finding(severity, result, "", advice)


async def played_signal(
    name: str,
    options: Mapping[str, Any],
    model: str | None,
    engine: Mapping[str, Any],
    *,
    prompts: int,
    seed: int,
    status: Callable[[str], None],
) -> Finding:
    """Play groups with a model as in training, and judge their training signal.

    Args:
        name: name of the environment.
        options: options of the environment, which may contain sections of a run's configuration.
        model: a directory, a hub id, the name of a model, or the directory of a run; None: a hosted model.
        engine: the section ``engine``.
        prompts: number of groups.
        seed: seed of the rollouts.
        status: called with messages to the user.

    Raises GrpoError if the model or the environment cannot be started.
    """
    own = {key: value for key, value in options.items() if key != "environment" and key not in sourced.DATA}
    data = {key: options[key] for key in sourced.DATA if key in options}
    settings: dict[str, Any] = {
        "tasks": {"audited": {"env": name, "options": own, **data}},
        "environment": options.get("environment", {}),
        "engine": engine,
    }
    async with session(model=model, env={"audited": name}, status=status, **settings) as playing:
        given = await playing.prompts()
        some = [given[index] for index in range(0, len(given), max(1, len(given) // prompts))][:prompts]
        size = playing.config.rollout.group_size
        status(f"playing {len(some)} groups of {size}")
        groups = await playing.play(some, group_size=size, seed=seed)
        success = playing.environments["audited"].about.success
    rewards = [[rollout.reward for rollout in group] for group in groups]
    return training_signal(rewards, success=success, model=model or str(engine["name"]))
