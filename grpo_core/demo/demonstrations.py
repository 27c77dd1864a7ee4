"""Demonstrations for the warm start: prompts played with the replies that their environment knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import evolve

from grpo_core.app.model_sources import SolvingEnvironment
from grpo_core.contracts.records import Episode, Message, Prompt
from grpo_core.text.response_formats import assistant_message

MOST = 5000
"""Largest number of prompts of all tasks together."""
AT_ONCE = 256
"""Number of concurrent rollouts of one environment."""
LONGEST = 1024
"""Largest number of tokens of a demonstration; the tiny model has one for each character."""
POSITIONS, MAX_TOKENS = 256, 16
"""Number of positions, and of tokens of a completion, if all solutions are short."""
TURNS = 8
"""Largest number of completions of a rollout that positions are made for."""

Demonstration = tuple[str, ...]
"""A conversation: the prompt, a reply, the environment's answer, a reply, ..."""


def lengths(found: Sequence[Demonstration], turns: int) -> tuple[int, int]:
    """Return the positions and the ``max_tokens`` that leave room for solutions, and for longer replies.

    Args:
        found: the demonstrations.
        turns: largest number of completions of a rollout.
    """
    prompts, replies, answers = (
        max((len(text) for texts in found for text in texts[part]), default=0)
        for part in (slice(1), slice(1, None, 2), slice(2, None, 2))
    )
    max_tokens = max(MAX_TOKENS, (replies + 1) * 5 // 4)
    rollout = prompts + min(turns, TURNS) * (max_tokens + answers)
    return max(POSITIONS, min(rollout, 2 * LONGEST)), max_tokens


async def demonstrations(
    environments: Mapping[str, SolvingEnvironment], prompts: Mapping[str, Sequence[Prompt]]
) -> tuple[Demonstration, ...]:
    """Make a demonstration for each prompt for which ``solve`` knows a reply, unless it exceeds ``LONGEST``.

    Args:
        environments: the environment of each task.
        prompts: the prompts of each task; at most ``MOST`` of all tasks together are played.
    """
    each = max(1, MOST // len(prompts))
    found: list[Demonstration] = []
    for task, part in prompts.items():
        some = part[:each]
        for begin in range(0, len(some), AT_ONCE):
            found += await _played(environments[task], some[begin : begin + AT_ONCE])
    return tuple(found)


async def _played(environment: SolvingEnvironment, prompts: Sequence[Prompt]) -> list[Demonstration]:
    """Play turn by turn; ``solve`` gets the conversation so far as the prompt's messages."""
    starts = {f"solution {i}": prompt for i, prompt in enumerate(prompts)}
    said = {name: [_text(prompt.messages)] for name, prompt in starts.items()}
    talks = dict(starts)
    # an agent sends its own prompts
    several = environment.about.max_turns > 1 and not environment.about.runs_agents
    try:
        tools = any(opened.tools for opened in await environment.open(starts)) if several else False
        for turn in range(environment.about.max_turns):
            solved = zip(talks.items(), await environment.solve(list(talks.values())), strict=True)
            replies = {name: (talk, reply) for (name, talk), reply in solved if reply is not None}
            for name, (_, reply) in replies.items():
                said[name].append(reply)
            if not replies or not several:
                break
            episodes = [
                Episode(
                    prompt=starts[name],
                    messages=(*talk.messages, assistant_message(reply, tools=tools)),
                    turn=turn,
                    session=name,
                    group=name,
                )
                for name, (talk, reply) in replies.items()
            ]
            talks = {}
            for episode, feedback in zip(episodes, await environment.evaluate(episodes), strict=True):
                if not feedback.done and feedback.error is None:
                    name = episode.group
                    said[name].append(_text(feedback.messages))
                    talks[name] = evolve(starts[name], messages=episode.messages + feedback.messages)
    finally:
        if several:
            await environment.close(list(starts))
    found = [tuple(texts[: len(texts) // 2 * 2]) for texts in said.values() if len(texts) > 1]
    return [texts for texts in found if sum(map(len, texts)) + len(texts) // 2 <= LONGEST]


def _text(messages: Sequence[Message]) -> str:
    return "".join(str(message.get("content") or "") for message in messages)
