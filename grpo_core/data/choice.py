"""The dataloader that a configuration names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import fields_dict, frozen

from grpo_core.config import RowOptions, structured
from grpo_core.contracts.errors import ConfigError
from grpo_core.data.files import is_file
from grpo_core.plugins.installed import in_file

FILES = "file:"
"""Name of the offer that reads files and directories; the path follows."""


@frozen
class DataChoice:
    """A dataloader, with the options that name the fields of its rows and its own options."""

    name: str
    """Name of the offer."""
    text: str
    """Value of the key ``data``."""
    rows: RowOptions
    options: Mapping[str, Any]
    """Options of the dataloader's factory."""

    def same(self, other: DataChoice) -> bool:
        """Return whether both name the same file, directory or data set."""
        paths = [os.path.realpath(Path(each.text).expanduser()) for each in (self, other)]
        return self.text == other.text or (self.name.startswith(FILES) and paths[0] == paths[1])

    def split(self, split: str) -> str:
        """Return the name of ``"train"`` or ``"validation"`` in the data."""
        return (self.rows.split if split == "train" else self.rows.validation_split) or split


def choose(text: str, options: Mapping[str, Any], *, where: str = "data_options") -> DataChoice:
    """Return the dataloader for ``data`` and ``data_options``.

    Raises ConfigError for an option of ours with a value of a wrong type.
    """
    known = fields_dict(RowOptions)
    ours = {key: value for key, value in options.items() if key in known}
    own = {key: value for key, value in options.items() if key not in known}
    name = FILES + text if is_path(text) else text
    return DataChoice(name, text, structured(RowOptions, ours, where=where), own)


def is_path(text: str) -> bool:
    """Return whether a value of ``data`` is a file or a directory, and not the name of a dataloader."""
    if in_file(text) is not None:
        return False
    return is_file(text) or Path(text).expanduser().exists() or (":" not in text and "/" in text)


def check_there(text: str, *, who: str) -> None:
    """Raise ConfigError if a value of ``data`` is a path that does not exist."""
    if not is_path(text) or Path(text).expanduser().exists():
        return
    hint = "" if is_file(text) else f"; a data set of the Hugging Face hub is written hub:{text}"
    raise ConfigError(f"{who} = {text!r}: there is no such file (from {str(Path.cwd())!r}){hint}")
