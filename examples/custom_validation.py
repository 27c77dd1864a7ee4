"""A validation strategy in a file: estimates ``pass^k``, the probability that all of k replies are right.

grpo-core validate RUN --validation ./examples/custom_validation.py:Reliable --set validation.options.k=4
"""

from collections.abc import Sequence
from math import comb

import grpo_core as grpo


class Reliable:
    """A strategy that implements the protocol only: it returns ``{task: {metric: number}}``.

    Args:
        k: number of replies that must all be right, estimated without bias from n (Yao et al. 2024,
            "tau-bench").
        n: number of rollouts of each prompt.
        temperature: sampling temperature.
    """

    def __init__(self, k: int = 4, n: int = 8, temperature: float = 1.0) -> None:
        if not 1 <= k <= n:
            raise grpo.ConfigError(f"reliable: k is {k} and n is {n}; expected 1 <= k <= n")
        self.k, self.n, self.temperature = k, n, temperature

    async def validate(self, context: grpo.ValidationContext) -> dict[str, dict[str, float]]:
        results = {}
        for task, prompts in context.prompts.items():  # score each task separately
            rollouts = await context.rollout(prompts, n=self.n, temperature=self.temperature)
            parts = [rollouts[i : i + self.n] for i in range(0, len(rollouts), self.n)]
            known = [score for score in map(self.score, parts) if score is not None]
            # an unscored rollout may be wrong or right: the interval holds either way
            lows, highs = ([self.score(part, each) or 0.0 for part in parts] for each in (False, True))
            measured = grpo.mean_with_interval(f"pass^{self.k}", known, seed=0, lows=lows, highs=highs)
            results[task] = {**measured, "prompts": len(known)}
        return results

    def score(self, rollouts: Sequence[grpo.Rollout], unscored: bool | None = None) -> float | None:
        """Return the score of one prompt, or None if too few of its rollouts count.

        Args:
            rollouts: of the prompt.
            unscored: whether a rollout without a reward is right; None: it does not count.
        """
        found = [unscored if r.reward is None else right(r) for r in rollouts]
        counted = [each for each in found if each is not None]
        return comb(sum(counted), self.k) / comb(len(counted), self.k) if len(counted) >= self.k else None


def right(rollout: grpo.Rollout) -> bool:
    """Return whether a scored reply is right; an environment that declares no success pays 1 for it."""
    return (rollout.reward or 0.0) >= 1 if rollout.success is None else rollout.success


@grpo.hookimpl
def grpo_validation_strategies() -> dict[str, type]:
    return {"reliable": Reliable}
