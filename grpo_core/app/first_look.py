"""Warnings about a run that can be known before its first step."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence

from grpo_core.app.lengths import shown_tools, unplayable
from grpo_core.config import RolloutConfig
from grpo_core.contracts.errors import ConfigError, ControlInText, GrpoError, ModelError, PluginError
from grpo_core.contracts.records import Episode, Prompt
from grpo_core.data.leakage import digest, leaked
from grpo_core.data.rows import ReadRows, SomePrompts, missing
from grpo_core.environments.feedback import BAD_REWARD
from grpo_core.environments.pool import EnvironmentPool
from grpo_core.text.conventions import REPLIES, WITH_CALLS, misread
from grpo_core.text.rendering import Renderer, Tools
from grpo_core.validation.runner import HeldOut

SOLVED = 16
"""Number of prompts of each task whose solutions are measured."""


BUGS = frozenset({"AttributeError", "ImportError", "ModuleNotFoundError", "NameError", "TypeError"})
"""Errors of a reward function that mean a bug, whatever the reply."""


async def judge_one_reply(
    environments: Mapping[str, EnvironmentPool], prompts: Mapping[str, Sequence[Prompt]]
) -> None:
    """Evaluate one reply of each task.  Raises PluginError for a bug, or a result that is no number."""
    for task, part in prompts.items():
        environment = environments[task]
        if environment.player is not None or environment.needs_group or not part:
            continue
        (solved,) = await environment.solve(part[:1])
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
