"""A search for a reply that is paid whatever the prompt says: hill climbing over short texts.  Pure."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from attrs import define, field

from grpo_core.audit.records import Solution, text_of

WIDTH = 16
"""Number of replies of a round."""
PARENTS = 4
"""Number of the best replies from which the next round is made."""
LONGEST = 2000
"""Largest length of a reply."""
WORDS = (
    "0", "1", "2", "3", "7", "10", "42", "100", "yes", "no", "true", "false", "A", "B", "C", "D", "the",
    "answer", "is", "correct", "because", "therefore", "<answer>", "</answer>", "<think>", "</think>",
    "\\boxed{", "}", "####", "[", "]", "(", ")", "{", ",", ".", ":", "\n", " ",
    "I think", "step by step", "please", "thank you",
)  # fmt: skip
"""Pieces that graders look for, beside those of the prompts."""


@define(eq=False)
class Search:
    """Makes rounds of replies from the best ones before.

    Args:
        solutions: prompts and right replies, from which pieces and forms are taken.
        seed: the same seed makes the same replies for the same scores.
    """

    solutions: Sequence[Solution]
    seed: int
    scores: dict[str, float] = field(factory=dict)
    """Mean score of each reply that was tried."""
    _drawn: random.Random = field(init=False)
    _pieces: list[str] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._drawn = random.Random(self.seed)
        words = {word for one in self.solutions for word in text_of(one.prompt).split()[:40]}
        answers = {one.answer for one in self.solutions if one.answer and len(one.answer) <= 60}
        self._pieces = [*WORDS, *sorted(words)[:60], *sorted(answers)]

    def round(self) -> list[str]:
        """Return new replies: forms of solutions without their answers first, then changes of the best."""
        best = self.best(PARENTS)
        found: dict[str, None] = {} if best else dict.fromkeys(self._forms())
        for _ in range(20 * WIDTH):
            if len(found) >= WIDTH:
                break
            reply = (
                self._changed(self._drawn.choice(best), best) if best else self._drawn.choice(self._pieces)
            )
            if len(reply) <= LONGEST and reply not in self.scores:
                found[reply] = None
        return list(found)

    def tell(self, scores: Mapping[str, float]) -> None:
        """Receive the scores of replies."""
        self.scores |= scores

    def best(self, number: int) -> list[str]:
        """Return the best replies so far; of equal ones the shortest."""
        return sorted(self.scores, key=lambda reply: (-self.scores[reply], len(reply), reply))[:number]

    def _forms(self) -> list[str]:
        """Return what is left of solutions without their answers, and a list of all answers."""
        answers = dict.fromkeys(one.answer for one in self.solutions if one.answer)
        forms = ["", " ", ", ".join(answers)[:LONGEST]]
        for one in self.solutions[:4]:
            if one.text and one.answer and one.answer in one.text and one.text != one.answer:
                forms += [one.text.replace(one.answer, new) for new in ("", "0", "x")]
        return forms

    def _changed(self, reply: str, best: Sequence[str]) -> str:
        piece, other = self._drawn.choice(self._pieces), self._drawn.choice(best)
        place = self._drawn.randrange(len(reply) + 1)
        match self._drawn.randrange(7):
            case 0:
                return f"{reply} {piece}"
            case 1:
                return f"{piece} {reply}"
            case 2:
                return reply[:place] + piece + reply[place:]
            case 3:
                return reply + reply
            case 4:
                return reply[:place]
            case 5:
                return f"{reply} {other}"
            case _:
                return piece
