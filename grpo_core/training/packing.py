"""Attention over rows that are concatenated without padding: each row sees itself and no other.

transformers' models call an attention function by its name, and pass on to it what a forward pass is given.
So a packed pass is the model's own code, with ``Packed`` as one more argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from itertools import accumulate, pairwise
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from grpo_core.errors import ModelError

NAME = "grpo_core_rows"
"""Name of the attention function in transformers."""
UNKNOWN = ("softcap", "s_aux", "position_bias")
"""Arguments with which a model asks for attention of another kind."""
SIXTEEN_BITS = (torch.bfloat16, torch.float16)
TOLERANCE = 5e-4
"""Difference of outputs, packed and alone, that float32 may make; another row in sight makes more."""


@frozen(eq=False)
class Packed:
    """The rows of a packed pass."""

    lengths: tuple[int, ...]
    """Tokens of each row."""
    ends: Tensor
    """0, and the place after each row's last token: int32 [rows + 1]."""

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> Packed:
        ends = [0, *accumulate(lengths)]
        return cls(tuple(lengths), torch.tensor(ends, dtype=torch.int32, device=device))

    @property
    def longest(self) -> int:
        return max(self.lengths)

    def positions(self) -> Tensor:
        """Return the position [1, T] of each token in its row."""
        places = [torch.arange(n) for n in self.lengths]
        return torch.cat(places)[None].to(self.ends.device)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    packed: Packed | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute the causal attention of queries [B, H, T, D] within their rows; returns [B, T, H, D].

    Without ``packed`` the rows are side by side.
    """
    if asked := [name for name in UNKNOWN if others.get(name) is not None]:
        raise ModelError(f"its attention has {asked[0]}, which this one has not")
    device = query.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype
    if packed is not None and query.is_cuda and dtype in SIXTEEN_BITS and _has_varlen():
        query, key, value = (each[0].transpose(0, 1).to(dtype) for each in (query, key, value))
        return _by_flash(query, key, value, packed, scaling, sliding_window)[None], None
    lengths = [query.shape[2]] if packed is None else list(packed.lengths)
    rows = zip(*(torch.split(each, lengths, dim=2) for each in (query, key, value)), strict=True)
    computed = [_of_row(q, k, v, scaling, sliding_window) for q, k, v in rows]
    return torch.cat(computed, dim=2).transpose(1, 2).contiguous(), None


def _of_row(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None) -> Tensor:
    """Compute the attention of one row, or of rows side by side: tensors [B, H, T, D]."""
    n = query.shape[2]
    mask = None
    if window is not None and n > window:
        behind = torch.arange(n, device=query.device)[:, None] - torch.arange(n, device=query.device)
        mask = (behind >= 0) & (behind < window)
    return scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _by_flash(
    query: Tensor, key: Tensor, value: Tensor, packed: Packed, scaling: float | None, window: int | None
) -> Tensor:
    """Compute all rows in one call, for tensors [T, H, D] of 16 bits on a GPU."""
    from torch.nn.attention.varlen import varlen_attn

    computed: Any = varlen_attn(
        query,
        key,
        value,
        packed.ends,
        packed.ends,
        packed.longest,
        packed.longest,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    attended: Tensor = computed
    return attended


@cache
def _has_varlen() -> bool:
    """Whether this torch has attention over rows of different lengths; otherwise each row is a call."""
    return find_spec("torch.nn.attention.varlen") is not None


def use_packing(model: Any) -> None:
    """Make a transformers model compute its attention by ``attention``.  Raises ModelError if it does not."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attention)
    model.set_attn_implementation(NAME)
    if model.config._attn_implementation != NAME:
        raise ModelError(f"{_REFUSED}: {type(model).__name__} does not let its attention be exchanged")


@torch.no_grad()
def check_packing(module: Any) -> None:
    """Compute two rows packed and alone.  Raises ModelError unless both give the same."""
    device = next(module.parameters()).device
    size = module.get_input_embeddings().weight.shape[0]
    lengths = (3, 5)
    ids = (torch.arange(sum(lengths), device=device) * 7 + 1).remainder(size)[None]
    try:
        together = module.base_model(input_ids=ids, use_cache=False, **packed_inputs(lengths, device))[0]
        alone = [
            module.base_model(input_ids=ids[:, begin:end], use_cache=False)[0]
            for begin, end in pairwise([0, *accumulate(lengths)])
        ]
    except Exception as error:  # code of the model, too
        raise ModelError(f"{_REFUSED} ({type(error).__name__}: {error})") from error
    expected = torch.cat(alone, dim=1)
    tolerance = max(TOLERANCE, 8 * torch.finfo(expected.dtype).eps)
    if not torch.allclose(together, expected, rtol=0, atol=tolerance * float(expected.abs().max())):
        raise ModelError(f"{_REFUSED}: a row's outputs are not the same with another row before it")


def packed_inputs(lengths: Sequence[int], device: torch.device) -> dict[str, Any]:
    """Return what a model is given besides the tokens of packed rows."""
    packed = Packed.of(lengths, device)
    return {"position_ids": packed.positions(), "packed": packed}


_REFUSED = "trainer.packing = true does not work with this model; leave it out"
