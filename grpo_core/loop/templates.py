"""Chat templates in Jinja's sandbox, with a bound on the time of a rendering.

The environment is that of transformers' ``apply_chat_template``, with the same options, filters and
functions.  The sandbox bounds one ``range``; it does not bound loops within loops, recursion that branches,
or arithmetic whose numbers grow.  Here turns of loops and calls look at the clock, and the operations that
compute for as long as a number says have a bound on that number.
"""

from __future__ import annotations

import functools
import itertools
import json
import operator
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, nodes, pass_context
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from grpo_core.records import Message

Tools = Sequence[Mapping[str, Any]]

SECONDS = 10.0
"""Seconds of computing that a rendering may take; a long conversation takes some milliseconds."""
LARGEST = 1_000_000
"""Largest number that an operation may repeat something for."""
MOST_CHARACTERS = 16_000_000
"""Number of characters of the conversations whose texts are kept."""
STEPS = 16
"""Steps after which the clock is read again."""


class ChatTemplate:
    """A compiled chat template.  Raises jinja2's TemplateError if it is none."""

    def __init__(self, source: str) -> None:
        self._environment = _Environment()
        self._template: Template = self._environment.from_string(source)

    def render(self, variables: Mapping[str, Any]) -> str:
        """Raises what the template raises, and SecurityError if it computes for more than ``SECONDS``."""
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


class _Generation(Extension):
    """The block ``{% generation %}``, by which some templates mark what a model says."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)  # what is set within is not seen outside


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, which also counts turns of loops and calls."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.filters = {name: _bounded(each, name) for name, each in self.filters.items()}
        self.filters |= {"tojson": _bounded(_tojson, "tojson"), _COUNTED: _counted}
        self.globals |= {"raise_exception": _raise, "strftime_now": _now}
        del self.globals["lipsum"]
        self.begin()

    def begin(self) -> None:
        """Start the clock."""
        self._ends = time.thread_time() + SECONDS
        self._steps = itertools.cycle([True] + [False] * (STEPS - 1))

    def step(self) -> None:
        """Raises SecurityError if the time is over."""
        if next(self._steps) and time.thread_time() > self._ends:
            raise SecurityError(f"it computes for more than {SECONDS:g} s")

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        __self.step()
        if isinstance(__obj, LoopContext):  # a recursive loop
            args = (_counted(__context, args[0]), *args[1:])
        elif isinstance(getattr(__obj, "__self__", None), str | bytes):
            _check(__obj.__name__, (*args, *kwargs.values()))
        return super().call(__context, __obj, *args, **kwargs)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Look up keys of messages at once; jinja2 looks for an attribute first, which a dict has not."""
        if type(obj) is dict and attribute in obj and attribute not in _OF_DICTS:
            return obj[attribute]
        return super().getattr(obj, attribute)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self.step()
        _check_product(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        """Count the turns of each loop; jinja2 calls this for the code of a parsed template."""
        for loop in list(source.find_all(nodes.For)):
            loop.iter = nodes.Filter(loop.iter, _COUNTED, [], [], None, None, lineno=loop.lineno)
        return super()._generate(source, *args, **kwargs)


_OF_DICTS = frozenset(dir(dict))

_COUNTED = "counted turns"
"""Name of a filter that no template can write."""


@pass_context
def _counted(context: Context, items: Iterable[Any]) -> Iterable[Any]:
    environment = context.environment
    assert isinstance(environment, _Environment)
    step = environment.step

    def turns() -> Iterator[Any]:
        for item in items:
            step()
            yield item

    return turns()


def _bounded(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a filter whose numbers have a bound."""

    @functools.wraps(function)  # jinja2's marks of what it is given belong to it
    def checked(*args: Any, **kwargs: Any) -> Any:
        _check(name, (*args[1:], *kwargs.values()))
        return function(*args, **kwargs)

    return checked


def _check(name: str, given: Iterable[Any]) -> None:
    for each in given:
        if isinstance(each, int) and abs(each) > LARGEST:
            raise SecurityError(f"{name} is given a number above {LARGEST:,}")


def _check_product(operator: str, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * (max(right, 1) if operator == "**" else 1) + right.bit_length()
        if bits > 1000:
            raise SecurityError(f"a number by {operator} has more than 300 digits")
    elif operator == "*":
        times = left if isinstance(left, int) else right
        items = right if isinstance(left, int) else left
        if isinstance(times, int) and hasattr(items, "__len__") and times * len(items) > LARGEST:
            raise SecurityError(f"a text or list by * has more than {LARGEST:,} items")


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
