"""A rollout: one prompt played to its end, turn by turn.

There is one ``play``.  Training calls it for a group, validation for the whole set or for one prompt at a
time; what is played together is generated in one engine call and judged in one environment call a turn.

    open       a session for each rollout, and the tools of its model
    generate   one completion for each rollout that speaks
    evaluate   tools answer those that call some, the environment judges the others
    close      whatever happened in between
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from grpo_core.completions import check_completions
from grpo_core.errors import ChildDied, DeadlineExceeded, EngineError
from grpo_core.protocols import Engine, EnvironmentClient
from grpo_core.records import EndReason, Message, Rollout
from grpo_core.rendering import Renderer
from grpo_core.tokens import Ids, as_ids
from grpo_core.turns import RolloutState, SamplingParams, Start, derive_seed

__all__ = ["LostBudget", "SamplingParams", "Start", "derive_seed", "play"]

T = TypeVar("T")
R = TypeVar("R")


async def play(
    starts: Sequence[Start],
    *,
    engine: Engine,
    environments: Mapping[str, EnvironmentClient],
    renderer: Renderer,
    sampling: SamplingParams,
    deadline: float | None = None,
) -> list[Rollout]:
    """Play rollouts turn by turn, together; the result has their order.

    A rollout that ends unscored (its environment failed, the engine gave it up, or ``deadline``
    seconds have passed) has ``reward=None`` and says why in ``error``.  Each session that was opened is
    closed once, also if this call is cancelled.

    Raises ModelError if the chat template cannot keep the tokens of earlier turns.
    """
    plays = [RolloutState(start, environments[start.prompt.environment], sampling) for start in starts]
    try:
        async with asyncio.timeout(deadline):
            await _open(plays, renderer)
            while live := [p for p in plays if not p.done]:
                await _speak([p for p in live if not p.spoken], engine, renderer)
                asked = _to_be_asked(plays)
                episodes = [p.episode() for p in asked]
                feedback = await _by_environment(
                    asked, episodes, lambda environment, part: environment.evaluate(part)
                )
                for p, each in zip(asked, feedback, strict=True):
                    p.apply_feedback(each, renderer)
    except TimeoutError:
        _give_up(plays, f"not finished within its deadline of {deadline:g} s", "deadline")
    except (EngineError, ChildDied, DeadlineExceeded) as error:
        _give_up(plays, str(error))
    finally:
        await _close(plays)
    return [p.rollout() for p in plays]


async def _open(plays: Sequence[RolloutState], renderer: Renderer) -> None:
    """Sessions and prompts; a prompt that several rollouts share is rendered once."""
    pairs = [(p.session, p.start.prompt) for p in plays]
    opened = await _by_environment(plays, pairs, lambda environment, part: environment.open(dict(part)))
    rendered: dict[tuple[int, str], Ids] = {}
    for p, begun in zip(plays, opened, strict=True):
        if p.environment.max_turns > 1:
            renderer.check_turns(tools=bool(begun.tools))
        key = id(p.start.prompt), repr(begun.tools) if begun.tools else ""
        if key not in rendered:
            rendered[key] = as_ids(renderer.prompt_ids(p.start.prompt.messages, begun.tools))
        p.begin(begun, rendered[key], renderer.context)


async def _speak(plays: Sequence[RolloutState], engine: Engine, renderer: Renderer) -> None:
    """One completion for each."""
    if not plays:
        return
    requests = [p.request(renderer.stop_token_ids) for p in plays]
    completions = await engine.generate(requests)
    check_completions(completions, requests)
    replies = renderer.texts([completion.token_ids.tolist() for completion in completions])
    for p, request, completion, text in zip(plays, requests, completions, replies, strict=True):
        message: Message = {"role": "assistant", "content": text}
        if p.tools:
            message = renderer.message(
                text,
                token_ids=completion.token_ids.tolist(),
                before=request.prompt_ids.tolist(),
                tools=p.tools,
            )
        p.take_completion(completion, message)


def _to_be_asked(plays: Sequence[RolloutState]) -> list[RolloutState]:
    """Those whose last completion are unscored.

    A group that is compared is shown whole, with those of it that have ended, once none of it calls a tool:
    until then only the callers go on.
    """
    waiting: dict[tuple[str, str], list[RolloutState]] = defaultdict(list)
    calling: set[tuple[str, str]] = set()
    for p in plays:
        group = p.start.prompt.environment, p.start.group
        if p.calls_tools:
            calling.add(group)
        if p.environment.needs_group and p.error is None:
            waiting[group].append(p)
    live = {group for group, members in waiting.items() if not all(p.done for p in members)}
    asked = []
    for p in plays:
        group = p.start.prompt.environment, p.start.group
        if not p.environment.needs_group:
            wanted = p.spoken
        elif group in calling:
            wanted = p.calls_tools
        else:
            wanted = group in live and p.error is None
        asked += [p] if wanted else []
    return asked


async def _by_environment(
    plays: Sequence[RolloutState],
    items: Sequence[T],
    ask: Callable[[EnvironmentClient, list[T]], Awaitable[Sequence[R]]],
) -> list[R]:
    """One result for each item, by one call for each environment, all at once."""
    by_environment: dict[str, list[int]] = defaultdict(list)
    for i, p in enumerate(plays):
        by_environment[p.start.prompt.environment].append(i)

    async def of(places: list[int]) -> Sequence[R]:
        return await ask(plays[places[0]].environment, [items[i] for i in places])

    groups = list(by_environment.values())
    if len(groups) == 1:  # as in training: without a task of its own
        answers = [await of(groups[0])]
    else:
        answers = await asyncio.gather(*map(of, groups))
    results: dict[int, R] = {}
    for places, answer in zip(groups, answers, strict=True):
        results.update(zip(places, answer, strict=True))
    return [results[i] for i in range(len(plays))]


async def _close(plays: Sequence[RolloutState]) -> None:
    sessions: dict[str, list[RolloutState]] = defaultdict(list)
    for p in plays:
        sessions[p.start.prompt.environment].append(p)
    for members in sessions.values():
        await members[0].environment.close([p.session for p in members])


def _give_up(plays: Sequence[RolloutState], error: str, reason: EndReason | None = None) -> None:
    for p in plays:
        if not p.done:
            p.finish_reason = reason or p.finish_reason
            p.give_up(error, lost=True)


class LostBudget:
    """Tells when all rollouts are lost, by the engine or with their sessions: ``in_a_row`` of them."""

    def __init__(self, in_a_row: int) -> None:
        self._in_a_row = in_a_row
        self._streak = 0

    def observe(self, rollout: Rollout) -> None:
        """Raises EngineError if this rollout is one too many."""
        self._streak = self._streak + 1 if rollout.lost else 0
        if self._streak >= self._in_a_row:
            raise EngineError(
                f"the last {self._streak} rollouts were lost, as many as all that may be in flight "
                f"with all their retries; the last one: {rollout.error}"
            )
