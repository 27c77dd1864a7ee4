"""Converts groups to the rows that a step trains.  Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import count
from math import isfinite, nan

from attrs import evolve

from grpo_core.errors import EngineError, PluginError
from grpo_core.protocols import AdvantageFunction
from grpo_core.records import Batch, Group, Rollout, Row
from grpo_core.tokens import sampled_versions


def with_advantages(
    groups: Sequence[Group], advantages: AdvantageFunction, *, all_rows: bool = False
) -> list[Group]:
    """Return the groups of a step; each rollout has its advantage, and says whether it is trained.

    Rollouts whose advantage is 0 (all of a group with equal rewards) are not trained: they have no policy
    gradient, and they do not count in the loss's average either (as in DAPO, arXiv 2503.14476, section 3.2,
    but without refilling the batch).  With ``all_rows`` they are, because the loss has another term that
    trains on them.  Rollouts that are masked (by the advantage function, or because they may not be trained)
    or have no sampled token are never trained.

    Raises PluginError if the advantage function returns anything but a finite float or None for each rollout.
    """
    scores = checked_scores(advantages(groups), groups, str(advantages))
    return [
        evolve(
            group,
            rollouts=tuple(
                _scored(rollout, score, all_rows=all_rows)
                for rollout, score in zip(group.rollouts, row, strict=True)
            ),
        )
        for group, row in zip(groups, scores, strict=True)
    ]


def _scored(rollout: Rollout, score: float | None, *, all_rows: bool) -> Rollout:
    advantage = score if rollout.train else None
    taught = advantage is not None and (all_rows or advantage != 0.0)
    return evolve(rollout, advantage=advantage, trained=taught and rollout.n_sampled > 0)


def make_batch(groups: Sequence[Group], *, step: int, temperature: float) -> Batch:
    """Make a row for each segment of each rollout that is trained, with the rollout's advantage.

    The groups are those of ``with_advantages``.
    """
    numbers = count()
    rows = tuple(
        Row(
            prompt_ids=segment.prompt_ids,
            tokens=segment.tokens,
            advantage=rollout.advantage,
            group=place,
            rollout=number,
            correct=_correct(rollout),
        )
        for place, group in enumerate(groups)
        for rollout, number in zip(group.rollouts, numbers, strict=False)
        if rollout.trained and rollout.advantage is not None
        for segment in rollout.segments
        if segment.tokens.n_sampled
    )
    masked: Counter[str] = Counter()
    for group in groups:
        masked[group.prompt.environment] += sum(rollout.advantage is None for rollout in group.rollouts)
    return Batch(step=step, rows=rows, temperature=temperature, masked=dict(+masked))


def _correct(rollout: Rollout) -> bool:
    if rollout.success is not None:
        return rollout.success
    return rollout.reward is not None and rollout.reward > 0


def checked_scores(
    scores: Sequence[Sequence[float | None]], groups: Sequence[Group], who: str
) -> list[list[float | None]]:
    """Check the result of an advantage function; return floats and None.  ``who`` names it in messages.

    Raises PluginError unless it is a finite number or None for each rollout.
    """
    try:
        sizes = [len(row) for row in scores]
    except TypeError:
        kind = type(scores).__name__
        raise PluginError(f"{who} returned a {kind}; expected a list of lists, one for each group") from None
    if sizes != [len(group.rollouts) for group in groups]:
        raise PluginError(
            f"{who} returned groups of sizes {sizes}; expected one number or None for each rollout: "
            f"{[len(group.rollouts) for group in groups]}"
        )
    return [
        [_number(value, f"{who}, prompt {group.prompt.id!r}, rollout {i}") for i, value in enumerate(row)]
        for group, row in zip(groups, scores, strict=True)
    ]


def _number(value: float | None, where: str) -> float | None:
    if value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = nan
    if not isfinite(number):
        raise PluginError(f"{where}: the advantage is {str(value)[:80]}; expected a finite number or None")
    return number


def check_staleness(groups: Sequence[Group], *, step: int, max_staleness: int) -> None:
    """Raises EngineError if a token was sampled by weights that the buffer did not allow.

    The buffer bounds the staleness by construction; what this finds is an engine that does not hold the
    weights that it said it holds.
    """
    oldest = step - max_staleness
    for group in groups:
        versions = sampled_versions(group.rollouts)
        wrong = versions[(versions < oldest) | (versions > step)]
        if wrong.size:
            raise EngineError(
                f"engine: prompt {group.prompt.id!r} came back with tokens of version {wrong.min()} for "
                f"step {step}; expected versions {oldest} to {step}"
            )
