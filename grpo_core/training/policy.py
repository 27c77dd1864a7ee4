"""The model as the trainer sees it: loaded, laid out in micro-batches, and scored at the sampled tokens."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attrs import field, frozen
from torch import Tensor, nn

from grpo_core.errors import ModelError, TrainerError
from grpo_core.models import keep_softcapping
from grpo_core.records import Canary, Row
from grpo_core.training.logprobs import token_logprobs

SHORT = 64
"""Tokens of a row, padding included, up to which its attention scores are computed as a whole."""


@frozen(kw_only=True, eq=False)
class MicroBatch:
    """Rows as one padded forward pass sees them; N sampled tokens in B rows of at most T tokens."""

    rows: tuple[Row, ...]
    input_ids: Tensor
    """[B, T], right-padded with 0: attention is causal, so what precedes never sees the padding."""
    positions: Tensor
    """[N], into the flattened [B x T]: each position whose next token was sampled."""
    targets: Tensor
    """[N], the sampled tokens."""
    row_of: Tensor
    """[N], from 0 to B - 1."""
    generation_logprobs: Tensor
    advantages: Tensor
    before: dict[str, Tensor] = field(factory=dict)
    """Logprobs [N] that are known before the step's first update: ``"proximal"``, ``"reference"``."""


def length(row: Row) -> int:
    """Tokens of a row that are input: up to the one before the last sampled token."""
    return len(row.prompt_ids) + _last_sampled(row)


def _last_sampled(row: Row) -> int:
    places = np.flatnonzero(row.tokens.sampled)
    return int(places[-1]) if places.size else -len(row.prompt_ids)


def collate(rows: Sequence[Row], device: torch.device, dtype: torch.dtype = torch.float32) -> MicroBatch:
    """Lay rows out for one forward pass.  Raises TrainerError for a sampled token that nothing precedes."""
    lengths = [length(row) for row in rows]
    ids = np.zeros((len(rows), max(lengths)), dtype=np.int64)
    positions, targets, row_of, logprobs = [], [], [], []
    for b, (row, n) in enumerate(zip(rows, lengths, strict=True)):
        tokens = np.concatenate([row.prompt_ids, row.tokens.ids])
        sampled = np.flatnonzero(row.tokens.sampled)
        if not len(row.prompt_ids) and sampled.size and sampled[0] == 0:
            raise TrainerError(f"a row of group {row.group} has no prompt: its first token cannot be scored")
        ids[b, :n] = tokens[:n]
        positions.append(sampled + (b * ids.shape[1] + len(row.prompt_ids) - 1))
        targets.append(tokens[len(row.prompt_ids) + sampled])
        logprobs.append(row.tokens.logprobs[sampled])
        row_of.append(np.full(sampled.size, b))
    counts = torch.tensor([len(each) for each in targets])
    advantages = torch.tensor([row.advantage for row in rows], dtype=dtype).repeat_interleave(counts)

    def joined(parts: list[Any], kind: torch.dtype) -> Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(device, kind)

    return MicroBatch(
        rows=tuple(rows),
        input_ids=torch.from_numpy(ids).to(device),
        positions=joined(positions, torch.int64),
        targets=joined(targets, torch.int64),
        row_of=joined(row_of, torch.int64),
        generation_logprobs=joined(logprobs, dtype),
        advantages=advantages.to(device),
    )


class Policy:
    """A causal language model whose sampled tokens can be scored.

    Args:
        model: a transformers causal language model with float32 weights.
        compute_dtype: of its matrix products (bfloat16: autocast); logprobs are float32 in any case.
    """

    def __init__(self, model: nn.Module, compute_dtype: torch.dtype = torch.float32) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        self._compute_dtype = compute_dtype
        self._plain_head = _has_plain_head(model)

    def score(self, micro: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
        """Logprobs [N] of the sampled tokens, with gradient, and the entropy [N] there, detached."""
        _choose_attention(micro.input_ids)
        if not self._plain_head:
            with self._precision():
                logits = self.model(input_ids=micro.input_ids, use_cache=False).logits
            return _from_logits(logits.flatten(0, 1)[micro.positions], micro.targets, temperature)
        with self._precision():
            hidden = self.model.base_model(input_ids=micro.input_ids, use_cache=False)[0]  # type: ignore[operator]
        head: Any = self.model.get_output_embeddings()  # type: ignore[operator]
        return token_logprobs(
            hidden.flatten(0, 1)[micro.positions],
            head.weight,
            micro.targets,
            bias=head.bias,
            temperature=temperature,
            product_dtype=self._compute_dtype if self._mixed else None,
        )

    @torch.no_grad()
    def next_tokens(self, prompts: Sequence[tuple[int, ...]], k: int = 16) -> tuple[Canary, ...]:
        """The ``k`` likeliest tokens after each prompt with their logprobs."""
        if not prompts:
            return ()
        ids = torch.zeros(len(prompts), max(map(len, prompts)), dtype=torch.int64)
        for b, prompt in enumerate(prompts):
            ids[b, : len(prompt)] = torch.tensor(prompt)
        last = torch.arange(len(prompts)), torch.tensor([len(prompt) - 1 for prompt in prompts])
        with self._precision():
            if self._plain_head:
                hidden = self.model.base_model(input_ids=ids.to(self.device), use_cache=False)[0]  # type: ignore[operator]
            else:
                logits = self.model(input_ids=ids.to(self.device), use_cache=False).logits[last]
        if self._plain_head:
            head: Any = self.model.get_output_embeddings()  # type: ignore[operator]
            logits = head(hidden[last].to(head.weight.dtype))
        log_p = torch.log_softmax(logits.float(), dim=-1)
        best = log_p.topk(min(k, log_p.shape[-1]))
        return tuple(
            Canary(prompt_ids=prompt, token_ids=tuple(tokens), logprobs=tuple(logprobs))
            for prompt, tokens, logprobs in zip(
                prompts, best.indices.tolist(), best.values.tolist(), strict=True
            )
        )

    @property
    def vocabulary(self) -> int:
        embedding: Any = self.model.get_input_embeddings()  # type: ignore[operator]
        return int(embedding.weight.shape[0])

    @property
    def _mixed(self) -> bool:
        return self._compute_dtype is torch.bfloat16

    def _precision(self) -> Any:
        if not self._mixed:
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)


def load(
    path: str | Path, *, device: torch.device, trust_remote_code: bool = False, checkpointing: bool = False
) -> nn.Module:
    """A transformers model with float32 weights from safetensors (never from pickles), without dropout.

    Raises ModelError.
    """
    import transformers

    transformers.utils.logging.disable_progress_bar()
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, trust_remote_code=trust_remote_code, use_safetensors=True
        )
    except Exception as error:
        reason = str(error).strip().splitlines()
        raise ModelError(
            f"model {str(path)!r} cannot be loaded ({type(error).__name__}: {reason[0] if reason else ''}); "
            "expected a directory or hub id of a transformers causal language model in safetensors"
        ) from error
    keep_softcapping(model)
    model.to(device)
    # The engine samples without dropout; with it the trainer would score another policy.
    for module in model.modules():
        for name in ("p", "dropout", "attention_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    model.train(checkpointing)  # transformers checkpoints activations only in training mode
    if checkpointing:
        enable = (
            getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        )
        enable({"use_reentrant": False})
    typed: nn.Module = model
    return typed


def _choose_attention(input_ids: Tensor) -> None:
    """For short rows on a CPU, whole score matrices instead of the fused kernel's blocks.

    With the demo's rows of about 14 tokens a step takes three quarters of the time.  The choice holds until
    the next call, so that checkpointed activations are computed again by the same kernel.
    """
    if input_ids.device.type == "cpu":
        torch.backends.cuda.enable_flash_sdp(input_ids.shape[1] > SHORT)  # its name aside, the CPU's too


@torch.no_grad()
def _has_plain_head(model: nn.Module) -> bool:
    """Whether the logits are a linear function of the base model's output: no soft-capping or scaling."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if not isinstance(head, nn.Linear) or not hasattr(model, "base_model"):
        return False
    ids = torch.arange(4, device=head.weight.device).remainder(head.weight.shape[0])[None]
    logits = model(input_ids=ids, use_cache=False).logits
    hidden = model.base_model(input_ids=ids, use_cache=False)[0]  # type: ignore[operator]
    expected = head(hidden) if hidden.shape[-1] == head.weight.shape[1] else None
    return expected is not None and torch.allclose(logits, expected, rtol=1e-4, atol=1e-5)


def _from_logits(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    log_p = torch.log_softmax(logits.float() / temperature, dim=-1)
    with torch.no_grad():
        entropy = -torch.linalg.vecdot(log_p.exp(), log_p)
    return log_p.gather(1, targets[:, None])[:, 0], entropy
