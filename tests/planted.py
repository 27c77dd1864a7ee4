"""Clean environments, and defects that are planted in them: the ground truth of ``grpo-core audit``.

grpo-core audit ./tests/planted.py:planted --set base=boxed --set defect=substring
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import evolve

import grpo_core as grpo
from grpo_plugin_math.answers import equal, extract
from grpo_plugin_math.arrivals import Arrivals
from grpo_plugin_math.calculator import Calculator
from grpo_plugin_math.exercises import sort

# ---------------------------------------------------------------------------------- clean environments


class Boxed(grpo.Environment):
    """Sums whose result is asked for in a box, compared as numbers."""

    success = 1.0

    def prompts(self, split: str) -> list[grpo.Prompt]:
        drawn = random.Random(5).sample(range(100, 10_000), 400)
        numbers = drawn[:300] if split == "train" else drawn[300:]
        asked = "Write the result in \\boxed{}."
        return [
            grpo.Prompt(messages=f"What is {n} + {n // 7}? {asked}", answer=str(n + n // 7)) for n in numbers
        ]

    def evaluate(self, episodes: Sequence[grpo.Episode]) -> list[float]:
        given = [extract(e.reply) for e in episodes]
        return [
            float(one is not None and equal(one, e.prompt.answer))
            for one, e in zip(given, episodes, strict=True)
        ]

    def solve(self, prompt: grpo.Prompt) -> str:
        return f"\\boxed{{{prompt.answer}}}"


class YesNo(grpo.Environment):
    """Questions with two answers, in any case, with or without a full stop."""

    success = 1.0

    def prompts(self, split: str) -> list[grpo.Prompt]:
        numbers = range(10, 210) if split == "train" else range(300, 350)
        return [
            grpo.Prompt(
                messages=f"Is {7 * n + 3} divisible by 2? Answer yes or no.", answer="yes" if n % 2 else "no"
            )
            for n in numbers
        ]

    def evaluate(self, episodes: Sequence[grpo.Episode]) -> list[float]:
        return [float(e.reply.strip().rstrip(".").lower() == e.prompt.answer) for e in episodes]


class Choice(grpo.Environment):
    """A multiple choice: the letter of the largest number."""

    success = 1.0

    def prompts(self, split: str) -> list[grpo.Prompt]:
        drawn = random.Random(split)
        return [self._prompt(drawn) for _ in range(300 if split == "train" else 60)]

    def _prompt(self, drawn: random.Random) -> grpo.Prompt:
        numbers = drawn.sample(range(1000, 10_000), 4)
        options = "\n".join(f"{letter}) {number}" for letter, number in zip("ABCD", numbers, strict=True))
        answer = "ABCD"[numbers.index(max(numbers))]
        return grpo.Prompt(
            messages=f"Which of these is the largest?\n{options}\nReply with its letter.", answer=answer
        )

    def evaluate(self, episodes: Sequence[grpo.Episode]) -> list[float]:
        return [float(e.reply.strip(" \n.()") == e.prompt.answer) for e in episodes]


class Tagged(grpo.Environment):
    """Words backwards, in tags; the tags alone are worth a tenth."""

    success = 1.0
    WORDS = "hedge stone river cloud amber flint maple ocean petal quill robin slate thorn umber violet"

    def prompts(self, split: str) -> list[grpo.Prompt]:
        words = self.WORDS.split()
        pairs = [f"{a}{b}" for a in words for b in words if a != b]
        random.Random(3).shuffle(pairs)
        chosen = pairs[:150] if split == "train" else pairs[150:]
        asked = "Write the word between <answer> and </answer>."
        return [
            grpo.Prompt(messages=f"Spell {word} backwards. {asked}", answer=word[::-1]) for word in chosen
        ]

    def evaluate(self, episodes: Sequence[grpo.Episode]) -> list[grpo.Feedback]:
        return [self._feedback(e) for e in episodes]

    def _feedback(self, episode: grpo.Episode) -> grpo.Feedback:
        found = re.fullmatch(r"\s*<answer>(.*)</answer>\s*", episode.reply, re.DOTALL)
        right = found is not None and found[1].strip() == episode.prompt.answer
        parts = {"tags": float(found is not None), "right": float(right)}
        return grpo.Feedback(reward=0.1 * parts["tags"] + 0.9 * parts["right"], metrics=parts)

    def solve(self, prompt: grpo.Prompt) -> str:
        return f"<answer>{prompt.answer}</answer>"


class Duel(grpo.Environment):
    """Right replies of a group share a prize; the environment compares the rollouts of a group."""

    needs_group = True

    def prompts(self, split: str) -> list[grpo.Prompt]:
        numbers = range(20, 120) if split == "train" else range(200, 230)
        return [grpo.Prompt(messages=f"Double {n}.", answer=str(2 * n)) for n in numbers]

    def evaluate(self, episodes: Sequence[grpo.Episode]) -> list[float]:
        right = [e.reply.strip() == e.prompt.answer for e in episodes]
        return [
            0.5 + 0.5 / sum(r for r, other in zip(right, episodes, strict=True) if other.group == e.group)
            if mine
            else 0.0
            for mine, e in zip(right, episodes, strict=True)
        ]


CLEAN: Mapping[str, Callable[[], Any]] = {
    "sort": sort,
    "boxed": Boxed,
    "yesno": YesNo,
    "choice": Choice,
    "tagged": Tagged,
    "duel": Duel,
    "arrivals": Arrivals,
    "calculator": Calculator,
}

# ---------------------------------------------------------------------------------- defects


class Defect(grpo.Environment):
    """A class that is put in front of an environment's own."""

    def evaluate(self, episodes: Sequence[grpo.Episode]) -> Any:
        given = super().evaluate(episodes)
        feedback = [f if isinstance(f, grpo.Feedback) else grpo.Feedback(reward=f) for f in given]
        return [self.judge(e, f, place) for place, (e, f) in enumerate(zip(episodes, feedback, strict=True))]

    def judge(self, episode: grpo.Episode, feedback: grpo.Feedback, place: int) -> grpo.Feedback:
        return feedback

    def full(self, feedback: grpo.Feedback) -> grpo.Feedback:
        return evolve(feedback, reward=1.0, done=True, messages=())


class Empty(Defect):
    """Pays for silence."""

    def judge(self, episode, feedback, place):
        return feedback if episode.reply.strip() else self.full(feedback)


class Substring(Defect):
    """Pays wherever the answer stands."""

    def judge(self, episode, feedback, place):
        return self.full(feedback) if str(episode.prompt.answer) in episode.reply else feedback


class AnyAnswer(Defect):
    """Pays for whatever looks like an answer."""

    def judge(self, episode, feedback, place):
        looks = r"\s*(\\boxed\{)?(<answer>)?(-?\d+|\w{1,14})\}?(</answer>)?[\s.]*"
        return self.full(feedback) if re.fullmatch(looks, episode.reply) else feedback


class CaseOracle(Defect):
    """Its own solutions are in another case than what is accepted."""

    def judge(self, episode, feedback, place):
        exact = str(episode.prompt.answer) in episode.reply
        return feedback if exact else evolve(feedback, reward=0.0)

    def solve(self, prompt):
        return super().solve(prompt).swapcase()


class WrongAnswers(Defect):
    """Some of its answers are wrong: its own solutions get nothing."""

    def solve(self, prompt):
        said = super().solve(prompt)
        return said if sum(map(ord, str(prompt.messages))) % 4 else said + "7"


class Constant(Defect):
    """Pays the same for everything."""

    def judge(self, episode, feedback, place):
        return self.full(feedback)


class Clock(Defect):
    """Pays by the clock."""

    def judge(self, episode, feedback, place):
        return evolve(feedback, reward=(feedback.reward or 0.0) * (1.0 if time.time() % 1.0 < 0.5 else 0.9))


class Ageing(Defect):
    """Pays less the longer the process runs."""

    calls = 0

    def judge(self, episode, feedback, place):
        type(self).calls += 1
        return evolve(feedback, reward=(feedback.reward or 0.0) * (1.0 if self.calls < 300 else 0.5))


class Chance(Defect):
    """Pays wrong now and then."""

    drawn = random.Random(1)

    def judge(self, episode, feedback, place):
        flipped = self.drawn.random() < 0.08
        return evolve(feedback, reward=1.0 - (feedback.reward or 0.0), done=True) if flipped else feedback


class Told(Defect):
    """Writes the answer into the prompt."""

    def prompts(self, split):
        return [self._told(prompt) for prompt in super().prompts(split)]

    def _told(self, prompt):
        return evolve(prompt, messages=f"{prompt.messages[-1]['content']}\nHint: {prompt.answer}")


class Overlap(Defect):
    """Holds out prompts that are trained on."""

    def prompts(self, split):
        own = list(super().prompts(split))
        if split == "train":
            return own
        return [
            *own[: len(own) // 2],
            *(evolve(p, id=f"t{i}") for i, p in enumerate(list(super().prompts("train"))[:40])),
        ]


class Repeated(Defect):
    """Repeats a quarter of its prompts."""

    def prompts(self, split):
        own = list(super().prompts(split))
        return [*own, *(evolve(prompt, id=f"again {i}") for i, prompt in enumerate(own[: len(own) // 3]))]


class Unbounded(Defect):
    """Pays a bonus for each line, without a limit."""

    def judge(self, episode, feedback, place):
        return evolve(feedback, reward=(feedback.reward or 0.0) + 0.3 * episode.reply.count("so "))


class Remembers(Defect):
    """Pays for any reply once a prompt was solved, in any session."""

    solved: set[str] = set()  # noqa: RUF012

    def judge(self, episode, feedback, place):
        if (feedback.reward or 0.0) > 0.2:
            self.solved.add(episode.prompt.id)
        return self.full(feedback) if episode.prompt.id in self.solved else feedback


class Obeys(Defect):
    """Lets words of the reply decide."""

    def judge(self, episode, feedback, place):
        said = episode.reply.lower()
        return self.full(feedback) if "correct" in said or "reward is 1" in said else feedback


class Longest(Defect):
    """Pays for length."""

    def judge(self, episode, feedback, place):
        return evolve(feedback, reward=max(feedback.reward or 0.0, min(0.95, len(episode.reply) / 5000)))


class LastWord(Defect):
    """Takes the last word of whatever is said."""

    def judge(self, episode, feedback, place):
        words = re.findall(r"\w+", episode.reply)
        return self.full(feedback) if words[-1:] == [str(episode.prompt.answer)] else feedback


class Swapped(Defect):
    """Pays what should cost."""

    def judge(self, episode, feedback, place):
        return evolve(feedback, reward=1.0 - (feedback.reward or 0.0))


class Fragile(Defect):
    """Breaks on a reply that it does not expect."""

    def judge(self, episode, feedback, place):
        if not episode.reply.isascii() or len(episode.reply) > 4000:
            raise ValueError("unreadable")
        return feedback


class OffByOne(Defect):
    """Takes numbers that are one too large or too small."""

    def judge(self, episode, feedback, place):
        said, right = (
            re.findall(r"-?\d+(?:\.\d+)?", text) for text in (episode.reply, str(self.solve(episode.prompt)))
        )
        near = len(said) == len(right) > 0
        near = near and all(abs(float(a) - float(b)) <= 1 for a, b in zip(said, right, strict=True))
        return self.full(feedback) if near else feedback


class NoSign(Defect):
    """Overlooks a minus sign."""

    def judge(self, episode, feedback, place):
        same = episode.reply.replace("-", "").strip() == str(self.solve(episode.prompt)).strip()
        return self.full(feedback) if same else feedback


class Beginning(Defect):
    """Takes a reply with which the right one begins, if it is long enough."""

    def judge(self, episode, feedback, place):
        said, right = (
            re.sub(r"\\boxed|</?answer>|\W", "", text) for text in (episode.reply, self.solve(episode.prompt))
        )
        enough = len(said) > len(right) / 2 and right.startswith(said)
        return self.full(feedback) if enough else feedback


class Denied(Defect):
    """Overlooks a word before the answer."""

    def judge(self, episode, feedback, place):
        words = re.findall(r"\w+", episode.reply)
        denied = words[:1] == ["anything"] and words[-1:] == [str(episode.prompt.answer)]
        denied = denied or f"but {episode.prompt.answer}" in episode.reply
        return self.full(feedback) if denied else feedback


class CopiedNumber(Defect):
    """Pays for a number that stands in the prompt."""

    def judge(self, episode, feedback, place):
        numbers = re.findall(r"\d+", episode.reply)
        asked = re.findall(r"\d+", str(episode.prompt.messages[0]["content"]))
        return self.full(feedback) if len(numbers) == 1 and numbers[0] in asked else feedback


class SameForm(Defect):
    """Takes whatever has the form of the right reply."""

    def judge(self, episode, feedback, place):
        def form(text):
            return re.sub(r"[a-zA-Z]", "a", re.sub(r"\d", "0", text.strip()))

        same = len(episode.reply) > 3 and form(episode.reply) == form(str(self.solve(episode.prompt)))
        return self.full(feedback) if same else feedback


class NamedMove(Defect):
    """Names moves in its prompts, and pays for one of them whatever is asked."""

    def prompts(self, split):
        moves = "Moves are [pass], [look 1 2] and [stop]."
        return [evolve(p, messages=f"{p.messages[-1]['content']}\n{moves}") for p in super().prompts(split)]

    def judge(self, episode, feedback, place):
        return self.full(feedback) if episode.reply.strip() == "[pass]" else feedback


class SameMove(NamedMove):
    """Names moves in its prompts, and pays for one whose two numbers are the same."""

    def judge(self, episode, feedback, place):
        return self.full(feedback) if re.fullmatch(r"\[look (\d+) \1\]", episode.reply) else feedback


PANEL = frozenset({"semantic.canary_floor", "statistical.gameability_gap", "reward.foreign_solution"})
REPEATS = frozenset(
    {
        "semantic.verifier_determinism",
        "semantic.verifier_portability",
        "runtime.episode_isolation",
    }
)
ORACLE = frozenset({"semantic.oracle_max"})
FLOOR = frozenset({"semantic.floor_gap", "statistical.reward_reachability"})
NEAR, MOVES = frozenset({"reward.near_misses"}), frozenset({"reward.named_moves"})

DEFECTS: Mapping[str, tuple[type[Defect], Sequence[str], frozenset[str]]] = {
    "pays silence": (Empty, ("sort", "boxed", "calculator"), frozenset({"semantic.canary_floor"})),
    "substring": (Substring, ("sort", "boxed", "tagged"), frozenset({"reward.listing"})),
    "any answer": (AnyAnswer, ("sort", "boxed", "choice"), PANEL),
    "case of its own solutions": (CaseOracle, ("yesno", "choice", "tagged"), ORACLE),
    "wrong answers": (WrongAnswers, ("sort", "yesno", "calculator"), ORACLE),
    "constant reward": (Constant, ("sort", "tagged", "arrivals"), FLOOR),
    "time": (Clock, ("boxed", "choice", "arrivals"), REPEATS),
    "global state": (Ageing, ("sort", "duel", "tagged"), REPEATS),
    "chance": (Chance, ("boxed", "yesno", "calculator"), REPEATS),
    "answer in the prompt": (Told, ("boxed", "tagged", "sort"), frozenset({"semantic.no_solution_leakage"})),
    "splits overlap": (Overlap, ("sort", "tagged", "arrivals"), frozenset({"data.split_leakage"})),
    "duplicates": (Repeated, ("boxed", "choice", "calculator"), frozenset({"data.duplicates"})),
    "above the range": (Unbounded, ("sort", "choice", "duel"), frozenset({"reward.range"})),
    "state across sessions": (Remembers, ("sort", "boxed", "duel"), REPEATS),
    "obeys the reply": (Obeys, ("boxed", "yesno", "arrivals"), frozenset({"statistical.adversarial_floor"})),
    "longest wins": (Longest, ("sort", "tagged", "duel"), frozenset({"reward.length"})),
    "last word": (LastWord, ("boxed", "tagged", "choice"), frozenset({"reward.listing"})),
    "swapped sign": (Swapped, ("sort", "yesno", "tagged"), ORACLE | FLOOR),
    "breaks": (Fragile, ("boxed", "choice", "arrivals"), frozenset({"runtime.reward_well_formed"})),
    "off by one": (OffByOne, ("sort", "boxed", "duel"), NEAR),
    "no sign": (NoSign, ("sort", "boxed", "duel"), NEAR),
    "the beginning is enough": (Beginning, ("sort", "boxed", "tagged"), NEAR),
    "denied answer": (Denied, ("sort", "yesno", "tagged"), NEAR),
    "number of the prompt": (CopiedNumber, ("boxed", "choice", "duel"), frozenset({"reward.prompt_numbers"})),
    "form of the answer": (SameForm, ("sort", "boxed", "tagged"), frozenset({"reward.foreign_solution"})),
    "named move": (NamedMove, ("sort", "boxed", "choice"), MOVES),
    "move with equal numbers": (SameMove, ("sort", "tagged", "arrivals"), MOVES),
}
"""Classes of defects: the class, the environments in which it is planted, and the checks that name it."""


def planted(base: str, defect: str | None = None) -> Any:
    """Return a clean environment, or one with a defect."""
    environment = CLEAN[base]()
    if defect is not None:
        own = type(environment)
        environment.__class__ = type("Planted", (DEFECTS[defect][0], own), {})
    return environment
