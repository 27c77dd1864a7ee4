"""Attention over rows that are concatenated without padding: each row sees itself and no other.

A prompt that rows share stands there once, and each of them sees it.

transformers' models call an attention function by its name, and pass on to it what a forward pass is given.
So a packed pass is the model's own code, with ``Packed`` as one more argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, cached_property
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
HEAD_MULTIPLE, LARGEST_HEAD = 8, 256
"""Sizes of heads for which flash attention has kernels."""
FIRST_WITH_FLASH = (8, 0)
"""Compute capability from which on GPUs can run them: Ampere's."""
TOLERANCE = 5e-4
"""Difference of outputs, packed and alone, that float32 may make; another row in sight makes more."""


@frozen
class Part:
    """Tokens that stand one after the other, and attend to themselves and to what is before them."""

    length: int
    before: int | None = None
    """Number of the part that is before this one in each of its rows: a prompt that several rows share."""


class Packed:
    """The parts of a packed pass, in their order.

    Args:
        parts: a row, or a prompt and what follows it in each of its rows.
        device: of the tensors of the pass.
    """

    def __init__(self, parts: Sequence[Part], device: torch.device) -> None:
        self.parts, self._device = tuple(parts), device
        self.lengths = [part.length for part in parts]

    def before(self, part: Part) -> int:
        """Return the tokens before a part."""
        return 0 if part.before is None else self.lengths[part.before]

    def positions(self) -> Tensor:
        """Return the position [1, T] of each token in its row."""
        places = [torch.arange(self.before(part), self.before(part) + part.length) for part in self.parts]
        return torch.cat(places)[None].to(self._device)

    @cached_property
    def keys(self) -> tuple[Tensor, Tensor, Tensor, int, int]:
        """Return what a kernel for all parts needs.

        These are the places [K] of the keys of each part, those before it included; the ends of the parts in
        queries and in keys, int32 [parts + 1]; and the largest number of queries and of keys of a part.
        """
        starts = [0, *accumulate(self.lengths)]
        own = [torch.arange(begin, end) for begin, end in pairwise(starts)]
        keys = [
            each if part.before is None else torch.cat([own[part.before], each])
            for part, each in zip(self.parts, own, strict=True)
        ]
        ends = [0, *accumulate(map(len, keys))]
        places = torch.cat(keys).to(self._device)
        queries, of_keys = (
            torch.tensor(each, dtype=torch.int32, device=self._device) for each in (starts, ends)
        )
        return places, queries, of_keys, max(self.lengths), max(map(len, keys))


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
    if packed is not None and query.is_cuda and dtype in SIXTEEN_BITS and _has_kernel(query, value):
        query, key, value = (each[0].transpose(0, 1).to(dtype) for each in (query, key, value))
        return _by_flash(query, key, value, packed, scaling, sliding_window)[None], None
    if packed is None:
        return _of_part(query, key, value, scaling, sliding_window).transpose(1, 2).contiguous(), None
    queries, keys, values = (torch.split(each, packed.lengths, dim=2) for each in (query, key, value))
    computed = []
    for part, q, k, v in zip(packed.parts, queries, keys, values, strict=True):
        if part.before is not None:
            k = torch.cat([keys[part.before], k], dim=2)
            v = torch.cat([values[part.before], v], dim=2)
        computed.append(_of_part(q, k, v, scaling, sliding_window))
    return torch.cat(computed, dim=2).transpose(1, 2).contiguous(), None


def _of_part(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None) -> Tensor:
    """Compute the attention of a part, or of rows side by side: queries [B, H, T, D], of the last keys."""
    n, m = query.shape[2], key.shape[2]
    mask = None
    if n < m or (window is not None and m > window):
        places = torch.arange(m, device=query.device)
        behind = places[m - n :, None] - places
        mask = (behind >= 0) & (behind < (window or m))
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
    """Compute all parts in one call, for tensors [T, H, D] of 16 bits on a GPU."""
    from torch.nn.attention.varlen import varlen_attn

    places, queries, keys, most_queries, most_keys = packed.keys
    if len(places) > len(key):
        key, value = key[places], value[places]
    computed: Any = varlen_attn(
        query,
        key,
        value,
        queries,
        keys,
        most_queries,
        most_keys,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    attended: Tensor = computed
    return attended


def _has_kernel(query: Tensor, value: Tensor) -> bool:
    """Whether flash attention takes heads of this size on this GPU; otherwise each part is a call.

    torch pads heads for its other attention, and refuses them here.
    """
    size = query.shape[-1]
    fits = size % HEAD_MULTIPLE == 0 and size <= LARGEST_HEAD and value.shape[-1] == size
    return fits and _has_varlen() and torch.cuda.get_device_capability(query.device) >= FIRST_WITH_FLASH


@cache
def _has_varlen() -> bool:
    """Whether this torch has attention over rows of different lengths."""
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
        parts = [Part(length=n) for n in lengths]
        together = module.base_model(input_ids=ids, use_cache=False, **packed_inputs(parts, device))[0]
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


def packed_inputs(parts: Sequence[Part], device: torch.device) -> dict[str, Any]:
    """Return what a model is given besides the tokens of packed rows."""
    packed = Packed(parts, device)
    return {"position_ids": packed.positions(), "packed": packed}


_REFUSED = "trainer.packing = true does not work with this model; leave it out"
