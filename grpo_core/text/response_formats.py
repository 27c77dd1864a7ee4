"""Reads a model's text: tool calls, and the formats of model families, with their reasoning.

An assistant message contains its calls in the format that chat templates expect::

    {"role": "assistant", "content": "...", "tool_calls": [
        {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}]}

The answer is ``{"role": "tool", "tool_call_id": "call00001", "name": "add", "content": "3"}``.  A failed call
is reported to the model in such a message; it is never an error of the run.

The package ``renderers`` knows the formats of families; it is installed with ``grpo-core[formats]``.
"""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from grpo_core.contracts.errors import ConfigError, ModelError, did_you_mean
from grpo_core.contracts.unicode import read_json, well_formed
from grpo_core.text.thoughts import THOUGHT_ENDS, THOUGHT_OPENS

if TYPE_CHECKING:
    from grpo_core.contracts.tokens import Ids


# ---------------------------------------------------------------------------------- tool calls

CALL_OPENS, CALL_ENDS = "<tool_call>", "</tool_call>"
_TAG = re.compile(f"{THOUGHT_OPENS}|{THOUGHT_ENDS}|{CALL_OPENS}")


def parse_calls(text: str, *, thinking: bool = False) -> tuple[str, list[dict[str, Any]]]:
    """Split a text into plain text and calls, ``<tool_call>{"name": ..., "arguments": ...}</tool_call>``.

    This is the format of Hermes and Qwen models.  Anything else between the tags becomes the ``arguments`` of
    a call without a name.  A call in a thought is a draft: it stays in the text.

    Args:
        text: the text of a reply.
        thinking: whether the prompt has begun a thought.
    """
    spans: list[tuple[int, int]] = []
    at, closed = _after(text, THOUGHT_ENDS, 0) if thinking else 0, True
    # in one pass: repeated tags must not cost quadratic time
    while found := _TAG.search(text, at):
        begin, at = found.span()
        if found[0] == THOUGHT_OPENS:
            at = _after(text, THOUGHT_ENDS, at)
        elif found[0] == THOUGHT_ENDS:  # the prompt has begun the thought, or nothing has
            spans.clear()
        elif not closed or (end := text.find(CALL_ENDS, at)) < 0:
            closed = False
        elif (last := text.rfind(THOUGHT_ENDS, at, end)) >= 0 and not _is_json(text[at:end]):
            spans.clear()
            at = last + len(THOUGHT_ENDS)
        else:
            at = end + len(CALL_ENDS)
            spans.append((begin, at))
    if not spans:
        return text, []
    starts, ends = zip(*spans, strict=True)
    plain = "".join(text[end:start] for end, start in zip((0, *ends), (*starts, len(text)), strict=True))
    inner = [text[start + len(CALL_OPENS) : end - len(CALL_ENDS)] for start, end in spans]
    return plain.strip(), [{"function": _function(each)} for each in inner]


def _after(text: str, tag: str, at: int) -> int:
    """Return the place after the next tag; the end of the text if there is none."""
    found = text.find(tag, at)
    return len(text) if found < 0 else found + len(tag)


def _is_json(text: str) -> bool:
    with contextlib.suppress(ValueError):
        return bool(read_json(text, dict))
    return False


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


# ---------------------------------------------------------------------------------- formats of model families

AUTO = "auto"
"""The format that the tokenizer itself describes."""

_OTHER = {"auto", "custom", "default"}
"""Names in the package that are not formats."""

ResponseReader = Callable[["Ids", "Ids", Sequence[Mapping[str, Any]]], dict[str, Any]]
"""Converts a completion, the tokens before it and the tools' schemas to the fields of a message.

``tool_calls`` has None for each call that is garbled.
"""


def check_response_format(name: str) -> None:
    """Raise ConfigError if there is no format of this name, or the package is missing."""
    if name == AUTO:
        return
    known = sorted(_formats())
    if name not in known:
        raise ConfigError(
            f"model.response_format is {name!r}, which is unknown.{did_you_mean(name, known)} Known: "
            + ", ".join([AUTO, *known])
        )


def known_formats() -> list[str]:
    """Return the names of the formats except "auto"; none without the package."""
    try:
        return sorted(_formats())
    except ConfigError:
        return []


def response_reader(name: str, tokenizer: Any) -> ResponseReader | None:
    """Return the reader of a format; None for "auto".

    Raises ConfigError as ``check_response_format``, and ModelError if the tokenizer lacks the format's
    tokens.
    """
    check_response_format(name)
    if name == AUTO:
        return None
    try:
        made = importlib.import_module("renderers").create_renderer(tokenizer, _formats()[name]())
    except Exception as error:
        raise ModelError(
            f"model.response_format is {name!r}, which does not fit the model's tokenizer: {error}"
        ) from error

    def read(token_ids: Ids, before: Ids, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        schemas = [tool.get("function", tool) for tool in tools]
        parsed = made.parse_response(token_ids.tolist(), tools=schemas or None, prompt_ids=before.tolist())
        calls = [
            {"function": {"name": call.name, "arguments": call.arguments}}
            if call.name and isinstance(call.arguments, dict)
            else None
            for call in parsed.tool_calls
        ]
        message: dict[str, Any] = {"content": parsed.content}
        if parsed.reasoning_content:
            message["reasoning_content"] = parsed.reasoning_content
        return {**message, "tool_calls": calls} if calls else message

    return read


def _formats() -> dict[str, Callable[[], Any]]:
    """Return the package's configurations by the names of their formats."""
    try:
        configs = importlib.import_module("renderers.configs")
    except ImportError:
        raise ConfigError(
            "model.response_format needs the package renderers: pip install 'grpo-core[formats]'"
        ) from None
    found = {}
    for kind in vars(configs).values():
        name = getattr(getattr(kind, "model_fields", {}).get("name"), "default", None)
        if isinstance(name, str) and name not in _OTHER:
            found[name] = kind
    return found
