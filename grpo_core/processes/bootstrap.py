"""Lets another interpreter use this installation's grpo-core: the child's side of ``interpreters``.

Another interpreter has its own packages and not ours.  It gets grpo-core and the few pure-Python packages
that grpo-core's part of an environment needs.  Its own packages come first.  This module runs before any of
them can be imported, so it uses the standard library only.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import sys
import types
from collections.abc import Sequence
from importlib.machinery import ModuleSpec

TEMPLATES = "transformers.utils.chat_template_utils"
"""The module with ``get_json_schema``, which makes the schemas of tools."""

_files: dict[str, str] = {}
"""Files of the modules that come from this installation, by name."""


class _Finder:
    """Finds modules of this installation; the last finder, so the interpreter's own modules come first."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        file = _files.get(name)
        return importlib.util.spec_from_file_location(name, file) if file else None


def main(version: str, files: str, fd: int, parent: int) -> None:
    """Run the child process of this version of grpo-core, with modules from these files (JSON)."""
    known = sys.modules["grpo_core._version"] = types.ModuleType("grpo_core._version")
    vars(known)["__version__"] = version  # grpo-core may not be installed here
    _files.update(json.loads(files))
    sys.meta_path.append(_Finder)
    from grpo_core.processes import served

    served.main(fd, parent, own_errors_only=True)


def chat_template_utils() -> types.ModuleType:
    """Return transformers' module of this name, alone if its package is not loaded or not there.

    The package takes a second, and gives it no more than the type hints of tensors and images.  Raises
    ImportError.
    """
    found = importlib.util.find_spec("transformers")
    if found is None and TEMPLATES in _files:
        return _alone(_files[TEMPLATES])
    if found and found.origin and not _files and not {"transformers", "torch", "PIL"} & sys.modules.keys():
        return _alone(found.origin.replace("__init__.py", "utils/chat_template_utils.py"))
    return importlib.import_module(TEMPLATES)


def _alone(file: str) -> types.ModuleType:
    """Import transformers' module from its file, in a stub package where nothing is available."""
    name = "grpo_core_bootstrap.chat_template_utils"
    if name in sys.modules:
        return sys.modules[name]

    def never(name: str) -> object:
        """Return ``is_..._available`` of a package that is not installed."""
        if not name.startswith("is_"):
            raise AttributeError(name)
        return lambda: False

    package = types.ModuleType("grpo_core_bootstrap")
    package.__path__ = []
    available = types.ModuleType("grpo_core_bootstrap.import_utils")
    vars(package)["logging"] = types.SimpleNamespace(get_logger=logging.getLogger)
    vars(available)["__getattr__"] = never
    sys.modules.update({package.__name__: package, available.__name__: available})
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    lacks_numpy = importlib.util.find_spec("numpy") is None
    if lacks_numpy:  # some versions import it, but schemas do not need it
        sys.modules["numpy"] = types.ModuleType("numpy")
    try:
        spec.loader.exec_module(module)
    finally:
        if lacks_numpy:
            del sys.modules["numpy"]
    sys.modules[name] = module
    return module
