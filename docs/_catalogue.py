"""The page catalogue.md of the site: supported formats of environments.

Each entry is a table ``[[tool.grpo-core.catalogue]]`` in the ``pyproject.toml`` of the distribution that
offers it, so a plugin describes itself; nothing is imported or asked.  ``docs/tested.json`` has what was seen
with the real libraries, by ``env``: each value has the keys ``SEEN``.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
TESTED = Path(__file__).with_name("tested.json")
GITHUB = "https://github.com/grpo-core/grpo-core/blob/main/plugins"

KEYS = ("format", "env", "library", "license", "offline", "check")
"""Keys of an entry, all of which are texts."""

SEEN = ("version", "tests", "agreement", "check")
"""Keys of what was seen with a real library, all of which are texts."""

HEAD = """\
# Environments

An environment that exists already needs no new code: the column `env` shows how a task names it.
`grpo-core plugins` lists what is installed on a machine.

* *Library* is the version that the tests run against; its licence follows.
* *Offline* says what a run needs besides the installed packages. No format asks a hub or a service by itself.
* *Check* is a command that passes without anything else, or says what such a check needs.

| format | `env` | install | library | licence | offline | check |
|---|---|---|---|---|---|---|
"""

SEEN_HEAD = """\

## Against the real libraries

Results of the tests with the libraries installed. The task names the environment; none of these formats needs
code of the user.

| format | library | lines of code | licence | offline | tests | agreement | `grpo-core check` |
|---|---|---|---|---|---|---|---|
"""

FOOT = """\

A library whose requirements do not fit those of the trainer can have another interpreter, which
`tasks.NAME.python` names ([Interpreters](interpreters.md)). An adapter asks a server on another machine only
if its option `remote` allows it.

`grpo-core train examples/five_formats.toml` trains the tiny model on five formats at once, on a CPU.
"""


def page() -> str:
    """The whole page."""
    offered = "".join(_row(name, entry) for name, entry in entries())
    return HEAD + offered + SEEN_HEAD + "".join(map(_seen_row, seen())) + FOOT


def seen() -> Iterator[dict[str, str]]:
    """Yield entries with what was seen.  Raises ValueError for what no entry offers, or a wrong key."""
    offered = {entry["env"]: entry for _, entry in entries()}
    for env, found in json.loads(TESTED.read_text(encoding="utf-8")).items():
        if env not in offered or tuple(found) != SEEN:
            raise ValueError(f"{TESTED}: {env} has to be offered, and to have the keys {', '.join(SEEN)}")
        yield {**offered[env], **found}


def entries() -> Iterator[tuple[str, Mapping[str, str]]]:
    """Yield distributions with their entries, those of the core first.  Raises ValueError for a wrong one."""
    for path in (ROOT / "pyproject.toml", *sorted(ROOT.glob("plugins/*/pyproject.toml"))):
        described = tomllib.loads(path.read_text(encoding="utf-8"))
        name = described["project"]["name"]
        for entry in described.get("tool", {}).get("grpo-core", {}).get("catalogue", ()):
            if tuple(entry) != KEYS or not all(isinstance(value, str) for value in entry.values()):
                raise ValueError(
                    f"{path}: an entry of the catalogue has the keys {', '.join(KEYS)}, in this order"
                )
            yield name, entry


def offers_environments(described: Mapping[str, Any], folder: Path) -> bool:
    """Return whether a distribution's modules implement the hook of environments."""
    modules = described.get("project", {}).get("entry-points", {}).get("grpo_core", {}).values()
    return any("def grpo_environments" in (folder / name / "__init__.py").read_text() for name in modules)


def _row(name: str, entry: Mapping[str, str]) -> str:
    install = "built in" if name == "grpo-core" else f"[`{name}`]({GITHUB}/{name}/README.md)"
    env, check = f"`{entry['env']}`", entry["check"]
    cells = [entry["format"], env, install, entry["library"], entry["license"], entry["offline"], check]
    return f"| {' | '.join(cells)} |\n"


def _seen_row(row: Mapping[str, str]) -> str:
    named = (f"`{row['env']}`", row["version"], "0", row["license"], row["offline"])
    return f"| {' | '.join([*named, *(row[key] for key in SEEN[1:])])} |\n"


if __name__ == "__main__":
    print(page())
