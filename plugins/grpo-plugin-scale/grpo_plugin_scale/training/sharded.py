"""A model sharded over the ranks of a trainer by FSDP2 (``fully_shard``), layer by layer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from grpo_core import Canary, ModelError
from grpo_core.kit import ModelSource, checkpoint_tensors
from grpo_core.training.microbatch import MicroBatch
from grpo_core.training.model import FullModel, Scorer
from grpo_core.training.passes import Passes

if TYPE_CHECKING:
    from grpo_plugin_scale.training.group import Group

HOST = torch.device("cpu")
"""Device for loading a sharded model, which may not fit on a GPU.  ``fully_shard`` moves one layer after
the other to the rank's device and keeps the rank's shard there."""


class ShardedModel(FullModel):
    """Trains, publishes and saves sharded weights.

    A checkpoint is a transformers directory with one file from each rank.
    """

    def __init__(self, group: Group, policy: _Sharded, *args: Any, **others: Any) -> None:
        self._group, self._names = group, policy.names
        super().__init__(policy, *args, **others)  # type: ignore[arg-type]  # has the interface of a Scorer

    @classmethod
    def build(cls, source: ModelSource) -> ShardedModel:
        """Load the weights, and keep this rank's shard.  Raises ModelError."""
        group = cast("Group", source.ranks)

        def sharded(path: str | Path, *, trains: bool, dtype: torch.dtype = torch.float32) -> _Sharded:
            module = source.load(path, dtype, device=HOST).requires_grad_(trains)
            names = _names(module, checkpoint_tensors(module))
            scorer = source.scorer(module)
            return _Sharded(module, scorer, group, names, copies=source.passes.copies)

        policy = group.in_turn(lambda: sharded(source.saved or source.start, trains=True))

        def other(name: str) -> _Sharded:
            # float32 weights are needed only where they move
            small = source.passes.copies and name == "start"
            dtype = torch.bfloat16 if small else torch.float32
            return group.in_turn(partial(sharded, source.start, trains=False, dtype=dtype))

        kept = {name: other(name) for name in source.kept}
        return cls(group, policy, kept, tokenizer=source.tokenizer())

    def published(self) -> list[tuple[str, Tensor]]:
        return list(_renamed(self.policy.module, self._names).items())

    def saved(self) -> Mapping[str, Tensor]:
        """Return the whole tensors that this rank writes."""
        return self._group.dealt(dict(self.published()))

    def write(self, directory: Path, tensors: Mapping[str, Tensor]) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        rank, size, published = self._group.rank, self._group.size, dict(self.published())
        save_file(dict(tensors), directory / _file_of(rank, size), metadata={"format": "pt"})
        if rank:
            return
        nbytes = sum(tensor.numel() * tensor.itemsize for tensor in published.values())
        owners = self._group.owners(published)
        files = {name: _file_of(owner, size) for name, owner in sorted(owners.items())}
        index = {"metadata": {"total_size": nbytes}, "weight_map": files}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
        module: Any = self.policy.module
        module.config.save_pretrained(directory)
        if getattr(module, "generation_config", None) is not None:
            module.generation_config.save_pretrained(directory)
        self._tokenizer.save(directory)

    def restore_kept(self, tensors: Mapping[str, Tensor]) -> None:
        kept = self.saved_kept()
        names = kept.keys() & tensors.keys()
        super().restore_kept({name: self._group.part(tensors[name], kept[name]) for name in names})


class _Sharded(nn.Module):
    """A ``Scorer`` that gathers sharded weights layer by layer.

    Args:
        module: module to shard in place.
        scorer: scorer of the module.
        group: group of ranks.
        names: see ``_names``, for the module before sharding.
        copies: whether to gather bfloat16 copies.  Gradients are summed in float32 in any case, and shards
            are float32.
    """

    def __init__(
        self, module: nn.Module, scorer: Scorer, group: Group, names: Mapping[str, str], *, copies: bool
    ) -> None:
        super().__init__()
        self.module, self.names = module, names
        self._scorer = scorer
        self.vocabulary = self._scorer.vocabulary
        options: dict[str, Any] = {"mesh": group.mesh, "reshard_after_forward": True}
        if copies:
            options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        parts = Passes.layers_of(module)
        for part in [*parts, self]:
            fully_shard(part, **options)
        register_fsdp_forward_method(self, "score")
        register_fsdp_forward_method(self, "next_tokens")
        for part in [*parts, self]:
            part.set_gradient_divide_factor(1.0)  # type: ignore[operator]  # losses are normalised already
            part.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]  # gloo supports sums only

    def score(
        self, micro: MicroBatch, temperature: float, *, entropy_gradient: bool = False
    ) -> tuple[Tensor, Tensor]:
        return self._scorer.score(micro, temperature, entropy_gradient=entropy_gradient)

    def next_tokens(self, prompts: Sequence[tuple[int, ...]]) -> tuple[Canary, ...]:
        return self._scorer.next_tokens(prompts)


def _file_of(rank: int, ranks: int) -> str:
    """Return the name of a rank's file, in transformers' naming scheme for shards."""
    return f"model-{rank + 1:05d}-of-{ranks:05d}.safetensors"


def divided(
    group: Group, module: nn.Module, scorer: Scorer, tensors: Mapping[str, Tensor], *, copies: bool
) -> tuple[Scorer, dict[str, Tensor]]:
    """Shard a module; return its scorer, and its sharded tensors.

    Args:
        group: group of ranks.
        module: module to shard.
        scorer: scorer of the module.
        tensors: whole tensors of the module, by their names in checkpoints.
        copies: see ``_Sharded``.
    """
    names = _names(module, tensors)
    policy: Any = _Sharded(module, scorer, group, names, copies=copies)
    return policy, _renamed(module, names)


def _renamed(module: nn.Module, names: Mapping[str, str]) -> dict[str, Tensor]:
    """Return the tensors of a module by their names in checkpoints; see ``_names``."""
    buffers = {name: nn.Buffer(value) for name, value in module.named_buffers()}
    own = {**dict(module.named_parameters()), **buffers}
    return {name: own[known] for name, known in names.items()}


def _names(module: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Map names of tensors in checkpoints to their names in the module.

    Raises ModelError if a checkpoint's tensor is not a whole tensor of the module.
    """
    in_module = {
        (tensor.data_ptr(), tensor.shape): name
        for name, tensor in [*module.named_buffers(), *module.named_parameters()]
    }
    names = {}
    for name, tensor in tensors.items():
        known = in_module.get((tensor.data_ptr(), tensor.shape))
        if known is None:
            raise ModelError(
                f"trainer.ranks: the checkpoint of {type(module).__name__} has a tensor {name!r} that is a "
                'part of another in memory; train with trainer.ranks = 1 and trainer.weights = "float32"'
            )
        names[name] = known
    return names
