"""Makes actions of OpenEnv from replies, by the JSON schema of the actions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import grpo_core as grpo
from grpo_core.kit import read_json

COMMON = ("metadata",)
"""Fields of all actions, which say nothing about what is done."""


class Actions:
    """Makes actions of replies.

    Args:
        schema: JSON schema of the server's actions.
        field: field of an action that gets the whole reply; empty: the only text that is required.

    Raises ConfigError if no such field exists.
    """

    def __init__(self, schema: Mapping[str, Any], field: str = "") -> None:
        properties = schema.get("properties", {})
        self._properties = {name: told for name, told in properties.items() if name not in COMMON}
        texts = [
            name
            for name in schema.get("required", ())
            if name in self._properties and self._properties[name].get("type") == "string"
        ]
        if field and field not in self._properties:
            near = grpo.did_you_mean(field, set(self._properties))
            raise grpo.ConfigError(
                f"openenv: an action has no field {field!r}.{near} Its fields: {self.told()}"
            )
        others = [name for name in schema.get("required", ()) if name not in (*COMMON, *texts)]
        self._field = field or (texts[0] if len(texts) == 1 and not others else "")

    def told(self) -> str:
        return ", ".join(f"{name} ({told.get('type', 'any')})" for name, told in self._properties.items())

    def instruction(self) -> str:
        """Return how an action is written, for a prompt; empty where the reply is the action."""
        return "" if self._field else f"Reply with an action as a JSON object with the fields {self.told()}."

    def of(self, reply: str) -> dict[str, Any]:
        """Return the action of a reply, without its thinking.  Raises ValueError if it is none."""
        reply = grpo.split_thought(reply)[1]
        if self._field:
            return {self._field: self._typed(self._field, reply)}
        start, end = reply.find("{"), reply.rfind("}")
        try:
            return read_json(reply[max(start, 0) : end + 1], dict)
        except ValueError:
            raise ValueError(f"no action: expected a JSON object with the fields {self.told()}") from None

    def _typed(self, name: str, reply: str) -> Any:
        """Return the reply as its field wants it; the server judges what is not of this type."""
        kind = self._properties[name].get("type")
        text = reply.strip()
        try:
            if kind == "integer":
                return int(text)
            if kind == "number":
                return float(text)
        except ValueError as error:
            raise ValueError(f"no action: {text[:80]!r} is no {kind}") from error
        return reply
