"""Describes how keys of an older configuration are written now."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

OLD = ("source", "dataloader", "dataloader_options")
"""Keys of a task or of a validation set that `data` and `data_options` replace."""


def new_lines(where: str, table: Mapping[str, Any]) -> str:
    """Return an error with the lines that replace the old keys of a table, or "" if it has none."""
    old = [key for key in OLD if key in table]
    if not old:
        return ""
    source = table.get("source", {})
    source = dict(source) if isinstance(source, Mapping) else {}
    path, held_out = _data(source.pop("path", "")), _data(source.pop("validation_path", ""))
    data = table.get("dataloader", path)
    if where.startswith("validation.sets."):
        data, held_out = held_out or data, ""
    dropped = [key for key in ("where", "workers") if source.pop(key, None)]
    options = {**source, **dict(table.get("dataloader_options", {}))}
    lines = [f"[{where}]", *(f"{key} = {json.dumps(table[key])}" for key in ("env", "task") if key in table)]
    lines += [f"data = {json.dumps(data)}"] if data else []
    lines += [f"validation_data = {json.dumps(held_out)}"] if held_out else []
    if options:
        lines += [f"[{where}.data_options]", *(f"{key} = {_value(value)}" for key, value in options.items())]
    names = " and ".join(f"{where}.{key}" for key in old)
    more = (
        f"\n{' and '.join(dropped)} cannot be written here: a dataloader of a few lines selects rows and "
        "reads in parallel (docs/first-dataloader.md)"
        if dropped
        else ""
    )
    return f"{names}: `data` names the prompts of a task now; write\n" + "\n".join(lines) + more


def _data(path: Any) -> str:
    """Return the text of ``data`` for a path of ``source``, which may be a hub id."""
    path = str(path)
    return f"hub:{path}" if path and not Path(path).suffix and not Path(path).exists() else path


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_value(each)}" for key, each in value.items()) + " }"
    return json.dumps(value, default=str)
