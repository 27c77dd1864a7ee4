"""The canary: a check after each weight sync that the engine uses the weights that it holds.

Checksums show that the bytes arrived.  Only a forward pass shows that they are *used*: that no tensor has the
wrong name, no prefix cache keeps keys and values of older weights, and no copy was rolled back.  With each
version the trainer publishes its own logprobs after a few contexts.  The engine completes these greedily by
one token, and its logprobs are compared with the trainer's as ``grpo_core.loop.agreement`` says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from math import inf

import numpy as np
from attrs import define, evolve, field

from grpo_core.contracts.errors import ChildDied, DeadlineExceeded, EngineError, WeightSyncError
from grpo_core.contracts.incidents import report
from grpo_core.contracts.playing import check_completions
from grpo_core.contracts.protocols import Engine
from grpo_core.contracts.records import Completion, GenerationRequest, Group, Rollout, Weights
from grpo_core.loop.agreement import Agreement, Known, Tolerance, TopToken, agreement, movement
from grpo_core.processes import aio

MAX_FAILURES = 3
"""Failures in a row after which the canary gives up: an engine may die during the check, and have the weights
again at the next try."""

CONTEXTS, FRESH, LENGTH = 24, 6, 20
"""Largest number of contexts, of contexts replaced in a step, and of tokens in a context.  So few are cheap,
and a prefix cache keeps contexts of this length."""
UNDECIDED = -0.7
"""Logprob of a token that is as likely as all others together: there logprobs move most."""


async def update(
    engine: Engine, weights: Weights, *, deadline: float | None, key: str = "engine.deadline"
) -> None:
    """Give an engine new weights.  Raises WeightSyncError if it does not hold them in time."""

    def late() -> WeightSyncError:
        return WeightSyncError(
            f"engine: update_weights() of version {weights.version} did not return within {deadline:g} s "
            f"({key})"
        )

    async with aio.time_limit(deadline, late):
        await engine.update_weights(weights)


async def verify(
    engine: Engine, weights: Weights, *, tolerance: Tolerance, deadline: float | None
) -> Agreement:
    """Compare the engine with the trainer after a weight sync, if there is a canary.

    An engine that disagrees is checked again.  One that does not answer within ``deadline`` seconds gets the
    weights again first, which replaces a frozen process.  Raises DeadlineExceeded if it still does not
    answer, WeightSyncError if it answers with another version, EngineError if it fails.
    """
    if not weights.canary:
        return Agreement()

    def late() -> DeadlineExceeded:
        return DeadlineExceeded(
            f"engine: no answer to the canary of version {weights.version} within {deadline:g} s "
            "(engine.deadline); it may be frozen"
        )

    async def ask() -> Agreement:
        async with aio.time_limit(deadline, late):
            return await _compared(engine, weights, tolerance)

    try:
        first = await ask()
    except DeadlineExceeded as error:
        report("deadline", "engine", f"{error}. Sending the weights again")
        await update(engine, weights, deadline=deadline)
        first = await ask()
    found = await ask() if first.fault else first
    if found.fault:
        raise WeightSyncError(
            f"engine: it does not use the weights of version {weights.version}: {found.fault}. The tensors "
            "arrived as the trainer wrote them, so look at what the engine does with them: a cache of older "
            "weights, tensors under other names, adapters that are left out, another dtype "
            "(health.canary_tolerance)"
        )
    if first.fault:
        message = f"the canary of version {weights.version} failed, and passed when it was repeated"
        report("doubted", "engine", f"{message}: {first.fault}")
    return found


async def _compared(engine: Engine, weights: Weights, tolerance: Tolerance) -> Agreement:
    requests = [
        GenerationRequest(prompt_ids=canary.prompt_ids, max_tokens=1, temperature=0.0)
        for canary in weights.canary
    ]
    completions = await aio.repeated(lambda: engine.generate(requests), MAX_FAILURES, EngineError, ChildDied)
    check_completions(completions, requests)
    explained = tolerance.explained({info.dtype for info in weights.tensors} | {getattr(engine, "dtype", "")})
    return agreement(weights.canary, [_answer(weights.version, each) for each in completions], explained)


def _answer(version: int, completion: Completion) -> TopToken:
    versions = completion.versions.tolist()
    if versions != [version]:
        raise WeightSyncError(
            f"engine: after the sync of version {version} it completed the canary with versions "
            f"{versions}; expected [{version}]"
        )
    return completion.token_ids.tolist()[0], completion.logprobs.tolist()[0]


@define
class Canaries:
    """The canaries of a run: their contexts, the trainer's logprobs for them, and what they proved.

    The contexts are prefixes of the replies trained last.  Each step replaces those whose logprobs moved
    least in the trainer.  Movement adds up over the steps until a sync is proved.
    """

    contexts: list[tuple[int, ...]]
    """Contexts for the trainer's logprobs, prompts at first.  Without any, nothing is compared."""
    proved: int | None = field(init=False, default=None)
    """The newest version that the engine uses, not older weights, as the canary showed."""
    unproved: int = field(init=False, default=0)
    """Number of weight syncs since then, or since the first one."""
    _agreement: Agreement | None = field(init=False, default=None)
    _before: dict[tuple[int, ...], Known] = field(init=False, factory=dict)
    _moved: dict[tuple[int, ...], float] = field(init=False, factory=dict)
    _replies: dict[int, list[tuple[int, ...]]] = field(init=False, factory=dict)
    """Contexts in the replies of finished groups, by slot; the tokens themselves are in the data plane."""

    def finished(self, group: Group) -> None:
        """Record a context from the worst and the best reply of a group that is ready."""
        if self.contexts:
            replies = sorted(group.rollouts, key=lambda rollout: rollout.reward or 0.0)
            ends = {id(reply): reply for reply in (replies[0], replies[-1])}
            self._replies[group.slot] = [found for reply in ends.values() if (found := _context(reply))]

    def trained(self, groups: Sequence[Group]) -> None:
        """Replace the contexts that moved least by some from the replies that a step trained."""
        noted = [
            contexts
            for group in groups
            if (contexts := self._replies.pop(group.slot, None)) and any(r.trained for r in group.rollouts)
        ]
        found = (context for same in zip_longest(*noted) for context in same if context is not None)
        fresh = [context for context in dict.fromkeys(found) if context not in self.contexts][:FRESH]
        by_movement = sorted(self.contexts, key=lambda context: self._moved.get(context, inf), reverse=True)
        self.contexts = [*by_movement[: CONTEXTS - len(fresh)], *fresh]

    def published(self, weights: Weights) -> Weights:
        """Return the weights; their canary also has the trainer's earlier logprobs for the same contexts."""
        canary = tuple(Known.of(each, before=self._before.get(each.prompt_ids)) for each in weights.canary)
        self._moved = {each.prompt_ids: movement(each, each.before) for each in canary if each.before}
        return evolve(weights, canary=canary)

    def verified(self, weights: Weights, found: Agreement) -> None:
        """Record the result of ``verify``: after a proof, later versions are compared with this one."""
        asked = zip(weights.canary, found.answers, strict=True)
        older = {} if found.proves else self._before
        self._before = {
            each.prompt_ids: older.get(each.prompt_ids) or Known.of(each, answer=answer)
            for each, answer in asked
        }
        self.unproved = 0 if found.proves or self._agreement is None else self.unproved + 1
        self.proved = weights.version if found.proves else self.proved
        self._agreement = found

    def metrics(self) -> Mapping[str, float]:
        """Return the metrics of the last weight sync."""
        found = self._agreement
        if found is None or not self.contexts:
            return {}
        measured = {
            "canary/difference_mean": found.mean,
            "canary/difference_max": found.largest,
            "canary/moved": found.moved,
        }
        return {**(measured if found.answers else {}), "canary/unproved": float(self.unproved)}


def _context(rollout: Rollout) -> tuple[int, ...]:
    """Return the tokens before the most undecided token of a reply; none if nothing was sampled."""
    segment = next((each for each in reversed(rollout.segments) if each.tokens.n_sampled), None)
    if segment is None:
        return ()
    tokens = segment.tokens
    sampled = np.flatnonzero(tokens.sampled)
    place = sampled[np.abs(tokens.logprobs[sampled] - UNDECIDED).argmin()]
    before = tokens.ids[max(0, place - LENGTH) : place].tolist()
    return (*segment.prompt_ids[-LENGTH:].tolist(), *before)[-LENGTH:]
