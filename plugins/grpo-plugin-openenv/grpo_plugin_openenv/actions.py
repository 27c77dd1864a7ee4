"""Parses replies into actions of OpenEnv, by their JSON schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import grpo_core as grpo
from grpo_core.kit import read_json

COMMON = ("metadata",)
"""Fields of all actions that carry no content."""


class Actions:
    """Parses replies into actions.

    Args:
        schema: JSON schema of the server's actions.
        field: field of an action that receives the whole reply; empty: the only required text field.

    Raises ConfigError if no such field exists.
    """

    def __init__(self, schema: Mapping[str, Any], field: str = "") -> None:
        properties = schema.get("properties", {})
        self._properties = {name: schema for name, schema in properties.items() if name not in COMMON}
        texts = [
            name
            for name in schema.get("required", ())
            if name in self._properties and self._properties[name].get("type") == "string"
        ]
        if field and field not in self._properties:
            near = grpo.did_you_mean(field, set(self._properties))
            raise grpo.ConfigError(
                f"openenv: an action has no field {field!r}.{near} Its fields: {self.fields()}"
            )
        others = [name for name in schema.get("required", ()) if name not in (*COMMON, *texts)]
        self._field = field or (texts[0] if len(texts) == 1 and not others else "")

    def fields(self) -> str:
        return ", ".join(f"{name} ({schema.get('type', 'any')})" for name, schema in self._properties.items())

    def instruction(self) -> str:
        """Return the instruction how to write an action; empty if the whole reply is the action."""
        return (
            "" if self._field else f"Reply with an action as a JSON object with the fields {self.fields()}."
        )

    def of(self, reply: str) -> dict[str, Any]:
        """Return the action of a reply, without its thinking.  Raises ValueError for an invalid action."""
        reply = grpo.split_thought(reply)[1]
        if self._field:
            return {self._field: self._typed(self._field, reply)}
        start, end = reply.find("{"), reply.rfind("}")
        try:
            return read_json(reply[max(start, 0) : end + 1], dict)
        except ValueError:
            raise ValueError(f"no action: expected a JSON object with the fields {self.fields()}") from None

    def _typed(self, name: str, reply: str) -> Any:
        """Convert the reply to the type of its field; the server rejects invalid values."""
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
