"""Decodes Llama-like models (Llama, Mistral, Qwen2, Qwen3) without transformers.

Weights have the layout that makes products fast, sums and activations are fused into products, and all rows
share their rotary angles: attention depends on differences of positions only, and rows are aligned at their
newest token.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor

from grpo_core.contracts.errors import WeightSyncError
from grpo_core.engines.local import attention
from grpo_core.engines.local.batch import Shapes
from grpo_core.engines.local.columns import Columns
from grpo_core.engines.local.linear import Linear

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, queries [N, H, D], keys [N, KV, D], values [N, KV, D]) -> [N, H * D]."""


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


@frozen(kw_only=True)
class _Layer:
    """Weights of a layer; the norms' weights are folded into the projections."""

    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Linear
    gate: Linear
    up: Linear
    down: Linear


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
        self._layer_shapes = _layer_shapes(shape)
        self._layers: dict[int, _Layer] = {}
        self._embedding = torch.zeros(shape.vocabulary, shape.width, dtype=dtype, device=device)
        self._norm = torch.zeros(shape.width, dtype=dtype, device=device)
        self._head: Linear
        powers = torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim
        self._frequencies = (shape.theta**-powers).to(device)
        self._mean = torch.full((shape.width,), 1 / shape.width, device=device)
        self._eps = torch.full((1,), shape.eps, device=device)

    def check(self, shapes: Shapes) -> None:
        ends = (self.vocabulary, self.shape.width)
        expected = {"model.embed_tokens.weight": ends, "model.norm.weight": ends[1:], "lm_head.weight": ends}
        expected |= {
            f"model.layers.{i}.{name}": dims
            for i in range(self.shape.layers)
            for name, dims in self._layer_shapes.items()
        }
        check_shapes(shapes, expected, optional={"lm_head.weight"} if self.shape.tied else set())

    def load(self, buckets: Iterable[Mapping[str, Tensor]]) -> None:
        """Copy all weights; each layer is laid out when its last tensor comes, so few are there twice."""
        waiting: dict[int, dict[str, Tensor]] = {i: {} for i in range(self.shape.layers)}
        for bucket in buckets:
            for name, tensor in bucket.items():
                if name == "model.embed_tokens.weight":
                    self._embedding.copy_(tensor)
                    if self.shape.tied:
                        self._head = Linear(self._embedding)
                elif name == "model.norm.weight":
                    self._norm.copy_(tensor)
                elif name != "lm_head.weight":
                    _, _, layer, suffix = name.split(".", 3)
                    found = waiting[int(layer)]
                    found[suffix] = self._copy(tensor)
                    if len(found) == len(self._layer_shapes):
                        self._layers[int(layer)] = _fused(waiting.pop(int(layer)))
                    del found
                elif not self.shape.tied:  # a tied tensor may come a second time
                    self._head = Linear(self._copy(tensor))
                del tensor
            del bucket  # the next one needs memory

    def _copy(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, self.dtype, copy=True)

    def new_cache(self) -> LlamaCache:
        return LlamaCache(self)

    def angles(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Return cos and sin [end - start, 1, D] of the rotary embedding (RoFormer, 2021), twice D / 2."""
        times = torch.arange(start, end, dtype=torch.float64, device=self.device)
        turns = (times[:, None, None] * self._frequencies).repeat(1, 1, 2)
        return turns.cos().to(self.dtype), turns.sin().to(self.dtype)

    def forward(self, tokens: Tensor, angles: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """Return float32 logits of the tokens after tokens [N]; angles are [N or 1, 1, D].

        The logits are [N, V], or [n, V] if the last layer's ``attend`` returns only the last of each N / n
        tokens.
        """
        s = self.shape
        q_k = s.heads + s.kv_heads
        x = F.embedding(tokens, self._embedding)
        for i in range(s.layers):
            w = self._layers[i]
            qkv = w.qkv(self._normed(x)).view(len(x), -1, s.head_dim)
            if w.q_norm is not None and w.k_norm is not None:
                attention.norm_heads_(qkv[:, : s.heads], w.q_norm, s.eps)
                attention.norm_heads_(qkv[:, s.heads : q_k], w.k_norm, s.eps)
            rotated = attention.rotate(qkv[:, :q_k], *angles)
            attended = attend(i, rotated[:, : s.heads], rotated[:, s.heads :], qkv[:, q_k:])
            x = w.o.plus(attended, x.view(len(attended), -1, s.width)[:, -1])
            h = self._normed(x)
            x = w.down.plus(w.up.times(h, w.gate.silu(h)), x)
        return self._head(self._normed(x).mul_(self._norm)).float()

    def _normed(self, x: Tensor) -> Tensor:
        """Apply the RMS norm without its weight to [N, width]."""
        if x.device.type != "cpu":
            return F.rms_norm(x, (self.shape.width,), None, self.shape.eps)
        wide = x.float()  # torch has no kernel for it on a CPU, and takes more operations
        return (wide * torch.addmv(self._eps, wide.square(), self._mean).rsqrt_()[:, None]).to(x.dtype)


class LlamaCache:
    """Keys and values of each layer as columns: [column, KV, D, row], in memory as [row, KV, column, D]."""

    def __init__(self, model: Llama) -> None:
        s = model.shape
        self._model = model
        self._columns = Columns(
            [((s.kv_heads, s.head_dim), model.dtype)] * (2 * s.layers), model.device, rows_first=True
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
            q, k, v = (x.view(prompts, longest, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
            for tensor, new in zip(self._of(layer, rows), (k, v), strict=True):
                tensor[:, :, here] = new[of] if shared else new
            gqa = k.shape[1] != q.shape[1]
            if layer == model.shape.layers - 1:  # only the last token's logits are needed
                last = None if mask is None else mask[:, :, -1:]
                out = F.scaled_dot_product_attention(q[:, :, -1:], k, v, last, enable_gqa=gqa)
            else:
                out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=gqa)
            return out.transpose(1, 2).flatten(2).flatten(0, 1)

        cos, sin = model.angles(columns.time - longest, columns.time)
        logits = model.forward(ids.flatten(), (cos.repeat(prompts, 1, 1), sin.repeat(prompts, 1, 1)), attend)
        self._starts = torch.cat([self._starts, starts[of]])
        self._look()
        return logits[of] if shared else logits

    def decode(self, tokens: Tensor) -> Tensor:
        model, columns, rows = self._model, self._columns, slice(len(tokens))
        columns.make_room(rows=rows.stop)
        angles = self._next_angles()
        here, columns.end = columns.end, columns.end + 1
        window = slice(columns.start, columns.end)
        mask = None
        if self._ragged:
            times = torch.arange(columns.start, columns.end, device=model.device) + columns.offset
            mask = torch.zeros(rows.stop, len(times), dtype=model.dtype, device=model.device)
            mask = mask.masked_fill_(times < self._starts[:, None], float("-inf"))[:, None, None]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self._of(layer, rows)
            keys[:, :, here] = k
            values[:, :, here] = v
            q = q.view(rows.stop, k.shape[1], -1, q.shape[2])
            return attention.attend(q, keys[:, :, window], values[:, :, window], mask).flatten(1)

        return model.forward(tokens, angles, attend)

    def select(self, order: Tensor) -> None:
        self._starts = self._starts[order]
        self._columns.select(order)
        self._look()

    def _of(self, layer: int, rows: slice) -> list[Tensor]:
        """Return keys and values of a layer and some rows, each [row, KV, column, D]."""
        return [x.permute(3, 1, 0, 2)[rows] for x in self._columns.tensors[2 * layer : 2 * layer + 2]]

    def _look(self) -> None:
        """Precompute what all rows share, so that a step does not loop over rows."""
        if len(self._starts):
            first, last = int(self._starts.min()), int(self._starts.max())
            self._columns.start = first - self._columns.offset
            self._ragged = first != last

    def _next_angles(self) -> tuple[Tensor, Tensor]:
        """Return cos and sin [1, 1, D] of the next column; they are computed for many columns at once."""
        time, (first, cos, sin) = self._columns.time, self._turns
        if not first <= time < first + len(cos):
            self._turns = first, cos, sin = time, *self._model.angles(time, time + 64)
        return cos[time - first, None], sin[time - first, None]


def _layer_shapes(s: Shape) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a layer's tensors by name."""
    q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
    projections = {
        "self_attn.q_proj": (q, s.width, s.qkv_bias),
        "self_attn.k_proj": (kv, s.width, s.qkv_bias),
        "self_attn.v_proj": (kv, s.width, s.qkv_bias),
        "self_attn.o_proj": (s.width, q, s.o_bias),
        "mlp.gate_proj": (s.mlp, s.width, s.mlp_bias),
        "mlp.up_proj": (s.mlp, s.width, s.mlp_bias),
        "mlp.down_proj": (s.width, s.mlp, s.mlp_bias),
    }
    norms = {"input_layernorm": s.width, "post_attention_layernorm": s.width}
    if s.qk_norm:
        norms |= {"self_attn.q_norm": s.head_dim, "self_attn.k_norm": s.head_dim}
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (size,) for name, size in norms.items()}
    shapes |= {f"{name}.weight": (outputs, inputs) for name, (outputs, inputs, _) in projections.items()}
    return shapes | {f"{name}.bias": (outputs,) for name, (outputs, _, bias) in projections.items() if bias}


def _fused(tensors: Mapping[str, Tensor]) -> _Layer:
    """Fold the norms' weights into the next projections; queries, keys and values become one product."""

    def joined(*names: str, norm: str = "") -> Linear:
        weight = torch.cat([tensors[f"{name}.weight"] for name in names])
        biases = [tensors[f"{name}.bias"] for name in names if f"{name}.bias" in tensors]
        return Linear(
            weight.mul_(tensors[f"{norm}.weight"]) if norm else weight, torch.cat(biases) if biases else None
        )

    qkv = (f"self_attn.{name}_proj" for name in "qkv")
    return _Layer(
        qkv=joined(*qkv, norm="input_layernorm"),
        q_norm=tensors.get("self_attn.q_norm.weight"),
        k_norm=tensors.get("self_attn.k_norm.weight"),
        o=joined("self_attn.o_proj"),
        gate=joined("mlp.gate_proj", norm="post_attention_layernorm"),
        up=joined("mlp.up_proj", norm="post_attention_layernorm"),
        down=joined("mlp.down_proj"),
    )


def check_shapes(shapes: Shapes, expected: Shapes, *, optional: Collection[str]) -> None:
    """Raise WeightSyncError unless the tensors are the expected ones; ``optional`` names may be missing."""
    missing, unknown = expected.keys() - shapes.keys(), shapes.keys() - expected.keys()
    problems = [
        f"{what}: {', '.join(sorted(names))}"
        for what, names in (("missing", missing - set(optional)), ("unknown", unknown - set(optional)))
        if names
    ]
    problems += [
        f"{name} is {tuple(shapes[name])}, expected {tuple(dims)}"
        for name, dims in expected.items()
        if name in shapes and tuple(shapes[name]) != tuple(dims)
    ]
    if problems:
        raise WeightSyncError(
            f"engine local: the weights do not fit the model in its config.json: {'; '.join(problems)}"
        )
