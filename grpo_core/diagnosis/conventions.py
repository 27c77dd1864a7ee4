"""Checks that a model's response format can read what its chat template writes.

A template that writes calls of tools as XML, with a format that reads JSON, would make every call fail.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from attrs import frozen

from grpo_core.contracts.errors import ModelError
from grpo_core.contracts.records import Message
from grpo_core.contracts.tokens import as_ids
from grpo_core.text.rendering import Renderer, Tools
from grpo_core.text.response_formats import known_formats, numbered
from grpo_core.text.thoughts import THOUGHT_KEYS, parted

TOOL = {
    "type": "function",
    "function": {
        "name": "find",
        "description": "Find things.",
        "parameters": {
            "type": "object",
            "properties": {
                "what": {"type": "string", "description": "a thing"},
                "count": {"type": "integer", "description": "how many"},
            },
            "required": ["what", "count"],
        },
    },
}
CALLS: list[dict[str, Any]] = [
    {"name": "find", "arguments": {"what": "green tea", "count": 3}},
    {"name": "find", "arguments": {"what": "red apples", "count": 12}},
]
THOUGHT, CONTENT = "First I look.", "It is done."
ASKED: Message = {"role": "user", "content": "?"}


@frozen(kw_only=True)
class Case:
    """A reply that is written and read back."""

    name: str
    thinks: bool = False
    calls: int = 0

    def read_back(self, renderer: Renderer) -> str | None:
        """Return the reply as the template writes it if it is parsed as a different one.

        None: it round-trips, or the template does not write such a reply.
        """
        tools = [TOOL] if self.calls else []
        for key in THOUGHT_KEYS if self.thinks else [""]:
            try:
                before, ids = written_by(renderer, self._message(key), tools)
            except ModelError:  # such as a template of single calls
                continue
            written = renderer.whole(ids)
            if all(part in written for part in self._parts()):
                return None if self._is_equal(_read(renderer, before, ids, tools)) else written
        return None

    def _message(self, key: str) -> Message:
        calls = numbered([{"function": call} for call in CALLS[: self.calls]], 0)
        return {
            "role": "assistant",
            "content": "" if calls else CONTENT,
            **({key: THOUGHT} if self.thinks else {}),
            **({"tool_calls": calls} if calls else {}),
        }

    def _parts(self) -> list[str]:
        called = [str(call["arguments"]["what"]) for call in CALLS[: self.calls]]
        return [*([THOUGHT] if self.thinks else []), *(called or [CONTENT])]

    def _is_equal(self, read: Message) -> bool:
        thought, content = parted(read)
        calls = [call["function"] for call in read.get("tool_calls", ())]
        return (
            (thought.strip() == THOUGHT or not self.thinks)
            and calls == CALLS[: self.calls]
            and (bool(self.calls) or content.strip().startswith(CONTENT))
        )


REPLIES = (Case(name="a reply"), Case(name="reasoning", thinks=True))
WITH_CALLS = (
    Case(name="a tool call", calls=1),
    Case(name="several tool calls", calls=2),
    Case(name="reasoning with a tool call", thinks=True, calls=1),
)


def misread(renderer: Renderer, cases: Sequence[Case]) -> str:
    """Describe the first reply that does not round-trip; "" if all do."""
    found = ((case.name, case.read_back(renderer)) for case in cases)
    name, written = next((each for each in found if each[1] is not None), ("", ""))
    if not name:
        return ""
    change = "choose the format of the model with model.response_format"
    if not known_formats():
        change += " (pip install 'grpo-core[formats]')"
    elif others := [other for other in known_formats() if _reads(renderer, other, cases)]:
        change += f"; {', '.join(map(repr, others))} read{'s' * (len(others) == 1)} it"
    return (
        f"the chat template writes {name} as {written!r:.200}, and model.response_format = "
        f"{renderer.response_format!r} reads that as something else: {change}"
    )


def _reads(renderer: Renderer, name: str, cases: Sequence[Case]) -> bool:
    try:
        other = renderer.reading(name)
        return all(case.read_back(other) is None for case in cases)
    except ModelError:  # its tokens differ from the tokenizer's
        return False


def _read(renderer: Renderer, before: Sequence[int], ids: Sequence[int], tools: Tools) -> Message:
    try:
        text = renderer.text(ids, before)
        return renderer.message(text, token_ids=as_ids(ids), before=as_ids(before), tools=tools)
    except Exception:  # a format of another family may fail in its own way
        return {"role": "assistant", "content": ""}


def missing_start(renderer: Renderer) -> str:
    """Return the token with which the tokenizer begins each text, and the template does not; or ""."""
    if not renderer.has_template:
        return ""
    bare, ids = (renderer.tokenizer.encode("a", add_special_tokens=special) for special in (False, True))
    start = ids[: next((i for i in range(len(ids)) if ids[i : i + len(bare)] == bare), 0)]
    if renderer.prompt_ids([ASKED])[: len(start)] == tuple(start):
        return ""
    return renderer.whole(start)


def ignores(renderer: Renderer, tools: Tools) -> bool:
    """Return whether there is a chat template that renders a prompt as if there were no tools."""
    asked = renderer.render([ASKED], generation=True)
    return renderer.has_template and renderer.render([ASKED], generation=True, tools=tools) == asked


def unstopped_end(renderer: Renderer, stop: Sequence[str], *, call: bool = False) -> str:
    """Return the template's end of a turn if no completion stops there, or else an empty text.

    Args:
        stop: texts at which a completion stops.
        call: whether the turn ends with a tool call instead of a text.
    """
    if not renderer.has_template:
        return ""
    mark, answer = "\N{ASTERISM}a", "\N{ASTERISM}b"
    said: list[Message] = [{"role": "assistant", "content": mark}]
    if call:
        (made,) = numbered([{"function": {"name": "f", "arguments": {"x": mark}}}], 0)
        said = [
            {"role": "assistant", "content": "", "tool_calls": [made]},
            {"role": "tool", "name": "f", "tool_call_id": made["id"], "content": answer},
        ]
    try:
        text = renderer.render([ASKED, *said], generation=False)
    except ModelError:
        return ""
    end = text.partition(mark)[2].partition(answer)[0].strip()
    stops = any(token in renderer.stop_token_ids for token in renderer.encode(end))
    return "" if stops or any(text.strip() in end for text in stop) else end


def written_by(
    renderer: Renderer, said: Message, tools: Tools = ()
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the tokens before a reply, and the reply as the template writes it, up to its stop token.

    Raises ModelError if the template cannot render it.
    """
    start = renderer.render([ASKED], generation=True, tools=tools)
    whole = renderer.render([ASKED, said], generation=False, tools=tools)
    if not whole.startswith(start):  # such as one that opens the reasoning for the model alone
        same = next(i for i, (a, b) in enumerate(zip(start, [*whole, ""], strict=False)) if a != b)
        start = start[: 1 + max(start.rfind(end, 0, same) for end in "\n>]")]
    ids = renderer.encode(whole[len(start) :])
    ends = next((i for i, token in enumerate(ids) if token in renderer.stop_token_ids), len(ids))
    return renderer.encode(start), ids[: ends + 1]


def conventions(renderer: Renderer, stop: Sequence[str], calling: Sequence[str]) -> dict[str, str]:
    """Return warnings about replies that are parsed differently from the chat template's format, by cause.

    Args:
        stop: stop strings of completions.
        calling: tasks whose replies may call tools.
    """
    messages = {"misread_replies": misread(renderer, REPLIES)}
    with contextlib.suppress(ModelError):
        if start := missing_start(renderer):
            messages["no_start"] = (
                f"the chat template lacks {start!r}, with which the tokenizer begins each text: a model that "
                "has always seen it may be much worse; begin the template with {{ bos_token }}"
            )
    if calling:
        who = f"the tool calls of task {', '.join(map(repr, calling))} fail"
        found = misread(renderer, WITH_CALLS)
        messages["misread_calls"] = found and f"{who}: {found}"
        end = unstopped_end(renderer, stop, call=True)
        messages["no_call_end"] = end and (
            f"{who}: the chat template continues a tool call with {end[:80]!r}, where no completion stops; "
            "add its token to eos_token_id of generation_config.json, or set rollout.stop"
        )
    return {cause: message for cause, message in messages.items() if message}
