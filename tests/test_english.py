"""Docstrings, configuration keys and command-line help are sentences, not fragments."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import docstring_parser
import pytest
from cyclopts import App

from grpo_core import cli, config

ROOT = Path(__file__).parent.parent
SOURCES = sorted(
    path
    for folder in ("grpo_core", "plugins", "examples", "docs", "tests")
    for path in (ROOT / folder).rglob("*.py")
)

FRAGMENT = re.compile(r"(Of|What|Those|Whoever|That|None of|So many)\b")
"""Beginnings that no docstring has: the reader would have to guess the subject."""
NO_SUBJECT = re.compile(
    r"(After|Also|And|As|At|Because|Before|But|By|During|Else|For|From|How|If|In|Into|It|On|Only|Or|Since"
    r"|So|Than|Then|These|They|This|To|Until|Where|Which|While|Who|Whose|With|Within|Without)\b"
)
"""Beginnings that no explanation of a key has, either: it stands alone in a table."""
FEWEST_WORDS = 3

ALLOWED = {"docstrings": 0, "configuration": 0, "command line": 0}
"""Offenders that are left; only ever lowered."""


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring: of modules, classes and functions, and below attributes."""
    for node in documented(ast.parse(source)):
        for before, statement in zip([None, *node.body], node.body, strict=False):
            documents = before is None or isinstance(before, ast.Assign | ast.AnnAssign)
            if documents and isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                text = statement.value.value
                if isinstance(text, str):
                    yield statement.lineno, inspect.cleandoc(text)


def documented(node: ast.AST) -> Iterator[Any]:
    """Each module, class and function.  Expressions, which are most of a tree, are not looked at."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield node
    for part in ("body", "orelse", "finalbody", "handlers", "cases"):
        below = getattr(node, part, ())
        for statement in below if isinstance(below, list) else ():
            yield from documented(statement)


def fragments() -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for path in SOURCES
        for line, text in docstrings(path.read_text(encoding="utf-8"))
        if FRAGMENT.match(text)
    ]


def complaint(text: str) -> str:
    """Say what keeps an explanation from being a sentence; "" if nothing does."""
    if not text:
        return "is missing"
    if FRAGMENT.match(text) or NO_SUBJECT.match(text):
        return f"begins with {text.split()[0]!r}"
    if not (text[0].isupper() or text[0] == "`"):
        return "does not begin with a capital letter"
    if not text.rstrip("\"')").endswith("."):
        return "does not end with a period"
    first = re.split(r"[.;:](?:\s|$)", text, maxsplit=1)[0]
    return "" if len(first.split()) >= FEWEST_WORDS else f"is not a sentence: {first!r}"


# ---------------------------------------------------------------------------------- configuration


def sections() -> list[type]:
    return [
        value
        for value in vars(config).values()
        if inspect.isclass(value) and attrs.has(value) and value.__module__.startswith(config.__name__)
    ]


def explanations() -> Iterator[tuple[str, str]]:
    """Each class of the configuration and each of its keys, with what is said of it."""
    for kind in sections():
        (node,) = ast.parse(inspect.getsource(kind)).body
        assert isinstance(node, ast.ClassDef)
        yield kind.__name__, inspect.cleandoc(ast.get_docstring(node) or "")
        below = dict(zip(node.body, [*node.body[1:], None], strict=True))
        own = {name.target.id: name for name in node.body if isinstance(name, ast.AnnAssign)}
        fields = attrs.fields(attrs.resolve_types(kind))
        keys = {field.name for field in fields if not attrs.has(field.type)}  # the class explains a section
        for name in own.keys() & keys:
            following = below[own[name]]
            said = following.value if isinstance(following, ast.Expr) else None
            text = said.value if isinstance(said, ast.Constant) else ""
            yield f"{kind.__name__}.{name}", " ".join(text.split())


def unclear_keys() -> list[str]:
    return sorted(f"{name}: {why}" for name, text in explanations() if (why := complaint(text)))


# ---------------------------------------------------------------------------------- command line


def commands(app: App, name: str = "grpo-core") -> dict[str, Callable[..., Any]]:
    """Return the function of each command, also of those below a command, by what the user types."""
    found = {}
    for below in app.subapps:
        typed, function = f"{name} {below.name[0]}", below.default_command
        if inspect.isfunction(function):
            found |= {typed: function} | commands(below, typed)
    return found


def unclear_options() -> list[str]:
    found = []
    for command, function in commands(cli.make_app()).items():
        parsed = docstring_parser.parse(function.__doc__ or "")
        said = {parameter.arg_name: parameter.description or "" for parameter in parsed.params}
        texts = {"": parsed.short_description or ""}
        texts |= {name: said.get(name, "") for name in inspect.signature(function).parameters}
        for name, text in texts.items():
            if why := complaint(" ".join(text.split())):
                found.append(f"{command} {name}: {why}")
    return sorted(found)


# ---------------------------------------------------------------------------------- tests


@pytest.mark.parametrize(
    ("part", "offenders"),
    [("docstrings", fragments), ("configuration", unclear_keys), ("command line", unclear_options)],
    ids=["docstrings", "configuration", "command line"],
)
def test_explanations_are_sentences(part, offenders):
    found = offenders()
    assert len(found) == ALLOWED[part], "\n".join(["", *found])


def test_every_key_and_every_command_is_looked_at():
    names = {name for name, _ in explanations()}
    assert {"Config", "Config.seed", "TrainerConfig.lr", "PipelineConfig.max_staleness"} <= names
    assert len(names) > 80
    assert {"grpo-core train", "grpo-core audit", "grpo-core runs compare", "grpo-core simulate"} <= set(
        commands(cli.make_app())
    )


@pytest.mark.parametrize(
    "text",
    [
        "Directory of the run.",
        "Number of GPUs per engine worker (Ray only).",
        "Names an engine (see `grpo-core plugins`).",
        "`auto` chooses the fastest transport.",
    ],
)
def test_a_sentence_is_accepted(text):
    assert complaint(text) == ""


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Of the deadline.",
        "What is told of it.",
        "None of the others.",
        "number of GPUs per worker.",
        "Number of GPUs per worker",
        "Only for the tiny model.",
        "Generates completions.",
        "A directory; and so on.",
    ],
)
def test_a_fragment_is_refused(text):
    assert complaint(text)


def test_docstrings_are_found_where_they_stand():
    source = (
        '"""Module."""\nX = 1\n"""Of X."""\nclass C:\n    y: int\n    """What y is."""\n    "no docstring"\n'
    )
    assert [text for _, text in docstrings(source)] == ["Module.", "Of X.", "What y is."]
