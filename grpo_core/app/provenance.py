"""Records the software of a run: versions of the core and the plugins, and hashes of files.

``provenance.jsonl`` in the directory of a run has a line for each start, so it shows a resume with other
versions.
"""

from __future__ import annotations

import json
import platform
import shlex
import sys
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from grpo_core._version import __version__
from grpo_core.app.paths import plugin_files
from grpo_core.config import Config
from grpo_core.models.files import directory_here, text_files
from grpo_core.plugins.host import BUILT_IN, PluginHost
from grpo_core.storage.disk import fingerprint
from grpo_core.storage.run_directory import PROVENANCE

LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "peft")
"""Libraries whose version may change numerical results, as may that of those that plugins need."""


def write(directory: Path, config: Config, host: PluginHost, *, resumed_from: int | None = None) -> None:
    """Append a line to the provenance of a run."""
    line = {
        "time": datetime.now().astimezone().isoformat(timespec="seconds"),
        "resumed_from": resumed_from,
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        **software(config, host),
    }
    with (directory / PROVENANCE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def software(config: Config, host: PluginHost) -> dict[str, Any]:
    """Return the versions of the software that a configuration uses, and the hashes of its files."""
    every = [offers for plugin in host.plugins for offers in plugin.offers.values()]
    names = {*LIBRARIES}.union(*(offer.requires for offers in every for offer in offers.values()))
    return {
        "grpo_core": __version__,
        "plugins": {
            plugin.name: f"{plugin.distribution} {plugin.version}"
            for plugin in host.plugins
            if plugin.fault is None and plugin.name != BUILT_IN and plugin.version
        },
        "files": file_hashes(config),
        "libraries": {name: known for name in sorted(names) if (known := _version(name)) is not None},
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
    }


def file_hashes(config: Config) -> dict[str, str]:
    """Return the sha256 of plugin files, of the tokenizer and of the chat template."""
    model = directory_here(config.model.path)
    files = {*plugin_files(config), Path(config.model.chat_template)} | (
        text_files(model) if model else set()
    )
    return {str(path): fingerprint(path)["sha256"] for path in sorted(files) if path.is_file()}


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
