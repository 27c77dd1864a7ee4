"""The records of an audit: what was played, what was found, and rates with their intervals.  Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Literal

from attrs import frozen

from grpo_core import Prompt
from grpo_core.kit import read_json

Severity = Literal["failed", "warned", "noted", "passed", "not applicable"]

Z = 1.959964
"""Quantile of the normal distribution for intervals of 95%."""
TOLERANCE = 1e-9
"""Difference of rewards that counts as none: sums of floats depend on their order."""


@frozen
class Rate:
    """A number of successes among trials."""

    successes: int
    trials: int

    @property
    def share(self) -> float:
        return self.successes / self.trials if self.trials else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """The interval of Wilson (1927) for a confidence of 95%; without trials it is all shares."""
        n = self.trials
        if not n:
            return 0.0, 1.0
        centre = (self.share + Z * Z / (2 * n)) / (1 + Z * Z / n)
        half = Z / (1 + Z * Z / n) * math.sqrt(self.share * (1 - self.share) / n + Z * Z / (4 * n * n))
        return max(0.0, centre - half), min(1.0, centre + half)

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.successes} of {self.trials} ({low:.0%} to {high:.0%})"


@frozen(kw_only=True)
class Finding:
    """The result of one check."""

    check: str
    """Name of the check, as ``semantic.oracle_max``: that of OpenEnv's RFC 008 where there is one."""
    title: str
    severity: Severity
    told: str
    """The result in words, with its numbers."""
    evidence: str = ""
    """One example."""
    advice: str = ""
    """Advice for the author."""
    seconds: float = 0.0


@frozen(kw_only=True)
class Reply:
    """A reply that is tried with a prompt."""

    prompt: Prompt
    text: str | None
    """The text of each turn, or with ``then`` of the first; None plays the environment's own solutions."""
    then: tuple[str, ...] = ()
    """Texts of the next turns; after them it begins anew."""
    kind: str
    """Name of the probe that it belongs to."""
    cut: bool = False
    """Whether a token limit cuts it off."""


@frozen(kw_only=True)
class Trial:
    """A reply and what it got."""

    reply: Reply
    said: str
    """The first reply that was given."""
    reward: float | None
    """Sum of the rewards of its turns; None: unscored."""
    error: str | None = None
    ended: bool = True
    """Whether the rollout came to its end; own solutions may know only how to begin."""
    answers: tuple[str, ...] = ()
    """The environment's messages between the turns."""
    turns: int = 1

    @property
    def prompt(self) -> Prompt:
        return self.reply.prompt

    @property
    def kind(self) -> str:
        return self.reply.kind

    def differs(self, other: Trial) -> bool:
        """Return whether another trial of the same reply went differently."""
        if (self.reward is None) != (other.reward is None) or self.answers != other.answers:
            return True
        return abs((self.reward or 0.0) - (other.reward or 0.0)) > TOLERANCE

    def __str__(self) -> str:
        got = f"unscored ({self.error})" if self.reward is None else f"reward {self.reward:g}"
        return f"prompt {short(text_of(self.prompt))}, reply {short(self.said)}: {got}"


@frozen(kw_only=True)
class Solution:
    """A right reply to a prompt, as far as one is known."""

    prompt: Prompt
    text: str | None
    """The environment's own reply; None if it knows none."""
    reward: float | None = None
    """Reward of this reply."""
    turns: int = 1
    """Number of turns in which it is said, each with another text."""

    @property
    def answer(self) -> str | None:
        """The bare answer: the prompt's, if it is a text, else the solution; without tags or a box."""
        given = self.prompt.answer
        if isinstance(given, str) and given.strip():
            return unwrapped(given)
        if isinstance(given, int | float) and not isinstance(given, bool):
            return str(given)
        return None if self.text is None else unwrapped(self.text)

    def deserves(self, reply: str) -> bool:
        """Return whether a reply says the right answer, in whatever form, or ends with it in a form."""
        right = {bare(known) for known in (self.text, self.answer) if known} - {""}
        said = [bare(reply)]
        if right and (marked := _MARKED.findall(reply)):
            said.append(bare(next((group for group in marked[-1] if group), "")))
        return not right.isdisjoint(said)


_WRAPPED = re.compile(
    r"\\boxed\{(.*)\}|<answer>(.*)</answer>|####(.*)|(?:the )?(?:final )?answer(?: is)?:?(.*)",
    re.DOTALL | re.I,
)


_MARKED = re.compile(
    r"\\boxed\{([^{}]*)\}|<answer>((?:(?!<answer>).)*?)</answer>|####\s*([^\n]*)", re.DOTALL | re.I
)
"""An answer that is marked as such within a longer reply."""
_FORM = re.compile(r"\\boxed\{(.*)\}|<answer>(.*)</answer>|####(.*)", re.DOTALL | re.I)


def unwrapped(text: str) -> str:
    """Return what stands in a box, in tags, after #### or as the only answer of JSON; else the text."""
    stripped = text.strip()
    if (found := _FORM.fullmatch(stripped)) is not None:
        inner = next(group for group in found.groups() if group is not None).strip()
        return inner or text
    if stripped.startswith("{"):
        try:
            held = read_json(stripped, dict)
        except ValueError:
            return text
        if list(held) == ["answer"] and isinstance(held["answer"], str | int | float):
            return str(held["answer"]) or text
    return text


def bare(text: str) -> str:
    """Return an answer without its wrapping, case, white space and punctuation; equal numbers are equal."""
    text = unwrapped(text.strip())
    while (found := _WRAPPED.fullmatch(text)) is not None:
        inner = next(group for group in found.groups() if group is not None).strip()
        if inner == text:
            break
        text = inner
    text = " ".join(text.casefold().split()).strip(" .,;:!?'\"`()[]$")
    try:
        number = float(text.replace(",", ""))
    except ValueError:
        return text
    return repr(number + 0.0) if math.isfinite(number) else text  # minus zero is zero


def text_of(prompt: Prompt) -> str:
    return "\n".join(str(message.get("content") or "") for message in prompt.messages)


def short(text: str, most: int = 70) -> str:
    """Return a text as it is quoted in a finding."""
    quoted = repr(text[: most + 1])
    return quoted if len(text) <= most else f"{quoted[: most + 1]}… ({len(text):,} characters)"


def spread(values: Sequence[float]) -> float:
    return max(values) - min(values) if values else 0.0
