"""Writes with which programs a run was made: versions and hashes of the core, the plugins and their files.

``provenance.jsonl`` in the directory of a run has a line for each start, so a run that was continued with
other versions says so.  A hash covers the files of a package as they are installed, also of one that is
edited.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import platform
import sys
from collections.abc import Iterable
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import grpo_core
from grpo_core.app.paths import plugin_files
from grpo_core.config import Config
from grpo_core.errors import GrpoError
from grpo_core.plugins.host import BUILT_IN, PluginHost
from grpo_core.run_directory import PROVENANCE

LIBRARIES = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "peft",
    "vllm",
    "ray",
    "bitsandbytes",
)
"""Libraries whose version may change numbers."""


def write(directory: Path, config: Config, host: PluginHost, *, resumed_from: int | None = None) -> None:
    """Append a line to the provenance of a run."""
    line = {
        "time": datetime.now().astimezone().isoformat(timespec="seconds"),
        "resumed_from": resumed_from,
        **found(config, host),
    }
    with (directory / PROVENANCE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def found(config: Config, host: PluginHost) -> dict[str, Any]:
    """Return versions and hashes of what a run with this configuration uses."""
    return {
        "grpo_core": {"version": grpo_core.__version__, "sha256": package_hash("grpo_core")},
        "plugins": {
            plugin.name: {
                "distribution": plugin.distribution,
                "version": plugin.version,
                "sha256": package_hash(plugin.module.partition(":")[0].partition(".")[0]),
            }
            for plugin in host.plugins
            if plugin.fault is None and plugin.name != BUILT_IN and plugin.version
        },
        "environments": {
            name: of_environment(task.env, host)
            for name, task in {
                **config.tasks,
                **config.validation.environments(config.validation.sets),
            }.items()
        },
        "files": _hashes(plugin_files(config)),
        "libraries": {name: known for name in LIBRARIES if (known := _version(name)) is not None},
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
    }


def _hashes(files: Iterable[Path]) -> dict[str, str]:
    """Return the hash of each file that exists."""
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(files) if path.is_file()
    }


def package_hash(name: str) -> str | None:
    """Return one hash of the names and contents of a package's files, or None without a package on disk."""
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None) if module is not None else find_spec(name)
    if spec is None or not (spec.submodule_search_locations or spec.origin):
        return None
    digest = hashlib.sha256()
    roots = [Path(root) for root in spec.submodule_search_locations or ()]
    files = [(file.relative_to(root).as_posix(), file) for root in roots for file in root.rglob("*")]
    if not roots:
        files = [(Path(str(spec.origin)).name, Path(str(spec.origin)))]
    for relative, file in sorted(files):
        if file.is_file() and "__pycache__" not in file.parts:
            digest.update(f"{relative}\0".encode())
            digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def of_environment(env: str, host: PluginHost) -> dict[str, str]:
    """Return who offers an environment, and for an object of the program the hash of its code.

    Another interpreter may have plugins that are not found here.
    """
    try:
        offer = host.find("environment", env)
    except GrpoError:
        return {"env": env}
    plugin = offer.plugin
    known = {"env": env, "distribution": plugin.distribution, "version": plugin.version}
    return known | (code_of(offer.offer.made_by or offer.load()) if host.of_program(env) else {})


def code_of(factory: Any) -> dict[str, str]:
    """Return the file that defines a class, function or object, and its hash.

    In a notebook there is no file, and the hash is that of the source text; without source text there is no
    hash.
    """
    defined = factory.func if isinstance(factory, functools.partial) else factory
    defined = defined if inspect.isroutine(defined) or isinstance(defined, type) else type(defined)
    try:
        file = Path(inspect.getsourcefile(defined) or "")
        if file.is_file():
            return {"file": str(file), "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
        return {"sha256": hashlib.sha256(inspect.getsource(defined).encode()).hexdigest()}
    except (OSError, TypeError):
        return {}


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
