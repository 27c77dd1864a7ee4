"""Parses completions in the formats of model families: reasoning, content and tool calls.

The package ``renderers`` knows the formats; it is installed with ``grpo-core[formats]``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from grpo_core.contracts.errors import ConfigError, ModelError, did_you_mean

if TYPE_CHECKING:
    from grpo_core.contracts.tokens import Ids

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
