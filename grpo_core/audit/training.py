"""Judgement of a model's groups: how many of them would teach it something.  Pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from attrs import frozen

from grpo_core.audit.records import TOLERANCE, Finding, Rate, Severity, spread
from grpo_core.audit.rewards import not_applicable


@frozen(kw_only=True)
class PlayingModel:
    """The model that plays groups.

    Attributes:
        target: directory, hub id or name of a model, or directory of a run.
        engine: engine that generates; None: as in the configuration.
        prompts: number of prompts.
        seed: seed of the rollouts.
    """

    target: str
    engine: str | None = None
    prompts: int = 24
    seed: int = 0


FEW = 0.2
"""Share of groups that teach below which most of the generation is for nothing."""


def training_signal(
    groups: Sequence[Sequence[float | None]], *, success: float | None, model: str
) -> Finding:
    """Judge the rewards of groups that a model has played; a group of equal rewards has no advantage.

    Args:
        groups: the rewards of each prompt's rollouts; None is unscored.
        success: reward of a success, if the environment declares it.
        model: name of the model.
    """
    check, title = "statistical.training_signal", f"groups that would teach {model}"
    scored = [[reward for reward in group if reward is not None] for group in groups]
    scored = [group for group in scored if len(group) > 1]
    if not scored:
        return not_applicable(check, title, "no group has two rewards")
    rewards = [reward for group in scored for reward in group]
    rate = Rate(sum(spread(group) > TOLERANCE for group in scored), len(scored))
    top = max(rewards) if success is None else success
    hopeless = sum(max(group) < top - TOLERANCE for group in scored)
    solved = sum(min(group) >= top - TOLERANCE for group in scored)
    severity: Severity = "passed" if rate.share >= FEW else "noted"
    if not rate.successes:
        severity = "warned"
    what = "success" if success is not None else "best reward"
    return Finding(
        check=check,
        title=title,
        severity=severity,
        told=f"{rate}; mean reward {fmean(rewards):.3g}; {hopeless} groups never reach the {what}, {solved} "
        "always do",
        advice=""
        if severity == "passed"
        else "choose easier or harder prompts, larger groups, or partial credit",
        measured=rate.measured() | {"mean_reward": fmean(rewards), "hopeless": hopeless, "solved": solved},
    )
