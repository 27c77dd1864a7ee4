"""An environment that pays each second reply of a group, whatever it says, so that any model is trained."""

from __future__ import annotations

from collections.abc import Sequence

from grpo_core import Episode, Prompt


class Halves:
    """Without a difference of rewards no row would be trained."""

    needs_group = True
    success = 1.0

    def prompts(self, split: str) -> list[Prompt]:
        return [Prompt(messages=f"{i}=", id=str(i)) for i in range(64)]

    def evaluate(self, episodes: Sequence[Episode]) -> list[float]:
        return [float(i % 2) for i in range(len(episodes))]
