"""Normalises messages to the form that chat templates and environments get.  Pure.

Data, environments and agents write the same conversation in several ways.  Here it becomes::

    {"role": "user", "content": "tea?"}
    {"role": "assistant", "content": "", "tool_calls": [
        {"type": "function", "id": "c1", "function": {"name": "price", "arguments": {"item": "tea"}}}]}
    {"role": "tool", "content": "7", "tool_call_id": "c1", "name": "price"}

The texts of a list of parts are joined, arguments that are JSON text are read, ``function_call`` is a call, a
developer is the system, and arrays are lists.  A key whose value is null is left out, because tables such as
Parquet cannot say whether a key of an object is null or absent; only in arguments that are JSON text nulls
are kept.  Messages that no model could read are refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attrs import evolve

from grpo_core.contracts.errors import PluginError, shown
from grpo_core.contracts.unicode import DEEPEST, read_json
from grpo_core.text.thoughts import THOUGHT_KEYS

if TYPE_CHECKING:
    from grpo_core.contracts.records import Prompt

ROLES = ("system", "user", "assistant", "tool")
_OTHER_NAMES = {"developer": "system", "function": "tool"}
"""Roles that OpenAI's API has under two names."""
_OWN_FORM = ("role", "content", "tool_calls", "function_call", "tool_call_id")
"""Keys of a message that are not copied as they are."""


class MessageError(ValueError):
    """Raised for a message that no model could read; its text names the message and the reason."""


class Arguments(dict[str, Any]):
    """Arguments of a call that were JSON text: their nulls stay, however often they are normalised."""


def normalised(given: Any, *, sampled: bool = False) -> tuple[dict[str, Any], ...]:
    """Return messages in the form of this module.

    Args:
        given: a list of messages.
        sampled: whether calls may be a model's own, sent back by an agent: arguments that are not an object
            stay as they are, including nulls.

    Raises MessageError.
    """
    listed = given if sampled else _plain(given)
    if not isinstance(listed, (list, tuple)):
        raise MessageError(f"the messages are {shown(given)}; expected a list")
    messages = [_message(message, f"message {place}", sampled) for place, message in enumerate(listed, 1)]
    names: dict[str, str] = {}
    for message in messages:
        for call in message.get("tool_calls", ()):
            names[call.get("id", "")] = call["function"]["name"]
        if message["role"] == "tool" and not message.get("name") and (id := message.get("tool_call_id")):
            message |= {"name": names[id]} if id in names else {}
    return tuple(messages)


def prompt_messages(given: Any) -> tuple[dict[str, Any], ...]:
    """Return the messages of a prompt in the form of this module.

    Raises MessageError also for a tool message without a call, or if the model's turn does not follow.
    """
    messages = normalised(given)
    if not messages:
        raise MessageError("there are no messages; expected at least one")
    calls: set[str | None] = set()
    before = ""
    for place, message in enumerate(messages, 1):
        calls |= {call.get("id") for call in message.get("tool_calls", ())}
        if message["role"] == "tool":
            id = message.get("tool_call_id")
            if before not in ("assistant", "tool") or (id and None not in calls and id not in calls):
                answered = f" the call {id!r}" if id else ""
                raise MessageError(
                    f"message {place} (tool) answers{answered}, and no message before it makes such a call"
                )
        before = message["role"]
    check_turn(messages)
    return messages


def readable(prompt: Prompt, who: str) -> Prompt:
    """Return a plugin's prompt with its messages in the form of this module.

    Raises PluginError, which names ``who``.
    """
    try:
        return evolve(prompt, messages=prompt_messages(prompt.messages))
    except MessageError as error:
        raise PluginError(f"{who}: prompt {prompt.id!r}: {error}") from None


def check_turn(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise MessageError if the last message is the model's own: its next turn must follow another one."""
    if messages and messages[-1]["role"] == "assistant":
        raise MessageError(
            f"message {len(messages)} (assistant) is the last one, and the model would answer itself; leave "
            "it out, or end with a message of the user"
        )


def parsed(arguments: Any) -> Any:
    """Return the arguments of a call; JSON is read, and any other text stays."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return read_json(arguments, object)
    except ValueError:
        return arguments


def _plain(value: Any, *, nulls: bool = False, deepest: int = DEEPEST) -> Any:
    """Convert a value to JSON values; keys that are null are dropped unless ``nulls``.

    Raises MessageError.
    """
    if type(value) is str:
        return value
    if not deepest:
        raise MessageError(f"a message is nested more than {DEEPEST} deep")
    if hasattr(value, "tolist"):  # an array or number of numpy, as pandas and pyarrow give them
        return _plain(value.tolist(), nulls=nulls, deepest=deepest - 1)
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(part, nulls=nulls, deepest=deepest - 1) for part in value]
    if isinstance(value, Mapping):
        if odd := [key for key in value if not isinstance(key, str)]:
            raise MessageError(f"a message has the key {shown(odd[0])}; expected JSON-serializable values")
        nulls = nulls or isinstance(value, Arguments)
        kept = {key: part for key, part in value.items() if nulls or part is not None}
        plain = {key: _plain(part, nulls=nulls, deepest=deepest - 1) for key, part in kept.items()}
        return Arguments(plain) if isinstance(value, Arguments) else plain
    kind = "number" if isinstance(value, float) else type(value).__name__
    raise MessageError(f"a message has the {kind} {shown(value)}; expected JSON-serializable values")


def _message(given: Any, where: str, sampled: bool) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        example = "{'role': 'user', 'content': '...'}"
        raise MessageError(f"{where} is {shown(given)}; expected one such as {example}")
    named = given.get("role")
    role = _OTHER_NAMES.get(str(named), named)
    if role not in ROLES:
        raise MessageError(f"{where} has the role {shown(named)}; expected system, user, assistant or tool")
    where = f"{where} ({role})"
    if given.get("content") is None and role in ("system", "user"):
        raise MessageError(f"{where} has no content; expected text")
    message: dict[str, Any] = {"role": role, "content": _text(given.get("content"), where)}
    for key, part in given.items():
        if key in THOUGHT_KEYS and not isinstance(part, (str, type(None))):
            raise MessageError(f"{where}: its {key} is {shown(part)}; expected text")
        if key not in _OWN_FORM and part is not None:
            message[key] = part
    if (id := given.get("tool_call_id")) is not None:
        message["tool_call_id"] = str(id)
    if calls := _calls(given, where, sampled):
        if role != "assistant":
            raise MessageError(f"{where} calls a tool; only an assistant does")
        message["tool_calls"] = calls
    return message


def _text(content: Any, where: str) -> str:
    """Return the text of a message's content, with its parts joined."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        raise MessageError(f"{where}: its content is {shown(content)}; expected text, or a list of its parts")
    return "".join(_part(part, where) for part in content)


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping):
        for key in ("text", "refusal"):
            if isinstance(part.get(key), str):
                return str(part[key])
    raise MessageError(f"{where}: its content has the part {shown(part)}, but the model reads text only")


def _calls(given: Mapping[str, Any], where: str, sampled: bool) -> list[dict[str, Any]]:
    calls, legacy = given.get("tool_calls"), given.get("function_call")
    if calls is None:
        calls = [] if legacy is None else [{"function": legacy}]
    if not isinstance(calls, (list, tuple)):
        raise MessageError(f"{where}: its tool_calls are {shown(calls)}; expected a list of calls")
    return [_call(call, where, sampled) for call in calls]


def _call(given: Any, where: str, sampled: bool) -> dict[str, Any]:
    call = given if isinstance(given, Mapping) else {}
    function = call.get("function") or call
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not (name or sampled):
        raise MessageError(f"{where}: the tool call {shown(given)} has no function with a name")
    written = function.get("arguments")
    arguments = {} if written in (None, "", "null") else parsed(written)
    if not sampled and not isinstance(arguments, dict):
        raise MessageError(f"{where}: the arguments of {name} are {shown(written)}; expected a JSON object")
    if not sampled and isinstance(written, str):
        arguments = _plain(Arguments(arguments))
    id = call.get("id")
    numbered = {} if id is None else {"id": str(id)}
    return {"type": "function", **numbered, "function": {"name": name, "arguments": arguments}}
