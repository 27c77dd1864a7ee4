"""How often is a comparison of equal versions wrong, and how many prompts does a difference of 5 points take?

    python tests/benchmarks/bench_comparison.py [RUNS]

Each run is looked at after every 16 prompts.  The limit is the fixed design: two independent samples of 1,568
prompts, which find 5 points with a power of 80% (two-sided, 5%).
"""

from __future__ import annotations

import sys

import numpy as np

from grpo_plugin_algorithms.comparison import Comparison

FIXED = 1568
EVERY = 16


def played(rng: np.random.Generator, effect: float, discordant: float) -> tuple[str | None, int]:
    better, worse = (discordant + effect) / 2, (discordant - effect) / 2
    differences = rng.choice([1.0, -1.0, 0.0], FIXED, p=[better, worse, 1 - better - worse])
    comparison = Comparison()
    for begin in range(0, FIXED, EVERY):
        comparison.add(differences[begin : begin + EVERY])
        if comparison.decision:
            break
    return comparison.decision, comparison.n


def main(runs: int) -> None:
    for discordant in (0.05, 0.1, 0.2, 0.3, 0.5):
        rng = np.random.default_rng(0)
        equal = [played(rng, 0.0, discordant)[0] for _ in range(runs // 5)]
        found = [played(rng, 0.05, discordant) for _ in range(max(1, runs // 50))]
        wrong = sum(decision is not None for decision in equal) / len(equal)
        power = sum(decision == "better" for decision, _ in found) / len(found)
        used = sum(n for _, n in found) / len(found) / FIXED
        print(
            f"prompts that differ {discordant:4.0%}: equal versions told apart {wrong:.2%} of {len(equal)} "
            f"(limit 5%), 5 points found {power:.0%} (80%) with {used:.0%} of the prompts (50%)",
            flush=True,
        )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000)
