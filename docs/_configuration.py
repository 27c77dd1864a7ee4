"""Writes docs/configuration.md from the docstrings of grpo_core/config."""

from __future__ import annotations

import json
from pathlib import Path

import attrs

from grpo_core import config
from grpo_core.commands.defaults import documented, meanings

HERE = Path(__file__).parent


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
        "`grpo-core config` prints all keys with their defaults as a TOML file, and",
        "`grpo-core config trainer` those of a section. Several sections choose a part by `name` and give it",
        "`options`: [options](options.md) lists them.",
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
    inherited = meanings(kind)
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
