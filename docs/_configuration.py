"""The page configuration.md of the site, from the docstrings of grpo_core/config."""

from __future__ import annotations

import json

import attrs

from grpo_core import config
from grpo_core.config.meanings import meanings
from grpo_core.config.sections import keys_of
from grpo_core.plugins.host import PluginHost


def page() -> str:
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
    ]
    lines += _table("top level", config.Config)
    lines += _table("[tasks.NAME]", config.TaskConfig)
    lines += _table("[tasks.NAME.data_options]", config.RowOptions)
    for field in attrs.fields(attrs.resolve_types(config.Config)):
        if attrs.has(field.type):
            lines += _table(f"[{field.name}]", field.type)
            if field.name == "optimizer":
                lines += _table("[optimizer.groups.NAME]", config.ParameterGroupConfig)
        if field.name == "validation":
            lines += _table("[validation.sets.NAME]", config.ValidationSetConfig)
    return "\n".join(lines + _sections_of_plugins())


def _sections_of_plugins() -> list[str]:
    """Return the tables of what our own plugins add."""
    lines: list[str] = []
    for plugin in PluginHost.discover().plugins:
        for section in plugin.sections if plugin.distribution.startswith("grpo-plugin-") else ():
            title = f"[{section.name}], with `pip install {plugin.distribution}`"
            lines += _table(title, section.kind)
    return lines


def _table(title: str, kind: type) -> list[str]:
    inherited = meanings(kind)
    lines = [f"## {title}", "", inherited[""], "", "| key | default | meaning |", "|---|---|---|"]
    for field in attrs.fields(attrs.resolve_types(kind)):
        if attrs.has(field.type) or field.name == "tasks" or field.name not in keys_of(kind):
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
    print(page())
