"""Checks of the rooms that import-linter's contracts (``[tool.importlinter]``, ``make lint``) cannot make."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import grpo_core

PACKAGE = Path(grpo_core.__file__).parent
ROOT = Path(__file__).parent.parent
PLUGINS = sorted((ROOT / "plugins").glob("*/pyproject.toml"))
LINTER = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
CONTRACTS = {contract["id"]: contract for contract in LINTER["contracts"]}
PURE = sorted(CONTRACTS["pure"]["source_modules"])

BUILTINS_WITH_EFFECTS = {"open", "print", "input", "exec", "eval", "__import__"}
MODULES_WITH_EFFECTS = {"np.random", "numpy.random"}

COMPARED = {
    (
        "contracts/advantages.py",
        "group",
    ): "a value of the option `scale`, which is also the name of an advantage",
    ("app/provenance.py", "model"): "a section of the configuration, which is also the name of a part",
    ("app/provenance.py", "python"): "a key of the configuration, which is also the name of an environment",
    ("data/states.py", "torch"): "the package, which is also the name of the trainer",
    ("processes/services.py", "http"): "a scheme of addresses, which is also the name of an engine",
    ("validation/runner.py", "batched"): "a mode of the strategy, which is also the name of a strategy",
}
"""Comparisons with the name of an offer that are known, each with its reason."""


def modules():
    return sorted(PACKAGE.rglob("*.py"))


def inside(path):
    return path.relative_to(PACKAGE).as_posix()


def source_of(module):
    package = module.partition(".")[0]
    home = PACKAGE.parent if package == PACKAGE.name else ROOT / "plugins" / package.replace("_", "-")
    path = home / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def packages_of_plugins():
    return {
        path.parent.name for plugin in PLUGINS for path in plugin.parent.glob("grpo_plugin_*/__init__.py")
    }


# ---------------------------------------------------------------------------------- contracts of plugins


@pytest.mark.parametrize("path", sorted((PACKAGE / "contracts").glob("*.py")), ids=lambda path: path.stem)
def test_contracts_import_nothing_from_above_not_even_for_types(path):
    tree = ast.parse(path.read_text())
    found = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    assert {
        name for name in found if name.startswith("grpo_core") and not name.startswith("grpo_core.contracts")
    } == set()


# ---------------------------------------------------------------------------------- complete contracts


@pytest.mark.parametrize(
    "listed",
    [
        LINTER["root_packages"],
        CONTRACTS["cycles"]["ancestors"],
        CONTRACTS["back-ends"]["forbidden_modules"],
        CONTRACTS["plugins"]["modules"],
    ],
    ids=["root packages", "cycles", "back ends", "independence"],
)
def test_the_contracts_know_every_plugin(listed):
    assert {name for name in listed if name.startswith("grpo_plugin_")} == packages_of_plugins()


@pytest.mark.parametrize(
    ("floors", "package"), [(floors, f"grpo_core.{floors}") for floors in ("contracts", "loop")]
)
def test_every_module_of_the_lowest_floor_is_held_to_be_pure(floors, package):
    lowest = CONTRACTS[floors]["layers"][-1]
    assert {f"{package}.{room}" for room in lowest.split(" : ")} <= set(PURE)


# ---------------------------------------------------------------------------------- the pure core


@pytest.mark.parametrize("module", PURE)
def test_the_pure_core_uses_no_builtin_with_effects(module):
    for node in ast.walk(ast.parse(source_of(module).read_text())):
        if isinstance(node, ast.Call):
            assert ast.unparse(node.func) not in BUILTINS_WITH_EFFECTS, node.lineno
        if isinstance(node, ast.Attribute):
            assert ast.unparse(node) not in MODULES_WITH_EFFECTS, node.lineno


def test_importing_the_contracts_and_the_pure_core_loads_no_framework():
    wanted = [
        "grpo_core",
        "grpo_core.contracts.protocols",
        "grpo_core.contracts.hookspecs",
        "grpo_core.config",
        *(f"grpo_core.losses.{path.stem}" for path in (PACKAGE / "losses").glob("[a-z]*.py")),
        *PURE,
    ]
    code = f"""
import importlib, sys
for name in {wanted}:
    importlib.import_module(name)
print(*sorted({{"torch", "transformers", "ray", "vllm"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


# ---------------------------------------------------------------------------------- names of plugins


def offers():
    """Names that configurations use: of the built-in offers, of our plugins and of their offers."""
    names = {"ray"}  # where workers run; it has a command-line option and no offer
    hosts = [source_of("grpo_core.plugins.builtins")]
    for plugin in PLUGINS:
        project = tomllib.loads(plugin.read_text())["project"]
        names |= {project["name"], *project["entry-points"].get("grpo_core", ())}
        hosts += plugin.parent.glob("grpo_plugin_*/__init__.py")
    for path in hosts:
        names |= offered_by(path)
    return names - {"*"}


def offered_by(path):
    spec = importlib.util.spec_from_file_location(f"offers_of_{path.parent.name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    hooks = [value for name, value in vars(module).items() if name.startswith("grpo_") and callable(value)]
    # a section of this name adds keys to a table of the core, which the core may name
    return {name for hook in hooks for name in hook()} - {"trainer"}


def compared_texts(tree):
    """Each string that source code compares something with, in an operator, a ``match`` or a method."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            compared = [node]
        elif isinstance(node, ast.match_case):
            compared = [node.pattern]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            compared = node.args if node.func.attr in ("startswith", "endswith") else []
        else:
            continue
        for part in compared:
            for constant in ast.walk(part):
                if isinstance(constant, ast.Constant) and isinstance(constant.value, str):
                    yield constant.value


def test_the_core_decides_nothing_by_the_name_of_a_plugin_or_of_its_offer():
    """A back end is an adapter behind a protocol, never a branch."""
    names = offers()
    assert {"mix", "local", "vllm", "math", "sort", "ray", "curriculum"} <= names
    found = {
        (inside(path), text)
        for path in modules()
        for text in compared_texts(ast.parse(path.read_text()))
        if text in names
    }
    assert found == set(COMPARED)


@pytest.mark.parametrize(
    "code",
    [
        "if name == 'mix': pass",
        "x = config['sampler']['name'] in ('round_robin', 'mix')",
        "match name:\n case 'vllm' | 'mix': pass",
        "name.startswith(('mix', 'round'))",
    ],
)
def test_comparisons_are_seen_however_they_are_written(code):
    assert "mix" in set(compared_texts(ast.parse(code)))


def test_only_the_built_in_offers_name_the_default_engine():
    named = {
        inside(path)
        for path in modules()
        if not inside(path).startswith("engines/local/") and "grpo_core.engines.local" in path.read_text()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node.value.startswith("grpo_core.engines.local")
    }
    assert named == {"plugins/builtins.py"}


# ---------------------------------------------------------------------------------- unsafe formats


def imports(path, module):
    if module not in path.read_text():
        return False
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import) and any(alias.name == module for alias in node.names):
            return True
        if isinstance(node, ast.ImportFrom) and node.module == module:
            return True
    return False


def test_no_pickle_is_read_from_a_file_or_a_network():
    # between a parent and the child that it started; hosted.py reads what it made itself
    allowed = {
        *(
            "processes/child.py",
            "processes/served.py",
            "environments/process.py",
            "environments/host.py",
            "testing/hosted.py",
        ),
        "data/rows.py",  # to the workers that read rows
    }
    assert {inside(path) for path in modules() if imports(path, "pickle")} <= allowed
    for path in modules():
        text = path.read_text()
        assert "torch.load" not in text
        assert "trust_remote_code=True" not in text
