"""The module of transformers that writes the schemas of tools, without the rest of transformers.

Transformers takes half a second to import, needs torch for the hint of a tensor alone, and may be missing in
another interpreter.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import sys
import types
from pathlib import Path

source = ""
"""The module's file, if the process that started this one runs in another interpreter."""


def file() -> str:
    """Return the module's file in this installation; empty without transformers."""
    found = importlib.util.find_spec("transformers")
    origin = found.origin if found else None
    return str(Path(origin).parent / "utils" / "chat_template_utils.py") if origin else ""


@functools.cache
def chat_template_utils() -> types.ModuleType:
    """Import the module, which has ``get_json_schema``, in a stub package with what hints need alone."""

    def never(name: str) -> object:
        """Return ``is_..._available`` of a package that no hint needs."""
        if not name.startswith("is_"):
            raise AttributeError(name)
        return lambda: False

    package = types.ModuleType("grpo_core_schemas")
    package.__path__ = []
    available = types.ModuleType("grpo_core_schemas.import_utils")
    vars(package)["logging"] = types.SimpleNamespace(get_logger=logging.getLogger)
    vars(available)["__getattr__"] = never
    vars(available)["is_vision_available"] = lambda: importlib.util.find_spec("PIL") is not None
    vars(available)["is_torch_available"] = lambda: bool(sys.modules.get("torch"))
    sys.modules |= {package.__name__: package, available.__name__: available}
    spec = importlib.util.spec_from_file_location("grpo_core_schemas.chat_template_utils", source or file())
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
    return module
