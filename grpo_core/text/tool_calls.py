"""Reads tool calls from a model's text.

An assistant message contains its calls in the format that chat templates expect::

    {"role": "assistant", "content": "...", "tool_calls": [
        {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}]}

The answer is ``{"role": "tool", "tool_call_id": "call00001", "name": "add", "content": "3"}``.  A failed call
is reported to the model in such a message; it is never an error of the run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_core.contracts.unicode import well_formed
from grpo_core.text.untrusted import read_json

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


def parse_calls(text: str) -> tuple[str, list[dict[str, Any]]]:
    """Split a text into plain text and calls, ``<tool_call>{"name": ..., "arguments": ...}</tool_call>``.

    This is the format of Hermes and Qwen models.  Anything else between the tags becomes the ``arguments`` of
    a call without a name.
    """
    inner, outer, at = [], [], 0
    # in one pass: repeated opening tags must not cost quadratic time
    while (begin := text.find(_OPEN, at)) >= 0 and (end := text.find(_CLOSE, begin + len(_OPEN))) >= 0:
        outer.append(text[at:begin])
        inner.append(text[begin + len(_OPEN) : end])
        at = end + len(_CLOSE)
    calls = [{"function": _function(each)} for each in inner]
    return "".join([*outer, text[at:]]).strip() if calls else text, calls


def read_calls(parsed: Any, text: str) -> list[dict[str, Any]]:
    """Normalise calls that a tokenizer has parsed; an invalid one becomes a call without a name."""
    given = parsed if isinstance(parsed, list) else [parsed] if parsed else []
    functions = [call.get("function") if isinstance(call, dict) else None for call in given]
    return [{"function": _checked(function, text)} for function in functions]


def numbered(calls: Sequence[Mapping[str, Any]], first: int) -> list[dict[str, Any]]:
    """Give each call an id, numbered from ``first``: nine letters and digits, as some templates require."""
    return [
        {"type": "function", **call, "id": f"call{number:05d}"} for number, call in enumerate(calls, first)
    ]


def assistant_message(reply: str, *, tools: bool) -> dict[str, Any]:
    """Convert a reply to an assistant message; with ``tools``, calls are parsed from its text."""
    content, calls = parse_calls(reply) if tools else (reply, [])
    called = {"tool_calls": numbered(calls, 0)} if calls else {}
    return {"role": "assistant", "content": content, **called}


def _function(text: str) -> dict[str, Any]:
    given = None
    with contextlib.suppress(ValueError):
        given = read_json(text, object)
    return _checked(given, text.strip())


def _checked(given: Any, text: str) -> dict[str, Any]:
    if isinstance(given, dict) and isinstance(given.get("name"), str):
        with contextlib.suppress(ValueError):  # nested too deeply to send to another process
            name, arguments = well_formed([given["name"], given.get("arguments", {})])
            return {"name": name, "arguments": arguments}
    return {"name": "", "arguments": well_formed(text)}
