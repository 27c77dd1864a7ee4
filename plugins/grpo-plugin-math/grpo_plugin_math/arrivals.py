"""A task of several turns: digits arrive one by one, and the model sorts them each time."""

import random
from collections.abc import Sequence

import grpo_core as grpo


class Arrivals(grpo.Environment):
    """``7:`` is ``7``; then ``3:`` is ``37``; then ``5:`` is ``357``; and so on.

    Each turn has an equal share of the total reward of 1; the first mistake ends the rollout.

    Args:
        count: number of digits; a power of two, so that the shares add up to exactly 1.
        train: number of training prompts.
        validation: number of held-out prompts; no sequence is in both splits.
        seed: decides which sequences belong to which split.
    """

    success = 1.0

    def __init__(self, count: int = 4, *, train: int = 5000, validation: int = 500, seed: int = 0) -> None:
        if count < 2 or count & (count - 1) or not 0 < train + validation <= 10**count:
            raise grpo.ConfigError(
                f"count is {count!r}, train {train!r}, validation {validation!r}: expected a power of two, "
                "and no more prompts than there are sequences (10^count)"
            )
        self.max_turns = count
        numbers = random.Random(seed).sample(range(10**count), train + validation)
        sequences = [f"{number:0{count}d}" for number in numbers]
        self._sequences = {"validation": sequences[:validation], "train": sequences[validation:]}

    def prompts(self, split: str) -> Sequence[grpo.Prompt]:
        return [grpo.Prompt(messages=f"{s[0]}:", answer=s, id=s) for s in self._sequences[split]]

    def evaluate(self, episodes: Sequence[grpo.Episode]) -> list[grpo.Feedback]:
        return [
            self._environment(episode.prompt.answer, episode.turn + 1, episode.reply) for episode in episodes
        ]

    def solve(self, prompt: grpo.Prompt) -> str:
        """Return the digits that have arrived, sorted."""
        arrived = sum(message["role"] == "user" for message in prompt.messages)
        return "".join(sorted(prompt.answer[:arrived]))

    def _environment(self, sequence: str, arrived: int, reply: str) -> grpo.Feedback:
        if reply.strip() != "".join(sorted(sequence[:arrived])):
            return grpo.Feedback(reward=0.0, answer=reply.strip())
        share = 1 / len(sequence)
        if arrived == len(sequence):
            return grpo.Feedback(reward=share, answer=reply.strip())
        return grpo.Feedback(reward=share, done=False, messages=f"{sequence[arrived]}:")
