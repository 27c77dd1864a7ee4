"""Decodes every other architecture with transformers' own forward pass and cache.

Requests that arrive while others are decoded form a separate batch: a cache of transformers accepts no more
rows once it has decoded.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from grpo_core.contracts.errors import ModelError
from grpo_core.engines.local.batch import Shapes
from grpo_core.engines.local.llama import check_shapes
from grpo_core.models.files import keep_softcapping
from grpo_core.weights.names import checkpoint_tensors, module_tensors


class TransformersModel:
    """A ``grpo_core.engines.local.batch.EngineModel`` of transformers; ``load`` brings its first weights."""

    rows_join = False

    def __init__(
        self, model: str, *, device: torch.device, dtype: torch.dtype, trust_remote_code: bool = False
    ) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        try:
            config = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
            module = AutoModelForCausalLM.from_config(
                config, dtype=dtype, trust_remote_code=trust_remote_code
            )
        except (OSError, ValueError, KeyError) as error:
            raise ModelError(
                f"engine local: {model!r} is not a causal language model of transformers: {error}"
            ) from error
        keep_softcapping(module)
        self.module = module.to(device).eval()
        self.config = config
        self.device = device
        text = config.get_text_config()
        self.vocabulary = int(text.vocab_size)
        self.max_positions = int(getattr(text, "max_position_embeddings", None) or 2**31)
        self.description = f"transformers' forward ({config.model_type})"
        self._arguments = set(inspect.signature(module.forward).parameters)
        # the name since transformers 5.24; the old one warns and is removed in 5.40
        self._cache_argument = "cache" if "cache" in self._arguments else "past_key_values"
        self._names = checkpoint_tensors(module), module_tensors(module)
        """Places of the tensors by the names in the family's checkpoints, and by the names of its modules."""
        self._tied = {name for name, _ in module.named_parameters(remove_duplicate=False)} - set(
            self._names[1]
        )

    def check(self, shapes: Shapes) -> None:
        """Accept the names of checkpoints or of modules: a checkpoint may have been saved with either."""
        checkpoint, modules = self._names
        tensors = modules if shapes.keys() & modules.keys() - checkpoint.keys() else checkpoint
        buffers = {name for name, tensor in tensors.items() if isinstance(tensor, torch.nn.Buffer)}
        expected = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        check_shapes(shapes, expected, optional=self._tied | buffers)  # a trainer may leave buffers out

    def load(self, buckets: Iterable[Mapping[str, Tensor]]) -> None:
        checkpoint, modules = self._names
        targets = {**modules, **checkpoint}
        for bucket in buckets:
            for name, tensor in bucket.items():
                if name in targets:  # a tied tensor may come a second time
                    targets[name].copy_(tensor)
                del tensor
            del bucket  # the next one needs memory

    def new_cache(self) -> TransformersCache:
        return TransformersCache(self)

    def forward(self, ids: Tensor, mask: Tensor, past: Any) -> Tensor:
        """Return logits [B, V] float32 after ids [B, T] after ``past``; mask [B, all] is 0 at padding."""
        optional = {
            "position_ids": (mask.cumsum(-1) - 1).clamp_(min=0)[:, -ids.shape[1] :],
            "logits_to_keep": 1,
        }
        known = {name: value for name, value in optional.items() if name in self._arguments}
        known[self._cache_argument] = past
        output = self.module(ids, attention_mask=mask, use_cache=True, **known)
        logits: Tensor = output.logits[:, -1]
        return logits.float()


class TransformersCache:
    """A DynamicCache and its attention mask."""

    def __init__(self, model: TransformersModel) -> None:
        from transformers import DynamicCache

        self._model = model
        self._past = DynamicCache(config=model.config)
        self._mask = torch.empty(0, 0, dtype=torch.int64, device=model.device)

    def prefill(self, ids: Tensor, lengths: Tensor, of: Tensor) -> Tensor:
        longest = ids.shape[1]
        at = torch.arange(longest, device=ids.device)
        mask = (at >= longest - lengths[:, None]).to(torch.int64)
        logits = self._model.forward(ids, mask, self._past)
        self._past.batch_select_indices(of)
        self._mask = mask[of]
        return logits[of]

    def decode(self, tokens: Tensor) -> Tensor:
        self._mask = torch.cat([self._mask, torch.ones_like(self._mask[:, :1])], 1)
        return self._model.forward(tokens[:, None], self._mask, self._past)

    def select(self, order: Tensor) -> None:
        self._past.batch_select_indices(order)
        self._mask = self._mask[order]
