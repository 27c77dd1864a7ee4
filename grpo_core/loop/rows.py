"""Converts groups to the rows that a step trains, with the default advantage function.  Pure.

An advantage function takes the groups of a step and returns, for each group, one float or None for each
rollout.  None masks the rollout: it is not trained and does not count.  Plugins add more with
``grpo_advantages``.  The formula is in ``grpo_core.advantages``.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from math import isfinite, nan
from statistics import fmean
from typing import Any, Literal, TypeAlias

import numpy as np
from attrs import evolve, frozen
from numpy.typing import NDArray

from grpo_core.contracts import advantages as formulas
from grpo_core.contracts.errors import EngineError, PluginError
from grpo_core.contracts.protocols import AdvantageFunction, Shaping
from grpo_core.contracts.records import Batch, Group, Rollout, Row
from grpo_core.contracts.tokens import Ids, Tokens

Advantages: TypeAlias = NDArray[np.float64]
"""Advantage of each sampled token of a rollout."""
Scores: TypeAlias = list[list[float | Advantages | None]]
"""Advantages of the rollouts of each group; None masks a rollout."""


def with_advantages(
    groups: Sequence[Group],
    advantages: AdvantageFunction,
    *,
    shaping: Shaping | None = None,
    all_rows: bool = False,
) -> list[Group]:
    """Return the groups of a step; each rollout has its advantage and whether it is trained.

    Rollouts whose advantage is 0 (all of a group with equal rewards) are not trained: they have no policy
    gradient, and they do not count in the loss's average either (as in DAPO, arXiv 2503.14476, section 3.2,
    but without refilling the batch).  With ``all_rows`` they are trained, because another term of the loss
    needs them, and so are rollouts with a hint from which it learns.  Rollouts that are masked (by the
    advantage function, or because they may not be trained) or have no sampled token are never trained.  The
    advantages compare shaped rewards, if there is a ``shaping``; the groups keep theirs.

    Raises PluginError if the advantage function returns anything but a finite float, one for each sampled
    token, or None for each rollout.
    """
    compared = groups if shaping is None else shaping(groups)
    scores = checked_scores(advantages(compared), groups, str(advantages))
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


def _scored(rollout: Rollout, score: float | Advantages | None, *, all_rows: bool) -> Rollout:
    """Return a rollout with its score.  Unlike ``evolve``, this converts no other value again."""
    its: dict[str, Any] = {"advantage": None, "token_advantages": None, "trained": False}
    score = score if rollout.train else None
    if isinstance(score, float):
        trained = (all_rows or score != 0.0 or bool(rollout.hint_ids)) and rollout.n_sampled > 0
        its |= {"advantage": score, "trained": trained}
    elif score is not None:
        its = {"advantage": float(score.mean()), "token_advantages": score, "trained": True}
    scored = object.__new__(type(rollout))
    object.__setattr__(scored, "__dict__", vars(rollout) | its)
    return scored


def make_batch(groups: Sequence[Group], *, step: int, temperature: float) -> Batch:
    """Make a row for each segment of each rollout that is trained, with the rollout's advantage.

    The groups are those of ``with_advantages``.
    """
    numbers = count()
    rows = tuple(
        row
        for place, group in enumerate(groups)
        for rollout, number in zip(group.rollouts, numbers, strict=False)
        if rollout.trained and rollout.advantage is not None
        for row in _rows(rollout, rollout.advantage, place, number)
    )
    masked: Counter[str] = Counter()
    for group in groups:
        masked[group.prompt.environment] += sum(rollout.advantage is None for rollout in group.rollouts)
    return Batch(step=step, rows=rows, temperature=temperature, masked=dict(+masked))


def _rows(rollout: Rollout, advantage: float, group: int, number: int) -> Iterator[Row]:
    """Yield a row for each segment that has sampled tokens."""
    begin = 0
    for segment in rollout.segments:
        if not (n := segment.tokens.n_sampled):
            continue
        of_tokens = rollout.token_advantages
        its = advantage if of_tokens is None else _plain(of_tokens[begin : begin + n])
        begin += n
        yield Row(
            prompt_ids=segment.prompt_ids,
            tokens=segment.tokens,
            advantage=its if isinstance(its, float) else float(its.mean()),
            group=group,
            rollout=number,
            correct=rollout.right,
            token_advantages=None if isinstance(its, float) else its.astype(np.float32),
            hint_prefix=rollout.hint_prefix,
            hint_ids=rollout.hint_ids,
        )


def _plain(values: Advantages) -> float | Advantages:
    """Return the one number that all tokens have, or the array if they differ."""
    if not len(values):
        return 0.0
    return float(values[0]) if values.min() == values.max() else values


def checked_scores(scores: Sequence[Sequence[Any]], groups: Sequence[Group], who: str) -> Scores:
    """Check the result of an advantage function; return floats, arrays and None.

    ``who`` names it in messages.  An array whose numbers are all equal becomes a float.  Raises PluginError
    unless the result is a finite number, one for each sampled token, or None, for each rollout.
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
        [
            value
            if value is None or (type(value) is float and isfinite(value))
            else _score(value, rollout, f"{who}, prompt {group.prompt.id!r}, rollout {i}")
            for i, (value, rollout) in enumerate(zip(row, group.rollouts, strict=True))
        ]
        for group, row in zip(groups, scores, strict=True)
    ]


def _score(value: Any, rollout: Rollout, where: str) -> float | Advantages | None:
    if not (isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.ndim)):
        return _number(value, where)
    try:
        array = np.asarray(value, np.float64)
    except (TypeError, ValueError):
        array = np.array([nan])
    if array.shape != (rollout.n_sampled,) and not (array.size and np.isnan(array).all()):
        raise PluginError(
            f"{where}: the advantages have shape {list(array.shape)}; expected one for each of its "
            f"{rollout.n_sampled} sampled tokens"
        )
    if not np.isfinite(array).all():
        raise PluginError(f"{where}: the advantages are {str(value)[:80]}; expected finite numbers")
    return _plain(array)


def _number(value: Any, where: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = nan
    if not isfinite(number):
        raise PluginError(f"{where}: the advantage is {str(value)[:80]}; expected a finite number or None")
    return number


def check_staleness(groups: Sequence[Group], *, step: int, max_staleness: int) -> None:
    """Raises EngineError if a token was sampled by weights that the buffer did not allow.

    The buffer bounds the staleness by construction; this finds an engine that does not hold the weights that
    it reports.
    """
    oldest = step - max_staleness
    versions = sampled_versions(rollout for group in groups for rollout in group.rollouts)
    if oldest <= versions.min(initial=step) and versions.max(initial=step) <= step:
        return
    for group in groups:
        versions = sampled_versions(group.rollouts)
        wrong = versions[(versions < oldest) | (versions > step)]
        if wrong.size:
            raise EngineError(
                f"engine: prompt {group.prompt.id!r} came back with tokens of version {wrong.min()} for "
                f"step {step}; expected versions {oldest} to {step}"
            )


def shaped_rewards(groups: Sequence[Group]) -> dict[str, float]:
    """Return the mean of the shaped rewards by task, as metrics."""
    rewards: dict[str, list[float]] = defaultdict(list)
    for group in groups:
        rewards[group.prompt.environment] += [reward for reward in group.rewards if reward is not None]
    return {f"shaped_reward/{task}": fmean(its) for task, its in sorted(rewards.items()) if its}


def sampled_versions(rollouts: Iterable[Rollout]) -> Ids:
    """Return the version of the weights for each sampled token of all rollouts, int32 [n]."""
    parts = [segment.tokens for rollout in rollouts for segment in rollout.segments]
    if not parts:
        return Tokens.empty().versions
    versions: Ids = np.concatenate([part.versions for part in parts])
    sampled: Ids = versions[np.concatenate([part.sampled for part in parts])]
    return sampled


# ---------------------------------------------------------------------------------- advantages


@frozen
class Clipped:
    """An advantage function clipped to [``low``, ``high``]; None means no limit."""

    function: AdvantageFunction
    low: float | None = None
    high: float | None = None

    def __call__(self, groups: Sequence[Group], /) -> Scores:
        scores = checked_scores(self.function(groups), groups, str(self))
        return [[self._limited(value) for value in row] for row in scores]

    def _limited(self, value: float | Advantages | None) -> float | Advantages | None:
        if value is None or isinstance(value, float):
            return None if value is None else formulas.clipped(value, self.low, self.high)
        return np.clip(value, self.low, self.high)

    def __str__(self) -> str:
        return str(self.function)


def check_group(*, scale: str = "group", **options: Any) -> None:
    numbers = {name: options[name] for name in ("ddof", "epsilon") if name in options}
    formulas.check_ranges(scale=scale, **numbers)
    if scale == "none" and numbers:
        raise ValueError(
            f"{min(numbers)} does nothing with scale = 'none', which does not divide: leave one of them out"
        )


def group(
    groups: Sequence[Group],
    *,
    scale: Literal["group", "batch", "others", "none"] = "group",
    leave_one_out: bool = False,
    ddof: int = 1,
    epsilon: float = 0.0,
) -> list[list[float | None]]:
    """Compute advantages relative to the group's mean reward (GRPO); see ``grpo_core.advantages.normalize``.

    A rollout without a reward is masked.

    Args:
        groups: the groups of a step.
        scale: ``"group"`` divides by the standard deviation of the group's rewards, ``"batch"`` by that of
            all rewards of the step, ``"others"`` by that of the other rewards of the group (unless they are
            equal), ``"none"`` does not divide.
        leave_one_out: compare each reward with the mean of the other rewards of its group.
        ddof: the variance is the sum of squares over n - ``ddof``.
        epsilon: is added to the standard deviation.

    Raises ValueError for a reward that is not finite, or an unknown ``scale``.
    """
    rewards = [each.rewards for each in groups]
    return formulas.group(rewards, scale=scale, leave_one_out=leave_one_out, ddof=ddof, epsilon=epsilon)
