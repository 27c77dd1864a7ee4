"""Attention over rows that are concatenated without padding: each row attends only to itself.

A prompt that rows share occurs once, and each of them attends to it.

transformers' models call an attention function by its name, and pass the forward pass's arguments to it.  So
a packed pass is the model's own code, with ``Packed`` as an additional argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, cached_property
from inspect import signature
from itertools import accumulate, pairwise
from typing import Any, cast

import numpy as np
import torch
from attrs import frozen
from torch import Tensor, nn

from grpo_core.contracts.errors import ModelError
from grpo_core.training.grids import Grid, Grids

NAME = "grpo_core_rows"
"""Name of the attention function in transformers."""
UNKNOWN = ("softcap", "s_aux", "position_bias")
"""Arguments by which a model requests another kind of attention."""
SIXTEEN_BITS = (torch.bfloat16, torch.float16)
HEAD_MULTIPLE, LARGEST_HEAD = 8, 256
"""Sizes of heads for which flash attention has kernels."""
FIRST_WITH_FLASH = (8, 0)
"""Lowest compute capability of GPUs that run them: Ampere."""
TOLERANCE = 5e-4
"""Largest difference of packed and separate outputs from float32 rounding; attention to another row exceeds
it."""
_LENGTHS = (3, 5)
_KINDS = {"full_attention", "sliding_attention"}
"""Layer types with causal attention, with or without a window; layers that divide a row do not count."""


@frozen
class Part:
    """Consecutive tokens that attend to themselves and to earlier ones."""

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
        lengths = np.asarray(self.lengths)
        before = np.asarray([self.before(part) for part in self.parts])
        first = before - lengths.cumsum() + lengths
        return torch.from_numpy(np.arange(lengths.sum()) + first.repeat(lengths))[None].to(self._device)

    @cached_property
    def grids(self) -> Grids:
        """Return the grids of the parts, for devices without a kernel for packed parts."""
        return Grids(self.lengths, [-1 if p.before is None else p.before for p in self.parts], self._device)

    @cached_property
    def keys(self) -> tuple[Tensor, Tensor, Tensor, int, int]:
        """Return the arguments of a kernel for all parts.

        These are the indices [K] of the keys of each part, those before it included; the ends of the parts in
        queries and in keys, int32 [parts + 1]; and the largest number of queries and of keys of a part.
        """
        starts = [0, *accumulate(self.lengths)]
        own = [torch.arange(begin, end) for begin, end in pairwise(starts)]
        keys = [
            each if part.before is None else torch.cat([own[part.before], each])
            for part, each in zip(self.parts, own, strict=True)
        ]
        ends = [0, *accumulate(map(len, keys))]
        indices = torch.cat(keys).to(self._device)
        queries, of_keys = (
            torch.tensor(each, dtype=torch.int32, device=self._device) for each in (starts, ends)
        )
        return indices, queries, of_keys, max(self.lengths), max(map(len, keys))


@torch.compiler.disable(reason="grids are made for each micro-batch")  # type: ignore[no-untyped-call, untyped-decorator]
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

    Without ``packed`` the rows are padded.  A compiled layer does not compile it: its shapes depend on the
    parts, so torch would recompile it for each micro-batch.
    """
    if asked := [name for name in UNKNOWN if others.get(name) is not None]:
        raise ModelError(f"its attention has {asked[0]}, which packing does not support")
    device = query.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype
    if packed is not None and query.is_cuda and dtype in SIXTEEN_BITS and _has_kernel(query, value):
        query, key, value = (each[0].transpose(0, 1).to(dtype) for each in (query, key, value))
        return _by_flash(query, key, value, packed, scaling, sliding_window)[None], None
    if packed is None:
        (rows, _, n, _), m = query.shape, key.shape[2]
        grid = Grid(before=np.full(rows, m - n), queries=n, keys=m)
        out = grid.attention(query, key, value, scaling, sliding_window)
        return out.transpose(1, 2).contiguous(), None
    return packed.grids.attention(query, key, value, scaling, sliding_window), None


def _by_flash(
    query: Tensor, key: Tensor, value: Tensor, packed: Packed, scaling: float | None, window: int | None
) -> Tensor:
    """Compute all parts in one call, for tensors [T, H, D] of 16 bits on a GPU."""
    from torch.nn.attention.varlen import varlen_attn

    indices, queries, keys, most_queries, most_keys = packed.keys
    if len(indices) > len(key):
        key, value = key[indices], value[indices]
    attended: Any = varlen_attn(
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
    return cast(Tensor, attended)


def _has_kernel(query: Tensor, value: Tensor) -> bool:
    """Whether flash attention supports heads of this size on this GPU; otherwise each part is a call.

    torch pads heads for its other attention, and refuses them here.
    """
    size = query.shape[-1]
    fits = size % HEAD_MULTIPLE == 0 and size <= LARGEST_HEAD and value.shape[-1] == size
    return fits and _has_varlen() and torch.cuda.get_device_capability(query.device) >= FIRST_WITH_FLASH


@cache
def _has_varlen() -> bool:
    """Whether this torch, from 2.12 on, has attention over rows of different lengths with grouped heads."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in signature(varlen_attn).parameters


def packs_well(dtype: str, device: torch.device) -> bool:
    """Return whether packed rows are as fast as padded ones at least, so that "auto" packs.

    A GPU has a kernel for rows of 16 bits; grids have not been measured there.
    """
    return device.type == "cpu" or dtype != "float32"


class PackingError(ModelError):
    """Raised for a model that cannot keep packed rows apart."""


@torch.no_grad()
def use_packing(module: Any) -> None:
    """Make a transformers model compute its attention by ``attention``.

    Raises PackingError unless two rows, packed, have the outputs that the model's own attention gives each
    of them.
    """
    device = next(module.parameters()).device
    size = module.get_input_embeddings().weight.shape[0]
    ids = (torch.arange(sum(_LENGTHS), device=device) * 7 + 1).remainder(size)[None]
    rows = torch.split(ids, list(_LENGTHS), dim=1)
    given = packed_inputs([Part(length=n) for n in _LENGTHS], device)
    try:
        with torch.compiler.set_stance("force_eager"):  # the layers will be compiled for longer rows
            alone = [module.base_model(input_ids=row, use_cache=False)[0] for row in rows]
            exchange_attention(module)
            together = module.base_model(input_ids=ids, use_cache=False, **given)[0]
    except PackingError:
        raise
    except Exception as error:  # it may come from the model's own code
        raise PackingError(f"{_REFUSED} ({type(error).__name__}: {error})") from error
    expected = torch.cat(alone, dim=1)
    tolerance = max(TOLERANCE, 8 * torch.finfo(expected.dtype).eps)
    if not torch.allclose(together, expected, rtol=0, atol=tolerance * float(expected.abs().max())):
        raise PackingError(f"{_REFUSED}: the outputs of two packed rows differ from each row alone")


def exchange_attention(model: Any) -> None:
    """Set ``attention`` in a transformers model.  Raises PackingError if the model does not accept it."""
    from transformers import AttentionInterface

    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    if others := sorted(kinds - _KINDS):
        raise PackingError(f"{_REFUSED}: it has layers of the type {others[0]}")
    AttentionInterface.register(NAME, attention)
    model.set_attn_implementation(NAME)
    if model.config._attn_implementation != NAME:
        raise PackingError(f"{_REFUSED}: {type(model).__name__} does not let its attention be replaced")


def packed_inputs(parts: Sequence[Part], device: torch.device) -> dict[str, Any]:
    """Return the arguments of a model in addition to the tokens of packed rows."""
    packed = Packed(parts, device)
    return {"position_ids": packed.positions(), "packed": packed}


_REFUSED = "trainer.packing = true does not work with this model; leave it out"
