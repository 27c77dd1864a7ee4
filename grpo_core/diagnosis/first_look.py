"""Warnings about a run that can be known before its first step, such as prompts that are too long."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType

import numpy as np
from attrs import frozen

from grpo_core.app.prompts import TOGETHER, bounds, longer, shown_tools
from grpo_core.config import Config, RolloutConfig
from grpo_core.contracts.errors import ConfigError, ControlInText, GrpoError, ModelError
from grpo_core.contracts.playing import EnvironmentClient
from grpo_core.contracts.records import Prompt
from grpo_core.data.prompts import digest, leaked
from grpo_core.data.rows import ReadRows, SomePrompts, missing
from grpo_core.diagnosis.conventions import conventions, ignores, unstopped_end
from grpo_core.environments.pool import EnvironmentPool
from grpo_core.text.rendering import INLINE, Renderer, Tools
from grpo_core.validation.runner import HeldOut

SOLVED = 16
"""Number of prompts of each task whose solutions are measured."""
LOOKED_AT = 200
"""Number of a task's longest prompts to encode for a warning."""

ByTask = Mapping[str, Sequence[Prompt]]
Environments = Mapping[str, EnvironmentPool]
NO_PROMPTS: ByTask = MappingProxyType({})
NO_ENVIRONMENTS: Environments = MappingProxyType({})


async def first_look(
    config: Config,
    renderer: Renderer,
    held_out: Sequence[HeldOut],
    prompts: ByTask = NO_PROMPTS,
    environments: Environments = NO_ENVIRONMENTS,
) -> dict[str, str]:
    """Return warnings about settings that let a run learn or measure little or nothing, by cause.

    An environment that fails is skipped: the run itself reports the error.  Raises ConfigError if no prompt
    of a task or set can be played.
    """
    rollout, messages, tools = config.rollout, dict[str, str](), dict[str, Tools]()
    if not renderer.stop_token_ids and not rollout.stop:
        messages["no_stop"] = (
            "the tokenizer has no end-of-sequence token and rollout.stop is empty: every completion runs to "
            f"rollout.max_tokens = {rollout.max_tokens}; set rollout.stop, or eos_token of the tokenizer"
        )
    elif end := unstopped_end(renderer, rollout.stop):
        messages["no_turn_end"] = (
            f"the chat template ends a turn with {end[:80]!r}, which is neither a stop token nor in "
            "rollout.stop, so that completions do not end there; add its token to eos_token_id "
            "of generation_config.json, or set rollout.stop"
        )
    for task, part in prompts.items():
        try:
            async for cause, message in _look(task, part, environments[task], rollout, renderer, tools):
                messages[f"{cause}/{task}"] = f"task {task!r}: {message}"
        except ControlInText as error:
            raise ConfigError(f"task {task!r}: its tools: {error}") from error
        except GrpoError:
            continue
    looked: list[tuple[str, str, str, Sequence[Prompt], EnvironmentClient]]
    looked = [("", f"task {name!r}", name, own, environments[name]) for name, own in prompts.items()]
    looked += [
        ("_held_out", f"validation of {name!r}", name, own, part.environments[name])
        for part in held_out
        for name, own in part.selection().items()
    ]
    answered = {name for name, own in prompts.items() if _without_answer(own) < len(own)}
    for where, what, name, own, _ in looked:
        without = _without_answer(own)
        if without and (without < len(own) or name in answered):
            messages[f"no_answer{where}/{name}"] = (
                f"{what}: {without:,} of its {len(own):,} prompts have no answer to compare a reply with "
                "(data_options.answer names the field of a row)"
            )
    for name in (name for part in held_out for name in part.prompts if prompts and not part.prompts[name]):
        messages[f"no_held_out/{name}"] = (
            f"task {name!r} is never validated, because its environment offers no prompts for validation; "
            "offer some, or set validation.every = 0"
        )
    for _, _, name, own, environment in looked:
        with contextlib.suppress(GrpoError):
            if name not in prompts:
                tools[name] = await shown_tools(environment, own)
    calling = [name for _, _, name, _, each in looked if tools.get(name) or each.player is not None]
    messages |= await asyncio.to_thread(conventions, renderer, rollout.stop, list(dict.fromkeys(calling)))
    for where, what, name, own, environment in looked:
        if own and environment.player is None:
            with contextlib.suppress(ModelError):  # a template that rejects a prompt is an error later
                message = await unplayable(what, own, rollout, renderer, tools.get(name, ()))
                messages |= {f"long{where or '_prompts'}/{name}": f"{what}: {message}"} if message else {}
    return messages


def _without_answer(prompts: Sequence[Prompt]) -> int:
    if isinstance(prompts, ReadRows):
        return prompts.without_answer
    return sum(missing(prompt.answer) for prompt in prompts)


def leaks(prompts: ByTask, held_out: Sequence[HeldOut]) -> dict[str, str]:
    """Return a warning for each task or set validated with training prompts, by cause."""
    trained = {task: _digests(part) for task, part in prompts.items()} if held_out else {}
    found = {}
    for part in held_out:
        for name, own in part.prompts.items():
            every, places = _digests(own), part.places(name)
            digests = [every[place] for place in places]
            for task in trained:
                if both := leaked(trained[task], digests):
                    id = own[places[both[0]]].id
                    found[f"leak/{name}/{task}"] = (
                        f"{len(both):,} of the {len(digests):,} held-out prompts of {name!r} are among the "
                        f"training prompts of task {task!r}, such as {id!r}: its validation measures what "
                        "the run has seen"
                    )
    return found


def _digests(prompts: Sequence[Prompt]) -> Sequence[int]:
    if isinstance(prompts, ReadRows | SomePrompts):
        return prompts.digests
    return [digest(prompt) for prompt in prompts]


async def _look(
    task: str,
    prompts: Sequence[Prompt],
    environment: EnvironmentPool,
    rollout: RolloutConfig,
    renderer: Renderer,
    tools: dict[str, Tools],
) -> AsyncIterator[tuple[str, str]]:
    """Yield the cause and message of each warning about a task, and record its tools."""
    if isinstance(prompts, ReadRows) and prompts.repeated:
        yield (
            "rows_left_out",
            f"{len(prompts):,} rows of its data are prompts; {prompts.repeated:,} repeat another one",
        )
    some = prompts[:SOLVED]
    solutions = [reply for reply in await environment.solve(some) if reply is not None]
    lengths = [len(renderer.encode(reply)) + bool(renderer.stop_token_ids) for reply in solutions]
    if too_long := [length for length in lengths if length > rollout.max_tokens]:
        yield (
            "long_solutions",
            f"{len(too_long)} of {len(lengths)} of its own solutions are longer than rollout.max_tokens = "
            f"{rollout.max_tokens} (the longest has {max(too_long)} tokens), and no such reply can be "
            "sampled; raise rollout.max_tokens",
        )
    shown = tools[task] = await shown_tools(environment, some)
    if shown and ignores(renderer, shown):
        yield (
            "tools_unseen",
            f"its {len(shown)} tools are not in the prompt, because the chat template ignores tools; use a "
            "template that shows them, or describe them in the prompts",
        )


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
    found = await longer(prompts, room.tokens, renderer, tools, most=LOOKED_AT)
    if not found:
        return ""
    place = max(found, key=lambda each: found[each])
    example = f"{prompts[place].id!r} with {found[place]:,} tokens"
    if len(found) == min(LOOKED_AT, len(prompts)):
        shortest = prompts[int(np.argmin(bounds(prompts)))]
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


async def spelling(
    renderer: Renderer,
    held_out: Sequence[HeldOut],
    prompts: ByTask = NO_PROMPTS,
    environments: Environments = NO_ENVIRONMENTS,
) -> dict[str, str]:
    """Return a message about each task or set with prompts that spell control tokens, by cause.

    Raises ConfigError for a prompt in which such a spelling cannot stay text, and for rendered prompts of a
    task whose player renders messages itself.
    """
    parts: list[tuple[str, str, ByTask, Mapping[str, EnvironmentClient]]]
    parts = [("task", "spelled", prompts, environments)]
    parts += [("validation of", "held_out_spelled", each.prompts, each.environments) for each in held_out]
    messages = {}
    for who, cause, by_task, played_by in parts:
        for name, own in by_task.items():
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
