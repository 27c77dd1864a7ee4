"""The core names no plugin: it finds what a plugin offers by the configuration, or by a role."""

from __future__ import annotations

import ast
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_core.contracts.hookspecs import Role
from grpo_core.plugins.host import BUILT_IN, HOOKS, PluginHost
from grpo_core.plugins.installed import INSTALLS

CORE = Path(__file__).parent.parent / "grpo_core"
SELECTING = {
    *("check_options", "check_values", "factory", "find", "function", "make", "offers"),
    *("find_transport", "install_command"),
}
"""Functions that take the name of an offer."""
EXCEPTIONS = {
    "loop/metrics.py: agent": "what rollouts wait for",
    "processes/services.py: http": "a scheme of addresses",
}
"""Words that select no plugin, and what they are."""


def names_of_plugins() -> set[str]:
    """Names of our plugins and of their offers, without those that the core itself offers."""
    core = next(plugin for plugin in PluginHost.discover([]).plugins if plugin.name == BUILT_IN)
    own = {name for offers in core.offers.values() for name in offers}
    kinds = [INSTALLS[kind] for kind in INSTALLS.keys() & HOOKS.keys()]
    return {name for names in kinds for name in names} - own - {*typing.get_args(Role)}


def values(node: ast.AST | None) -> Iterator[str]:
    """Yield the strings that an expression may be, or contain."""
    match node:
        case ast.Constant(value=str(value)):
            yield value
        case ast.BoolOp() | ast.IfExp() | ast.List() | ast.Tuple() | ast.Set() | ast.Lambda():
            for each in ast.iter_child_nodes(node):
                yield from values(each)


def chosen(code: str) -> Iterator[str]:
    """Yield the strings that code compares, gives a name, or hands to a function that selects."""
    for node in ast.walk(ast.parse(code)):
        match node:
            case ast.Compare():
                parts = [node.left, *node.comparators]
            case ast.Assign() | ast.AnnAssign() | ast.NamedExpr() | ast.Return():
                parts = [node.value]
            case ast.keyword(arg="default" | "factory" | "name" | "env"):
                parts = [node.value]
            case ast.Dict():
                parts = node.values
            case ast.arguments():
                parts = [*node.defaults, *node.kw_defaults]
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in SELECTING:
                parts = node.args
            case _:
                continue
        for part in parts:
            yield from values(part)


def test_the_core_selects_no_plugin_by_its_name():
    names, found = names_of_plugins(), set()
    for file in sorted(CORE.rglob("*.py")):
        if named := sorted(names & {*chosen(file.read_text())}):
            found.add(f"{file.relative_to(CORE).as_posix()}: {', '.join(named)}")
    assert found == {*EXCEPTIONS}, "let the configuration name it, or give the offer a role"


@pytest.mark.parametrize(
    "code",
    [
        'host.find("placement", "ray")',
        'find_transport("collective", host)',
        'player = task.player or ("agents" if runs else "turns")',
        'trackers: list[str] = field(factory=lambda: ["files", "report"])',
        'if name != "report": pass',
        'changes = merge(changes, {"placement": {"name": "ray"}})',
        'def make(name="vllm:http"): ...',
    ],
)
def test_a_name_that_selects_is_found(code):
    assert names_of_plugins() & {*chosen(code)}


def test_a_message_or_a_key_is_not_a_choice():
    code = 'say("ray")\nself.agents = described["agents"]\nraise ConfigError(f"use {name} or ray")'
    assert not names_of_plugins() & {*chosen(code)}
