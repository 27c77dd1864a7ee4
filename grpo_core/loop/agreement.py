"""The statistic of the canary: whether an engine's logprobs belong to its newest weights.  Pure.

Two programs with the same weights give a token logprobs that differ by rounding: ``EXPLAINED`` has the
differences to expect for each dtype.  For each context of a canary, an engine returns its most likely token
and that token's logprob.  Two tests use all answers together.

*Do they match the trainer's?*  The mean and the largest difference must be within the bounds of the dtype.
This finds tensors that are missing or exchanged, at any version.  In 16 bits a mixture of experts may route a
near tie differently: there a few of many contexts may differ by any amount.  But then, and where a single
answer to all contexts would match as well (a model that has become flat), wrong tensors may match, too: the
sync is unproved.

*Did they move with the trainer's?*  A step may move logprobs by less than these limits, and an engine that
ignores it would pass.  So each answer is compared with the engine's answer under older weights.  An engine
that uses the new weights moved as much as the trainer (the difference is ``new``); one that still uses the
older ones did not move (the difference is ``old``).  Rounding has heavy tails: a difference r is modelled by
the Laplace density exp(-|r| / b) / 2b.  The evidence for the new weights is the logarithm of the likelihood
ratio,

    sum of (|r_old| - |r_new|) / b,  each term between -CLIP and CLIP,

censored as in Huber's robust test (Annals of Mathematical Statistics 36, 1965), so that no single context
decides.  The engine fails if the evidence is 0 or less.  By Chernoff's bound (Annals of Mathematical
Statistics 23, 1952) a correct engine fails with a probability of at most exp(-power), and an engine with the
old weights passes with at most the same probability.  A context that the trainer has moved by x times b adds
to the power

    -log of the integral of the square root of (density of old * density of new)  =  x / 2 - log(1 + x / 2).

So the power depends on the trainer alone.  Below ``POWER`` the second test is undecided, and the sync is
unproved.  b is the value of the dtype, or the one from the median of the smaller differences if that is
larger.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf, isnan, log, log1p
from statistics import fmean, median
from typing import Any

from attrs import evolve, field, frozen

from grpo_core.contracts.records import Canary

TopToken = tuple[int, float]
"""The most likely token after a context, and its logprob."""


@frozen(kw_only=True)
class Known(Canary):
    """A canary with what is known of older weights, by which an engine that still uses those is found."""

    before: Known | None = None
    """The same under older weights."""
    answer: TopToken | None = None
    """The engine's answer under these weights."""

    @classmethod
    def of(cls, canary: Canary, **more: Any) -> Known:
        return cls(prompt_ids=canary.prompt_ids, token_ids=canary.token_ids, logprobs=canary.logprobs, **more)


CLIP = 7.0
"""Largest weight of a context in the evidence, and largest x in the power, where it is worth two nats."""
POWER = 14.0
"""Least power for the second test to decide; it is wrong in at most one of a million syncs."""


@frozen
class Explained:
    """Differences of logprobs between two programs that use the same weights."""

    typical: float
    """Mean difference to expect."""
    mean: float
    """Largest accepted mean difference of a canary."""
    largest: float
    """Largest accepted difference of a context."""
    spared: float = 0.0
    """Fraction of the contexts, the worst ones, that these limits ignore."""


EXPLAINED: Mapping[str, Explained] = {
    "float32": Explained(typical=1e-5, mean=3e-4, largest=1e-3),
    "float16": Explained(typical=0.00125, mean=0.0125, largest=0.125, spared=1 / 12),
    "bfloat16": Explained(typical=0.01, mean=0.1, largest=1.0, spared=1 / 12),
}
"""Expected differences by dtype.  In float32 engines and trainer differ by about 1e-5.  For bfloat16,
published means are 0.01 to 0.03, with single differences of 0.1 to 0.3, and larger for mixtures of experts.
float16 has three bits more."""


@frozen
class Tolerance:
    """The differences between an engine and the trainer that a configuration allows."""

    largest: float = 0.0
    """Largest difference of a context; 0 uses the limit of the dtype."""
    dtype: str = ""
    """Dtype in which the engine computes, if the configuration says so."""

    def explained(self, dtypes: Iterable[str]) -> Explained:
        """Return the accepted differences for dtypes of weights and engine; ``""`` is unknown."""
        if self.largest:
            return Explained(typical=self.largest / 100, mean=self.largest, largest=self.largest)
        return max((_explained(each) for each in (*dtypes, self.dtype)), key=lambda each: each.typical)


def _explained(dtype: str) -> Explained:
    """Return the differences to expect for a dtype; unlisted ones, such as float8, count as the coarsest."""
    listed = "float32" if dtype in ("", "float64") else dtype
    return EXPLAINED.get(listed, EXPLAINED["bfloat16"])


@frozen(kw_only=True)
class Agreement:
    """Agreement of an engine's answers to a canary with the trainer."""

    mean: float = 0.0
    """Mean difference of logprobs."""
    largest: float = 0.0
    """The largest one."""
    moved: float = 0.0
    """Mean difference between the trainer's logprobs now and under the older weights."""
    power: float = 0.0
    """How well the older weights can be distinguished, in nats; see the module's docstring."""
    proves: bool = False
    """Whether the engine uses the new weights, and neither the older ones nor wrong tensors."""
    fault: str = ""
    """Why the engine does not seem to use the weights; empty if it does."""
    answers: tuple[TopToken, ...] = field(default=(), repr=False)
    """The engine's answers, in the order of the contexts."""


def agreement(canaries: Sequence[Canary], answers: Sequence[TopToken], explained: Explained) -> Agreement:
    """Run both tests on an engine's answers to a canary, one for each context."""
    differences = [difference(canary, answer) for canary, answer in zip(canaries, answers, strict=True)]
    found = Agreement(mean=fmean(differences), largest=max(differences), answers=tuple(answers))
    if not _match(differences, explained):
        worst = differences.index(found.largest)
        return evolve(found, fault=_differs(found, canaries[worst], answers[worst], explained))
    known = [
        (canary, canary.before, answer)
        for canary, answer in zip(canaries, answers, strict=True)
        if isinstance(canary, Known) and canary.before is not None
    ]
    if not known:
        return found
    pairs = [_old_and_new(canary, before, answer) for canary, before, answer in known]
    moves = [movement(canary, before) for canary, before, _ in known]
    scale = max(explained.typical, min(map(median, zip(*pairs, strict=True))) / log(2))
    found = evolve(found, moved=fmean(moves), power=sum(_power(move / scale) for move in moves))
    evidence = sum(max(-CLIP, min(CLIP, (old - new) / scale)) for old, new in pairs)
    if found.power < POWER:
        return found
    if evidence > 0:
        middle = sorted(canaries, key=lambda each: each.logprobs[0])[len(canaries) // 2]
        alike = [movement(each, middle) for each in canaries]
        return evolve(found, proves=found.largest <= explained.largest and not _match(alike, explained))
    old, new = map(fmean, zip(*pairs, strict=True))
    return evolve(
        found,
        fault=f"after {len(pairs)} canary prompts its logprobs are nearer to older weights (mean difference "
        f"{old:.3g}) than to the new ones (mean difference {new:.3g})",
    )


def _match(differences: Sequence[float], explained: Explained) -> bool:
    judged = sorted(differences)[: len(differences) - int(explained.spared * len(differences))]
    return fmean(judged) <= explained.mean and max(judged) <= explained.largest


def _old_and_new(canary: Canary, before: Known, answer: TopToken) -> tuple[float, float]:
    """Return the differences to an engine that did not move, and to one that moved with the trainer.

    If the most likely token changed, or the engine's earlier answer is unknown, the answer is compared with
    the trainer's logprobs.
    """
    if before.answer is not None and before.answer[0] == answer[0]:
        token, now, then = answer[0], dict(_named(canary)), dict(_named(before))
        if token in now and token in then:
            moved = answer[1] - before.answer[1]
            return abs(moved), abs(moved - (now[token] - then[token]))
    return difference(before, answer), difference(canary, answer)


def _named(canary: Canary) -> Iterable[tuple[int, float]]:
    return zip(canary.token_ids, canary.logprobs, strict=True)


def difference(canary: Canary, answer: TopToken) -> float:
    """Return the difference between engine and trainer after a context, or a lower bound of it.

    The engine gives the trainer's most likely token at most its own top logprob; the trainer gives a token
    that it does not name at most the least logprob that it names.
    """
    if any(map(isnan, canary.logprobs)):
        return inf
    token, logprob = answer
    known = dict(_named(canary))
    of_token = abs(logprob - known[token]) if token in known else logprob - min(canary.logprobs)
    return max(of_token, max(canary.logprobs) - logprob, 0.0)


def movement(canary: Canary, before: Canary) -> float:
    """Return the difference that the trainer's older logprobs show after a context."""
    return difference(canary, (before.token_ids[0], before.logprobs[0]))


def _power(moved: float) -> float:
    half = min(moved, CLIP) / 2
    return half - log1p(half)


def _differs(found: Agreement, canary: Canary, answer: TopToken, explained: Explained) -> str:
    token, logprob = answer
    known = dict(_named(canary))
    said = f"{known[token]:.6f}" if token in known else "less than for its likeliest tokens"
    return (
        f"for token {token} after a canary prompt of {len(canary.prompt_ids)} tokens its logprob is "
        f"{logprob:.6f}, the trainer's {said}; the differences are {found.mean:.3g} in the mean and "
        f"{found.largest:.3g} at most (tolerance {explained.mean:g} and {explained.largest:g})"
    )
