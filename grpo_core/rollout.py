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

from attrs import define, evolve, field, frozen

from grpo_core.errors import ChildDied, DeadlineExceeded, EngineError, PluginError
from grpo_core.protocols import Engine, Judge
from grpo_core.records import Completion, Episode, GenerationRequest, Message, Prompt, Rollout, Verdict
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
    plays = [_Play(start, judges[start.prompt.environment], renderer) for start in starts]
    live = plays
    try:
        async with asyncio.timeout(deadline):
            while live:
                requests = [p.request(sampling) for p in live]
                completions = await engine.generate(requests)
                check_completions(completions, requests)
                for p, completion in zip(live, completions, strict=True):
                    p.take_completion(completion)
                for p, reply in zip(live, renderer.texts([c.token_ids for c in completions]), strict=True):
                    p.messages.append({"role": "assistant", "content": reply})
                for p, verdict in zip(live, await _evaluate(live), strict=True):
                    p.take_verdict(verdict)
                live = [p for p in live if not p.done]
    except TimeoutError:
        _give_up(live, f"not finished within its deadline of {deadline:g} s")
    except (EngineError, ChildDied, DeadlineExceeded) as error:
        _give_up(live, str(error))
    return [p.rollout for p in plays]


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
    renderer: Renderer
    rollout: Rollout = field(init=False)
    messages: list[Message] = field(init=False)
    done: bool = False

    def __attrs_post_init__(self) -> None:
        prompt = self.start.prompt
        self.messages = list(prompt.messages)
        self.rollout = Rollout(prompt_ids=self.renderer.prompt_ids(prompt.messages))

    def request(self, sampling: Sampling) -> GenerationRequest:
        seed = self.start.seed if self.rollout.turns == 0 else seed_of(self.start.seed, self.rollout.turns)
        return GenerationRequest(
            prompt_ids=self.rollout.prompt_ids + self.rollout.token_ids,
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            stop_token_ids=self.renderer.stop_token_ids,
            stop=sampling.stop,
            seed=seed,
        )

    def take_completion(self, completion: Completion) -> None:
        self.rollout = evolve(
            self.rollout,
            token_ids=self.rollout.token_ids + completion.token_ids,
            sampled=self.rollout.sampled + (True,) * len(completion.token_ids),
            logprobs=self.rollout.logprobs + completion.logprobs,
            versions=self.rollout.versions + completion.versions,
            turns=self.rollout.turns + 1,
            finish_reason=completion.finish_reason,
        )

    def episode(self) -> Episode:
        return Episode(
            prompt=self.start.prompt,
            messages=tuple(self.messages),
            turn=self.rollout.turns - 1,
            group=self.start.group,
            finish_reason=self.rollout.finish_reason,  # type: ignore[arg-type]
        )

    def take_verdict(self, verdict: Verdict) -> None:
        if verdict.error is not None or (verdict.done and verdict.reward is None):
            self.end(verdict.error or "the environment gave no verdict")
            return
        reward = (self.rollout.reward or 0.0) + (verdict.reward or 0.0)
        metrics = {**self.rollout.metrics, **verdict.metrics}
        self.rollout = evolve(self.rollout, reward=reward, metrics=metrics)
        last = self.rollout.turns >= self.judge.max_turns or self.rollout.finish_reason != "stop"
        if verdict.done or last:
            self.end()
            return
        self.messages += verdict.messages
        new = self.renderer.continuation_ids(verdict.messages)
        self.rollout = evolve(
            self.rollout,
            token_ids=self.rollout.token_ids + new,
            sampled=self.rollout.sampled + (False,) * len(new),
            logprobs=self.rollout.logprobs + (0.0,) * len(new),
            versions=self.rollout.versions + (-1,) * len(new),
        )

    def end(self, error: str | None = None) -> None:
        self.done = True
        reward = None if error is not None else self.rollout.reward
        self.rollout = evolve(self.rollout, reward=reward, error=error, messages=tuple(self.messages))


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
            p.end(error)
