"""Reads published weights from any transport, with their adapters.

LoRA adapters are two small matrices for each adapted layer.  A plugin's trainer publishes both under the
names of peft, and names the directory of the model that they belong to.  An engine that reads weights gets
the sums: the model's files are read again for each version, so nothing adds up from one version to the next,
and no engine holds a second copy of the model.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from attrs import evolve
from safetensors import SafetensorError, safe_open
from torch import Tensor

from grpo_core.contracts.errors import WeightSyncError, one_line
from grpo_core.contracts.records import Weights
from grpo_core.models.files import weight_files
from grpo_core.plugins.files import load_object
from grpo_core.plugins.transports import transport_of
from grpo_core.weights.layout import BUCKET, LowRankSum, buckets, unpack
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


# ---------------------------------------------------------------------------------- adapters

RIGHT, LEFT = ".lora_A.weight", ".lora_B.weight"
"""Name suffixes of the two factors of a layer's update: left @ right."""
WEIGHT = ".weight"


def added(weights: Weights, tensors: Mapping[str, Tensor]) -> Generator[dict[str, Tensor]]:
    """Yield the tensors of the whole model in buckets.

    Args:
        weights: of adapters, with the directory of their model.
        tensors: of the adapters.

    Raises WeightSyncError if the model cannot be read, or the adapters belong to another model.
    """
    with _opened(weights) as files:
        _check(weights, files)
        device = next(iter(tensors.values())).device
        bucket: dict[str, Tensor] = {}
        size = 0
        for name, file in files.items():
            tensor = file.get_tensor(name).to(device)
            layer = name.removesuffix(WEIGHT)
            if f"{layer}{LEFT}" in tensors:
                tensor = LowRankSum(tensor, tensors[f"{layer}{LEFT}"], tensors[f"{layer}{RIGHT}"]).computed()
            if bucket and size + tensor.nbytes > BUCKET:
                yield bucket
                bucket, size = {}, 0
            bucket[name] = tensor
            size += tensor.nbytes
            del tensor
        yield bucket


def _check(weights: Weights, files: Mapping[str, Any]) -> None:
    """Raise WeightSyncError unless each pair of factors belongs to a tensor of the model."""
    published = {info.name: tuple(info.shape) for info in weights.tensors}
    for name, shape in published.items():
        layer = name.removesuffix(RIGHT if name.endswith(RIGHT) else LEFT)
        left, right = (published.get(f"{layer}{end}", ()) for end in (LEFT, RIGHT))
        if not left or not right:
            lost = f"{layer}{LEFT if right else RIGHT}"
            raise WeightSyncError(f"version {weights.version}: there is {name}, and {lost} is missing")
        file = files.get(f"{layer}{WEIGHT}")
        expected = None if file is None else tuple(file.get_slice(f"{layer}{WEIGHT}").get_shape())
        if (left[0], right[1]) != expected or left[1] != right[0]:
            raise WeightSyncError(
                f"version {weights.version}: {name} is {shape}, and {layer}{WEIGHT} in {weights.base} is "
                f"{expected or 'missing'}: the adapters belong to another model"
            )


@contextmanager
def _opened(weights: Weights) -> Iterator[dict[str, Any]]:
    """Yield the file of each tensor of the model, by name.  Raises WeightSyncError."""
    try:
        opened: list[Any] = [
            safe_open(str(each), framework="pt") for each in weight_files(Path(weights.base))
        ]
        yield {name: file for file in opened for name in file.keys()}  # noqa: SIM118 - it is not a mapping
    except (OSError, SafetensorError) as error:
        raise WeightSyncError(
            f"version {weights.version}: the model in {weights.base}, to which adapters are added, cannot be "
            f'read ({one_line(error)}); for an engine that does not see it set model.lora.publish = "merged"'
        ) from error
