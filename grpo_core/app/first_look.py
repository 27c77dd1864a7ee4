"""Warnings about a run that can be known before its first step, such as prompts that are too long."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType

import numpy as np
from attrs import evolve, field, frozen
from numpy.typing import NDArray

from grpo_core.app.model_sources import StartModel
from grpo_core.config import Config, RolloutConfig
from grpo_core.contracts.errors import ConfigError, ControlInText, GrpoError, ModelError, PluginError
from grpo_core.contracts.playing import EnvironmentClient
from grpo_core.contracts.records import Episode, Prompt
from grpo_core.data.leakage import digest, leaked
from grpo_core.data.loaders import LookAhead
from grpo_core.data.rows import ReadRows, SomePrompts, missing
from grpo_core.data.sizes import sizes
from grpo_core.environments.feedback import BAD_REWARD
from grpo_core.environments.pool import EnvironmentPool
from grpo_core.text.conventions import REPLIES, WITH_CALLS, misread
from grpo_core.text.rendering import INLINE, Renderer, Tools
from grpo_core.validation.runner import HeldOut

SOLVED = 16
"""Number of prompts of each task whose solutions are measured."""


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
        if environment.player is not None or environment.needs_group or not part:
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
        if hints and environment.max_turns == 1 and part[0].hint is feedback.hint is None:
            raise ConfigError(f"task {task!r} gives no hints, from which the loss learns: set Prompt.hint")


async def first_look(
    rollout: RolloutConfig,
    environments: Mapping[str, EnvironmentPool],
    prompts: Mapping[str, Sequence[Prompt]],
    renderer: Renderer,
    held_out: Sequence[HeldOut] = (),
) -> dict[str, str]:
    """Return warnings about settings that let a run learn little or nothing, by cause.

    An environment that fails is skipped: the run itself reports the error.  Raises ConfigError if no prompt
    of a task can be played.
    """
    messages = {}
    tools: dict[str, Tools] = {}
    if not renderer.stop_token_ids and not rollout.stop:
        messages["no_stop"] = (
            "the tokenizer has no end-of-sequence token and rollout.stop is empty: every completion runs to "
            f"rollout.max_tokens = {rollout.max_tokens}; set rollout.stop, or eos_token of the tokenizer"
        )
    elif end := renderer.unstopped_end(rollout.stop):
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
    looked = [("", f"task {name!r}", name, own) for name, own in prompts.items()]
    looked += [
        ("_held_out", f"validation of {name!r}", name, own)
        for part in held_out
        for name, own in part.measured().items()
    ]
    answered = {name for name, own in prompts.items() if _without_answer(own) < len(own)}
    for where, what, name, own in looked:
        without = _without_answer(own)
        if without and (without < len(own) or name in answered):
            messages[f"no_answer{where}/{name}"] = (
                f"{what}: {without:,} of its {len(own):,} prompts have no answer to compare a reply with "
                "(data_options.answer names the field of a row)"
            )
    for name in (name for part in held_out for name, own in part.prompts.items() if not own):
        messages[f"no_held_out/{name}"] = (
            f"task {name!r} is never validated, because its environment offers no prompts for validation; "
            "offer some, or set validation.every = 0"
        )
    calling = [task for task in prompts if tools.get(task) or environments[task].player is not None]
    messages |= await asyncio.to_thread(conventions, renderer, rollout.stop, calling)
    played = {name: each.player for name, each in environments.items()}
    played |= {name: each.player for part in held_out for name, each in part.environments.items()}
    for where, what, name, own in looked:
        if own and played[name] is None:
            with contextlib.suppress(ModelError):  # a template that rejects a prompt is an error later
                message = await unplayable(what, own, rollout, renderer, tools.get(name, ()))
                messages |= {f"long{where or '_prompts'}/{name}": f"{what}: {message}"} if message else {}
    return messages


def _without_answer(prompts: Sequence[Prompt]) -> int:
    if isinstance(prompts, ReadRows):
        return prompts.without_answer
    return sum(missing(prompt.answer) for prompt in prompts)


def conventions(renderer: Renderer, stop: Sequence[str], calling: Sequence[str]) -> dict[str, str]:
    """Return warnings about replies that are parsed differently from the chat template's format, by cause.

    Args:
        stop: stop strings of completions.
        calling: tasks whose replies may call tools.
    """
    messages = {"misread_replies": misread(renderer, REPLIES)}
    with contextlib.suppress(ModelError):
        if start := renderer.missing_start():
            messages["no_start"] = (
                f"the chat template lacks {start!r}, with which the tokenizer begins each text: a model that "
                "has always seen it may be much worse; begin the template with {{ bos_token }}"
            )
    if calling:
        who = f"the tool calls of task {', '.join(map(repr, calling))} fail"
        found = misread(renderer, WITH_CALLS)
        messages["misread_calls"] = found and f"{who}: {found}"
        end = renderer.unstopped_end(stop, call=True)
        messages["no_call_end"] = end and (
            f"{who}: the chat template continues a tool call with {end[:80]!r}, where no completion stops; "
            "add its token to eos_token_id of generation_config.json, or set rollout.stop"
        )
    return {cause: message for cause, message in messages.items() if message}


async def conventions_of_validation(
    renderer: Renderer, stop: Sequence[str], held_out: Sequence[HeldOut]
) -> dict[str, str]:
    """Return the warnings of ``conventions`` for the measured tasks and sets."""
    calling = [
        name
        for part in held_out
        for name, own in part.prompts.items()
        if own and (part.environments[name].player or await shown_tools(part.environments[name], own))
    ]
    return await asyncio.to_thread(conventions, renderer, stop, calling)


def leaks(prompts: Mapping[str, Sequence[Prompt]], held_out: Sequence[HeldOut]) -> dict[str, str]:
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
    lengths = [renderer.length(reply) + bool(renderer.stop_token_ids) for reply in solutions]
    if too_long := [length for length in lengths if length > rollout.max_tokens]:
        yield (
            "long_solutions",
            f"{len(too_long)} of {len(lengths)} of its own solutions are longer than rollout.max_tokens = "
            f"{rollout.max_tokens} (the longest has {max(too_long)} tokens), and no such reply can be "
            "sampled; raise rollout.max_tokens",
        )
    shown = tools[task] = await shown_tools(environment, some)
    if shown and renderer.ignores(shown):
        yield (
            "tools_unseen",
            f"its {len(shown)} tools are not in the prompt, because the chat template ignores tools; use a "
            "template that shows them, or describe them in the prompts",
        )


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
