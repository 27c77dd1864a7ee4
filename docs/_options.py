"""The page options.md of the site: the options of every loss, engine, sampler and so on of this repository.

Names, types and defaults are the parameters of the factories that the plugins offer; meanings are from the
``Args:`` sections of their docstrings (or of a base class), or the docstrings of an attrs class's attributes.
"""

from __future__ import annotations

import html
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from grpo_core.config.meanings import meanings
from grpo_core.plugins.host import BUILT_IN, PluginHost
from grpo_core.plugins.offers import HOOKS, hint_of
from grpo_core.plugins.values import classes_of

ROOT = Path(__file__).parent.parent

OURS = {"grpo-core", *(path.name for path in (ROOT / "plugins").iterdir())}
"""Distributions of this repository: what else is installed has its own documents."""
LEFT_OUT = {"environment", "preflight"}
"""Each environment is documented by its plugin; a check has no options."""
POOL = "pool"
"""The engine that a run makes of ``engine.workers`` others; nobody selects it."""
FROM_THE_CORE = {"self", "setup", "run", "plugins", "placement", "inputs", "group", "groups", "rewards"}
"""Parameters that the core fills in."""
SELECTED = {
    "validation_strategy": '[validation] name = "{}"',
    "tracker": '[tracking] trackers = ["{}"]',
    "model": '[model] path = "{}"',
    "filter": "[filters.{}]",
}
"""How the configuration selects a part, where it is not ``[KIND] name = "NAME"``."""

HEAD = """\
# Options

The configuration chooses each of these parts by name, and gives it options:

```toml
[loss]
name = "grpo"
options = { clip_high = 0.3 }
```

or, on the command line, `--set loss.options.clip_high=0.3`. An unknown option is an error that names the
nearest one. Options are checked before any process or model starts.
"""


def page() -> str:
    """The whole page."""
    lines = [HEAD]
    host = PluginHost.discover()
    sections = {each.name for each in host.sections.added}
    for kind in HOOKS:
        offers = [
            (plugin.name, name)
            for plugin in host.plugins
            if plugin.distribution in OURS and kind not in LEFT_OUT
            for name in sorted(plugin.offers.get(kind, {}))
            if not (kind == "tracker" and name in sections) and name != POOL
        ]
        if offers:
            lines.append(f"## {kind.replace('_', ' ').capitalize()}\n")
        for plugin_name, name in offers:
            unique = [other for _, other in offers].count(name) == 1
            full = name if plugin_name == BUILT_IN or unique else f"{plugin_name}:{name}"
            factory = host.find(kind, f"{plugin_name}:{name}").load()
            selected = SELECTED.get(kind, f'[{kind}] name = "{{}}"').format(full)
            lines.append(_one(full, selected, factory))
    return "\n".join(lines).rstrip() + "\n"


def _one(name: str, selected: str, factory: Any) -> str:
    lines = [f"### `{name}`", "", f"`{selected}`: {_plain(_paragraph(factory))}", ""]
    told = _meanings(factory)
    rows = [
        row
        for parameter in _options(factory)
        for row in _rows(parameter, classes_of(hint_of(factory, parameter)), told.get(parameter.name, ""))
    ]
    if rows:
        lines += ["| option | type | default | meaning |", "|---|---|---|---|", *rows, ""]
    else:
        lines += ["It has no options.", ""]
    return "\n".join(lines)


def _rows(parameter: inspect.Parameter, kinds: Mapping[str, Any], meaning: str) -> Iterator[str]:
    """Yield the row of an option, and one for each key of its table."""
    if not kinds:
        kind = _code(_type(parameter))
        yield f"| `{parameter.name}` | {kind} | {_default(parameter.default)} | {_plain(meaning)} |"
        return
    usual, several = parameter.default, len(kinds) > 1
    names = (f"`{each}`" for each, kind in kinds.items() if kind is type(usual))
    name = next(names) if several else "see below"
    formulas = [f"`{each}`: {_paragraph(kind)}" for each, kind in kinds.items() if several]
    told = _plain(" ".join([f"{meaning}{'' if meaning.endswith('.') else '.'}", *formulas]))
    yield f"| `{parameter.name}` | {'a name or a table' if several else 'a table'} | {name} | {told} |"
    fields = {each.name: (each, kind) for kind in kinds.values() for each in attrs.fields(kind)}
    for key, (each, kind) in fields.items():
        default = getattr(usual, key, each.default)
        yield (
            f"| `{parameter.name}.{key}` | {_code(str(each.type))} | {_default(default)} "
            f"| {_plain(meanings(kind)[key])} |"
        )


def _options(factory: Any) -> Iterator[inspect.Parameter]:
    for parameter in inspect.signature(factory).parameters.values():
        named = parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        if named and parameter.name not in FROM_THE_CORE:
            yield parameter


def _meanings(factory: Any) -> dict[str, str]:
    """Collect the explanation of each parameter; the factory's own wins over those of its base classes."""
    found: dict[str, str] = {}
    for documented in reversed(inspect.getmro(factory) if inspect.isclass(factory) else (factory,)):
        if inspect.isclass(documented) and attrs.has(documented):
            found |= meanings(documented)
        found |= _arguments(documented.__doc__)
        if inspect.isclass(documented) and "__init__" in vars(documented):
            found |= _arguments(documented.__init__.__doc__)
    return found


def _arguments(docstring: str | None) -> dict[str, str]:
    """The entries of a Google-style ``Args:`` section; "a, b: text" is an entry of both."""
    section = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", inspect.cleandoc(docstring or "") + "\n", re.S | re.M)
    entries: dict[str, str] = {}
    if section:
        text = textwrap.dedent(section[1])
        for names, told in re.findall(r"^(\w[\w, ]*):\s+(.*?)(?=^\w|\Z)", text, re.S | re.M):
            entries |= dict.fromkeys(names.split(", "), " ".join(told.split()))
    return entries


def _paragraph(factory: Any) -> str:
    return " ".join((inspect.getdoc(factory) or "").split("\n\n")[0].split())


def _type(parameter: inspect.Parameter) -> str:
    """As it is written; a name of another module without the module."""
    annotation = parameter.annotation
    if annotation is parameter.empty:
        return ""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    text = text.replace("collections.abc.", "")
    return {"Mode": 'Literal["batched", "pipelined"]'}.get(text, text)


def _default(default: Any) -> str:
    if default is inspect.Parameter.empty:
        return "required"
    if default is None or default is attrs.NOTHING:  # the latter: an attrs class makes it when it is used
        return "not set"
    return f"`{str(default).lower() if isinstance(default, bool) else repr(default)}`"


def _code(text: str) -> str:
    """As code in a cell: GitHub and MkDocs disagree about a bar between backticks, and agree about this."""
    return (
        f"<code>{html.escape(text, quote=False).replace('|', '&#124;')}</code>"
        if "|" in text
        else f"`{text}`"
    )


def _plain(text: str) -> str:
    text = re.sub(r"``(.+?)``", r"`\1`", text).replace("|", "\\|")
    return text[:1].upper() + text[1:]


if __name__ == "__main__":
    print(page())
