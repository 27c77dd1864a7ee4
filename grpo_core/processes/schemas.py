"""The module of transformers that writes the schemas of tools, also where transformers is not installed."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
import types
from pathlib import Path

TEMPLATES = "transformers.utils.chat_template_utils"
"""The module with ``get_json_schema``."""

spare = ""
"""The module's file in the installation that started this process, if that is another interpreter."""


def file() -> str:
    """Return the module's file in this installation; empty without transformers."""
    found = importlib.util.find_spec("transformers")
    return (
        str(Path(found.origin).parent / "utils" / "chat_template_utils.py") if found and found.origin else ""
    )


def chat_template_utils() -> types.ModuleType:
    """Return the module; without transformers, that of ``spare``.  Raises ImportError."""
    if spare and importlib.util.find_spec("transformers") is None:
        return _alone(spare)
    return importlib.import_module(TEMPLATES)


def _alone(file: str) -> types.ModuleType:
    """Import the module from its file, in a stub package where nothing is available."""
    name = "grpo_core_schemas.chat_template_utils"
    if name in sys.modules:
        return sys.modules[name]

    def never(name: str) -> object:
        """Return ``is_..._available`` of a package that is not installed."""
        if not name.startswith("is_"):
            raise AttributeError(name)
        return lambda: False

    package = types.ModuleType("grpo_core_schemas")
    package.__path__ = []
    available = types.ModuleType("grpo_core_schemas.import_utils")
    vars(package)["logging"] = types.SimpleNamespace(get_logger=logging.getLogger)
    vars(available)["__getattr__"] = never
    sys.modules |= {package.__name__: package, available.__name__: available}
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
