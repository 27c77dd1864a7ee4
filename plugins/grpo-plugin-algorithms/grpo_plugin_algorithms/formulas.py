"""Advantages as functions of plain numbers, like ``grpo_core.advantages``.  Pure Python, in float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import comb, fsum, inf, isfinite, sqrt
from typing import Literal

from grpo_core import advantages

Rewards = Sequence["float | None"]
"""Rewards of one group, or other scores of its rollouts; None is unscored."""
Turns = Sequence["Sequence[float] | None"]
"""Rewards of the turns of each rollout of a group; None is an unscored rollout."""


def max_rl(rewards: Sequence[float]) -> list[float]:
    """Divide the differences from the mean by the mean (MaxRL, arXiv 2602.02710).

    With mean m::

        advantage = (r - m) / m

    Its expectation is the gradient of the log-likelihood of a success, truncated after n terms of its series,
    so rarely solved prompts have a larger weight.  A mean of 0 gives advantages of 0.

    Args:
        rewards: rewards of the rollouts of one group, each at least 0.

    Raises ValueError for a reward that is negative or not finite.
    """
    if not all(0 <= reward < inf for reward in rewards):
        raise ValueError(f"max_rl divides by the mean of rewards >= 0; got {list(rewards)}")
    if len(rewards) < 2 or advantages.equal(rewards):
        return [0.0] * len(rewards)
    mean = fsum(rewards) / len(rewards)
    return [reward / mean - 1.0 for reward in rewards]


def pass_at_k(successes: Sequence[bool], k: int) -> list[float]:
    """Credit a rollout for what it adds to pass@k (Pass@k Training, arXiv 2508.10751, section 3).

    A reward belongs to k rollouts at once: 1 if one of them is a success.  Of n rollouts f fail.  Over all
    choices of k of them::

        m = 1 - C(f, k) / C(n, k)            mean reward of a choice
        s = sqrt(m (1 - m))                  its standard deviation
        success:  (1 - m) / s
        failure:  (1 - m - C(f - 1, k - 1) / C(n - 1, k - 1)) / s

    which is the mean advantage of the choices that a rollout belongs to.  If every choice has a success, or
    none has, all advantages are 0.  ``k = 1`` is ``normalize(..., ddof=0)``.

    Args:
        successes: whether each rollout of one group is a success.
        k: rollouts of a choice, from 1 to the number of rollouts.
    """
    n, failures = len(successes), sum(not success for success in successes)
    if not 1 <= k <= max(n, 1):
        raise ValueError(f"k is {k}; expected 1 to {n}, the number of rollouts with a reward")
    if n < 2 or failures < k or failures == n:
        return [0.0] * n
    missed = comb(failures, k) / comb(n, k)
    spread = sqrt(missed * (1 - missed))
    failed = (missed - comb(failures - 1, k - 1) / comb(n - 1, k - 1)) / spread
    return [missed / spread if success else failed for success in successes]


def reinforce_plus_plus(
    rewards: Sequence[Rewards],
    *,
    lengths: Sequence[Sequence[float]] | None = None,
    baseline: bool = True,
    floor: float = 1e-8,
) -> list[list[float | None]]:
    """Normalise over all rollouts of a step (REINFORCE++, arXiv 2501.03262).

    With m the mean of a group (0 without ``baseline``)::

        a = r - m
        advantage = (a - mean(a)) / sqrt(max(variance(a), floor))

    Mean and variance (over n, not n - 1) are taken over all tokens of the step, so a rollout is weighted by
    its length.

    Args:
        rewards: rewards of each group.
        lengths: number of sampled tokens of each rollout; None counts each rollout once.
        baseline: subtract the mean of the group first.
        floor: lower bound of the variance.
    """
    advantages.check_ranges(floor=floor)
    centred: Sequence[Rewards] = rewards
    if baseline:
        centred = [
            advantages.of_known(lambda known: advantages.normalize(known, scale="none"), each)
            for each in rewards
        ]
    return whiten(centred, weights=lengths, floor=floor)


def whiten(
    values: Sequence[Rewards], *, weights: Sequence[Sequence[float]] | None = None, floor: float = 1e-8
) -> list[list[float | None]]:
    """Shift and scale numbers to mean 0 and variance 1 over all lists; None stays None.

    Args:
        values: lists of numbers, for example one list for each group, or the tokens of each rollout.
        weights: weight of each number; None weights them equally.
        floor: lower bound of the variance.
    """
    weights = weights or [[1.0] * len(row) for row in values]
    pairs = [
        (value, weight)
        for row, its in zip(values, weights, strict=True)
        for value, weight in zip(row, its, strict=True)
        if value is not None
    ]
    numbers = [value for value, _ in pairs]
    if not all(map(isfinite, numbers)):
        raise ValueError(f"values are not finite: {numbers}")
    total = fsum(weight for _, weight in pairs)
    if not total or advantages.equal(numbers):
        return [[None if value is None else 0.0 for value in row] for row in values]
    mean = fsum(value * weight for value, weight in pairs) / total
    if abs(mean) <= 1e-12 * max(map(abs, numbers)):
        mean = 0.0  # keeps zeros exactly 0
    variance = fsum((value - mean) ** 2 * weight for value, weight in pairs) / total
    divisor = sqrt(max(variance, floor))
    return [[None if value is None else (value - mean) / divisor for value in row] for row in values]


def gdpo(
    parts: Sequence[Sequence[Mapping[str, float | None]]],
    *,
    weights: Mapping[str, float] | None = None,
    scale: Literal["group", "others", "none"] = "group",
    leave_one_out: bool = False,
    ddof: int = 1,
    epsilon: float = 0.0,
    batch_epsilon: float = 0.0,
) -> list[list[float | None]]:
    """Normalise each part of the reward by itself, and then their sum over the step (GDPO, arXiv 2601.05242).

    With A_k the advantages of part k in its group (see ``normalize``)::

        a = sum over k of w_k A_k
        advantage = (a - mean(a)) / (std(a) + batch_epsilon)

    with mean and standard deviation over all rollouts of the step.  A part whose reward is None adds nothing;
    a rollout without any part has None.

    Args:
        parts: rewards by name of each rollout of each group.
        weights: weight of each part that counts; None takes all parts with weight 1.
        scale: what the differences are divided by; see ``Scale``.
        leave_one_out: compare each part with the mean of the other rollouts of its group.
        ddof: both variances are the sum of squares divided by n - ``ddof``.
        epsilon: added to the standard deviation of a part in its group.
        batch_epsilon: added to the standard deviation of the sums.
    """
    advantages.check_ranges(ddof=ddof, epsilon=epsilon)
    weights = weights or dict.fromkeys(sorted({name for row in parts for each in row for name in each}), 1.0)

    one = partial(advantages.normalize, scale=scale, leave_one_out=leave_one_out, ddof=ddof, epsilon=epsilon)
    sums: list[list[float | None]] = []
    for row in parts:
        scored = {name: advantages.of_known(one, [each.get(name) for each in row]) for name in weights}
        sums.append(
            [
                advantages.combine({name: its[i] for name, its in scored.items()}, weights)
                for i in range(len(row))
            ]
        )
    numbers = [value for row in sums for value in row if value is not None]
    if len(numbers) <= ddof or advantages.equal(numbers):
        return [[None if value is None else 0.0 for value in row] for row in sums]
    mean, divisor = fsum(numbers) / len(numbers), advantages.deviation(numbers, ddof) + batch_epsilon
    if abs(mean) <= 1e-12 * max(map(abs, numbers)):
        mean = 0.0  # gives equal rewards an advantage of exactly 0
    return [[None if value is None else (value - mean) / divisor for value in row] for row in sums]


def returns(rewards: Sequence[float], discount: float = 1.0) -> list[float]:
    """Return the discounted return of each turn: the sum over later rewards of reward * discount^distance.

    Args:
        rewards: reward of each turn.
        discount: between 0 (only the turn's own reward) and 1.
    """
    sums: list[float] = []
    for reward in reversed(rewards):
        sums.append(reward + discount * (sums[-1] if sums else 0.0))
    return sums[::-1]


def turns(
    rewards: Sequence[Turns],
    *,
    discount: float = 1.0,
    scale: Literal["group", "none"] = "group",
    ddof: int = 1,
    epsilon: float = 0.0,
) -> list[list[list[float] | None]]:
    """Credit each turn with the rewards that follow it, relative to the turns of its group.

    With G the ``returns`` of a turn, m and s their mean and standard deviation over all turns of the group::

        advantage = (G - m) / (s + epsilon)

    This is GRPO with process supervision (arXiv 2402.03300, section 4.1.3), except that returns are summed
    before the normalisation.  With one turn in each rollout it equals ``group``.

    Args:
        rewards: rewards of the turns of each rollout of each group.
        discount: factor of a reward for each turn between it and the turn that is credited.
        scale: what the differences are divided by; see ``Scale``.
        ddof: the variance is the sum of squares over n - ``ddof``.
        epsilon: is added to the standard deviation.
    """
    advantages.check_ranges(discount=discount)
    one = partial(advantages.normalize, scale=scale, ddof=ddof, epsilon=epsilon)
    scores: list[list[list[float] | None]] = []
    for row in rewards:
        sums = [None if its is None else returns(its, discount) for its in row]
        flat = iter(one([value for its in sums if its is not None for value in its]))
        scores.append([None if its is None else [next(flat) for _ in its] for its in sums])
    return scores


def gigpo(
    rewards: Sequence[Turns],
    states: Sequence[Sequence[Sequence[str | None]]],
    *,
    weight: float = 1.0,
    discount: float = 0.95,
    scale: Literal["group", "none"] = "group",
    ddof: int = 1,
    epsilon: float = 0.0,
) -> list[list[list[float] | None]]:
    """Compare whole rollouts, and turns that begin in the same state (GiGPO, arXiv 2505.10978).

    With R a rollout's reward and G the ``returns`` of a turn::

        advantage = normalize(R, in the group) + weight * normalize(G, among turns that begin as it does)

    A turn whose state occurs once has only the first term.

    Args:
        rewards: rewards of the turns of each rollout of each group.
        states: name of the state before each of these turns; a turn with None is not compared.
        weight: factor of the second term.
        discount: factor of a reward for each turn between it and the turn that is credited.
        scale: what the differences are divided by; see ``Scale``.
        ddof: the variance is the sum of squares over n - ``ddof``.
        epsilon: is added to the standard deviation.
    """
    advantages.check_ranges(discount=discount)
    one = partial(advantages.normalize, scale=scale, ddof=ddof, epsilon=epsilon)
    scores: list[list[list[float] | None]] = []
    for row, its_states in zip(rewards, states, strict=True):
        whole = advantages.of_known(one, [None if its is None else fsum(its) for its in row])
        sums = [None if its is None else returns(its, discount) for its in row]
        turns_of: dict[str, list[tuple[int, int]]] = {}
        for i, (its, begun) in enumerate(zip(sums, its_states, strict=True)):
            for t, state in enumerate(begun if its is not None else ()):
                if state is not None:
                    turns_of.setdefault(state, []).append((i, t))
        scores.append(
            [None if a is None else [a] * len(its or ()) for a, its in zip(whole, sums, strict=True)]
        )
        for turns_in_state in turns_of.values():
            compared = one([sums[i][t] for i, t in turns_in_state])  # type: ignore[index]
            for (i, t), value in zip(turns_in_state, compared, strict=True):
                scores[-1][i][t] += weight * value  # type: ignore[index]
    return scores
