"""Decodes Llama-like models (Llama, Mistral, Qwen2, Qwen3) without transformers.

A decoding step of a small model spends most of its time on dispatch and elementwise work.  Therefore
projections are fused, attention over one query has the rows innermost (every operation is a long contiguous
loop), and all rows share their rotary angles: attention depends on differences of positions only, and rows
are aligned at their newest token.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from attrs import define, frozen
from torch import Tensor

from grpo_core.contracts.errors import WeightSyncError
from grpo_core.engines.local import attention
from grpo_core.engines.local.batch import Shapes
from grpo_core.engines.local.columns import Columns

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, queries [H, D, N], keys [KV, D, N], values [KV, D, N]) -> [H * D, N]; queries are scaled."""


@frozen(kw_only=True)
class Shape:
    """Dimensions and details of a model."""

    kind: str
    vocabulary: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    eps: float
    theta: float
    max_positions: int
    tied: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Shape | None:
        """Read ``config.json``; return None for a model that this module cannot compute exactly."""
        kind = config.get("model_type")
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        sliding = config.get("sliding_window") is not None and config.get("use_sliding_window", True)
        plain = (
            kind in ("llama", "mistral", "qwen2", "qwen3")
            and (rope.get("rope_type") or rope.get("type") or "default") == "default"
            and rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) == 1.0
            and not sliding
            and config.get("hidden_act", "silu") == "silu"
            and set(config.get("layer_types") or ["full_attention"]) == {"full_attention"}
            and not config.get("quantization_config")
        )
        if not plain:
            return None
        heads, width = config["num_attention_heads"], config["hidden_size"]
        bias = bool(config.get("attention_bias", False))
        return cls(
            kind=str(kind),
            vocabulary=config["vocab_size"],
            width=width,
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or (128 if kind == "qwen3" else width // heads),
            mlp=config["intermediate_size"],
            eps=config.get("rms_norm_eps", 1e-6),
            theta=rope.get("rope_theta") or config.get("rope_theta") or 10000.0,
            max_positions=config.get("max_position_embeddings", 2048),
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=bias or kind == "qwen2",
            o_bias=bias and kind != "qwen2",
            mlp_bias=bool(config.get("mlp_bias", False)),
            qk_norm=kind == "qwen3",
        )


@define
class _Layer:
    """Weights of a layer; weights that multiply the same input are fused into one tensor."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Tensor
    o_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


class Llama:
    """The fast path of the engine; see ``grpo_core.engines.local.batch.EngineModel``."""

    rows_join = True

    def __init__(self, shape: Shape, *, device: torch.device, dtype: torch.dtype) -> None:
        self.shape = shape
        self.device = device
        self.dtype = dtype
        self.vocabulary = shape.vocabulary
        self.max_positions = shape.max_positions
        self.description = f"fast path ({shape.kind})"
        self.rows_first = device.type != "cpu" or dtype != torch.float32
        """Whether attention uses torch's fused kernels, or elementwise operations with the rows innermost."""
        self.views: dict[str, Tensor] = {}
        """Views into the fused tensors, by the names of the trainer's tensors."""
        self.layers = [self._layer(f"model.layers.{i}.") for i in range(shape.layers)]
        self.embedding = self._place(shape.vocabulary, shape.width, name="model.embed_tokens.weight")
        self.norm = self._place(shape.width, name="model.norm.weight")
        if shape.tied:  # a separate tensor, because the last norm's weight is folded into it
            self.head = torch.zeros_like(self.embedding)
        else:
            self.head = self._place(shape.vocabulary, shape.width, name="lm_head.weight")
        powers = torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim
        self._frequencies = (shape.theta**-powers).to(device)
        self._mean = torch.full((shape.width,), 1 / shape.width, device=device)
        self._logits = torch.empty(0, dtype=dtype, device=device)
        self._eps = torch.full((1,), shape.eps, device=device)

    def _place(self, *dims: int, name: str) -> Tensor:
        tensor = torch.zeros(dims, dtype=self.dtype, device=self.device)
        self.views[name] = tensor
        return tensor

    def _fused(self, prefix: str, suffix: str, *rows: tuple[str, int], inner: tuple[int, ...]) -> Tensor:
        tensor = torch.zeros(sum(n for _, n in rows), *inner, dtype=self.dtype, device=self.device)
        parts = torch.split(tensor, [n for _, n in rows])
        self.views.update(
            (f"{prefix}{name}.{suffix}", part) for (name, _), part in zip(rows, parts, strict=True)
        )
        return tensor

    def _layer(self, prefix: str) -> _Layer:
        s, place = self.shape, self._place
        q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        qkv = (("q_proj", q), ("k_proj", kv), ("v_proj", kv))
        gate_up = (("gate_proj", s.mlp), ("up_proj", s.mlp))
        return _Layer(
            input_norm=place(s.width, name=f"{prefix}input_layernorm.weight"),
            qkv=self._fused(attention, "weight", *qkv, inner=(s.width,)),
            qkv_bias=self._fused(attention, "bias", *qkv, inner=()) if s.qkv_bias else None,
            q_norm=place(s.head_dim, name=f"{attention}q_norm.weight") if s.qk_norm else None,
            k_norm=place(s.head_dim, name=f"{attention}k_norm.weight") if s.qk_norm else None,
            o=place(s.width, q, name=f"{attention}o_proj.weight"),
            o_bias=place(s.width, name=f"{attention}o_proj.bias") if s.o_bias else None,
            mlp_norm=place(s.width, name=f"{prefix}post_attention_layernorm.weight"),
            gate_up=self._fused(mlp, "weight", *gate_up, inner=(s.width,)),
            gate_up_bias=self._fused(mlp, "bias", *gate_up, inner=()) if s.mlp_bias else None,
            down=place(s.width, s.mlp, name=f"{mlp}down_proj.weight"),
            down_bias=place(s.width, name=f"{mlp}down_proj.bias") if s.mlp_bias else None,
        )

    def check(self, shapes: Shapes) -> None:
        check_shapes(shapes, self.views, optional={"lm_head.weight"} if self.shape.tied else set())

    def load(self, buckets: Iterable[Mapping[str, Tensor]]) -> None:
        s = self.shape
        copy_all(buckets, self.views)
        if s.tied:
            self.head.copy_(self.embedding)
        # a norm's weight is folded into the next projection, and the scale of attention into the queries
        self.head *= self.norm
        for w in self.layers:
            w.qkv *= w.input_norm
            w.gate_up *= w.mlp_norm
            scale = s.head_dim**-0.5
            if w.q_norm is not None:
                w.q_norm *= scale
                continue
            w.qkv[: s.heads * s.head_dim] *= scale
            if w.qkv_bias is not None:
                w.qkv_bias[: s.heads * s.head_dim] *= scale

    def new_cache(self) -> LlamaCache:
        return LlamaCache(self)

    def angles(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Return cos and sin [D, end - start] of the rotary embedding (RoFormer, 2021), twice D / 2."""
        times = torch.arange(start, end, dtype=torch.float64, device=self.device)
        turns = (self._frequencies[:, None] * times).repeat(2, 1)
        return turns.cos().to(self.dtype), turns.sin().to(self.dtype)

    def forward(self, tokens: Tensor, angles: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """Return float32 logits of the tokens after tokens [N]; angles are [D, N or 1].

        The logits are [N, V], or [n, V] if the last layer's ``attend`` returns only the last of each N / n
        tokens.
        """
        s = self.shape
        q_k = s.heads + s.kv_heads
        x = F.embedding(tokens, self.embedding)
        for i, w in enumerate(self.layers):
            h = self._normed(x)
            qkv = _columns(w.qkv, h, w.qkv_bias).view(q_k + s.kv_heads, s.head_dim, -1)
            if w.q_norm is not None and w.k_norm is not None:
                attention.norm_heads_(qkv[: s.heads], w.q_norm, s.eps)
                attention.norm_heads_(qkv[s.heads : q_k], w.k_norm, s.eps)
            rotated = attention.rotate(qkv[:q_k], *angles)
            attended = attend(i, rotated[: s.heads], rotated[s.heads :], qkv[q_k:])
            x = torch.addmm(x.view(attended.shape[1], -1, s.width)[:, -1], attended.t(), w.o.t())
            if w.o_bias is not None:
                x += w.o_bias
            gate, up = _columns(w.gate_up, self._normed(x), w.gate_up_bias).chunk(2)
            x = torch.addmm(x, F.silu(gate, inplace=True).mul_(up).t(), w.down.t())
            if w.down_bias is not None:
                x += w.down_bias
        return self._project(self._normed(x))

    def _project(self, x: Tensor) -> Tensor:
        """Compute logits in memory that all steps share.

        With a large vocabulary, fresh memory costs more than the product.
        """
        size = len(x) * self.vocabulary
        if size > len(self._logits):
            self._logits = torch.empty(size, dtype=self.dtype, device=self.device)
        out = self._logits[:size].view(len(x), self.vocabulary)
        return torch.mm(x, self.head.t(), out=out).float()

    def _normed(self, x: Tensor) -> Tensor:
        """Apply the RMS norm without its weight to [N, width]."""
        if x.dtype != torch.float32:
            return F.rms_norm(x, (self.shape.width,), None, self.shape.eps)
        return x * torch.addmv(self._eps, x.square(), self._mean).rsqrt_()[:, None]


class LlamaCache:
    """Keys and values of each layer as columns: [column, KV, D, row]."""

    def __init__(self, model: Llama) -> None:
        s = model.shape
        self._model = model
        self._rows_first = model.rows_first
        self._columns = Columns(
            [((s.kv_heads, s.head_dim), model.dtype)] * (2 * s.layers),
            model.device,
            rows_first=self._rows_first,
        )
        self._starts = torch.empty(0, dtype=torch.int64, device=model.device)
        """The time of each row's first token, [R]."""
        self._ragged = False
        self._turns = (0, torch.empty(0), torch.empty(0))
        """Rotary angles of the next columns, with the time of the first."""

    def prefill(self, ids: Tensor, lengths: Tensor, of: Tensor) -> Tensor:
        (prompts, longest), model, columns = ids.shape, self._model, self._columns
        rows = slice(len(self._starts), len(self._starts) + len(of))
        columns.make_room(before=longest, after=1, rows=rows.stop)
        columns.rows, columns.end = rows.stop, max(columns.end, longest)
        here = slice(columns.end - longest, columns.end)
        starts = columns.time - lengths
        padded, shared = bool((lengths != longest).any()), len(of) != prompts
        mask = attention.prompt_mask(longest, lengths) if padded else None

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (tensor.view(*tensor.shape[:2], prompts, longest) for tensor in (q, k, v))
            keys, values = (tensor.permute(3, 0, 1, 2).contiguous() for tensor in (k, v))
            for tensor, new in zip(columns.tensors[2 * layer : 2 * layer + 2], (keys, values), strict=True):
                tensor[here, ..., rows] = attention.fan_out(new, of) if shared else new
            if layer == model.shape.layers - 1:  # only the last token's logits are needed
                return self._attend(q[..., -1], keys, values, starts if padded else None)
            q, k, v = (tensor.permute(2, 0, 3, 1).contiguous() for tensor in (q, k, v))
            gqa = k.shape[1] != q.shape[1]
            out = F.scaled_dot_product_attention(
                q, k, v, mask, is_causal=mask is None, scale=1.0, enable_gqa=gqa
            )
            return out.permute(1, 3, 0, 2).flatten(2).flatten(0, 1)

        cos, sin = model.angles(columns.time - longest, columns.time)
        logits = model.forward(ids.flatten(), (cos.repeat(1, prompts), sin.repeat(1, prompts)), attend)
        self._starts = torch.cat([self._starts, starts[of]])
        self._look()
        return logits[of] if shared else logits

    def decode(self, tokens: Tensor) -> Tensor:
        model, columns, rows = self._model, self._columns, slice(len(tokens))
        columns.make_room(rows=rows.stop)
        angles = self._next_angles()
        here, columns.end = columns.end, columns.end + 1
        window = slice(columns.start, columns.end)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = columns.tensors[2 * layer : 2 * layer + 2]
            keys[here, ..., rows] = k
            values[here, ..., rows] = v
            starts = self._starts if self._ragged else None
            return self._attend(q, keys[window, ..., rows], values[window, ..., rows], starts)

        return model.forward(tokens, angles, attend)

    def select(self, order: Tensor) -> None:
        self._starts = self._starts[order]
        self._columns.select(order)
        self._look()

    def _look(self) -> None:
        """Precompute what all rows share, so that a step does not loop over rows."""
        if len(self._starts):
            first, last = int(self._starts.min()), int(self._starts.max())
            self._columns.start = first - self._columns.offset
            self._ragged = first != last

    def _next_angles(self) -> tuple[Tensor, Tensor]:
        """Return cos and sin of the next column, [D, 1] each; they are computed for many columns at once."""
        time, (first, cos, sin) = self._columns.time, self._turns
        if not first <= time < first + cos.shape[-1]:
            self._turns = first, cos, sin = time, *self._model.angles(time, time + 64)
        return cos[:, time - first, None], sin[:, time - first, None]

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, starts: Tensor | None) -> Tensor:
        """Attend from each row's newest token: q [H, D, R], keys and values [S, KV, D, R] -> [H * D, R].

        ``starts`` [R] are the times of the rows' first tokens; None means the first column.
        """
        mask = None
        if starts is not None:
            times = torch.arange(self._columns.time - len(keys), self._columns.time, device=q.device)
            mask = torch.zeros(len(keys), len(starts), dtype=q.dtype, device=q.device)
            mask = mask.masked_fill_(times[:, None] < starts, float("-inf"))[:, None, None]
        kernel = attention.attend_rows_first if self._rows_first else attention.attend_columns
        return kernel(q.view(keys.shape[1], -1, *q.shape[1:]), keys, values, mask).flatten(0, 2)


def _columns(weight: Tensor, h: Tensor, bias: Tensor | None) -> Tensor:
    """Apply ``weight`` [O, I] to the rows of ``h`` [N, I]; return [O, N]."""
    return torch.mm(weight, h.t()) if bias is None else torch.addmm(bias[:, None], weight, h.t())


def check_shapes(shapes: Shapes, targets: Mapping[str, Tensor], *, optional: Collection[str]) -> None:
    """Raise WeightSyncError if tensors do not fit their targets; ``optional`` names may be there or not."""
    missing, unknown = targets.keys() - shapes.keys(), shapes.keys() - targets.keys()
    problems = [
        f"{what}: {', '.join(sorted(names))}"
        for what, names in (("missing", missing - set(optional)), ("unknown", unknown - set(optional)))
        if names
    ]
    problems += [
        f"{name} is {tuple(shapes[name])}, expected {tuple(target.shape)}"
        for name, target in targets.items()
        if name in shapes and tuple(shapes[name]) != tuple(target.shape)
    ]
    if problems:
        raise WeightSyncError(
            f"engine local: the weights do not fit the model in its config.json: {'; '.join(problems)}"
        )


def copy_all(buckets: Iterable[Mapping[str, Tensor]], targets: Mapping[str, Tensor]) -> None:
    """Copy each tensor to its target, if it has one: a tied tensor may come a second time."""
    for bucket in buckets:
        for name, tensor in bucket.items():
            if name in targets:
                targets[name].copy_(tensor)
            del tensor
        del bucket  # the next one needs memory
