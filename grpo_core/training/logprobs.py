"""Logprobs of given tokens from hidden states, without the [N, V] logits of all of them at once.

The vocabulary head is most of a small model's work and its logits are most of its memory.  Here they exist
for one chunk of tokens at a time, in one buffer; what the backward pass needs is computed again there,
unless all of it fits ``KEEP_BYTES``.  Peak memory, except the results, does not grow with N.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_BYTES = 32 << 20
"""Size in bytes of the buffer for a chunk's logits on a CPU, where it should stay in a cache."""
CUDA_CHUNK_BYTES = 1 << 30
"""Size in bytes of that buffer on a GPU, which reads the whole weight [V, D] again for each chunk."""
KEEP_BYTES = 256 << 20
"""Probabilities up to this size are kept for the backward pass instead of being recomputed."""


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    chunk: int | None = None,
    product_dtype: torch.dtype | None = None,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute ``log_softmax((hidden @ weight.T + bias) / temperature)`` at ``targets``, and the entropy.

    Args:
        hidden: [N, D], only the positions that are scored.
        weight: [V, D], and ``bias`` [V] or None.
        targets: [N], integers below V.
        chunk: tokens at a time; default: as many as fit ``CHUNK_BYTES``.
        product_dtype: of the factors of the matrix products (bfloat16 is several times faster); default:
            that of ``weight``.  In the forward pass their products and sums have the precision of
            ``weight``, and float32 at least, as in an engine whose head computes in float32: an error of
            logprobs would look like a difference between trainer and engine.
        entropy_gradient: whether the entropy has a gradient; costs one more buffer in the backward pass.

    Returns:
        logprobs [N], with gradient; entropy [N] of each distribution, detached unless ``entropy_gradient``.
    """
    wide = torch.promote_types(weight.dtype, torch.float32)
    product_dtype = product_dtype or weight.dtype
    if chunk is None:
        room = CUDA_CHUNK_BYTES if weight.is_cuda else CHUNK_BYTES
        chunk = max(16, room // (weight.shape[0] * wide.itemsize))
    hidden = hidden.to(wide)
    apply: Any = _TokenLogprobs.apply
    logprobs, entropy = apply(
        hidden, weight, bias, targets, temperature, chunk, product_dtype, entropy_gradient
    )
    return logprobs, entropy


def extra_bytes_on_gpu(n: int, vocabulary: int) -> int:
    """Return the additional bytes of a pass over n tokens on a GPU, whose chunks of logits are larger.

    The forward pass has three such float32 buffers at a time, one of them for the entropy.
    """
    all_logits = n * vocabulary * torch.float32.itemsize
    return 3 * (min(CUDA_CHUNK_BYTES, all_logits) - min(CHUNK_BYTES, all_logits))


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
        dtype: torch.dtype,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        n, vocabulary = hidden.shape[0], weight.shape[0]
        needed = any(ctx.needs_input_grad)
        keep = needed and n * vocabulary * hidden.itemsize <= KEEP_BYTES
        logprobs, entropy = hidden.new_empty(n), hidden.new_empty(n)
        kept_dtype = hidden.dtype if entropy_gradient else dtype
        kept = hidden.new_empty(n, vocabulary, dtype=kept_dtype) if keep else None
        logits = hidden.new_empty(min(chunk, n), vocabulary)
        probabilities = torch.empty_like(logits)
        rounded_hidden, rounded_weight = rounded(hidden, dtype), rounded(weight, dtype)
        for begin in range(0, n, chunk):
            part = slice(begin, min(begin + chunk, n))
            rows = part.stop - begin
            log_p = _logits(rounded_hidden[part], rounded_weight, bias, temperature, logits[:rows])
            torch.log_softmax(log_p, dim=1, out=log_p)
            p = torch.exp(log_p, out=probabilities[:rows])
            logprobs[part] = log_p.gather(1, targets[part, None])[:, 0]
            entropy[part] = -torch.linalg.vecdot(p, log_p)
            if kept is not None:
                kept[part] = p.scatter_(1, targets[part, None], 0.0)
        if needed:
            ctx.save_for_backward(hidden, weight, bias, targets, kept, entropy if entropy_gradient else None)
            ctx.temperature, ctx.dtype, ctx.chunk = temperature, dtype, chunk
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients for one part of the vocabulary at a time, if the probabilities were kept.

        So the weight's gradient, which is as large as the weight, is written once and not for each chunk.
        """
        hidden, weight, bias, targets, kept, entropy = ctx.saved_tensors
        to_hidden, to_weight, to_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.zeros_like(hidden) if to_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=hidden.dtype) if to_weight else None
        grad_bias = torch.zeros_like(bias, dtype=hidden.dtype) if to_bias else None
        product_hidden = hidden.to(ctx.dtype)
        product_weight = weight.to(ctx.dtype) if kept is None else weight  # or a part of it at a time
        (n, vocabulary), at_target = (hidden.shape[0], weight.shape[0]), hidden.new_zeros(hidden.shape[0], 1)
        rows = ctx.chunk if kept is None else max(1, n)
        width = max(1, ctx.chunk * vocabulary // rows)
        if kept is None:
            rounded_hidden, rounded_weight = rounded(hidden, ctx.dtype), rounded(weight, ctx.dtype)
            buffer = hidden.new_empty(min(rows, n), vocabulary)
        grad = (grad / ctx.temperature)[:, None]
        if entropy is not None:
            entropy = entropy[:, None]
            grad_entropy = (grad_entropy / ctx.temperature)[:, None]
        for begin in range(0, n, rows):
            part = slice(begin, min(begin + rows, n))
            if kept is None:
                again = buffer[: part.stop - begin]
                _logits(rounded_hidden[part], rounded_weight, bias, ctx.temperature, again)
                torch.softmax(again, dim=1, out=again)
                again.scatter_(1, targets[part, None], 0.0)
            for first in range(0, vocabulary, width):
                columns = slice(first, first + width)
                p = (again if kept is None else kept)[:, columns]
                if entropy is not None:  # of an entropy h: -p (log p + h)
                    d_entropy = torch.special.entr(p).sub_(p * entropy[part]).mul_(grad_entropy[part])
                d_logits = torch.mul(p, -grad[part].to(p.dtype), out=p if kept is None else None)
                if entropy is not None:
                    d_logits += d_entropy
                at_target[part] -= d_logits.sum(1, keepdim=True)
                if grad_bias is not None:
                    grad_bias[columns] += d_logits.sum(0)
                factor = d_logits.to(ctx.dtype)
                if grad_hidden is not None:
                    grad_hidden[part] += factor @ product_weight[columns].to(ctx.dtype)
                if grad_weight is not None:
                    grad_weight[columns] += factor.T @ product_hidden[part]
        # Of a logprob: onehot(target) - p.  A row's sum is 0; near 1, 1 - p would lose its digits.
        if grad_bias is not None:
            grad_bias.index_put_((targets,), at_target[:, 0], accumulate=True)
        if grad_hidden is not None:
            grad_hidden += at_target * product_weight[targets].to(ctx.dtype)
        if grad_weight is not None:
            grad_weight.index_put_((targets,), at_target * product_hidden, accumulate=True)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None, None


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, out: Tensor) -> Tensor:
    """Compute the logits [n, V] of hidden states [n, D] into ``out``."""
    if hidden.dtype != out.dtype:  # rounded factors on a GPU: the products and sums are wider
        torch.mm(hidden, weight.T, out_dtype=out.dtype, out=out)
        out /= temperature
    else:
        # D numbers to divide for each token, not V
        torch.mm(hidden if temperature == 1.0 else hidden / temperature, weight.T, out=out)
    if bias is not None:
        out += bias / temperature
    return out


def rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Round a factor of a product to ``dtype``; on a CPU the result is as wide as ``tensor``, or float32."""
    factor = tensor.to(dtype)
    return factor if factor.is_cuda else factor.to(torch.promote_types(tensor.dtype, torch.float32))
