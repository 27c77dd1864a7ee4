"""Logprobs of given tokens from hidden states, without the [N, V] logits of all of them at once.

The vocabulary head is most of a small model's work and its logits are most of its memory.  Here they exist
for one chunk of tokens at a time, in one buffer; what the backward pass needs is computed again there,
unless all of it fits ``KEEP_BYTES``.  Peak memory besides the results does not grow with N.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_BYTES = 32 << 20
"""Size of the buffer for a chunk's logits."""
KEEP_BYTES = 64 << 20
"""Probabilities up to this size are kept for the backward pass instead of computed again."""


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    chunk: int | None = None,
    product_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """``log_softmax((hidden @ weight.T + bias) / temperature)`` at ``targets``, and the entropy.

    Args:
        hidden: [N, D], the positions that are scored and no others.
        weight: [V, D], and ``bias`` [V] or None.
        targets: [N], integers below V.
        chunk: tokens at a time; default: as many as fit ``CHUNK_BYTES``.
        product_dtype: of the matrix products of the backward pass (bfloat16 is several times faster);
            default: that of ``hidden``.  The forward pass keeps the precision of ``weight``: an error of
            logprobs would pass for a difference between trainer and engine.

    Returns:
        logprobs [N], with gradient; entropy [N] of each distribution, detached.
    """
    if chunk is None:
        chunk = max(16, CHUNK_BYTES // (weight.shape[0] * weight.element_size()))
    hidden = hidden.to(weight.dtype)
    apply: Any = _TokenLogprobs.apply
    logprobs, entropy = apply(hidden, weight, bias, targets, temperature, chunk, product_dtype)
    return logprobs, entropy


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk: int,
        product_dtype: torch.dtype | None,
    ) -> tuple[Tensor, Tensor]:
        n, vocabulary = hidden.shape[0], weight.shape[0]
        needed = any(ctx.needs_input_grad)
        keep = needed and n * vocabulary * weight.element_size() <= KEEP_BYTES
        logprobs, entropy = hidden.new_empty(n), hidden.new_empty(n)
        kept = hidden.new_empty(n, vocabulary) if keep else None
        logits = hidden.new_empty(min(chunk, n), vocabulary)
        probabilities = torch.empty_like(logits) if kept is None else logits
        for begin in range(0, n, chunk):
            part = slice(begin, min(begin + chunk, n))
            rows = part.stop - begin
            log_p = _log_softmax(hidden[part], weight, bias, temperature, logits[:rows])
            p = torch.exp(log_p, out=probabilities[:rows] if kept is None else kept[part])
            logprobs[part] = log_p.gather(1, targets[part, None])[:, 0]
            entropy[part] = -torch.linalg.vecdot(p, log_p)
        if needed:
            ctx.save_for_backward(hidden, weight, bias, targets, kept)
            ctx.temperature, ctx.chunk, ctx.product_dtype = temperature, chunk, product_dtype
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, kept = ctx.saved_tensors
        to_hidden, to_weight, to_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if to_hidden else None
        grad_weight = torch.zeros_like(weight) if to_weight else None
        grad_bias = torch.zeros_like(bias) if to_bias else None
        dtype = ctx.product_dtype or hidden.dtype
        product_weight = weight.to(dtype)
        n = hidden.shape[0]
        buffer = None if kept is not None else hidden.new_empty(min(ctx.chunk, n), weight.shape[0])
        grad = (grad / ctx.temperature)[:, None]
        for begin in range(0, n, ctx.chunk):
            part = slice(begin, min(begin + ctx.chunk, n))
            some_hidden = hidden[part].to(dtype)
            if buffer is None:
                d_logits = kept[part] * -grad[part]
            else:
                d_logits = buffer[: part.stop - begin]
                _log_softmax(some_hidden, product_weight, bias, ctx.temperature, d_logits).exp_().mul_(
                    -grad[part]
                )
            d_logits.scatter_add_(1, targets[part, None], grad[part])  # of a logprob: onehot(target) - p
            if grad_bias is not None:
                grad_bias += d_logits.sum(0)
            d_logits = d_logits.to(dtype)
            if grad_hidden is not None:
                grad_hidden[part] = d_logits @ product_weight
            if grad_weight is not None:
                _add_product(grad_weight, d_logits.T, some_hidden)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


def _log_softmax(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, out: Tensor
) -> Tensor:
    """[n, D] -> [n, V] in ``out``."""
    if hidden.dtype == out.dtype:
        torch.mm(hidden, weight.T, out=out)
    else:
        out.copy_(hidden @ weight.T)
    if bias is not None:
        out += bias
    if temperature != 1.0:
        out /= temperature
    return torch.log_softmax(out, dim=1, out=out)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """``total += a @ b``."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b
