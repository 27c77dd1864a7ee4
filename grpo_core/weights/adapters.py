"""Adapters of LoRA on their way to engines: for each adapted layer two small matrices instead of its weight.

The trainer publishes both under the names of peft, and names the directory of the model that they belong to.
An engine that reads weights gets the sums: the model's files are read again for each version, so nothing adds
up from one version to the next, and no engine holds a second copy of the model.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from grpo_core.errors import WeightSyncError, one_line
from grpo_core.models import weight_files
from grpo_core.records import Weights
from grpo_core.weights.layout import BUCKET, LowRankSum

RIGHT, LEFT = ".lora_A.weight", ".lora_B.weight"
"""Ends of the names of the two factors of what is added to a layer's weight: left @ right."""
WEIGHT = ".weight"


def factors(tensors: Sequence[tuple[str, Tensor | LowRankSum]]) -> list[tuple[str, Tensor]]:
    """Return the factors of all sums among the tensors of a model, by their names."""
    found = []
    for name, tensor in tensors:
        if isinstance(tensor, LowRankSum):
            layer = name.removesuffix(WEIGHT)
            found += [(f"{layer}{RIGHT}", tensor.right), (f"{layer}{LEFT}", tensor.left)]
    return found


def added(weights: Weights, tensors: Mapping[str, Tensor]) -> Generator[dict[str, Tensor]]:
    """Yield the tensors of the whole model, some at a time.

    Args:
        weights: of adapters, with the directory of their model.
        tensors: of the adapters.

    Raises WeightSyncError if the model cannot be read, or the adapters are not its own.
    """
    whole_shapes(weights)
    device = next(iter(tensors.values())).device
    with _opened(weights) as files:
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


def whole_shapes(weights: Weights) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the model's tensors by name, also where adapters are published.

    Raises WeightSyncError if the model cannot be read, or the adapters are not its own.
    """
    published = {info.name: tuple(info.shape) for info in weights.tensors}
    if not weights.base:
        return published
    with _opened(weights) as files:
        shapes = _shapes(files)
    for name, shape in published.items():
        layer = name.removesuffix(RIGHT if name.endswith(RIGHT) else LEFT)
        left, right = (published.get(f"{layer}{end}", ()) for end in (LEFT, RIGHT))
        if not left or not right:
            lost = f"{layer}{LEFT if right else RIGHT}"
            raise WeightSyncError(f"version {weights.version}: there is {name}, and {lost} is missing")
        expected = shapes.get(f"{layer}{WEIGHT}")
        if (left[0], right[1]) != expected or left[1] != right[0]:
            raise WeightSyncError(
                f"version {weights.version}: {name} is {shape}, and {layer}{WEIGHT} in {weights.base} is "
                f"{expected or 'missing'}: the adapters are another model's"
            )
    return shapes


def shapes_in_files(directory: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors in a model's files.  Raises OSError, SafetensorError."""
    return _shapes(_files(directory))


def _shapes(files: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(file.get_slice(name).get_shape()) for name, file in files.items()}


def _files(directory: Path) -> dict[str, Any]:
    """Open the files of a model; return the one of each tensor, by name.  Raises OSError, SafetensorError."""
    opened: list[Any] = [safe_open(str(path), framework="pt") for path in weight_files(directory)]
    return {name: file for file in opened for name in file.keys()}  # noqa: SIM118 - it is not a mapping


@contextmanager
def _opened(weights: Weights) -> Iterator[dict[str, Any]]:
    """Yield the file of each tensor of the model, by name.  Raises WeightSyncError."""
    try:
        yield _files(Path(weights.base))
    except (OSError, SafetensorError) as error:
        raise WeightSyncError(
            f"version {weights.version}: the model in {weights.base}, to which adapters are added, cannot be "
            f'read ({one_line(error)}); for an engine that does not see it set model.lora.publish = "merged"'
        ) from error
