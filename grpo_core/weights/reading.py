"""Reads published weights from any transport."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing

import torch
from attrs import evolve

from grpo_core.contracts.records import Weights
from grpo_core.plugins.files import load_object
from grpo_core.plugins.transports import transport_of
from grpo_core.weights.adapters import added
from grpo_core.weights.layout import buckets, unpack
from grpo_core.weights.layout import verify as check_sums


def read_weights(
    weights: Weights, *, verify: bool = True, device: torch.device | None = None
) -> dict[str, torch.Tensor]:
    """Return the tensors of published weights by name, for any transport: views of one block of bytes.

    Copy them before the trainer publishes again, which overwrites the block.  Adapters are added to their
    model, so the tensors are always the whole model's.

    Args:
        weights: as ``Engine.update_weights`` receives them.
        verify: compare each tensor's checksum with the trainer's; False if that was done already.
        device: device of the engine; with ``collective`` they arrive on this GPU directly, or on the CPU
            without it.

    Raises WeightSyncError if the weights cannot be read or a tensor's checksum differs from the trainer's.
    """
    tensors = unpack(weights.tensors, block(weights, device))
    if verify:
        check_sums(weights.version, weights.tensors, tensors)
    if not weights.base:
        return tensors
    return {name: tensor for bucket in added(weights, tensors) for name, tensor in bucket.items()}


def read_buckets(
    weights: Weights, *, verify: bool = True, device: torch.device | None = None
) -> Generator[dict[str, torch.Tensor]]:
    """Yield the tensors of ``read_weights`` in buckets, so that an engine needs no copy of all of them.

    An engine that must not use part of them reads them twice, first to verify all.  With ``collective`` they
    are then sent twice, and their memory is freed with the tensors: drop them before the next bucket.
    Arguments and errors are as in ``read_weights``.
    """
    if weights.base:
        yield from added(weights, read_weights(evolve(weights, base=""), verify=verify, device=device))
        return
    sent = transport_of(weights.location).stream
    with closing(
        load_object(sent, who="transport")(weights, device) if sent else _parts(weights, device)
    ) as parts:
        for bucket in buckets(weights):
            tensors = unpack(bucket.tensors, next(parts), bucket.begin)
            if verify or sent:  # a second transfer is verified again
                check_sums(weights.version, bucket.tensors, tensors)
            yield tensors
            del tensors  # the next bucket needs memory
        next(parts, None)  # ends the transfer


def _parts(weights: Weights, device: torch.device | None) -> Generator[torch.Tensor]:
    whole = block(weights, device)
    for bucket in buckets(weights):
        yield whole[bucket.begin : bucket.end]


def block(weights: Weights, device: torch.device | None = None) -> torch.Tensor:
    """Return all bytes, uint8 [nbytes or more].  Raises WeightSyncError if they cannot be read."""
    whole: torch.Tensor = load_object(transport_of(weights.location).reader, who="transport")(weights, device)
    return whole
