"""Writes docs/configuration.md from the docstrings of grpo_core/config.py."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import attrs

from grpo_core import config

HERE = Path(__file__).parent


def documented() -> dict[str, dict[str, str]]:
    """Docstrings of classes (under "") and of their attributes."""
    tree = ast.parse(Path(config.__file__).read_text(encoding="utf-8"))
    found: dict[str, dict[str, str]] = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            texts = found[node.name] = {"": ast.get_docstring(node) or ""}
            for one, following in zip(node.body, node.body[1:], strict=False):
                if isinstance(one, ast.AnnAssign) and isinstance(following, ast.Expr):
                    texts[one.target.id] = " ".join(ast.literal_eval(following.value).split())
    return found


def page() -> str:
    texts = documented()
    lines = [
        "# Configuration",
        "",
        "A run is configured by a TOML file, `--set section.key=value`, and the options of the command;",
        'later ones win. Unknown keys are errors. With `model.path = "tiny"` (the default) the defaults are',
        "those of `grpo_core/demo/tiny.toml`. The resolved configuration is `config.toml` in the",
        "run's directory.",
        "",
        "Several sections choose a part by `name` and give it `options`: [options](options.md) lists them.",
        "",
        "(Written by `python docs/_configuration.py`.)",
        "",
    ]
    lines += _table("top level", config.Config, texts)
    lines += _table("[tasks.NAME]", config.TaskConfig, texts)
    lines += _table("[tasks.NAME.source]", config.SourceConfig, texts)
    for field in attrs.fields(attrs.resolve_types(config.Config)):
        if attrs.has(field.type):
            lines += _table(f"[{field.name}]", field.type, texts)
            if field.name == "optimizer":
                lines += _table("[optimizer.groups.NAME]", config.ParameterGroupConfig, texts)
        if field.name == "validation":
            lines += _table("[validation.sets.NAME]", config.ValidationSetConfig, texts)
        if field.name == "model":
            lines += _table("[model.lora]", config.LoraConfig, texts)
    return "\n".join(lines)


def _table(title: str, kind: type, texts: dict[str, dict[str, str]]) -> list[str]:
    lines = [f"## {title}", "", texts[kind.__name__][""], "", "| key | default | meaning |", "|---|---|---|"]
    inherited: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        inherited |= texts.get(base.__name__, {})
    for field in attrs.fields(attrs.resolve_types(kind)):
        if attrs.has(field.type) or field.name == "tasks":
            continue
        default = field.default
        if isinstance(default, attrs.Factory):
            default = default.factory()
        shown = "required" if default is attrs.NOTHING else f"`{json.dumps(default)}`"
        shown = "not set" if default is None else shown
        choice = getattr(field.type, "__args__", ()) if "Literal" in str(field.type) else ()
        choices = " or ".join(f"`{c!r}`" for c in choice)
        lines.append(f"| `{field.name}` | {shown} | {inherited.get(field.name, '')} {choices} |")
    return [*lines, ""]


if __name__ == "__main__":
    (HERE / "configuration.md").write_text(page(), encoding="utf-8")
