"""Writes grpo_core/plugins/installs.json: what installs each part of our own distributions.

    python docs/_installs.py

It reads the plugins that are installed here, and the extras of pyproject.toml.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import attrs

from grpo_core import commands
from grpo_core.plugins.host import PluginHost
from grpo_core.plugins.installed import find_commands

ROOT = Path(__file__).parents[1]
FILE = ROOT / "grpo_core" / "plugins" / "installs.json"
OURS = "grpo-plugin-"


def extras(distribution: str) -> dict[str, str]:
    """Return what installs this plugin with an extra, by the extra's name."""
    own = _optional(ROOT / "plugins" / distribution / "pyproject.toml")
    core = _optional(ROOT / "pyproject.toml")
    with_it = {name for name, needs in core.items() if any(need.startswith(distribution) for need in needs)}
    return {name: f"'{distribution}[{name}]'" for name in own} | {
        name: f"'grpo-core[{name}]'" for name in with_it
    }


def _optional(file: Path) -> dict[str, list[str]]:
    return tomllib.loads(file.read_text())["project"].get("optional-dependencies", {})


def installs() -> dict[str, dict[str, str]]:
    """Return what pip installs, by kind and by the name of an offer or of its plugin."""
    found: dict[str, dict[str, str]] = {"command": {}, "key": {}}
    for plugin in PluginHost.discover().plugins:
        if not plugin.distribution.startswith(OURS):
            continue
        of_extra = extras(plugin.distribution)
        for kind, offers in plugin.offers.items():
            if kind == "preflight" or not offers:  # nobody chooses a preflight
                continue
            names = found.setdefault(kind, {})
            pips = {name: of_extra.get(name, plugin.distribution) for name in offers}
            names |= {name.rstrip(":*") or plugin.name: pip for name, pip in pips.items()}
            names |= {offer.role: pips[name] for name, offer in offers.items() if offer.role}
            of_plugin = names.setdefault(plugin.name, plugin.distribution)
            names |= {f"{plugin.name}:{name}": pip for name, pip in pips.items() if pip != of_plugin}
        for section in plugin.sections:
            keys = [f"{section.name}.{each.name}" for each in attrs.fields(section.kind)]
            for key in keys if section.adds_keys else [section.name]:
                found["key"][key] = of_extra.get(key.rpartition(".")[2], plugin.distribution)
    for plugin in (ours := find_commands(commands)).plugins:
        if plugin.distribution.startswith(OURS):
            found["command"] |= dict.fromkeys(ours.offered[plugin.name], plugin.distribution)
    return {kind: dict(sorted(names.items())) for kind, names in sorted(found.items()) if names}


def page() -> str:
    return json.dumps(installs(), indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(page())
