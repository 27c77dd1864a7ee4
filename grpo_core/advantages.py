"""Formulas of advantages: what a reward is worth next to others.  Pure Python, in float64.

Each function takes plain numbers: the rewards of the rollouts of one group, or of all groups of a step, as
lists.  A reward that is None takes part in no mean, and its advantage is None.  Equal rewards (see ``equal``)
have advantage 0 exactly.  ``grpo_core.loop.advantages`` offers the same formulas to the configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import comb, fsum, isfinite, sqrt
from typing import Literal

Rewards = Sequence["float | None"]
"""Rewards of one group, or numbers that stand for them."""
Scale = Literal["group", "batch", "others", "none"]
"""A choice of the standard deviation that divides the differences: that of the group's rewards, of all
rewards of the step, or of the other rewards of the group; ``"none"`` does not divide."""

EQUAL = 1e-6
"""Rewards of a group that differ by less than this share of the largest are equal.

Float noise must not pass for a signal: divided by its own standard deviation it would be as loud as a real
difference.
"""

SMALLEST = 1e-150
"""Differences below this count as 0: their squares are 0 in float64."""


def equal(rewards: Sequence[float], tolerance: float = 0.0) -> bool:
    """Return whether a group's rewards differ by no more than ``tolerance``, or than float noise (``EQUAL``).

    Metrics, filters and advantages share this definition.  No rewards at all are equal.
    """
    if not rewards:
        return True
    spread = max(rewards) - min(rewards)
    return spread <= max(tolerance, SMALLEST, EQUAL * max(map(abs, rewards)))


# ---------------------------------------------------------------------------------- relative to the group


def group(
    rewards: Sequence[Rewards],
    *,
    scale: Scale = "group",
    leave_one_out: bool = False,
    ddof: int = 1,
    epsilon: float = 0.0,
) -> list[list[float | None]]:
    """Compute the advantages of all groups of a step; see ``normalize``.

    ``scale="batch"`` divides each group's differences from its mean by the standard deviation of all rewards
    of the step (Lite PPO, arXiv 2508.08221).

    Args:
        rewards: rewards of each group.
        scale: what the differences are divided by; see ``Scale``.
        leave_one_out: compare each reward with the mean of the other rewards of its group.
        ddof: the variance is the sum of squares over n - ``ddof``.
        epsilon: is added to the standard deviation.
    """
    check_ranges(scale=scale, ddof=ddof, epsilon=epsilon)
    if scale != "batch":
        one = partial(normalize, scale=scale, leave_one_out=leave_one_out, ddof=ddof, epsilon=epsilon)
        return [of_known(one, each) for each in rewards]
    centred = [
        of_known(lambda known: normalize(known, scale="none", leave_one_out=leave_one_out), each)
        for each in rewards
    ]
    everything = _numbers(rewards)
    if len(everything) <= ddof or equal(everything):
        return [[None if value is None else 0.0 for value in row] for row in centred]
    divisor = deviation(everything, ddof) + epsilon
    return [[None if value is None else value / divisor for value in row] for row in centred]


def normalize(
    rewards: Sequence[float],
    *,
    scale: Literal["group", "others", "none"] = "group",
    leave_one_out: bool = False,
    ddof: int = 1,
    epsilon: float = 0.0,
) -> list[float]:
    """Compute the advantages of one group's rewards, relative to their mean (GRPO, arXiv 2402.03300 eq. 1).

    With n rewards r, mean m and standard deviation s (the sum of squares over n - ``ddof``)::

        advantage = (r - m)                  scale="none" (Dr. GRPO, arXiv 2503.20783)
        advantage = (r - m) / (s + epsilon)  scale="group"; at most (n - 1) / sqrt(n) in magnitude

    ``leave_one_out`` takes the mean of the *other* rewards as the baseline (RLOO, arXiv 2402.14740), which
    is the same times n / (n - 1).  ``scale="others"`` divides by the standard deviation of the other rewards,
    too, unless these are equal: then the difference stays as it is.  Equal rewards (see ``equal``) and a
    single reward have advantage 0.

    Args:
        rewards: rewards of the rollouts of one group.
        scale: what the differences are divided by; see ``Scale``.
        leave_one_out: compare each reward with the mean of the other rewards of its group.
        ddof: 1 for the sample's standard deviation, 0 for the population's.
        epsilon: is added to the standard deviation.

    Raises ValueError for a reward that is not finite, or an option out of range.
    """
    if scale not in ("group", "others", "none"):
        raise ValueError(f"scale is {scale!r}; expected 'group' or 'others' or 'none'")
    check_ranges(ddof=ddof, epsilon=epsilon)
    _finite(rewards)
    n = len(rewards)
    if n < 2 or equal(rewards):
        return [0.0] * n
    mean = fsum(rewards) / n
    centred = [reward - mean for reward in rewards]
    factor = n / (n - 1) if leave_one_out else 1.0
    if scale == "others":
        return [c * factor / _others(rewards, i, ddof, epsilon) for i, c in enumerate(centred)]
    if scale == "group":
        factor /= sqrt(fsum(c * c for c in centred) / (n - ddof)) + epsilon
    return [c * factor for c in centred]


def _others(rewards: Sequence[float], place: int, ddof: int, epsilon: float) -> float:
    """Return what a reward's difference is divided by: the others' deviation, or 1 if they are equal."""
    others = [*rewards[:place], *rewards[place + 1 :]]
    if len(others) <= ddof or equal(others):
        return 1.0
    return deviation(others, ddof) + epsilon


def max_rl(rewards: Sequence[float]) -> list[float]:
    """Divide the differences from the mean by the mean (MaxRL, arXiv 2602.02710).

    With mean m::

        advantage = (r - m) / m

    Its expectation is the gradient of the log-likelihood of a success, to the order n of its series: a prompt
    that is rarely solved counts more.  A mean of 0 gives 0.

    Args:
        rewards: rewards of the rollouts of one group, at least 0 each.

    Raises ValueError for a reward that is negative or not finite.
    """
    _finite(rewards)
    if any(reward < 0 for reward in rewards):
        raise ValueError(f"max_rl divides by the mean of rewards >= 0; got {list(rewards)}")
    if len(rewards) < 2 or equal(rewards):
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


# ---------------------------------------------------------------------------------- relative to the step


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

    Mean and variance (over n, not n - 1) are those of all tokens of the step: a rollout counts with its
    length.

    Args:
        rewards: rewards of each group.
        lengths: number of sampled tokens of each rollout; None counts each rollout once.
        baseline: subtract the mean of the group first.
        floor: the variance is at least this.
    """
    check_ranges(floor=floor)
    centred: Sequence[Rewards] = rewards
    if baseline:
        centred = [of_known(lambda known: normalize(known, scale="none"), each) for each in rewards]
    return whiten(centred, weights=lengths, floor=floor)


def whiten(
    values: Sequence[Rewards], *, weights: Sequence[Sequence[float]] | None = None, floor: float = 1e-8
) -> list[list[float | None]]:
    """Shift and scale numbers to mean 0 and variance 1, over all of them; None stays None.

    Args:
        values: lists of numbers, such as one for each group, or the tokens of each rollout.
        weights: weight of each number; None weighs them equally.
        floor: the variance is at least this.
    """
    weights = weights or [[1.0] * len(row) for row in values]
    pairs = [
        (value, weight)
        for row, its in zip(values, weights, strict=True)
        for value, weight in zip(row, its, strict=True)
        if value is not None
    ]
    numbers = [value for value, _ in pairs]
    _finite(numbers)
    total = fsum(weight for _, weight in pairs)
    if not total or equal(numbers):
        return [[None if value is None else 0.0 for value in row] for row in values]
    mean = fsum(value * weight for value, weight in pairs) / total
    if abs(mean) <= 1e-12 * max(map(abs, numbers)):
        mean = 0.0  # so that what is 0 stays 0
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
        ddof: both variances are the sum of squares over n - ``ddof``.
        epsilon: is added to the standard deviation of a part in its group.
        batch_epsilon: is added to the standard deviation of the sums.
    """
    check_ranges(ddof=ddof, epsilon=epsilon)
    weights = weights or dict.fromkeys(sorted({name for row in parts for each in row for name in each}), 1.0)

    one = partial(normalize, scale=scale, leave_one_out=leave_one_out, ddof=ddof, epsilon=epsilon)
    sums: list[list[float | None]] = []
    for row in parts:
        scored = {name: of_known(one, [each.get(name) for each in row]) for name in weights}
        sums.append(
            [combine({name: its[i] for name, its in scored.items()}, weights) for i in range(len(row))]
        )
    numbers = _numbers(sums)
    if len(numbers) <= ddof or equal(numbers):
        return [[None if value is None else 0.0 for value in row] for row in sums]
    mean, divisor = fsum(numbers) / len(numbers), deviation(numbers, ddof) + batch_epsilon
    if abs(mean) <= 1e-12 * max(map(abs, numbers)):
        mean = 0.0  # so that equal rewards have advantage 0
    return [[None if value is None else (value - mean) / divisor for value in row] for row in sums]


def combine(parts: Mapping[str, float | None], weights: Mapping[str, float]) -> float | None:
    """Return the weighted sum of parts; a part that is None adds nothing, and None is the sum of none.

    Args:
        parts: numbers by name.
        weights: weight of each part that counts.
    """
    known = [(value, weight) for name, weight in weights.items() if (value := parts.get(name)) is not None]
    return fsum(value * weight for value, weight in known) if known else None


# ---------------------------------------------------------------------------------- of turns

Turns = Sequence["Sequence[float] | None"]
"""Rewards of the turns of each rollout of a group; None is a rollout without a reward."""


def returns(rewards: Sequence[float], discount: float = 1.0) -> list[float]:
    """Return for each turn the sum of its reward and those after it, each times ``discount`` ** distance.

    Args:
        rewards: reward of each turn.
        discount: from 0, where only a turn's own reward counts, to 1.
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

    This is the process supervision of GRPO (arXiv 2402.03300, section 4.1.3) with the sum before the
    normalisation instead of after it.  With one turn in each rollout it is ``group``.

    Args:
        rewards: rewards of the turns of each rollout of each group.
        discount: factor of a reward for each turn between it and the turn that is credited.
        scale: what the differences are divided by; see ``Scale``.
        ddof: the variance is the sum of squares over n - ``ddof``.
        epsilon: is added to the standard deviation.
    """
    check_ranges(discount=discount)
    one = partial(normalize, scale=scale, ddof=ddof, epsilon=epsilon)
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
        states: name of the state in which each of these turns begins; None is compared with no other.
        weight: factor of the second term.
        discount: factor of a reward for each turn between it and the turn that is credited.
        scale: what the differences are divided by; see ``Scale``.
        ddof: the variance is the sum of squares over n - ``ddof``.
        epsilon: is added to the standard deviation.
    """
    check_ranges(discount=discount)
    one = partial(normalize, scale=scale, ddof=ddof, epsilon=epsilon)
    scores: list[list[list[float] | None]] = []
    for row, its_states in zip(rewards, states, strict=True):
        whole = of_known(one, [None if its is None else fsum(its) for its in row])
        sums = [None if its is None else returns(its, discount) for its in row]
        places: dict[str, list[tuple[int, int]]] = {}
        for i, (its, begun) in enumerate(zip(sums, its_states, strict=True)):
            for t, state in enumerate(begun if its is not None else ()):
                if state is not None:
                    places.setdefault(state, []).append((i, t))
        scores.append(
            [None if a is None else [a] * len(its or ()) for a, its in zip(whole, sums, strict=True)]
        )
        for its_places in places.values():
            compared = one([sums[i][t] for i, t in its_places])  # type: ignore[index]
            for (i, t), value in zip(its_places, compared, strict=True):
                scores[-1][i][t] += weight * value  # type: ignore[index]
    return scores


# ---------------------------------------------------------------------------------- of tokens


def distillation(teacher: Sequence[float], student: Sequence[float]) -> list[float]:
    """Return the advantages of tokens by a teacher: log p_teacher - log p_student (arXiv 2306.13649).

    Their mean is an estimate of minus the reverse KL divergence from the student to the teacher.

    Args:
        teacher: logprobs of the sampled tokens by the teacher.
        student: logprobs of the same tokens by the weights that sampled them.
    """
    return [by_teacher - by_student for by_teacher, by_student in zip(teacher, student, strict=True)]


def clip(
    advantages: Sequence[Sequence[float | None]], *, low: float | None = None, high: float | None = None
) -> list[list[float | None]]:
    """Limit advantages to [``low``, ``high``]; None is no limit.

    Args:
        advantages: advantages of each group.
        low: smallest advantage.
        high: largest advantage.
    """
    return [[None if value is None else clipped(value, low, high) for value in row] for row in advantages]


def clipped(value: float, low: float | None, high: float | None) -> float:
    """Return the nearest number within [``low``, ``high``]."""
    value = value if low is None else max(value, low)
    return value if high is None else min(value, high)


# ---------------------------------------------------------------------------------- helpers


def deviation(values: Sequence[float], ddof: int = 1) -> float:
    """Return the standard deviation: the root of the sum of squares over n - ``ddof``."""
    mean = fsum(values) / len(values)
    return sqrt(fsum((value - mean) ** 2 for value in values) / (len(values) - ddof))


def check_ranges(
    *,
    scale: str = "group",
    ddof: int = 1,
    epsilon: float = 0.0,
    batch_epsilon: float = 0.0,
    floor: float = 0.0,
    discount: float = 1.0,
) -> None:
    """Raise ValueError for an option that is out of range."""
    if scale not in ("group", "batch", "others", "none"):
        raise ValueError(f"scale is {scale!r}; expected 'group', 'batch', 'others' or 'none'")
    if ddof not in (0, 1):
        raise ValueError(f"ddof is {ddof}; expected 0 or 1")
    for name, value in (("epsilon", epsilon), ("batch_epsilon", batch_epsilon), ("floor", floor)):
        if not 0 <= value < float("inf"):
            raise ValueError(f"{name} is {value}; expected a finite number >= 0")
    if not 0 <= discount <= 1:
        raise ValueError(f"discount is {discount}; expected 0 to 1")


def of_known(function: Callable[[Sequence[float]], Sequence[float]], values: Rewards) -> list[float | None]:
    """Apply a function to the numbers that are known; the others stay None."""
    known = iter(function([value for value in values if value is not None]))
    return [None if value is None else next(known) for value in values]


def _numbers(rows: Sequence[Rewards]) -> list[float]:
    return [value for row in rows for value in row if value is not None]


def _finite(rewards: Sequence[float]) -> None:
    if not all(isfinite(reward) for reward in rewards):
        raise ValueError(f"rewards are not finite: {list(rewards)}")
