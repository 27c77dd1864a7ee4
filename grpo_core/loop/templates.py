"""Compiled chat templates, and the conversations that they rendered lately."""

from __future__ import annotations

import json
import operator
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from grpo_core.records import Message

Tools = Sequence[Mapping[str, Any]]

MOST_CHARACTERS = 16_000_000
"""Number of characters of the conversations whose texts are kept."""


class ChatTemplate:
    """A compiled chat template, in the sandbox of transformers' ``apply_chat_template``.

    It has the same options, filters and functions.  Raises jinja2's TemplateError if it is none.
    """

    def __init__(self, source: str) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals |= {"raise_exception": _raise, "strftime_now": _now}
        self._template = environment.from_string(source)

    def render(self, variables: Mapping[str, Any]) -> str:
        """Raises what the template raises, and jinja2's SecurityError if it leaves the sandbox."""
        return self._template.render(variables)


class _Generation(Extension):
    """The block ``{% generation %}``, by which some templates mark what a model says."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)  # what is set within is not seen outside


def _tojson(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(format: str) -> str:
    return datetime.now().strftime(format)


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
