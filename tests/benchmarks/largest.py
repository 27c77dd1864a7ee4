"""The largest of eight numbers: the second task of the study of hints, for ``bench_learning.py``."""

import random
import re

import grpo_core as grpo


class Largest(grpo.Environment):
    """Pays 1 if the last number of the reply is the largest one, and up to 0.2 more for a short reply.

    Args:
        hint: whether prompts have a hint, from which the loss "self_distillation" learns.
        held_out: prompts of the validation.
    """

    success = 1.0

    def __init__(self, hint: bool = False, held_out: int = 400) -> None:
        chance = random.Random(0)
        cases = [chance.sample(range(10, 100), 8) for _ in range(2400)]
        self._cases = {"validation": cases[:held_out], "train": cases[held_out:]}
        self._hint = "Of {0}, the largest number is {1}." if hint else ""

    def prompts(self, split):
        return [
            grpo.Prompt(
                messages=f"Which of these numbers is the largest: {listed}? Reply with the number only.",
                answer=answer,
                hint=self._hint.format(listed, answer) or None,
            )
            for numbers in self._cases[split]
            for listed, answer in [(", ".join(map(str, numbers)), str(max(numbers)))]
        ]

    def evaluate(self, episodes):
        return [self._judged(episode.reply, episode.prompt.answer) for episode in episodes]

    def _judged(self, reply, answer):
        right = re.findall(r"\d+", reply)[-1:] == [answer]
        return grpo.Feedback(reward=right * (1 + 0.2 * max(0.0, 1 - len(reply) / 100)))
