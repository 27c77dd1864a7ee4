"""A module imports only lower layers; the pure core has no I/O, clock, randomness, logging or asyncio."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import grpo_core

PACKAGE = Path(grpo_core.__file__).parent

LAYERS = [
    {"records", "versions", "errors", "events", "tool_calls"},
    {"buffer", "advantages", "batching", "dynamic", "laws", "loss", "rows", "health"}
    | {"reporting.charts", "reporting.curves"},
    {"protocols", "hookspecs"},
    {
        "aio",
        "completions",
        "rollout",
        "turns",
        "rendering",
        "config",
        "checkpoint",
        "disk",
        "metrics",
        "processes",
        "cpu",
        "models",
    }
    | {"environments.batcher", "environments.pool", "environments.tools", "environments.feedback"}
    | {"engines.canary", "engines.members", "engines.pool", "training.logprobs"}
    | {"validation.estimates", "validation.results", "validation.strategies"}
    | {"data", "plugins", "reporting", "weights"},
    {
        "pipeline",
        "environments",
        "engines",
        "training",
        "validation",
        "workers",
        "placement",
        "model_sources",
        "demo",
        "testing",
    },
    {
        "run",
        "assembly",
        "parts",
        "preflight",
        "tasks",
        "cli",
        "commands",
        "validation.target",
        "check",
    },
]
"""From below; a package's modules may lie in other layers than the package."""
CONTRACTS = {"protocols"}
"""Types only: the pure core may name them."""

PURE = LAYERS[0] | LAYERS[1]
IMPURE = {"asyncio", "time", "random", "logging", "os", "pathlib", "socket", "subprocess", "threading", "io"}


def modules():
    return sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


NAMED = set().union(*LAYERS)


def part(path):
    """What LAYERS calls it: the module, or the package that it is in."""
    return named(path.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", "."))


def named(module):
    """The longest beginning of a dotted name that is in LAYERS; the first part if none is."""
    parts = module.split(".")
    beginnings = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
    return next((name for name in beginnings if name in NAMED), parts[0])


def imported(path, *, at_run_time=True):
    """Names of imported modules; with ``at_run_time``, not those under TYPE_CHECKING."""
    tree = ast.parse(path.read_text())
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if at_run_time and id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            if node.module.split(".")[0] == "grpo_core":
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
            else:
                yield node.module


def level(name):
    return next(i for i, layer in enumerate(LAYERS) if name in layer)


def test_every_module_has_a_layer():
    assert {part(path) for path in modules()} == NAMED


@pytest.mark.parametrize("path", modules(), ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_modules_import_only_lower_layers(path):
    for name in imported(path):
        if not name.startswith("grpo_core."):
            continue
        other = named(name.removeprefix("grpo_core."))
        if other in CONTRACTS or other not in NAMED:  # __version__ of the package
            continue
        assert level(other) <= level(part(path)), f"{part(path)} imports {other}, which lies above it"


@pytest.mark.parametrize("path", [p for p in modules() if part(p) in PURE], ids=lambda path: path.stem)
def test_the_pure_core_is_pure(path):
    assert not {name.split(".")[0] for name in imported(path)} & IMPURE


def test_no_module_of_the_core_names_a_plugin_or_an_engine_in_its_decisions():
    """A back end is an adapter behind a protocol, never a branch."""
    for path in modules():
        if path.stem == "builtins" or part(path).startswith("engines"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare):
                constants = {c.value for c in ast.walk(node) if isinstance(c, ast.Constant)}
                assert not constants & {"local", "vllm", "ray", "math", "sort"}, f"{path}:{node.lineno}"


def test_no_pickle_is_read_from_a_file_or_a_network():
    # between a parent and the child that it started; subjects.py reads what it made itself
    allowed = {"processes.py", "environments/process.py", "environments/host.py", "testing/subjects.py"}
    users = {path.relative_to(PACKAGE).as_posix() for path in modules() if "pickle" in set(imported(path))}
    assert users <= allowed
    for path in modules():
        text = path.read_text()
        assert "torch.load" not in text
        assert "trust_remote_code=True" not in text
