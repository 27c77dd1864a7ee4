"""A task with a tool: a calculator multiplies numbers that a small model cannot multiply."""

import random
from collections.abc import Sequence

import grpo_core as grpo


def multiply(a: int, b: int) -> int:
    """Multiplies two whole numbers.

    Args:
        a: one of them
        b: the other
    """
    return a * b


class Calculator(grpo.Environment):
    """Products: ``51*29=`` is ``1479``; the reward is 1 if the last message is the product, otherwise 0.

    Args:
        digits: number of digits of each factor.
        train: number of training prompts.
        validation: number of held-out prompts; no product is in both splits.
        seed: decides which products belong to which split.
    """

    max_turns = 3
    success = 1.0
    tools = (multiply,)

    def __init__(self, digits: int = 2, *, train: int = 5000, validation: int = 500, seed: int = 0) -> None:
        numbers = range(10 ** max(digits - 1, 0), 10 ** max(digits, 0))
        if not 0 < train + validation <= len(numbers) ** 2:
            raise grpo.ConfigError(
                f"digits is {digits!r}, train {train!r} and validation {validation!r}: expected at least one "
                "digit, and no more prompts than there are products"
            )
        drawn = random.Random(seed).sample(range(len(numbers) ** 2), train + validation)
        pairs = [(numbers[i // len(numbers)], numbers[i % len(numbers)]) for i in drawn]
        self._pairs = {"validation": pairs[:validation], "train": pairs[validation:]}

    def prompts(self, split: str) -> Sequence[grpo.Prompt]:
        return [grpo.Prompt(messages=f"{a}*{b}=", answer=str(a * b)) for a, b in self._pairs[split]]

    def evaluate(self, episodes: Sequence[grpo.Episode]) -> list[grpo.Feedback]:
        """Score the last messages; tool calls were answered before."""
        return [
            grpo.Feedback(
                reward=float(episode.reply.strip() == episode.prompt.answer),
                answer=episode.reply.strip(),
                metrics={"calculated": float(any(m["role"] == "tool" for m in episode.messages))},
            )
            for episode in episodes
        ]

    def solve(self, prompt: grpo.Prompt) -> str:
        """Call the calculator, then repeat its answer."""
        last = prompt.messages[-1]
        if last["role"] == "tool":
            return str(last["content"])
        a, b = str(last["content"]).rstrip("=").split("*")
        call = f'{{"name": "multiply", "arguments": {{"a": {a}, "b": {b}}}}}'
        return f"<tool_call>{call}</tool_call>"
