"""Hooks of MkDocs (see mkdocs.yml) that add generated pages to the site.

README, ARCHITECTURE, CONTRIBUTING, SECURITY and the READMEs of the plugins are pages of the site.  The pages
of keys, options, records and environments are generated from the code, and are not committed.  The
reference of the public API has a page for each public module, written from the names that the module exports.
Links between pages of the repository become links of the site, or links to the repository if the site has no
such page.
"""

from __future__ import annotations

import ast
import importlib.util
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
REPOSITORY = "https://github.com/grpo-core/grpo-core/blob/main/"

OUTSIDE = {
    "index.md": "README.md",
    "architecture.md": "ARCHITECTURE.md",
    "contributing.md": "CONTRIBUTING.md",
    "security.md": "SECURITY.md",
}
"""Page of the site, and the file of the repository that it shows."""
OUTSIDE |= {
    f"plugins/{path.parent.name}.md": path.relative_to(ROOT).as_posix()
    for path in sorted(ROOT.glob("plugins/*/README.md"))
}
GENERATED = ("configuration", "options", "records", "catalogue")
"""Pages that a module of docs/ makes: `_NAME.py` has a function `page`."""
ALGORITHMS = "plugins/grpo-plugin-algorithms/grpo_plugin_algorithms"
SOURCES = {
    "grpo_core/config": "configuration.md",
    "grpo_core/config/run.py": "configuration.md#tasksnamedata_options",
    "grpo_core/contracts/records.py": "records.md",
    "grpo_core/contracts/events.py": "records.md#events",
    "grpo_core/plugins/builtins.py": "options.md",
    "grpo_core/engines/local/engine.py": "options.md#engine",
    f"{ALGORITHMS}/advantages.py": "options.md#advantage",
    f"{ALGORITHMS}/losses.py": "options.md#loss",
    f"{ALGORITHMS}/optimizers.py": "options.md#optimizer",
}
"""Code that a committed page may name, and the page of the site: generated pages are on the site only."""
PUBLIC = ("grpo_core", "grpo_core.losses", "grpo_core.testing", "grpo_core.kit")
"""Modules whose names are public."""
LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Leave pages out of the navigation that do not exist."""
    there = set(OUTSIDE) | {f"api/{name}.md" for name in PUBLIC if _source(name) is not None}
    there |= {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    there |= {f"{name}.md" for name in GENERATED}
    config.nav = _existing(config.nav, there)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are outside of docs/, and those of the API."""
    for page, path in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / path).read_text(encoding="utf-8")))
    for name in GENERATED:
        files.append(File.generated(config, f"{name}.md", content=generated(name)))
    for name in PUBLIC:
        if (source := _source(name)) is not None:
            files.append(File.generated(config, f"api/{name}.md", content=_reference(name, source)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links between files of the repository at pages of the site."""
    here = page.file.src_uri
    path = OUTSIDE.get(here, f"docs/{here}")
    pages = SOURCES | {OUTSIDE.get(file.src_uri, f"docs/{file.src_uri}"): file.src_uri for file in files}

    def pointed(found: re.Match[str]) -> str:
        target, _, anchor = found[0].partition("#")
        if target.startswith(REPOSITORY):
            target = target.removeprefix(REPOSITORY)
        elif not target or "://" in target or target.startswith("mailto:"):
            return found[0]
        else:
            target = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
        if target not in pages:
            return f"{REPOSITORY}{target}" + (f"#{anchor}" if anchor else "")
        relative = posixpath.relpath(pages[target], posixpath.dirname(here) or ".")
        return relative + (f"#{anchor}" if anchor and "#" not in relative else "")

    return LINK.sub(pointed, markdown)


def generated(name: str) -> str:
    """Return the text of a page that is made from the code."""
    spec = importlib.util.spec_from_file_location(f"{name}_page", ROOT / "docs" / f"_{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return str(module.page())


def _existing(nav: Any, there: set[str]) -> Any:
    """The navigation without pages that are not there, and without sections that would be empty."""
    if isinstance(nav, list):
        return [item for item in (_existing(item, there) for item in nav) if item]
    if isinstance(nav, dict):
        (title, below), *_ = nav.items()
        return {title: kept} if (kept := _existing(below, there)) else None
    return nav if nav in there or "://" in nav else None


def _source(name: str) -> Path | None:
    path = ROOT / name.replace(".", "/")
    found = (path.with_suffix(".py"), path / "__init__.py")
    return next((file for file in found if file.is_file()), None)


def _reference(name: str, source: Path) -> str:
    """A page: the module's docstring, then a directive for each name that it exports, where it is defined."""
    tree = ast.parse(source.read_text(encoding="utf-8"))
    text = [f"# `{name}`", "", re.sub(r"``(.+?)``", r"`\1`", ast.get_docstring(tree) or "")]
    exported = sorted(
        {
            (alias.asname or alias.name, f"{node.module}.{alias.name}")
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("grpo_core")
            for alias in node.names
            if node.module != "grpo_core" and not alias.name.startswith("_") and alias.name not in ("attach",)
        }
    )
    for _, home in exported:
        text += ["", f"::: {home}"]
    return "\n".join(text) + "\n"
