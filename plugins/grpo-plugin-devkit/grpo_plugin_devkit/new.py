"""``grpo-core new``: generates a working plugin as a distribution.

The files come from ``templates``.  They are templates of ``string.Template``.
"""

from __future__ import annotations

import ast
import importlib.util
import keyword
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Literal

from attrs import frozen

from grpo_core import ConfigError
from grpo_core.config import read_toml
from grpo_core.kit import PluginHost
from grpo_core.plugins import offers
from grpo_core.plugins.options import Flag
from grpo_core.processes.secrets import inert
from grpo_plugin_devkit.adding import with_offer, with_requirements

TEMPLATES = Path(__file__).parent / "templates"
LONGEST_NAME = 32
"""Largest length of a name, limited by the line length of the generated files."""


@frozen
class Sort:
    """A kind of plugin to generate.

    Attributes:
        kind: kind of the offer.
        contract: module, in this package, and function of its contract.
        trains: options of ``grpo-core train`` that use the plugin NAME.
        a_class: whether the offer is a class, not a function.
        needs: distributions that the plugin imports.
    """

    kind: offers.Kind
    contract: str
    trains: str
    a_class: bool = True
    needs: tuple[str, ...] = ()


AGENT = ("grpo-plugin-agents", "openai>=1.60")
SORT = "--env math:sort"
TRACKED = """--set 'tracking.trackers=["files", "terminal", "*", "NAME"]'"""
SORTS: Mapping[str, Sort] = {
    "environment": Sort("environment", "environments:check_environment", "--env NAME"),
    "agent": Sort("environment", "environments:check_agent", "--env NAME", needs=AGENT),
    "dataloader": Sort("dataloader", "dataloaders:check_dataloader", f"{SORT} --set tasks.sort.data=NAME"),
    "sampler": Sort("sampler", "samplers:check_sampler", f"{SORT} --sampler NAME"),
    "validation": Sort(
        "validation_strategy", "strategies:check_validation_strategy", f"{SORT} --validation NAME"
    ),
    "engine": Sort("engine", "decoding:check_decoding", f"{SORT} --engine NAME"),
    "loss": Sort("loss", "objectives:check_loss", f"{SORT} --set loss.name=NAME", a_class=False),
    "advantage": Sort(
        "advantage", "objectives:check_advantage", f"{SORT} --set advantage.name=NAME", a_class=False
    ),
    "filter": Sort("filter", "filters:check_filter", f"{SORT} --set filters.NAME={{}}", a_class=False),
    "tracker": Sort("tracker", "trackers:check_tracker", f"{SORT} {TRACKED}"),
}
VARIANTS: Mapping[str, tuple[str, ...]] = {"multi_turn": (), "tools": (), "judge": ("aiohttp>=3.10",)}
"""Variants of environments, with the distributions that they import."""


def new(
    kind: Literal[
        "environment",
        "agent",
        "dataloader",
        "sampler",
        "validation",
        "engine",
        "loss",
        "advantage",
        "filter",
        "tracker",
    ],
    name: str,
    /,
    *,
    multi_turn: Flag = False,
    tools: Flag = False,
    judge: Flag = False,
    into: Path | None = None,
) -> int:
    """Write a new plugin into the directory grpo-plugin-NAME: code, a test, and what a package needs.

    In the directory of a plugin, or with --into, add to that plugin.

    Parameters
    ----------
    kind
        Kind of the offer that the plugin makes.
    name
        Name of the plugin and of what it offers, as in "caesar" or "word_count".
    multi_turn
        Make an environment of several turns.
    tools
        Make an environment with a tool.
    judge
        Make an environment whose replies another model judges.
    into
        Directory of the plugin to add to.
    """
    variants = {"multi_turn": multi_turn, "tools": tools, "judge": judge}
    chosen = [variant for variant, wanted in variants.items() if wanted]
    train = SORTS[kind].trains.replace("NAME", name)
    if into or _plugins(Path()):
        module = add(kind, name, chosen, into or Path())
        print(inert(f"{module}: the {kind} {name!r}, added with a test. Train at once:\n"))
        print(inert(f"    grpo-core train {train}"))
        return 0
    directory = write(kind, name, chosen, Path())
    print(inert(f"{directory}: a plugin with the {kind} {name!r}. Install it, and train at once:\n"))
    print(inert(f"    pip install -e './{directory}[dev]'"))
    print(inert(f"    grpo-core train {train}\n"))
    print(inert(f"Its code is {directory}/{_package(name)}/{kind}.py; {directory}/README.md says more."))
    return 0


def write(sort: str, name: str, variants: list[str], where: Path) -> Path:
    """Write ``grpo-plugin-NAME`` atomically; return its path.

    Raises ConfigError for an invalid name, or if the directory exists.
    """
    _check(sort, name, variants)
    files = _files(sort, name, variants[0] if variants else "")
    target = where / _distribution(name)
    if target.exists():
        raise ConfigError(f"{target}: exists already; remove it, or give another name")
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=where))
    try:
        made = scratch / target.name
        for path, text in files.items():
            (made / path).parent.mkdir(parents=True, exist_ok=True)
            (made / path).write_text(text, encoding="utf-8")
        made.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def add(sort: str, name: str, variants: list[str], directory: Path) -> Path:
    """Add an offer to the plugin in a directory; return its module.

    Raises ConfigError for an invalid name, for one that exists, and for files that cannot be extended safely.
    """
    package, toml = "".join(_plugins(directory)), directory / "pyproject.toml"
    homes = [directory / root / package.replace(".", "/") for root in ("", "src")]
    home = next((path for path in homes if package and (path / "__init__.py").is_file()), None)
    if home is None:
        raise ConfigError(f"{directory}: no plugin; expected a package that its pyproject.toml names once")
    _check(sort, name, variants, package)
    module, init, test = home / f"{name}.py", home / "__init__.py", directory / "tests" / f"test_{name}.py"
    if taken := [path for path in (module, home / name, test) if path.exists()]:
        raise ConfigError(f"{taken[0]}: exists already; give another name")
    files = _files(sort, name, variants[0] if variants else "", package)
    (target,) = re.findall(r': "(.*)"}', files[f"{package}/__init__.py"])
    texts = {module: files[f"{package}/{name}.py"], test: files[f"tests/test_{name}.py"]}
    try:
        texts[toml] = with_requirements(toml.read_text("utf-8"), files["pyproject.toml"])
        texts[init] = with_offer(init.read_text("utf-8"), offers.HOOKS[SORTS[sort].kind], name, target)
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{directory}: cannot be extended safely; {error}, and run this again") from error
    test.parent.mkdir(exist_ok=True)
    for path, text in texts.items():
        newline = "\r\n" if path.exists() and b"\r\n" in path.read_bytes() else "\n"
        path.write_text(text, "utf-8", newline=newline)
    return module


def _plugins(directory: Path) -> list[str]:
    """Return the modules of the plugins whose sources are in a directory."""
    path = directory / "pyproject.toml"
    project = read_toml(path).get("project", {}) if path.is_file() else {}
    return list(project.get("entry-points", {}).get("grpo_core", {}).values())


def _check(sort: str, name: str, variants: list[str], package: str = "") -> None:
    if variants and (sort != "environment" or len(variants) > 1):
        given = ", ".join(f"--{variant.replace('_', '-')}" for variant in variants)
        raise ConfigError(f"{given}: only an environment has variants, and at most one of them")
    rule = "a name has lower-case letters, digits and underscores, and begins with a letter"
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or name.endswith("_") or "__" in name:
        near = re.sub(r"_+", "_", re.sub(r"[^a-z0-9]", "_", name.lower())).strip("_0123456789")
        hint = f"; for example {near}" if re.fullmatch(r"[a-z][a-z0-9_]*", near) else ""
        raise ConfigError(f"{name!r} cannot be the name of a plugin: {rule}{hint}")
    if len(name) > LONGEST_NAME:
        raise ConfigError(f"{name!r} has {len(name)} characters; a name has at most {LONGEST_NAME}")
    if keyword.iskeyword(name) or keyword.issoftkeyword(name):
        raise ConfigError(f"{name!r} is a keyword of Python; give another name")
    host, kind = PluginHost.discover(), SORTS[sort].kind
    installed = {plugin.name.rpartition("/")[2]: plugin for plugin in host.plugins}
    if not package and (name in installed or name in host.left_out):
        whose = f": {installed[name]}" if name in installed else ""
        raise ConfigError(f"a plugin {name!r} is installed already{whose}; give another name")
    for plugin in host.plugins:
        if name in plugin.offers.get(kind, {}) and plugin.module != package:
            raise ConfigError(f"{plugin} offers the {kind.replace('_', ' ')} {name!r}; give another name")
    if not package and importlib.util.find_spec(_package(name)) is not None:
        raise ConfigError(f"a module {_package(name)} already exists; give another name")


def _files(sort: str, name: str, variant: str, into: str = "") -> dict[str, str]:
    """Return the contents of each file, by path in the distribution.

    In the package of another plugin, the module has the name of the offer.
    """
    chosen, package, file = SORTS[sort], into or _package(name), name if into else sort
    symbol = "".join(part.capitalize() for part in name.split("_")) if chosen.a_class else name
    source = _read(f"{sort}_{variant}.py" if variant else f"{sort}.py")
    if symbol in _names(Template(source).substitute(name="name", symbol="PLACEHOLDER")):
        raise ConfigError(f"{name!r} is a name that the files of a new {sort} use; give another name")
    kit, _, contract = chosen.contract.partition(":")
    needs = ("grpo-core>=0.1,<1", *chosen.needs, *VARIANTS.get(variant, ()))
    about = source.split('"""')[1].partition(": ")[2].partition(".")[0]
    values = {
        "name": name,
        "symbol": symbol,
        "package": package,
        "distribution": _distribution(name),
        "file": file,
        "title": sort if sort != "validation" else "validation strategy",
        "summary": f"{about[0].upper()}{about[1:]}.",
        "hook": offers.HOOKS[chosen.kind],
        "kit": f"grpo_plugin_devkit.{kit}",
        "contract": contract,
        "dependencies": ", ".join(f'"{each}"' for each in needs),
        "train": f"grpo-core train {chosen.trains.replace('NAME', name)}",
        "check": f"grpo-core check {name}",
    }
    sources = {
        "pyproject.toml": "pyproject.toml",
        "README.md": "README.md",
        ".gitignore": "gitignore",
        ".github/workflows/test.yml": "test.yml",
        f"{package}/__init__.py": "init.py",
        f"tests/test_{name}.py": "test.py",
    }
    files = {path: Template(_read(template)).substitute(values) for path, template in sources.items()}
    return {**files, f"{package}/{file}.py": Template(source).substitute(values)}


def _names(source: str) -> set[str]:
    """Return all names that a module uses or defines, except attributes."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Name(id=name) | ast.arg(arg=name):
                found.add(name)
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.add(name)
            case ast.alias(name=name, asname=other):
                found.add(other or name)
    return found


def _read(template: str) -> str:
    return (TEMPLATES / f"{template}.tmpl").read_text(encoding="utf-8")


def _package(name: str) -> str:
    return f"grpo_plugin_{name}"


def _distribution(name: str) -> str:
    return f"grpo-plugin-{name.replace('_', '-')}"
