"""Environments with one real fault each, for ``bench_explain_real.py``."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Sequence
from typing import Any

from grpo_core import Environment, Episode, Feedback, Prompt

LETTERS = "abcdefgh"


class Repeat(Environment):
    """Asks for three letters; pays for each right one."""

    success = 1.0

    def prompts(self, split: str) -> Sequence[Prompt]:
        place = 0 if split == "train" else 10_000
        made = []
        for i in range(120 if split == "train" else 12):
            letters = "".join(random.Random(place + i).choices(LETTERS, k=3))
            made.append(Prompt(messages=f"{place + i}: {letters}", answer=letters, id=str(place + i)))
        return made

    def solve(self, prompt: Prompt) -> str | None:
        return str(prompt.answer)

    def evaluate(self, episodes: Sequence[Episode]) -> Sequence[Any]:
        return [self.judged(episode) for episode in episodes]

    def judged(self, episode: Episode) -> Any:
        """Return the share of letters that are right."""
        answer, reply = str(episode.prompt.answer), episode.reply.strip()
        if reply == answer:
            return 1.0
        return 0.4 * sum(a == b for a, b in zip(answer, reply, strict=False)) / len(answer)


class Zero(Repeat):
    def judged(self, episode: Episode) -> Any:
        return 0.0


class Full(Repeat):
    def judged(self, episode: Episode) -> Any:
        return 1.0


class Half(Repeat):
    def judged(self, episode: Episode) -> Any:
        return 0.5


class NotANumber(Repeat):
    def judged(self, episode: Episode) -> Any:
        return float("nan") if random.random() < 0.2 else super().judged(episode)


class Silent(Repeat):
    def judged(self, episode: Episode) -> Any:
        return None if random.random() < 0.2 else super().judged(episode)


class Raising(Repeat):
    def judged(self, episode: Episode) -> Any:
        if random.random() < 0.2:
            raise KeyError("answer")
        return super().judged(episode)


class Crashing(Repeat):
    def evaluate(self, episodes: Sequence[Episode]) -> Sequence[Any]:
        if random.random() < 0.25:
            os.kill(os.getpid(), signal.SIGSEGV)
        return super().evaluate(episodes)


class Poisoned(Repeat):
    def judged(self, episode: Episode) -> Any:
        if int(episode.prompt.id) % 5 == 0:
            return Feedback(error="the answer of this row cannot be parsed")
        return super().judged(episode)


class Slow(Repeat):
    def judged(self, episode: Episode) -> Any:
        time.sleep(0.15)
        return super().judged(episode)


class LongSolutions(Repeat):
    def solve(self, prompt: Prompt) -> str | None:
        return "a" * 200


class Few(Repeat):
    def prompts(self, split: str) -> Sequence[Prompt]:
        return super().prompts(split)[: 3 if split == "train" else 12]


class Leaking(Repeat):
    def prompts(self, split: str) -> Sequence[Prompt]:
        return super().prompts("train")


class LongPrompts(Repeat):
    def prompts(self, split: str) -> Sequence[Prompt]:
        made = list(super().prompts(split))
        if split == "train":
            made[::4] = [Prompt(messages="abcd " * 500, answer="ab", id=f"long {i}") for i in range(30)]
        return made
