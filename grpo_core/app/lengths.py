"""Finds prompts that are too long, or spell control tokens, before a run begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType

import numpy as np
from attrs import evolve, field, frozen
from numpy.typing import NDArray

from grpo_core.app.model_sources import StartModel
from grpo_core.config import Config, RolloutConfig
from grpo_core.contracts.errors import ConfigError, ControlInText, ModelError
from grpo_core.contracts.playing import EnvironmentClient
from grpo_core.contracts.records import Prompt
from grpo_core.data.loaders import LookAhead
from grpo_core.data.rows import ReadRows
from grpo_core.data.sizes import sizes
from grpo_core.text.rendering import INLINE, Renderer, Tools
from grpo_core.validation.runner import HeldOut

LOOKED_AT = 200
"""Number of a task's longest prompts to encode for a warning."""
TOGETHER = 64
"""Number of prompts to encode before the event loop runs again."""
_SHORT = {"role": "user", "content": "?"}

NO_LOADERS: Mapping[str, LookAhead] = MappingProxyType({})


@frozen(kw_only=True)
class Room:
    """The tokens that a rollout leaves for its prompt."""

    tokens: int
    """Largest number of tokens of a prompt."""
    why: str

    @classmethod
    def of(cls, config: RolloutConfig, positions: int) -> Room:
        if config.max_total_tokens > positions:
            total = f"fewer than rollout.max_total_tokens = {config.max_total_tokens}"
            return cls(tokens=positions - 1, why=f"the model has {positions:,} positions, {total}")
        if config.max_total_tokens:
            most = config.max_total_tokens - 1
            return cls(tokens=most, why=f"rollout.max_total_tokens = {config.max_total_tokens} allows {most}")
        most = positions - config.max_tokens
        return cls(
            tokens=most,
            why=f"the model has {positions:,} positions, of which rollout.max_tokens = {config.max_tokens} "
            f"leaves {most:,} to a prompt",
        )


async def unplayable(
    what: str, prompts: Sequence[Prompt], config: RolloutConfig, renderer: Renderer, tools: Tools = ()
) -> str:
    """Return a warning about prompts that are too long for any rollout, or "".

    Only the longest prompts are encoded.  Raises ConfigError if even the shortest prompt is too long.
    """
    room = Room.of(config, renderer.context)
    found = await _longer(prompts, room.tokens, renderer, tools, most=LOOKED_AT)
    if not found:
        return ""
    place = max(found, key=lambda each: found[each])
    example = f"{prompts[place].id!r} with {found[place]:,} tokens"
    if len(found) == min(LOOKED_AT, len(prompts)):
        shortest = prompts[int(np.argmin(_bounds(prompts)))]
        if (tokens := len(renderer.prompt_ids(shortest.messages, tools))) > room.tokens:
            raise ConfigError(
                f"{what}: no prompt is short enough to be played; even {shortest.id!r} has {tokens:,} "
                f"tokens: {room.why}. Choose shorter prompts, a smaller rollout.max_tokens or another model"
            )
    number = f"at least {len(found):,}" if len(found) == LOOKED_AT else f"{len(found):,}"
    return (
        f"no rollout can play {number} of its {len(prompts):,} prompts, such as {example}: {room.why}. Such "
        f"a prompt is skipped whenever it is drawn; rollout.max_prompt_tokens = {room.tokens} leaves it out"
    )


async def left_out(
    what: str, prompts: Sequence[Prompt], most: int, renderer: Renderer, tools: Tools = ()
) -> tuple[Sequence[Prompt], str]:
    """Return the prompts with at most ``most`` tokens, and a message about the others, if any.

    Raises ConfigError if no prompt is left.
    """
    found = await _longer(prompts, most, renderer, tools)
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


@frozen(kw_only=True, eq=False)
class RunPrompts:
    """The prompts of a run."""

    prompts: Mapping[str, Sequence[Prompt]] = field(factory=dict)
    """Training prompts by task."""
    held_out: Sequence[HeldOut] = ()

    async def short_enough(
        self,
        most: int,
        environments: Mapping[str, EnvironmentClient],
        renderer: Renderer,
        loaders: Mapping[str, LookAhead] = NO_LOADERS,
    ) -> tuple[RunPrompts, dict[str, str]]:
        """Return the prompts with at most ``most`` tokens (0: all), and messages about the others, by cause.

        Loaders that read ahead leave out prompts that are too long when they read them.

        Raises ConfigError if none are left of a task or set.
        """
        messages: dict[str, str] = {}
        if not most:
            return self, messages

        async def kept(
            prompts: Mapping[str, Sequence[Prompt]],
            environments: Mapping[str, EnvironmentClient],
            who: str,
            cause: str,
        ) -> dict[str, Sequence[Prompt]]:
            left = dict(prompts)
            for name, own in prompts.items():
                if own and environments[name].player is None:
                    tools = await shown_tools(environments[name], own)
                    left[name], message = await left_out(f"{who} {name!r}", own, most, renderer, tools)
                    if message:
                        messages[f"{cause}/{name}"] = f"{who} {name!r}: {message}"
            return left

        read = {name: own for name, own in self.prompts.items() if name not in loaders}
        prompts = await kept(read, environments, "task", "prompts_left_out")
        for name, loader in loaders.items():
            prompts[name] = own = self.prompts[name]
            if environments[name].player is None:
                tools = await shown_tools(environments[name], own)
                loader.keep(partial(_fits, most, renderer, tools))
                prompts[name] = await loader.first(len(own))
        held_out = [
            evolve(
                part,
                prompts=await kept(part.prompts, part.environments, "validation of", "held_out_left_out"),
            )
            for part in self.held_out
        ]
        return RunPrompts(prompts=prompts, held_out=held_out), messages

    async def spelling(
        self, environments: Mapping[str, EnvironmentClient], renderer: Renderer
    ) -> dict[str, str]:
        """Return a message about each task or set with prompts that spell control tokens, by cause.

        Raises ConfigError for a prompt in which such a spelling cannot stay text, and for rendered prompts of
        a task whose player renders messages itself.
        """
        parts = [("task", "spelled", self.prompts, environments)]
        parts += [
            ("validation of", "held_out_spelled", each.prompts, each.environments) for each in self.held_out
        ]
        messages = {}
        for who, cause, prompts, played_by in parts:
            for name, own in prompts.items():
                if played_by[name].player is None:
                    if message := await _spelled(f"{who} {name!r}", own, renderer):
                        messages[f"{cause}/{name}"] = message
                elif renderer.rendered_prompts:
                    raise ConfigError(
                        f"model.prompt_is_rendered: {who} {name!r} has a player, whose agents send messages; "
                        "leave it out"
                    )
        return messages


async def _spelled(what: str, prompts: Sequence[Prompt], renderer: Renderer) -> str:
    """Return a message about prompts that spell control tokens, or "".

    Raises ConfigError for a prompt in which such a spelling cannot stay text.
    """
    found: list[tuple[str, str]] = []

    def look(some: Sequence[Prompt]) -> None:
        for prompt in some:
            if token := renderer.spelled(prompt.messages):
                found.append((prompt.id, token))
                try:
                    renderer.prompt_ids(prompt.messages)
                except ControlInText as error:
                    raise ConfigError(f"{what}: prompt {prompt.id!r}: {error}") from error

    for begin in range(0, len(prompts), TOGETHER):
        await renderer.run(partial(look, prompts[begin : begin + TOGETHER]), INLINE + 1)
    if not found:
        return ""
    id, token = found[0]
    return (
        f"{what}: {len(found):,} of {len(prompts):,} prompts spell control tokens (first: id {id}, {token}); "
        "they are text; if they are rendered on purpose, set model.prompt_is_rendered = true"
    )


def _fits(most: int, renderer: Renderer, tools: Tools, prompt: Prompt) -> bool:
    """Return whether a prompt has at most ``most`` tokens."""
    return len(renderer.prompt_ids(prompt.messages, tools)) <= most


def has_tokenizer(config: Config, start: StartModel) -> bool:
    """Return whether a model's tokenizer exists before the trainer has started.

    Raises ConfigError if it does not, and the number of steps depends on prompt lengths.
    """
    if start.prepare is not None and config.trainer.epochs:
        raise ConfigError(
            f"rollout.max_prompt_tokens with trainer.epochs: the model {config.model.path!r} is made when "
            "the run starts, so the number of remaining prompts is not known before; set trainer.steps "
            "instead of trainer.epochs"
        )
    return start.prepare is None


async def shown_tools(environment: EnvironmentClient, prompts: Sequence[Prompt]) -> Tools:
    """Return the tools of the first prompt as an estimate for all prompts."""
    if environment.max_turns == 1 or environment.player is not None:
        return ()
    (opened,) = await environment.open({"first look": prompts[0]})
    await environment.close(["first look"])
    return opened.tools


async def _longer(
    prompts: Sequence[Prompt], limit: int, renderer: Renderer, tools: Tools, most: int | None = None
) -> dict[int, int]:
    """Return the indices of prompts with more than ``limit`` tokens, and their numbers of tokens.

    Args:
        most: number of prompts to encode, the longest first; None: all that may be too long.
    """
    bounds = _bounds(prompts)
    try:  # number of template tokens of an almost empty prompt
        always = len(renderer.prompt_ids((_SHORT,), tools))
    except ModelError:  # the template needs other messages
        always = 2**31
    indices = np.flatnonzero(bounds > max(0, limit - always))
    if most is not None and len(indices) > most:
        indices = np.sort(indices[np.argsort(-bounds[indices].astype(np.int64), kind="stable")[:most]])
    found: dict[int, int] = {}
    for begin in range(0, len(indices), TOGETHER):
        some = {int(index): prompts[int(index)] for index in indices[begin : begin + TOGETHER]}

        def count(some: Mapping[int, Prompt] = some) -> dict[int, int]:
            return {index: len(renderer.prompt_ids(each.messages, tools)) for index, each in some.items()}

        counted = await renderer.run(count, sum(int(bounds[index]) for index in some))
        found |= {index: tokens for index, tokens in counted.items() if tokens > limit}
    return found


def _bounds(prompts: Sequence[Prompt]) -> NDArray[np.uint32]:
    """Return the sizes of the prompts."""
    if not isinstance(prompts, ReadRows):
        return np.asarray(sizes(prompts), np.uint32)
    prompts.open()
    return np.asarray(prompts.sizes, np.uint32)
