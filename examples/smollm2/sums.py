"""Sums in words: "What is 12 plus 7?"; the reply may be a sentence, and its last number counts."""

import random
import re

import grpo_core as grpo


class Sums(grpo.Environment):
    """Pays 1 for the right sum, and up to 0.2 more for a short reply.

    Args:
        limit: both numbers are smaller.
        hint: whether prompts have a hint, from which the loss "self_distillation" learns.
        held_out: prompts of the validation.
    """

    success = 1.0

    def __init__(self, limit: int = 30, hint: bool = False, held_out: int = 200) -> None:
        pairs = [(a, b) for a in range(limit) for b in range(limit)]
        random.Random(0).shuffle(pairs)
        self._pairs = {"validation": pairs[:held_out], "train": pairs[held_out:]}
        self._hint = "{0} + {1} = {2}\nReply with the number only." if hint else ""

    def prompts(self, split):
        return [
            grpo.Prompt(
                messages=f"What is {a} plus {b}?",
                answer=str(a + b),
                hint=self._hint.format(a, b, a + b) or None,
            )
            for a, b in self._pairs[split]
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
