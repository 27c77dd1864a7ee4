"""Compiled chat templates, and the conversations that they rendered lately."""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import Template

from grpo_core.loop.sandbox import Sandbox
from grpo_core.records import Message

Tools = Sequence[Mapping[str, Any]]

MOST_CHARACTERS = 16_000_000
"""Number of characters of the conversations whose texts are kept."""


class ChatTemplate:
    """A compiled chat template.  Raises jinja2's TemplateError if it is none."""

    def __init__(self, source: str) -> None:
        self._environment = Sandbox()
        self._template: Template = self._environment.from_string(source)

    def render(self, variables: Mapping[str, Any]) -> str:
        """Raises what the template raises, and SecurityError if it takes too much time or memory."""
        self._environment.begin()
        return self._template.render(variables)


class Rendered:
    """Conversations that were rendered lately: the next turn of a rollout begins with one of them.

    Messages are compared as objects, which rollouts keep from turn to turn.
    """

    def __init__(self, most: int = MOST_CHARACTERS) -> None:
        self._most, self._size = most, 0
        self._texts: OrderedDict[int, tuple[Sequence[Message], Tools, str]] = OrderedDict()

    def find(self, messages: Sequence[Message], tools: Tools) -> str | None:
        """Return the text of a conversation, if it is known."""
        if not messages:
            return None
        known, shown, text = self._texts.get(id(messages[-1]), ((), (), ""))
        same = len(known) == len(messages) and all(map(operator.is_, known, messages))
        return text if same and list(shown) == list(tools) else None

    def keep(self, messages: Sequence[Message], tools: Tools, text: str) -> None:
        """Remember a text, and forget the oldest ones if all are too long."""
        self._drop(self._texts.pop(id(messages[-1]), None))
        self._texts[id(messages[-1])] = messages, tools, text
        self._size += len(text)
        while self._size > self._most:
            self._drop(self._texts.popitem(last=False)[1])

    def _drop(self, entry: tuple[Sequence[Message], Tools, str] | None) -> None:
        self._size -= len(entry[2]) if entry else 0
