"""Sums in words: "What is 12 plus 7?"; the reply may be a sentence, and its last number counts."""

import random
import re

import grpo_core as grpo


class Sums(grpo.Environment):
    """Pays 1 for the right sum, and up to 0.2 more for a short reply.

    Args:
        limit: both numbers are smaller.
    """

    success = 1.0

    def __init__(self, limit: int = 30) -> None:
        pairs = [(a, b) for a in range(limit) for b in range(limit)]
        random.Random(0).shuffle(pairs)
        self._pairs = {"validation": pairs[:200], "train": pairs[200:]}

    def prompts(self, split):
        return [
            grpo.Prompt(messages=f"What is {a} plus {b}?", answer=str(a + b)) for a, b in self._pairs[split]
        ]

    def evaluate(self, episodes):
        return [self._judged(episode.reply, episode.prompt.answer) for episode in episodes]

    def _judged(self, reply, answer):
        numbers = re.findall(r"\d+", reply)
        right = bool(numbers) and numbers[-1] == answer
        brevity = max(0.0, 1 - len(reply) / 100)
        return grpo.Feedback(reward=right * (1 + 0.2 * brevity), metrics={"right": right, "brevity": brevity})

    def solve(self, prompt):
        return prompt.answer
