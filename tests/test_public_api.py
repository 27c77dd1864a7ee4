"""Plugins and documents use the public API alone, and it does not change unnoticed.

``tests/public_api.txt`` lists every public name with its signature and its attributes.  After a change that
is meant, write it anew and look at the difference:

    python tests/test_public_api.py --write
    git diff tests/public_api.txt
"""

from __future__ import annotations

import ast
import difflib
import enum
import importlib
import inspect
import re
import subprocess
import sys
import tomllib
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

import grpo_core

ROOT = Path(__file__).parent.parent
SNAPSHOT = ROOT / "tests" / "public_api.txt"
WRITE = "python tests/test_public_api.py --write"
PUBLIC = ("grpo_core", "grpo_core.kit", "grpo_core.losses", "grpo_core.testing")
PLUGINS = sorted(path for path in ROOT.glob("plugins/*/**/*.py") if "build" not in path.parts)
EXAMPLES = sorted(ROOT.glob("examples/*.py"))
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("plugins/*/README.md"))]


# ---------------------------------------------------------------------------------- who uses what


def used(code: str) -> Iterator[tuple[str, str]]:
    """``(module, name)`` of what the code takes from grpo_core; the name is empty where it takes a module."""
    tree = ast.parse(code)
    aliases = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "grpo_core":
                    aliases[alias.asname or "grpo_core"] = alias.name if alias.asname else "grpo_core"
                    yield alias.name, ""
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "grpo_core":
            for alias in node.names:
                module = f"{node.module}.{alias.name}"
                yield (module, "") if module in PUBLIC else (str(node.module), alias.name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
            module = f"{aliases[node.value.id]}.{node.attr}"
            yield (module, "") if module in PUBLIC else (aliases[node.value.id], node.attr)


def not_public(code: str) -> set[str]:
    """List the names that the code takes from grpo_core and that are not public."""
    return {
        f"{module}.{name}".rstrip(".")
        for module, name in used(code)
        if module not in PUBLIC or (name and name not in importlib.import_module(module).__all__)
    }


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


SOURCES = [path for path in PLUGINS if "/tests/" not in relative(path)]
SEAMS = {
    "plugins/grpo-plugin-algorithms/tests/test_losses.py",
    "plugins/grpo-plugin-algorithms/tests/test_losses_as_trl.py",
    "plugins/grpo-plugin-algorithms/tests/test_shaping.py",
    "plugins/grpo-plugin-curriculum/tests/test_learnable_prompts.py",
    "plugins/grpo-plugin-judge/tests/test_compose.py",
    "plugins/grpo-plugin-ray/tests/test_ray.py",
    "plugins/grpo-plugin-ray/tests/test_cluster.py",
    "plugins/grpo-plugin-ray/tests/test_ray_plane.py",
    "plugins/grpo-plugin-ray/tests/test_ray_trainer.py",
    "plugins/grpo-plugin-scale/tests/test_experts.py",
    "plugins/grpo-plugin-scale/tests/test_lora.py",
    "plugins/grpo-plugin-scale/tests/test_pool.py",
    "plugins/grpo-plugin-smollm2/tests/test_smollm2.py",
    "plugins/grpo-plugin-tinker/tests/test_tinker.py",
    "plugins/grpo-plugin-transferqueue/tests/test_transferqueue.py",
    "plugins/grpo-plugin-vllm/tests/test_http.py",
    "plugins/grpo-plugin-vllm/tests/test_options.py",
}
"""Tests across the seam between a plugin and the core, which run its pool, pipeline, laws and commands."""
BEYOND = {
    "grpo-plugin-agents": "import_file numbered orphans parsed thoughts",
    "grpo-plugin-judge": "DEADLINE as_feedback units",
    "grpo-plugin-ray": """
        EngineConfig LimitedEngine RemoteTraceback SessionStart Tolerance
        TrainerConfig copies engine_metrics interpreters offers wire
    """,
    "grpo-plugin-scale": """
        EngineConfig FullModel MicroBatch Passes Scorer StartProcess Tolerance canary copies cpu
        during engine_metrics find_transport layout memory placement plan publishing reported_as room_for
    """,
}
"""Internal names that other distributions of ours take; no name may be added."""


OURS = ("audit", "devkit", "doctor", "replay", "report")
"""Our own tools: they need the core of their version, and import its modules themselves."""
OUR_FILES = {
    relative(path) for path in PLUGINS if path.relative_to(ROOT).parts[1].removeprefix("grpo-plugin-") in OURS
}


@pytest.mark.parametrize("name", OURS)
def test_our_own_tools_need_the_core_of_their_version(name: str) -> None:
    about = tomllib.loads((ROOT / f"plugins/grpo-plugin-{name}/pyproject.toml").read_text())["project"]
    assert f"grpo-core=={about['version']}" in about["dependencies"]


@pytest.mark.parametrize(
    "path",
    [path for path in (*PLUGINS, *EXAMPLES) if relative(path) not in SEAMS | OUR_FILES],
    ids=relative,
)
def test_plugins_and_examples_use_the_public_api_alone(path: Path) -> None:
    beyond = BEYOND.get(path.relative_to(ROOT).parts[1], "").split()
    assert {name.rpartition(".")[2] for name in not_public(path.read_text())} <= set(beyond)


@pytest.mark.parametrize("name", sorted(BEYOND))
def test_what_extends_the_built_in_parts_takes_no_more_than_it_did(name: str) -> None:
    files = (path for path in SOURCES if name in path.parts)
    taken = {each.rpartition(".")[2] for path in files for each in not_public(path.read_text())}
    assert taken == set(BEYOND[name].split())


def test_each_name_of_the_kit_has_a_user_who_is_not_ours() -> None:
    strangers = [path for path in (*SOURCES, *EXAMPLES) if relative(path) not in OUR_FILES]
    taken = {name for path in strangers for module, name in used(path.read_text()) if module.endswith(".kit")}
    assert taken - {""} == (kit := set(importlib.import_module("grpo_core.kit").__all__))
    assert len(kit) <= 44, "the kit only shrinks"


@pytest.mark.parametrize(
    "path", [path for path in SOURCES if "grpo_plugin_devkit" not in path.parts], ids=relative
)
def test_plugins_do_not_need_the_test_kit(path: Path) -> None:
    taken = {name for module, name in used(path.read_text()) if module == "grpo_core.testing"}
    assert taken <= {"clock"}, "virtual time is no test"


@pytest.mark.parametrize("path", PAGES, ids=relative)
def test_code_in_documents_uses_the_public_api_alone(path: Path) -> None:
    for block in re.findall(r"```python\n(.*?)```", path.read_text(), re.S):
        assert not_public(block) == set(), block


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import grpo_core as grpo\ngrpo.Prompt", set()),
        ("from grpo_core import Prompt, testing\nfrom grpo_core.kit import ChildEngine", set()),
        ("import grpo_core.testing\ngrpo_core.testing.run", set()),
        ("import grpo_core.loop.buffer", {"grpo_core.loop.buffer"}),
        ("from grpo_core.loop import buffer", {"grpo_core.loop.buffer"}),
        ("from grpo_core.contracts.errors import ConfigError", {"grpo_core.contracts.errors.ConfigError"}),
        ("def f():\n    from grpo_core.testing import clock", {"grpo_core.testing.clock"}),
        ("import grpo_core as g\ng.Buffer", {"grpo_core.Buffer"}),
    ],
)
def test_what_is_not_public_is_found(code: str, found: set[str]) -> None:
    assert not_public(code) == found


# ---------------------------------------------------------------------------------- what it is


class Plain(str):
    """A text that shows itself without quotes."""

    def __repr__(self) -> str:
        return str(self)


def signature(function: Callable[..., Any]) -> str:
    """A signature as it is written in the source; a default that is a function is only called so."""
    try:
        found = inspect.signature(function)
    except (TypeError, ValueError):
        return "(...)"

    def plain(parameter: inspect.Parameter) -> inspect.Parameter:
        note, default = parameter.annotation, parameter.default
        if isinstance(default, types.FunctionType):
            default = Plain("<function>")
        elif isinstance(default, enum.Enum):
            default = Plain(default.name)
        return parameter.replace(annotation=Plain(note) if isinstance(note, str) else note, default=default)

    result = found.return_annotation
    return str(
        found.replace(
            parameters=[plain(parameter) for parameter in found.parameters.values()],
            return_annotation=Plain(result) if isinstance(result, str) else result,
        )
    )


def described(name: str, value: Any) -> Iterator[str]:
    """The lines of one public name."""
    if isinstance(value, types.ModuleType):
        yield f"{name}: module"
        for member, inner in sorted(vars(value).items()):
            if not member.startswith("_") and getattr(inner, "__module__", "") == value.__name__:
                yield from described(f"{name}.{member}", inner)
    elif inspect.isclass(value):
        yield from described_class(name, value)
    elif inspect.isfunction(value):
        yield f"{name}: {'async ' if inspect.iscoroutinefunction(value) else ''}function {signature(value)}"
    elif isinstance(value, dict):
        yield f"{name}: table"
        yield from (f"    {key!r}" for key in value)
    elif typing.get_origin(value) is not None:
        yield f"{name}: alias {value}"
    else:
        yield f"{name}: {type(value).__name__}"


def described_class(name: str, value: type) -> Iterator[str]:
    protocol = getattr(value, "_is_protocol", False)
    plain = protocol or issubclass(value, Exception)
    bases = ", ".join(base.__name__ for base in value.__bases__ if base is not object)
    yield f"{name}: class{f'({bases})' if bases else ''}{'' if plain else ' ' + signature(value)}"
    fields = [field.name for field in attrs.fields(value)] if attrs.has(value) else []
    notes = {key: note for base in reversed(value.__mro__) for key, note in notes_of(base).items()}
    for member in sorted({*dir(value), *fields, *notes}):
        if member.startswith("_"):
            continue
        found = inspect.getattr_static(value, member, None)
        home = next(
            (base for base in value.__mro__ if member in vars(base) or member in notes_of(base)), None
        )
        if home is None or not home.__module__.startswith("grpo_core"):
            continue
        if isinstance(found, property):
            yield f"    {member}: property -> {found.fget.__annotations__.get('return', '?')}"
        elif isinstance(found, classmethod | staticmethod):
            yield f"    {member}: {type(found).__name__} {signature(found.__func__)}"
        elif inspect.isfunction(found):
            yield f"    {'async ' if inspect.iscoroutinefunction(found) else ''}{member}{signature(found)}"
        else:
            yield f"    {member}: {notes.get(member) or type(found).__name__}"


def notes_of(value: type) -> dict[str, Any]:
    return dict(vars(value).get("__annotations__", {}))


def api() -> str:
    lines = [f"# Written by {WRITE}", ""]
    for module in PUBLIC:
        lines.append(f"## {module}")
        package = importlib.import_module(module)
        for name in package.__all__:
            value = getattr(package, name)
            lines += [f"{name}: str"] if name == "__version__" else described(name, value)
        lines.append("")
    return "\n".join(lines)


def test_the_public_api_does_not_change_unnoticed() -> None:
    known, now = SNAPSHOT.read_text(), api()
    difference = difflib.unified_diff(known.splitlines(), now.splitlines(), "known", "now", n=0, lineterm="")
    assert known == now, "\n".join(
        ["the public API is not what tests/public_api.txt says.", *difference, f"If it is meant: {WRITE}"]
    )


def test_every_public_name_is_documented() -> None:
    for module in PUBLIC:
        package = importlib.import_module(module)
        for name in package.__all__:
            value = getattr(package, name)
            if inspect.isclass(value) or inspect.isfunction(value) or inspect.ismodule(value):
                assert inspect.getdoc(value), f"{module}.{name} has no docstring"


@pytest.mark.parametrize("module", PUBLIC)
def test_type_checkers_see_the_names_that_are_loaded(module: str) -> None:
    package = importlib.import_module(module)
    tree = ast.parse(Path(str(package.__file__)).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    shown = {
        alias.asname: f"{node.module}.{alias.name}"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert sorted(str(name) for name in shown) == package.__all__
    for name, home in shown.items():
        owner, _, attribute = home.rpartition(".")
        assert getattr(package, str(name)) is getattr(importlib.import_module(owner), attribute)


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    assert set(grpo_core.__all__) <= set(dir(grpo_core))
    with pytest.raises(AttributeError, match="module 'grpo_core' has no attribute 'Trajectory'"):
        grpo_core.Trajectory  # type: ignore[attr-defined]  # noqa: B018


# ---------------------------------------------------------------------------------- a whole engine


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["custom_engine.py:mine", "custom_trainer.py:accelerated"])
def test_the_engine_and_the_trainer_of_the_examples_keep_their_contracts(name: str) -> None:
    command = [Path(sys.executable).with_name("grpo-core"), "check", f"./examples/{name}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 failed" in done.stdout


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        SNAPSHOT.write_text(api())
    else:
        print(api(), end="")
