"""Reads published weights from any transport."""

from __future__ import annotations

import torch

from grpo_core.records import Weights
from grpo_core.weights import COLLECTIVE, collective, cuda_ipc, shm, unreadable
from grpo_core.weights.layout import unpack, verify


def read(weights: Weights) -> dict[str, torch.Tensor]:
    """Return the tensors as views of a block, verified; copy them before the trainer publishes again.

    Raises WeightSyncError if the weights cannot be read or a tensor's checksum differs from the trainer's.
    """
    tensors = views(weights)
    verify(weights, tensors)
    return tensors


def views(weights: Weights) -> dict[str, torch.Tensor]:
    """Return the same views without verifying them.  Raises WeightSyncError if they cannot be read."""
    return unpack(weights, block(weights))


def block(weights: Weights) -> torch.Tensor:
    """Return all bytes, uint8 [nbytes or more].  Raises WeightSyncError if they cannot be read."""
    if weights.location.startswith(COLLECTIVE):
        return collective.pulled(weights)
    if weights.location.startswith(cuda_ipc.SCHEME):
        return cuda_ipc.opened(weights)
    try:
        return shm.mapped(weights)
    except (OSError, ValueError) as error:
        raise unreadable(weights, error) from None
