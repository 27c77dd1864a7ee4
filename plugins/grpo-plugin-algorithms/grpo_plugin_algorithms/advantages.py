"""Advantage functions of published methods, on groups; ``formulas`` computes them on numbers.  Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from grpo_core import ConfigError, Group, Rollout, advantages
from grpo_core.kit import Config
from grpo_plugin_algorithms import formulas

Scores = list[list[float | None]]
TokenScores = list[list[NDArray[np.floating[Any]] | None]]


def check_numbers(*, weights: Mapping[str, float] | None = None, **options: Any) -> None:
    known = ("scale", "ddof", "epsilon", "batch_epsilon", "floor", "discount")
    advantages.check_ranges(**{name: value for name, value in options.items() if name in known})
    numbers = options | {f"weights.{part}": weight for part, weight in (weights or {}).items()}
    for name, value in numbers.items():
        if isinstance(value, float) and not isfinite(value):
            raise ValueError(f"{name} is {value}; expected a finite number")
    if options.get("weight", 0) < 0:
        raise ValueError(f"weight is {options['weight']}; expected at least 0")


def check_scaled(*, scale: str = "group", **options: Any) -> None:
    check_numbers(scale=scale, **options)
    _refuse_idle(scale, {"ddof", "epsilon"} & set(options))


def check_scaled_parts(*, scale: str = "group", **options: Any) -> None:
    """Check like ``check_scaled``; the standard deviation over the step has a ``ddof``, too."""
    check_numbers(scale=scale, **options)
    _refuse_idle(scale, {"epsilon"} & set(options))


def check_by_turn(*, config: Config | None = None, **options: Any) -> None:
    """Check like ``check_scaled``; a group with equal rewards trains if the rewards of its turns differ."""
    check_scaled(**options)
    filters = () if config is None else config.filters
    keys = [f"[filters.{name}]" for name in filters if name.rpartition(":")[2] == "equal_rewards"]
    if config is not None and config.dynamic_sampling.enabled:
        keys.append("dynamic_sampling.enabled = true")
    if config is not None and keys:
        raise ConfigError(
            f"{keys[0]} filters groups whose rollouts have equal rewards, and advantage.name = "
            f"{config.advantage.name!r} learns from them where the rewards came at different turns: leave it "
            "out; [filters.pass_rate] filters prompts that are too easy or too hard"
        )


def _refuse_idle(scale: str, given: set[str]) -> None:
    if scale == "none" and given:
        raise ValueError(
            f"{min(given)} does nothing with scale = 'none', which does not divide: leave one of them out"
        )


def check_pass_at_k(*, group_size: int, k: int = 2, **options: Any) -> None:
    check_numbers(**options)
    if not 1 <= k <= group_size:
        raise ValueError(f"k is {k}; expected 1 to {group_size} (rollout.group_size)")


def reinforce_plus_plus(
    groups: Sequence[Group],
    *,
    baseline: bool = True,
    count: Literal["tokens", "rollouts"] = "tokens",
    floor: float = 1e-8,
) -> Scores:
    """Normalise over the whole step (REINFORCE++); see ``formulas.reinforce_plus_plus``.

    A group with equal rewards may have nonzero advantages if other groups differ: with ``baseline`` one small
    number for the whole group, which is 0 with ``count="rollouts"``.

    Args:
        groups: the groups of a step.
        baseline: subtract the mean of the group first (REINFORCE++-baseline).
        count: take mean and variance of the step over its sampled tokens, or over its rollouts.
        floor: lower bound of the variance.
    """
    lengths = [[float(rollout.n_sampled) for rollout in each.rollouts] for each in groups]
    return formulas.reinforce_plus_plus(
        [each.rewards for each in groups],
        lengths=lengths if count == "tokens" else None,
        baseline=baseline,
        floor=floor,
    )


def gdpo(
    groups: Sequence[Group],
    *,
    weights: Mapping[str, float] | None = None,
    scale: Literal["group", "others", "none"] = "group",
    leave_one_out: bool = False,
    ddof: int = 1,
    epsilon: float = 0.0,
    batch_epsilon: float = 0.0,
) -> Scores:
    """Normalise each part of the reward by itself, then their sum (GDPO); see ``formulas.gdpo``.

    The parts are the environment's ``Feedback.metrics``, added over the turns of a rollout.  A rollout with a
    part that is not finite is not trained.

    Args:
        groups: the groups of a step.
        weights: weight of each part that counts.  Default: all metrics of the rollouts, with weight 1.
        scale: divide a part by its standard deviation in the group, or among the other rollouts
            (``"others"``), or not (``"none"``).
        leave_one_out: compare each part with the mean of the other rollouts of its group.
        ddof: the variances are the sum of squares over n - ``ddof``.
        epsilon: added to the standard deviation of a part in its group.
        batch_epsilon: added to the standard deviation of the sums over the step.

    Raises ValueError if a rollout lacks a part.
    """
    parts = [[_parts(rollout, each, weights) for rollout in each.rollouts] for each in groups]
    return formulas.gdpo(
        parts,
        weights=weights,
        scale=scale,
        leave_one_out=leave_one_out,
        ddof=ddof,
        epsilon=epsilon,
        batch_epsilon=batch_epsilon,
    )


def parts_of_gdpo(*, weights: Mapping[str, float] | None = None, **options: Any) -> Sequence[str]:
    """Return the metrics that ``gdpo`` reads: all of them without weights."""
    return list(weights or ["*"])


def _parts(rollout: Rollout, its: Group, weights: Mapping[str, float] | None) -> Mapping[str, float]:
    if rollout.reward is None or rollout.left_out.keys() & (weights or rollout.left_out).keys():
        return {}  # a part that is not finite counts as a missing reward
    missing = sorted(set(weights or ()) - set(rollout.metrics))
    if missing or not rollout.metrics:
        raise ValueError(
            f"prompt {its.prompt.id!r} has no metric {', '.join(missing) or 'at all'}; its environment gives "
            f"Feedback.metrics {sorted(rollout.metrics)}"
        )
    return rollout.metrics


def max_rl(groups: Sequence[Group]) -> Scores:
    """Divide the differences from the group's mean by the mean (MaxRL); see ``formulas.max_rl``.

    Rewards must be at least 0.

    Args:
        groups: the groups of a step.
    """
    return [advantages.of_known(formulas.max_rl, each.rewards) for each in groups]


def pass_at_k(groups: Sequence[Group], *, k: int = 2, success: float | None = None) -> Scores:
    """Credit a rollout for what it adds to pass@k; see ``formulas.pass_at_k``.

    Args:
        groups: the groups of a step.
        k: number of rollouts that share a reward; at most ``rollout.group_size``.  A smaller group shares
            one among all its rollouts.
        success: reward from which a rollout is a success.  None: the task's own success, or a reward of 1 if
            it declares none.
    """

    def of_group(each: Group) -> list[float | None]:
        successes = each.successes(success)
        done = iter(formulas.pass_at_k(successes, min(k, max(1, len(successes)))))
        return [None if rollout.reward is None else next(done) for rollout in each.rollouts]

    return [of_group(each) for each in groups]


def turns(
    groups: Sequence[Group],
    *,
    discount: float = 1.0,
    scale: Literal["group", "none"] = "group",
    ddof: int = 1,
    epsilon: float = 0.0,
) -> TokenScores:
    """Credit each turn with the rewards that follow it; see ``formulas.turns``.

    The reward of a turn is the ``Feedback.reward`` that answers it.

    Args:
        groups: the groups of a step.
        discount: factor of a reward for each turn between it and the turn that is credited.
        scale: ``"group"`` divides by the standard deviation of the group's turns, ``"none"`` does not.
        ddof: the variance is the sum of squares over n - ``ddof``.
        epsilon: is added to the standard deviation.
    """
    scores = formulas.turns(
        [_turn_rewards(each) for each in groups], discount=discount, scale=scale, ddof=ddof, epsilon=epsilon
    )
    return _on_tokens(groups, scores)


def gigpo(
    groups: Sequence[Group],
    *,
    weight: float = 1.0,
    discount: float = 0.95,
    scale: Literal["group", "none"] = "group",
    ddof: int = 1,
    epsilon: float = 0.0,
) -> TokenScores:
    """Compare rollouts, and turns that begin in the same state (GiGPO); see ``formulas.gigpo``.

    An environment names the state that a turn leads to in ``Feedback.state``.  All rollouts of a group begin
    in the same state; a turn whose state has no name is not compared.

    Args:
        groups: the groups of a step.
        weight: factor of the advantages of turns.
        discount: factor of a reward for each turn between it and the turn that is credited.
        scale: ``"group"`` divides by the standard deviation of what is compared, ``"none"`` does not.
        ddof: the variance is the sum of squares over n - ``ddof``.
        epsilon: is added to the standard deviation.
    """
    scores = formulas.gigpo(
        [_turn_rewards(each) for each in groups],
        [[_states(rollout) for rollout in each.rollouts] for each in groups],
        weight=weight,
        discount=discount,
        scale=scale,
        ddof=ddof,
        epsilon=epsilon,
    )
    return _on_tokens(groups, scores)


def _turn_rewards(its: Group) -> list[Sequence[float] | None]:
    return [
        None if rollout.reward is None else rollout.turn_rewards or (rollout.reward,)
        for rollout in its.rollouts
    ]


def _states(rollout: Rollout) -> list[str | None]:
    """Return the name of the state before each turn; "" is the prompt, None is unnamed."""
    count = max(1, len(rollout.turn_rewards))
    led_to = [state or None for state in rollout.turn_states] or [None] * count
    return ["", *led_to][:count]


def _on_tokens(groups: Sequence[Group], scores: Sequence[Sequence[Sequence[float] | None]]) -> TokenScores:
    """Assign the advantage of each turn to its sampled tokens."""
    return [
        [
            None if its is None else np.repeat(its, rollout.turn_tokens or (rollout.n_sampled,))
            for rollout, its in zip(each.rollouts, row, strict=True)
        ]
        for each, row in zip(groups, scores, strict=True)
    ]
