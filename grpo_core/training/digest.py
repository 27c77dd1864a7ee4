"""Fingerprints of a trainer's weights and of its optimizer's state, taken after each step.

A fingerprint consists of two sums over a tensor's bytes as 8-byte integers: of the integers, and of the
integers times their places.  They take two passes at memory speed, on the tensor's device, and any changed,
lost or moved bit changes them.  They do not protect against an attacker.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn

from grpo_core._version import __version__
from grpo_core.contracts.records import StateDigest
from grpo_core.training.optimization import Optimization
from grpo_core.training.ranks import Ranks

BLOCK = 1 << 14
"""Row width of the matrix used to sum a large tensor."""
SHORT = 4
"""Bytes recorded of a tensor's fingerprint, to name a tensor that differs."""
LONG = 8
"""Bytes of the fingerprint of all tensors, to detect a difference."""


class Digests:
    """Takes the fingerprints of one trainer.

    Args:
        named: the parameters that are trained.
        optimizers: hold the state of each parameter.
        ranks: each computes the fingerprints of its parts.
        device: of the trainer.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        optimizers: Optimization,
        *,
        ranks: Ranks,
        device: torch.device,
    ) -> None:
        self._weights, self._optimizers, self._ranks = dict(named), optimizers, ranks
        self._computed_by = _described(device, ranks.size)
        self._named: tuple[str, ...] = ()
        self._positions = torch.arange(1, BLOCK + 1, device=device)

    @torch.no_grad()
    def current(self) -> StateDigest:
        """Return the fingerprints of the current state; all ranks must call this, and get the same."""
        state, about = self._optimizers.saved()
        state |= {twin: state[name] for twin, name in about["twins"].items()}
        state = {name: state[name] for name in sorted(state)}  # the order of slots differs after a resume
        weights = self._of(self._weights)
        optimizer = self._of(state)
        numbers = repr(sorted(about["numbers"].items())).encode()
        shown = {name: value for name, value in optimizer.items() if state[name].numel() > 1}
        names = (*weights, *shown)
        news, self._named = () if names == self._named else names, names
        return StateDigest(
            weights=_joined(weights.values()),
            optimizer=_joined([*optimizer.values(), numbers]),
            tensors=base64.b64encode(
                b"".join(each[:SHORT] for each in (*weights.values(), *shown.values()))
            ).decode(),
            names=news,
            threads=torch.get_num_threads(),
            computed_by=self._computed_by,
        )

    def _of(self, tensors: Mapping[str, Tensor]) -> dict[str, bytes]:
        """Return the fingerprint of each tensor, over the parts of all ranks."""
        found = [self._sums(_local(tensor)) for tensor in tensors.values()]
        mine = torch.stack([each.to(self._positions.device) for each in found]).tolist() if found else []
        parts = self._ranks.gathered(mine)
        return {
            name: blake2b(
                repr((name, tuple(tensor.shape), str(tensor.dtype), [part[i] for part in parts])).encode(),
                digest_size=LONG,
            ).digest()
            for i, (name, tensor) in enumerate(tensors.items())
        }

    def _sums(self, tensor: Tensor) -> Tensor:
        """Return both sums of a tensor, int64 [2], modulo 2**64."""
        words, positions = _words(tensor), self._positions.to(tensor.device)
        rows = len(words) // BLOCK
        rest = words[rows * BLOCK :]
        first, second = rest.sum(), (rest * (positions[: len(rest)] + rows * BLOCK)).sum()
        if rows:
            matrix = words[: rows * BLOCK].view(rows, BLOCK)
            columns, lines = matrix.sum(0), matrix.sum(1)
            first = first + columns.sum()
            second = second + (columns * positions).sum()
            second = second + BLOCK * (lines * torch.arange(rows, device=lines.device)).sum()
        return torch.stack([first, second])


def _words(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes as 8-byte integers; each remaining byte is one integer."""
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    whole = flat.numel() // 8 * 8
    if flat.storage_offset() % 8:
        flat = flat.clone()  # a part of another tensor, which torch does not view as larger integers
    words = flat[:whole].view(torch.int64)
    return words if whole == flat.numel() else torch.cat([words, flat[whole:].to(torch.int64)])


def _local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank holds."""
    part: Any = tensor.detach()
    local: Tensor = part.to_local() if hasattr(part, "to_local") else part
    return local


def _joined(parts: Any) -> str:
    return blake2b(b"".join(parts), digest_size=LONG).hexdigest()


def _described(device: torch.device, ranks: int) -> str:
    """Describe programs and processor: others may round differently."""
    processor = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"CPU {torch.backends.cpu.get_cpu_capability()}"
    )
    return f"grpo-core {__version__}, torch {torch.__version__}, {processor}, ranks {ranks}"
