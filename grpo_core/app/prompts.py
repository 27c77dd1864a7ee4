"""The prompts of a run: those that are short enough, and one reply of each task that is judged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType

import numpy as np
from attrs import evolve
from numpy.typing import NDArray

from grpo_core.contracts.errors import ConfigError, ModelError, PluginError
from grpo_core.contracts.playing import EnvironmentClient
from grpo_core.contracts.records import Episode, Prompt
from grpo_core.data.loaders import LookAhead
from grpo_core.data.prompts import sizes
from grpo_core.data.rows import ReadRows
from grpo_core.environments.feedback import BAD_REWARD
from grpo_core.environments.pool import EnvironmentPool
from grpo_core.text.rendering import Renderer, Tools
from grpo_core.validation.runner import HeldOut

BUGS = frozenset({"AttributeError", "ImportError", "ModuleNotFoundError", "NameError", "TypeError"})
"""Errors of a reward function that mean a bug, whatever the reply."""


async def judge_one_reply(
    environments: Mapping[str, EnvironmentPool],
    prompts: Mapping[str, Sequence[Prompt]],
    *,
    hints: bool = False,
) -> None:
    """Evaluate one reply of each task.  Raises PluginError for a bug, or a result that is no number.

    With ``hints`` the reply is wrong, and ConfigError is raised if it gets none.
    """
    for task, part in prompts.items():
        environment = environments[task]
        if environment.player is not None or environment.about.needs_group or not part:
            continue
        (solved,) = [None] if hints else await environment.solve(part[:1])
        reply = {"role": "assistant", "content": solved or "I do not know."}
        await environment.open({task: part[0]})
        messages = (*part[0].messages, reply)
        episode = Episode(prompt=part[0], messages=messages, session=task, finish_reason="length")
        (feedback,) = await environment.evaluate([episode])
        await environment.close([task])
        if (fault := feedback.fault) is not None and fault.kind in BUGS:
            raise PluginError(f"task {task!r}: {feedback.error}").carrying(fault)
        if fault is not None and fault.kind == BAD_REWARD:
            raise PluginError(f"task {task!r}: reply {reply['content']!r:.80}: {feedback.error}")
        if hints and environment.about.max_turns == 1 and part[0].hint is feedback.hint is None:
            raise ConfigError(f"task {task!r} gives no hints, from which the loss learns: set Prompt.hint")


TOGETHER = 64
"""Number of prompts to encode before the event loop runs again."""
_SHORT = {"role": "user", "content": "?"}


async def left_out(
    what: str, prompts: Sequence[Prompt], most: int, renderer: Renderer, tools: Tools = ()
) -> tuple[Sequence[Prompt], str]:
    """Return the prompts with at most ``most`` tokens, and a message about the others, if any.

    Raises ConfigError if no prompt is left.
    """
    found = await longer(prompts, most, renderer, tools)
    if not found:
        return prompts, ""
    if len(found) == len(prompts):
        place = min(found, key=lambda each: found[each])
        raise ConfigError(
            f"{what}: all of its {len(prompts):,} prompts have more than rollout.max_prompt_tokens = {most} "
            f"tokens; the shortest, {prompts[place].id!r}, has {found[place]:,}"
        )
    place = max(found, key=lambda each: found[each])
    message = (
        f"rollout.max_prompt_tokens = {most} leaves out {len(found):,} of its {len(prompts):,} prompts, such "
        f"as {prompts[place].id!r} with {found[place]:,} tokens"
    )
    if isinstance(prompts, ReadRows):
        prompts.leave_out(found)
        return prompts, message
    return [prompt for place, prompt in enumerate(prompts) if place not in found], message


async def short_enough(
    most: int,
    prompts: Mapping[str, Sequence[Prompt]],
    held_out: Sequence[HeldOut],
    environments: Mapping[str, EnvironmentClient],
    renderer: Renderer,
    loaders: Mapping[str, LookAhead] = MappingProxyType({}),
) -> tuple[Mapping[str, Sequence[Prompt]], Sequence[HeldOut], dict[str, str]]:
    """Return the prompts with at most ``most`` tokens (0: all), and messages about the others, by cause.

    Loaders that read ahead leave out prompts that are too long when they read them.

    Raises ConfigError if none are left of a task or set.
    """
    messages: dict[str, str] = {}
    if not most:
        return prompts, held_out, messages
    parts = [("task", "prompts_left_out", prompts, environments)]
    parts += [("validation of", "held_out_left_out", one.prompts, one.environments) for one in held_out]
    kept = [dict(own) for _, _, own, _ in parts]
    for left, (who, cause, given, there) in zip(kept, parts, strict=True):
        for name, each in given.items():
            if not each or there[name].player is not None:
                continue
            tools = await shown_tools(there[name], each)
            if given is prompts and name in loaders:
                loaders[name].keep(partial(_fits, most, renderer, tools))
                left[name] = await loaders[name].first(len(each))
                continue
            left[name], message = await left_out(f"{who} {name!r}", each, most, renderer, tools)
            if message:
                messages[f"{cause}/{name}"] = f"{who} {name!r}: {message}"
    own, *sets = kept
    return own, [evolve(one, prompts=left) for one, left in zip(held_out, sets, strict=True)], messages


def _fits(most: int, renderer: Renderer, tools: Tools, prompt: Prompt) -> bool:
    """Return whether a prompt has at most ``most`` tokens."""
    return len(renderer.prompt_ids(prompt.messages, tools)) <= most


async def shown_tools(environment: EnvironmentClient, prompts: Sequence[Prompt]) -> Tools:
    """Return the tools of the first prompt as an estimate for all prompts."""
    if environment.about.max_turns == 1 or environment.player is not None:
        return ()
    (opened,) = await environment.open({"first look": prompts[0]})
    await environment.close(["first look"])
    return opened.tools


async def longer(
    prompts: Sequence[Prompt], limit: int, renderer: Renderer, tools: Tools, most: int | None = None
) -> dict[int, int]:
    """Return the indices of prompts with more than ``limit`` tokens, and their numbers of tokens.

    Args:
        most: number of prompts to encode, the longest first; None: all that may be too long.
    """
    sized = bounds(prompts)
    try:  # number of template tokens of an almost empty prompt
        always = len(renderer.prompt_ids((_SHORT,), tools))
    except ModelError:  # the template needs other messages
        always = 2**31
    indices = np.flatnonzero(sized > max(0, limit - always))
    if most is not None and len(indices) > most:
        indices = np.sort(indices[np.argsort(-sized[indices].astype(np.int64), kind="stable")[:most]])
    found: dict[int, int] = {}
    for begin in range(0, len(indices), TOGETHER):
        some = {int(index): prompts[int(index)] for index in indices[begin : begin + TOGETHER]}

        def count(some: Mapping[int, Prompt] = some) -> dict[int, int]:
            return {index: len(renderer.prompt_ids(each.messages, tools)) for index, each in some.items()}

        counted = await renderer.run(count, sum(int(sized[index]) for index in some))
        found |= {index: tokens for index, tokens in counted.items() if tokens > limit}
    return found


def bounds(prompts: Sequence[Prompt]) -> NDArray[np.uint32]:
    """Return the sizes of the prompts."""
    own = prompts.sizes if isinstance(prompts, ReadRows) else sizes(prompts)
    return np.asarray(own, np.uint32)
