"""The record of what the engine of training held, in each checkpoint.

A trainer saves its masters: the float32 weights that its optimizer updates, for a resume alone.  Engines hold
them as ``publish`` casts them; these are the weights that were sampled from, measured and trained.  Every
other reader of a checkpoint casts the masters to the recorded dtypes and compares the recorded checksums, so
it gets the same bits on any machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Self

from attrs import asdict, frozen

from grpo_core.contracts import typed
from grpo_core.contracts.errors import ModelError
from grpo_core.contracts.records import Weights
from grpo_core.storage.disk import Disk

FILE = "published.json"
"""File of the record, next to the weights."""
_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}


@frozen(kw_only=True)
class Published:
    """The tensors of a version as the engine of training held them."""

    version: typed.Count
    sent: str
    """Dtype of the weights when they were published; integers and buffers may have another one."""
    dtype: str
    """Dtype of the weights in the engine: a narrower one, or the same."""
    merged: str
    """Dtype of the sums of weights and adapters; empty if the engine kept both apart."""
    tensors: Mapping[str, tuple[str, int | None]]
    """Dtype and checksum of each tensor by name; the checksum is None if it is unknown."""

    @classmethod
    def of(cls, weights: Weights, *, version: int, engine: str, apart: bool, exact: bool) -> Self | None:
        """Describe the newest weights of an engine; None if the trainer names no tensors.

        Args:
            weights: as they were published.
            version: version that is saved; it is newer than the weights if it was never published.
            engine: dtype of the engine; empty: that of the weights.
            apart: whether the engine keeps the model and its adapters apart.
            exact: whether other machines compute the same tensors from what is saved.
        """
        if not weights.tensors:
            return None
        sent = weights.tensors[0].dtype
        own = engine if engine in _SIZES else sent
        held = sent if weights.base or _SIZES.get(own, 0) >= _SIZES.get(sent, 0) else own
        known = exact and held == sent and version == weights.version
        return cls(
            version=version,
            sent=sent,
            dtype=held,
            merged="" if apart else own if weights.base else held,
            tensors={
                info.name: (held if info.dtype == sent else info.dtype, info.checksum if known else None)
                for info in weights.tensors
            },
        )

    @classmethod
    def read(cls, directory: Path) -> Self | None:
        """Read the record in a directory of weights; None if there is none.  Raises CheckpointError."""
        path = directory / FILE
        return typed.read(path, cls) if path.is_file() else None

    def write(self, disk: Disk, directory: Path) -> None:
        """Write the record next to the weights, and the dtype to config.json, for transformers."""
        disk.write(directory / FILE, json.dumps(asdict(self), separators=(",", ":")).encode())
        config = directory / "config.json"
        if config.is_file():
            table = json.loads(config.read_text(encoding="utf-8"))
            table.pop("torch_dtype", None)  # the key of older releases
            text = json.dumps({**table, "dtype": self.dtype}, indent=2)
            disk.write(config, f"{text}\n".encode())

    def check(self, tensors: Iterable[tuple[str, str, int]]) -> None:
        """Raise ModelError if the dtype or the checksum of a tensor differs from the record."""
        for name, dtype, checksum in tensors:
            expected = self.tensors.get(name, (dtype, None))
            if expected[1] is not None and expected != (dtype, checksum):
                raise ModelError(
                    f"version {self.version}: tensor {name!r} is not what the engine held ({dtype}, checksum "
                    f"{checksum:#x}; expected {expected[0]}, {expected[1]:#x}): the trainer saved other "
                    "weights than it published"
                )
