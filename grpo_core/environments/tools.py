"""Tools of a model: their schemas, and the execution of calls from ``grpo_core.text.response_formats``."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from grpo_core.contracts.errors import PluginError, describe, message_of, shortened, shown
from grpo_core.contracts.protocols import Tool
from grpo_core.contracts.records import Message
from grpo_core.contracts.unicode import well_formed
from grpo_core.processes.schemas import chat_template_utils

_TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "string": (str,),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}

LONGEST_RESULT = 1_000_000
"""Largest number of characters of a tool's result: longer results fit no model and take long to encode."""

# ---------------------------------------------------------------------------------- running it


class Toolbox:
    """A set of tools by name.

    Args:
        tools: functions, bound methods and ``Tool`` records.
        who: name of the owner in errors.

    Raises PluginError for a function without a schema (type hints, and a docstring in Google's format that
    describes each argument), or if two tools have the same name.
    """

    def __init__(self, tools: Iterable[Callable[..., Any] | Tool], who: str) -> None:
        self._tools: dict[str, Callable[..., Any] | Tool] = {}
        self._schemas: dict[str, dict[str, Any]] = {}
        for tool in tools:
            schema = tool.schema if isinstance(tool, Tool) else _schema(getattr(tool, "__func__", tool), who)
            name = schema["function"]["name"]
            if name in self._tools:
                raise PluginError(f"{who}: two tools are called {name!r}; tool names must be unique")
            self._tools[name], self._schemas[name] = tool, schema

    @property
    def schemas(self) -> tuple[dict[str, Any], ...]:
        return tuple(self._schemas.values())

    def call(self, call: Mapping[str, Any]) -> Any:
        """Return the tool's result, which may be an awaitable.  Raises ToolError if it cannot be called."""
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        if not name:
            raise ToolError(
                f"not a call: {shown(arguments)}; expected a JSON object with a name and arguments"
            )
        if name not in self._tools:
            raise ToolError(f"there is no tool {shown(name)}; there is {', '.join(self._tools) or 'none'}")
        if not isinstance(arguments, Mapping):
            raise ToolError(f"the arguments of {name} are {shown(arguments)}, expected a JSON object")
        tool = self._tools[name]
        parameters = self._schemas[name]["function"]["parameters"]
        if isinstance(tool, Tool):
            if missing := [each for each in parameters.get("required", ()) if each not in arguments]:
                raise ToolError(f"{name}: missing a required argument: {missing[0]!r}")
        else:
            try:
                inspect.signature(tool).bind(**arguments)
            except TypeError as error:
                raise ToolError(f"{name}: {error}") from None
        for key, value in arguments.items():
            if problem := _mismatch(parameters.get("properties", {}).get(key, {}), value):
                raise ToolError(f"{name}: argument {key!r} is {shown(value)}, expected {problem}")
        return tool.call(arguments) if isinstance(tool, Tool) else tool(**arguments)


class ToolError(Exception):
    """Raised for an invalid call of the model, which reads the text."""


def message(call: Mapping[str, Any], result: Any, mask: Callable[[str], str] = str) -> Message:
    """Make the answer to a call: text unchanged, other values as JSON, an exception as "error: ...".

    A result that is too long or not JSON-serializable is an error as well.

    Args:
        mask: hides secrets in the text of an exception.
    """
    name = call["function"]["name"]
    if isinstance(result, ToolError):
        content = f"error: {mask(str(result))}"
    elif isinstance(result, BaseException):
        content = f"error: {type(result).__name__}: {shortened(mask(message_of(result)))}"
    else:
        content = _written(name, result, mask)
    return {
        "role": "tool",
        "tool_call_id": call.get("id", ""),
        "name": name,
        "content": well_formed(content),
    }


def _written(name: str, result: Any, mask: Callable[[str], str]) -> str:
    """Return a tool's result as text, or an error if that is impossible."""
    try:
        text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
    except (Exception, SystemExit) as error:
        return f"error: {name}: the result cannot be written as JSON: {mask(describe(error))}"
    if len(text) <= LONGEST_RESULT:
        return text
    return f"error: {name}: the result has {len(text):,} characters, expected at most {LONGEST_RESULT:,}"


def tools_of(session: Any) -> list[Callable[..., Any] | Tool]:
    """Return the tools of a session: its public Python methods, and ``tools`` if a ``Tool`` is in it."""
    kind = type(session)
    public = [name for name in dir(kind) if not name.startswith("_")]
    names = [name for name in public if inspect.isfunction(inspect.getattr_static(kind, name))]
    given = getattr(session, "tools", ())
    listed = list(given) if isinstance(given, Sequence) else []
    own = listed if any(isinstance(each, Tool) for each in listed) else []
    return [*(getattr(session, name) for name in names), *own]


@functools.lru_cache(maxsize=1024)
def _schema(tool: Callable[..., Any], who: str) -> dict[str, Any]:
    name = getattr(tool, "__name__", repr(tool))
    try:
        schema: dict[str, Any] = chat_template_utils().get_json_schema(tool)
    except Exception as error:
        raise PluginError(
            f"{who}: tool {name!r} cannot be shown to a model: {error}; a tool needs type hints and a "
            "docstring with a description and an Args: section (public methods of a session are tools: a "
            "leading underscore hides one)"
        ) from error
    return schema


def _mismatch(schema: Mapping[str, Any], value: Any) -> str:
    """Return the expected type if the value has another type, or ""."""
    kind = schema.get("type")
    if not isinstance(kind, str) or kind not in _TYPES or (value is None and schema.get("nullable")):
        return ""
    fits = isinstance(value, _TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))
    return "" if fits else f"{'an' if kind[0] in 'aio' else 'a'} {kind}"
