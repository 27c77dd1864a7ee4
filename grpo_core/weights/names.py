"""The tensors of a transformers model under the names and shapes of its checkpoint.

transformers loads some families into modules with other names, and with the matrices of all experts in one
tensor.  Engines such as vLLM read checkpoints.  So the trainer publishes the checkpoint's names, and an
engine that computes with transformers' modules maps them by the same function: on both sides each tensor of
the checkpoint is a view of a module's tensor, and no name is translated while weights travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from grpo_core.contracts.errors import ModelError
from grpo_core.storage.published import FILE
from grpo_core.weights.layout import load_tensors


class _Views(TorchFunctionMode):
    """Makes ``contiguous`` return its argument, so that parts of a tensor stay views of it."""

    def __torch_function__(
        self, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return args[0] if function is Tensor.contiguous else function(*args, **(kwargs or {}))


def module_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return views of a module's parameters, tied ones once, and of its persistent buffers, by their names.

    Buffers are instances of ``torch.nn.Buffer``.
    """
    kept = module.state_dict().keys()
    named: dict[str, Tensor] = {name: tensor.detach() for name, tensor in module.named_parameters()}
    return named | {name: nn.Buffer(value.detach()) for name, value in module.named_buffers() if name in kept}


def checkpoint_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return ``module_tensors`` of a transformers model under the names and shapes of its checkpoint.

    The views follow every change in place, so they are made once.  Buffers come last.

    Raises ModelError if transformers cannot map a tensor to the checkpoint, or only by copying it.
    """
    from transformers.core_model_loading import revert_weight_conversion

    named = module_tensors(module)
    storages = {tensor.untyped_storage()._cdata for tensor in named.values()}
    family = f"model family {getattr(getattr(module, 'config', None), 'model_type', '')!r}"
    try:
        with _Views():
            views: dict[str, Tensor] = revert_weight_conversion(module, named)
    except Exception as error:
        raise ModelError(
            f"{family}: transformers cannot name its tensors as its checkpoint does "
            f"({type(error).__name__}: {error}), so no engine could take its weights; use another model"
        ) from error
    if copied := [name for name, view in views.items() if view.untyped_storage()._cdata not in storages]:
        raise ModelError(
            f"{family}: {copied[0]} of its checkpoint is computed from several tensors of transformers' "
            f"modules ({len(copied)} of {len(views)} are), which grpo-core does not do at each weight sync; "
            "use another model"
        )
    return dict(sorted(views.items(), key=lambda item: isinstance(item[1], nn.Buffer)))


@torch.no_grad()
def read_held(module: nn.Module, directory: str | Path) -> None:
    """Give a model that was loaded from a checkpoint the weights that the engine of training held.

    Other directories change nothing.  Raises ModelError.
    """
    if (Path(directory) / FILE).is_file():
        views = checkpoint_tensors(module)
        for name, tensor in load_tensors(Path(directory)):
            if name in views:  # a tied tensor has one name
                views[name].copy_(tensor)
