"""Records of an audit: replies, trials, findings, and rates with confidence intervals.  Pure."""

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
"""Quantile of the normal distribution for 95% intervals."""
TOLERANCE = 1e-9
"""Largest difference of equal rewards: sums of floats depend on their order."""


@frozen
class Rate:
    """A number of successes in a number of trials."""

    successes: int
    trials: int

    @property
    def share(self) -> float:
        return self.successes / self.trials if self.trials else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """The 95% confidence interval of Wilson (1927); (0, 1) without trials."""
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
    """Name of the check, such as ``semantic.oracle_max``; from OpenEnv's RFC 008 where it has one."""
    title: str
    severity: Severity
    result: str
    """The result as a sentence with its numbers."""
    evidence: str = ""
    """An example."""
    advice: str = ""
    """Advice for the author."""
    seconds: float = 0.0


@frozen
class Check:
    """The name and the title of a check, which its findings have."""

    name: str
    title: str

    def finding(self, severity: Severity, result: str, evidence: object = "", advice: str = "") -> Finding:
        """Return a finding.  If the check is passed, there is no example and no advice.

        Args:
            evidence: an example, such as a trial; None if there is none.
        """
        passed = severity == "passed"
        return Finding(
            check=self.name,
            title=self.title,
            severity=severity,
            result=result,
            evidence="" if passed else str(evidence or ""),
            advice="" if passed else advice,
        )

    def not_applicable(self, why: str) -> Finding:
        return self.finding("not applicable", why)


@frozen
class Reply:
    """A reply to try with a prompt."""

    prompt: Prompt
    text: str | None
    """Text of each turn, or with ``then`` of the first turn; None plays the environment's solutions."""
    kind: str
    """Name of the probe."""
    then: tuple[str, ...] = ()
    """Texts of the next turns; after the last one the sequence repeats."""
    cut: bool = False
    """Whether the reply is marked as cut off by a token limit."""


@frozen(kw_only=True)
class Trial:
    """A played reply and its result."""

    reply: Reply
    said: str
    """Text of the first reply."""
    reward: float | None
    """Sum of the rewards of the turns; None is unscored."""
    error: str | None = None
    ended: bool = True
    """Whether the rollout ended; ``solve`` may know only the first turns."""
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
        """Whether the results of two trials of the same reply differ."""
        if (self.reward is None) != (other.reward is None) or self.answers != other.answers:
            return True
        return abs((self.reward or 0.0) - (other.reward or 0.0)) > TOLERANCE

    def __str__(self) -> str:
        got = f"unscored ({self.error})" if self.reward is None else f"reward {self.reward:g}"
        return f"prompt {short(text_of(self.prompt))}, reply {short(self.said)}: {got}"


@frozen(kw_only=True)
class Solution:
    """The right reply to a prompt, if it is known."""

    prompt: Prompt
    text: str | None
    """The environment's solution, or None."""
    reward: float | None = None
    """Reward of this reply."""
    turns: int = 1
    """Number of turns of the solution, each with another text."""

    @property
    def answer(self) -> str | None:
        """The bare answer, without tags or a box: the prompt's answer if it is a text, else the solution."""
        given = self.prompt.answer
        if isinstance(given, str) and given.strip():
            return unwrapped(given)
        if isinstance(given, int | float) and not isinstance(given, bool):
            return str(given)
        return None if self.text is None else unwrapped(self.text)

    def deserves(self, reply: str) -> bool:
        """Whether a reply is the right answer in any form, or ends with it in a marked form."""
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
"""A marked answer within a longer reply."""
_FORM = re.compile(r"\\boxed\{(.*)\}|<answer>(.*)</answer>|####(.*)", re.DOTALL | re.I)


def unwrapped(text: str) -> str:
    """Return the content of a box or tags, the text after ####, the only answer of JSON, or else the text."""
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
    """Normalise an answer: no wrapping, case, white space or punctuation; equal numbers get equal texts."""
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
    return repr(number + 0.0) if math.isfinite(number) else text  # + 0.0 turns minus zero into zero


def text_of(prompt: Prompt) -> str:
    return "\n".join(str(message.get("content") or "") for message in prompt.messages)


def short(text: str, most: int = 70) -> str:
    """Quote a text for a finding, shortened."""
    quoted = repr(text[: most + 1])
    return quoted if len(text) <= most else f"{quoted[: most + 1]}… ({len(text):,} characters)"


def spread(values: Sequence[float]) -> float:
    return max(values) - min(values) if values else 0.0
