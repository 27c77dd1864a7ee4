"""A validation strategy in a file: it estimates ``pass^k``, the chance that all of k replies are right.

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
            scores = [self.score(rollouts[i : i + self.n]) for i in range(0, len(rollouts), self.n)]
            known = [score for score in scores if score is not None]
            measured = grpo.mean_with_interval(f"pass^{self.k}", known, seed=0)
            results[task] = {**measured, "prompts": len(known)}
        return results

    def score(self, rollouts: Sequence[grpo.Rollout]) -> float | None:
        """Return the score of one prompt, or None if too few of its rollouts are scored."""
        judged = [r.reward for r in rollouts if r.reward is not None]
        correct = sum(reward >= 1 for reward in judged)
        return comb(correct, self.k) / comb(len(judged), self.k) if len(judged) >= self.k else None


@grpo.hookimpl
def grpo_validation_strategies() -> dict[str, type]:
    return {"reliable": Reliable}
