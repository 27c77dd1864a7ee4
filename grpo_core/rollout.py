"""A rollout: one prompt played to its end, turn by turn.

There is one ``play``.  Training calls it for a group, validation for the whole set or for one prompt at a
time; what is played together is generated in one engine call and judged in one environment call a turn.
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

from attrs import define, field, frozen

from grpo_core.errors import ChildDied, DeadlineExceeded, EngineError, PluginError
from grpo_core.protocols import Engine, Judge
from grpo_core.records import (
    Completion,
    Episode,
    FinishReason,
    GenerationRequest,
    Message,
    Prompt,
    Rollout,
    Verdict,
)
from grpo_core.rendering import Renderer

LOGPROB_SLACK = 1e-3
"""A logprob may exceed 0 by rounding."""


@frozen(kw_only=True)
class Sampling:
    """How completions are sampled."""

    temperature: float
    max_tokens: int
    stop: tuple[str, ...] = ()


@frozen(kw_only=True)
class Start:
    """A rollout that is to be played."""

    prompt: Prompt
    seed: int
    group: str = ""


def seed_of(*parts: Any) -> int:
    """63 bits that depend on all of ``parts`` and on nothing else."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest(), "big") >> 1


async def play(
    starts: Sequence[Start],
    *,
    engine: Engine,
    judges: Mapping[str, Judge],
    renderer: Renderer,
    sampling: Sampling,
    deadline: float | None = None,
) -> list[Rollout]:
    """Play rollouts turn by turn, together; the result has their order.

    A rollout that comes to no verdict (its environment failed, the engine gave it up, or ``deadline``
    seconds have passed) has ``reward=None`` and says why in ``error``.
    """
    distinct = {id(start.prompt): start.prompt for start in starts}
    ids = {key: renderer.prompt_ids(prompt.messages) for key, prompt in distinct.items()}
    plays = [_Play(start, judges[start.prompt.environment], ids[id(start.prompt)]) for start in starts]
    live = plays
    try:
        async with asyncio.timeout(deadline):
            while live:
                requests = [p.request(sampling, renderer.stop_token_ids) for p in live]
                completions = await engine.generate(requests)
                check_completions(completions, requests)
                replies = renderer.texts([completion.token_ids for completion in completions])
                for p, completion, reply in zip(live, completions, replies, strict=True):
                    p.take_completion(completion, reply)
                for p, verdict in zip(live, await _evaluate(live), strict=True):
                    p.take_verdict(verdict, renderer)
                live = [p for p in live if not p.done]
    except TimeoutError:
        _give_up(live, f"not finished within its deadline of {deadline:g} s")
    except (EngineError, ChildDied, DeadlineExceeded) as error:
        _give_up(live, str(error))
    return [p.rollout() for p in plays]


def check_completions(completions: Sequence[Completion], requests: Sequence[GenerationRequest]) -> None:
    """Raises PluginError if an engine's answer breaks its contract: nothing of it may reach the trainer."""
    if len(completions) != len(requests):
        raise PluginError(
            f"engine: generate() returned {len(completions)} completions for {len(requests)} requests"
        )
    for completion, request in zip(completions, requests, strict=True):
        lengths = len(completion.token_ids), len(completion.logprobs), len(completion.versions)
        if len(set(lengths)) > 1 or lengths[0] > request.max_tokens:
            raise PluginError(
                f"engine: generate() returned {lengths[0]} token ids, {lengths[1]} logprobs and {lengths[2]} "
                f"versions; expected as many of each, and at most max_tokens = {request.max_tokens}"
            )
        if not all(-math.inf < logprob <= LOGPROB_SLACK for logprob in completion.logprobs):
            wrong = next(x for x in completion.logprobs if not -math.inf < x <= LOGPROB_SLACK)
            raise PluginError(
                f"engine: generate() returned the logprob {wrong} for a sampled token; expected a finite "
                "number of at most 0"
            )


@define(eq=False)
class _Play:
    """A rollout while it is played."""

    start: Start
    judge: Judge
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...] = ()
    sampled: tuple[bool, ...] = ()
    logprobs: tuple[float, ...] = ()
    versions: tuple[int, ...] = ()
    messages: tuple[Message, ...] = field(init=False)
    reward: float | None = None
    metrics: dict[str, float] = field(factory=dict)
    turns: int = 0
    finish_reason: FinishReason = "stop"
    error: str | None = None
    lost: bool = False
    done: bool = False

    def __attrs_post_init__(self) -> None:
        self.messages = self.start.prompt.messages

    def request(self, sampling: Sampling, stop_token_ids: tuple[int, ...]) -> GenerationRequest:
        return GenerationRequest(
            prompt_ids=self.prompt_ids + self.token_ids,
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            stop_token_ids=stop_token_ids,
            stop=sampling.stop,
            seed=self.start.seed if self.turns == 0 else seed_of(self.start.seed, self.turns),
        )

    def take_completion(self, completion: Completion, reply: str) -> None:
        n = len(completion.token_ids)
        self._append(completion.token_ids, (True,) * n, completion.logprobs, completion.versions)
        self.messages = (*self.messages, {"role": "assistant", "content": reply})
        self.turns += 1
        self.finish_reason = completion.finish_reason

    def episode(self) -> Episode:
        return Episode(
            prompt=self.start.prompt,
            messages=self.messages,
            turn=self.turns - 1,
            group=self.start.group,
            finish_reason=self.finish_reason,
        )

    def take_verdict(self, verdict: Verdict, renderer: Renderer) -> None:
        if verdict.error is not None or (verdict.done and verdict.reward is None):
            self.give_up(verdict.error or "the environment gave no verdict")
            return
        self.reward = (self.reward or 0.0) + (verdict.reward or 0.0)
        self.metrics |= verdict.metrics
        self.done = verdict.done or self.turns >= self.judge.max_turns or self.finish_reason != "stop"
        if not self.done:
            self.messages += verdict.messages
            new = renderer.continuation_ids(verdict.messages)
            n = len(new)
            self._append(new, (False,) * n, (0.0,) * n, (-1,) * n)

    def give_up(self, error: str, *, lost: bool = False) -> None:
        self.done, self.reward, self.error, self.lost = True, None, error, lost

    def rollout(self) -> Rollout:
        return Rollout(
            prompt_ids=self.prompt_ids,
            token_ids=self.token_ids,
            sampled=self.sampled,
            logprobs=self.logprobs,
            versions=self.versions,
            messages=self.messages,
            reward=self.reward,
            metrics=self.metrics,
            turns=self.turns,
            finish_reason=self.finish_reason,
            error=self.error,
            lost=self.lost,
        )

    def _append(
        self,
        token_ids: tuple[int, ...],
        sampled: tuple[bool, ...],
        logprobs: tuple[float, ...],
        versions: tuple[int, ...],
    ) -> None:
        self.token_ids += token_ids
        self.sampled += sampled
        self.logprobs += logprobs
        self.versions += versions


async def _evaluate(plays: Sequence[_Play]) -> list[Verdict]:
    """One call for each environment, all at once."""
    by_environment: dict[str, list[int]] = defaultdict(list)
    for i, p in enumerate(plays):
        by_environment[p.start.prompt.environment].append(i)
    verdicts: dict[int, Verdict] = {}

    async def ask(places: list[int]) -> None:
        answer = await plays[places[0]].judge.evaluate([plays[i].episode() for i in places])
        verdicts.update(zip(places, answer, strict=True))

    await asyncio.gather(*map(ask, by_environment.values()))
    return [verdicts[i] for i in range(len(plays))]


def _give_up(plays: Sequence[_Play], error: str) -> None:
    for p in plays:
        if not p.done:
            p.give_up(error, lost=True)


class EngineBudget:
    """Tells when an engine gives up all that it is asked: ``in_a_row`` rollouts with none between them."""

    def __init__(self, in_a_row: int) -> None:
        self._in_a_row = in_a_row
        self._streak = 0

    def observe(self, rollout: Rollout) -> None:
        """Raises EngineError if this rollout is one too many."""
        self._streak = self._streak + 1 if rollout.lost else 0
        if self._streak >= self._in_a_row:
            raise EngineError(
                f"engine: the last {self._streak} rollouts were lost, as many as all that may be in flight "
                f"with all their retries; the last one: {rollout.error}"
            )
