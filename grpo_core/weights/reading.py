"""Reads published weights from any transport."""

from __future__ import annotations

import torch

from grpo_core.records import Weights
from grpo_core.weights import COLLECTIVE, collective, cuda_ipc, shm, unreadable
from grpo_core.weights.layout import unpack
from grpo_core.weights.layout import verify as check_sums


def read_weights(
    weights: Weights, *, verify: bool = True, device: torch.device | None = None
) -> dict[str, torch.Tensor]:
    """The tensors of published weights by name, wherever they are: views of one block of bytes.

    Copy them before the trainer publishes again, which overwrites the block.

    Args:
        weights: as ``Engine.update_weights`` receives them.
        verify: compare each tensor's checksum with the trainer's; False if that was done already.
        device: device of the engine; by ``collective`` they come to this GPU directly, without it to the CPU.

    Raises WeightSyncError if the weights cannot be read or a tensor's checksum differs from the trainer's.
    """
    tensors = unpack(weights, block(weights, device))
    if verify:
        check_sums(weights, tensors)
    return tensors


def block(weights: Weights, device: torch.device | None = None) -> torch.Tensor:
    """Return all bytes, uint8 [nbytes or more].  Raises WeightSyncError if they cannot be read."""
    if weights.location.startswith(COLLECTIVE):
        return collective.pulled(weights, device)
    if weights.location.startswith(cuda_ipc.SCHEME):
        return cuda_ipc.opened(weights)
    try:
        return shm.mapped(weights)
    except (OSError, ValueError) as error:
        raise unreadable(weights, error) from None
