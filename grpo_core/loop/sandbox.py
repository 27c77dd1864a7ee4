"""The sandbox in which chat templates are rendered, with bounds on the time and the memory of a rendering.

It is the environment of transformers' ``apply_chat_template``, with the same options, filters and functions.
Jinja's sandbox bounds one ``range``; it does not bound loops within loops, recursion that branches, or
numbers and texts that grow.  Here turns of loops and calls look at the clock, and the characters and items of
all texts and lists that a template makes are counted: before they are made, where one operation makes many.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

SECONDS = 10.0
"""Seconds of computing that a rendering may take; a long conversation takes some milliseconds."""
LARGEST = 1_000_000
"""Largest number that an operation may repeat something for."""
MADE = 100_000_000
"""Characters and items that a rendering may make in all, 0.1 to 1 GB.  A template that joins each of 200
turns to earlier ones makes as many for a conversation of a million characters; most write each turn once."""
LONG = 10_000
"""Size of a result after which the clock is read at once."""
STEPS = 64
"""Steps after which the clock is read again; some machines take 0.1 ms to tell a thread's time."""


class _Generation(Extension):
    """The block ``{% generation %}``, by which some templates mark what a model says."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)  # what is set within is not seen outside


class Sandbox(ImmutableSandboxedEnvironment):
    """The sandbox, which also counts turns, calls, characters and items."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
            finalize=self._printed,
        )
        self.begin()
        self.filters = {name: self._bounded(each, name) for name, each in self.filters.items()}
        self.filters |= {"tojson": self._bounded(_tojson, "tojson")}
        self.filters |= {_COUNTED: _counted, _JOINED: self._joined, _MEASURED: self._measured}
        self.globals |= {"raise_exception": _raise, "strftime_now": _now}
        del self.globals["lipsum"]

    def begin(self) -> None:
        """Start the clock and the count."""
        self._ends = time.thread_time() + SECONDS
        self._steps = itertools.cycle([True] + [False] * (STEPS - 1))
        self._left = MADE

    def step(self) -> None:
        """Raises SecurityError if the time is over."""
        if next(self._steps):
            self._check_time()

    def _check_time(self) -> None:
        if time.thread_time() > self._ends:
            raise SecurityError(f"it computes for more than {SECONDS:g} s")

    def spend(self, size: int) -> None:
        """Raises SecurityError if the template makes more than it may."""
        self._left -= size
        if size > LONG:  # which took some time, too
            self._check_time()
        if self._left < 0:
            raise SecurityError(f"it makes texts and lists of more than {MADE:,} characters and items")

    def concat(self, parts: Iterable[str]) -> str:
        """Join what a template or a block of it has written."""
        texts: list[str] = []
        rest = iter(parts)
        while some := list(itertools.islice(rest, 256)):
            self.spend(sum(map(len, some)) + len(some))
            texts += some
        return "".join(texts)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        __self.step()
        text = getattr(__obj, "__self__", None)
        if isinstance(__obj, LoopContext):  # a recursive loop
            args = (_counted(__context, args[0]), *args[1:])
        elif isinstance(text, str | bytes) and __obj.__name__ == "join" and args:
            args = (list(args[0]),)
            __self._check("join", args[0], [text])
        elif isinstance(text, str | bytes) and __obj.__name__ in _GROWING:
            __self._check(__obj.__name__, text, [*args, *kwargs.values()])
        return __self._measured(super().call(__context, __obj, *args, **kwargs))

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Look up keys of messages at once; jinja2 looks for an attribute first, which a dict has not."""
        if type(obj) is dict and attribute in obj and attribute not in _OF_DICTS:
            return obj[attribute]
        return super().getattr(obj, attribute)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":  # the most frequent
            return self._measured(left + right)
        if operator == "%" and isinstance(left, str):
            self._check("%", left, [right])
        else:
            self.step()
            _check_product(operator, left, right)
        return self._measured(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return what stands for ``str.format``; jinja2 calls this."""
        if not (wrapped := super().wrap_str_format(value)):
            return None
        text, name = value.__self__, value.__name__

        def checked(*args: Any, **kwargs: Any) -> str:
            self._check(name, text, [*args, *kwargs.values()])
            return wrapped(*args, **kwargs)

        return checked

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        """Count what each node makes; jinja2 calls this for the code of a parsed template."""
        return super()._generate(_Counting().visit(source), *args, **kwargs)

    def _bounded(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Return a filter whose results have a bound."""
        place = 1 if hasattr(function, "jinja_pass_arg") else 0
        items = name in ("join", "sum")

        @functools.wraps(function)  # jinja2's marks of what it is given belong to it
        def checked(*args: Any, **kwargs: Any) -> Any:
            if items and len(args) > place:
                args = (*args[:place], list(args[place]), *args[place + 1 :])
            if name in _GROWING and len(args) > place:
                self._check(name, args[place], [*args[place + 1 :], *kwargs.values()])
            return self._measured(function(*args, **kwargs))

        return checked

    def _check(self, name: str, value: Any, args: list[Any]) -> None:
        """Count what a filter or a text's method makes of a value at most, where that can be much more."""
        for each in args:
            if isinstance(each, int) and abs(each) > LARGEST:
                raise SecurityError(f"{name} is given a number above {LARGEST:,}")
        if name in _FORMATS:
            self._weigh(args)
            _check_format(name, str(value), args)
        if name in _WRITING:
            self._weigh(value)
        if repeats := _repeats(name, value, args):
            self._weigh(args, repeats)
            widths = [abs(each) for each in args if isinstance(each, int)]
            self.spend(repeats * max(widths, default=0) if name in _INDENTING else 0)

    def _measured(self, made: Any) -> Any:
        if isinstance(made, _COLLECTIONS):
            self.spend(len(made))
        return made

    def _joined(self, parts: list[Any]) -> str:
        texts = [str(self._printed(part)) for part in parts]
        self.spend(sum(map(len, texts)))
        return "".join(texts)

    def _printed(self, value: Any) -> Any:
        """Count what the text of a value will have."""
        if not isinstance(value, str):
            self._weigh(value)
        return value

    def _weigh(self, value: Any, times: int = 1) -> None:
        """Count all that is in a value, ``times`` times; what it holds twice counts twice."""
        if isinstance(value, str | bytes):
            self.spend(len(value) * times)
        elif isinstance(value, Mapping):
            for item in value.items():
                self._weigh(item, times)
        elif isinstance(value, list | tuple | set | frozenset):
            self.step()
            self.spend(len(value) * times)
            for each in value:
                self._weigh(each, times)


class _Counting(NodeTransformer):
    """Lets the turns of loops, and the texts of ``~`` and of slices, be counted by filters."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - as jinja2 calls it
        self.generic_visit(node)
        node.iter = _filtered(node.iter, _COUNTED)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), _JOINED)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        return _filtered(node, _MEASURED) if isinstance(node.arg, nodes.Slice) else node


def _filtered(node: Any, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno, environment=node.environment)


_COLLECTIONS = (str, bytes, list, tuple, dict, set, frozenset)
_OF_DICTS = frozenset(dir(dict))

_COUNTED, _JOINED, _MEASURED = "counted turns", "joined texts", "measured slice"
"""Names of filters that no template can write."""

_WRITING = frozenset({"string", "tojson", "pprint", "urlencode", "xmlattr", "join", "sum"})
"""Filters that write all that is in a value."""

_INDENTING = frozenset({"indent", "expandtabs"})
_FORMATS = frozenset({"format", "format_map", "%"})
_PADDING = frozenset({"center", "ljust", "rjust", "zfill", "round", "batch", "slice", "truncate"})
_GROWING = _WRITING | _INDENTING | _FORMATS | _PADDING | {"replace", "urlize", "wordwrap"}
"""Filters and methods of texts whose results can be much larger than the values."""

_FIELD = re.compile(r"[%{]")
_FIELDS = re.compile(r"%[^a-zA-Z%]*|\{[^{}]*:[^{}]*")
_WIDE = re.compile(r"\d{4}")
_GIVEN_WIDTH = re.compile(r"%[^a-zA-Z%]*\*|\{[^{}]*:[^{}]*\{")
"""A field whose width is an argument."""


@pass_context
def _counted(context: Context, items: Iterable[Any]) -> Iterable[Any]:
    environment = context.environment
    assert isinstance(environment, Sandbox)
    step = environment.step

    def turns() -> Iterator[Any]:
        for item in items:
            step()
            yield item

    return turns()


def _repeats(name: str, value: Any, args: list[Any]) -> int:
    """Return how often an operation writes its arguments into its result, at most."""
    if name in _FORMATS:
        return len(_FIELD.findall(str(value)))
    if name == "replace" and args:
        return str(value).count(str(args[0])) if args[0] else len(str(value)) + 1
    if name == "join":
        return len(value)
    if name in _INDENTING:
        return str(value).count("\n" if name == "indent" else "\t") + 1
    return len(value) if name in ("xmlattr", "urlize", "wordwrap") else 0


def _check_format(name: str, text: str, args: list[Any]) -> None:
    given = [str(args)] if _GIVEN_WIDTH.search(text) else []
    if any(map(_WIDE.search, [*_FIELDS.findall(text), *given])):
        raise SecurityError(f"{name} is given a width above 999")


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
    if isinstance(indent, int) and indent > 100:
        raise SecurityError(f"tojson is given an indentation of {indent}, which is above 100")
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(format: str) -> str:
    return datetime.now().strftime(format)
