"""Checks that a model's response format can read what its chat template writes.

A template that writes calls of tools as XML, with a format that reads JSON, would make every call fail.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen

from grpo_core.contracts.errors import ModelError
from grpo_core.contracts.records import Message
from grpo_core.contracts.tokens import as_ids
from grpo_core.text.rendering import Renderer
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
                before, ids = renderer.written(self._message(key), tools)
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


def _read(
    renderer: Renderer, before: Sequence[int], ids: Sequence[int], tools: Sequence[Mapping[str, Any]]
) -> Message:
    try:
        text = renderer.text(ids, before)
        return renderer.message(text, token_ids=as_ids(ids), before=as_ids(before), tools=tools)
    except Exception:  # a format of another family may fail in its own way
        return {"role": "assistant", "content": ""}
