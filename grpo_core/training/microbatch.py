"""Rows laid out for one forward pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from attrs import evolve, field, frozen
from numpy.typing import NDArray
from torch import Tensor

from grpo_core.contracts.errors import TrainerError
from grpo_core.contracts.records import Row
from grpo_core.contracts.tokens import Tokens
from grpo_core.training.batching import length, rollouts
from grpo_core.training.packing import Part


@frozen(kw_only=True, eq=False)
class MicroBatch:
    """Rows as one forward pass sees them; N sampled tokens in B rows of at most T tokens."""

    rows: tuple[Row, ...]
    """Empty in a micro-batch that only takes part in the ranks' collectives; see ``without_rows``."""
    input_ids: Tensor
    """Token ids [B, T], right-padded with 0: attention is causal, so no token sees the padding.  Packed rows
    are concatenated: [1, T].  A prompt that several of them share occurs once."""
    positions: Tensor
    """Positions [N] in the flattened ids whose next token was sampled."""
    targets: Tensor
    """Ids [N] of the sampled tokens."""
    row_of: Tensor
    """Row [N] of each sampled token, from 0 to B - 1."""
    generation_logprobs: Tensor
    advantages: Tensor
    sequences: Tensor
    """Rollout [N] of each sampled token, numbered from 0 in this micro-batch."""
    correct: Tensor
    """Whether the rollout of each sampled token is right: bool [N]."""
    weights: Tensor
    """Factor [N] of each token's loss in the update's loss, float64."""
    proximal_logprobs: Tensor | None = None
    """Logprobs [N] by the weights that the step starts from; None if this update starts there."""
    scores: Mapping[str, Tensor] = field(factory=dict)
    """Logprobs [N] of each score that the loss needs."""
    packed: tuple[Part, ...] = ()
    """The parts that the rows consist of, if they are packed."""

    @property
    def n_tokens(self) -> int:
        """Tokens of its rows, padding included; a prompt that rows share counts in each."""
        if self.packed and self.rows:
            return sum(map(length, self.rows))
        return self.input_ids.numel() if self.rows else 0


def collate(
    rows: Sequence[Row],
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    *,
    weights: Sequence[float] | None = None,
    packed: bool = False,
) -> MicroBatch:
    """Lay rows out for one forward pass.

    Args:
        rows: the rows to lay out.
        device: of all tensors.
        dtype: of the logprobs and advantages.
        weights: factor of the losses of each row's tokens; None is 0.
        packed: whether rows are concatenated instead of padded.

    Raises TrainerError if a row begins with a sampled token.
    """
    lengths = [length(row) for row in rows]
    parts, offsets = _packed(rows, lengths) if packed else ((), _side_by_side(rows, max(lengths)))
    ids = np.zeros(sum(part.length for part in parts) or len(rows) * max(lengths), dtype=np.int64)
    positions, targets = _fill(ids, rows, lengths, offsets)
    counts = [each.size for each in targets]
    numbers = {rollout: number for number, rollout in enumerate(dict.fromkeys(rollouts(rows)))}

    def repeated(of_rows: Sequence[float], kind: torch.dtype) -> Tensor:
        return torch.from_numpy(np.repeat(np.asarray(of_rows), counts)).to(device, kind)

    def joined(parts: Sequence[NDArray[Any]], kind: torch.dtype) -> Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(device, kind)

    return MicroBatch(
        rows=tuple(rows),
        input_ids=torch.from_numpy(ids.reshape(1 if packed else len(rows), -1)).to(device),
        positions=joined(positions, torch.int64),
        targets=joined(targets, torch.int64),
        row_of=repeated(range(len(rows)), torch.int64),
        generation_logprobs=joined([row.tokens.logprobs[row.tokens.sampled] for row in rows], dtype),
        advantages=joined(
            [
                np.full(n, row.advantage) if row.token_advantages is None else row.token_advantages
                for row, n in zip(rows, counts, strict=True)
            ],
            dtype,
        ),
        sequences=repeated([numbers[rollout] for rollout in rollouts(rows)], torch.int64),
        correct=repeated([row.correct for row in rows], torch.bool),
        weights=repeated(weights or [0.0] * len(rows), torch.float64),
        packed=parts,
    )


def _fill(
    ids: NDArray[np.int64],
    rows: Sequence[Row],
    lengths: Sequence[int],
    offsets: Sequence[tuple[int, int]],
) -> tuple[list[NDArray[np.int64]], list[NDArray[np.int32]]]:
    """Write the tokens of rows into the flattened ids; return the positions and the ids of sampled ones."""
    positions, targets = [], []
    for row, n, (prompt, rest) in zip(rows, lengths, offsets, strict=True):
        tokens = np.concatenate([row.prompt_ids, row.tokens.ids])
        sampled, n_prompt = np.flatnonzero(row.tokens.sampled), len(row.prompt_ids)
        if not n_prompt and sampled.size and sampled[0] == 0:
            raise TrainerError(f"a row of group {row.group} has no prompt: its first token cannot be scored")
        ids[prompt : prompt + min(n, n_prompt)] = tokens[: min(n, n_prompt)]
        ids[rest : rest + n - n_prompt] = tokens[n_prompt:n]
        positions.append(np.where(sampled, sampled + (rest - 1), prompt + n_prompt - 1))
        targets.append(tokens[n_prompt + sampled])
    return positions, targets


def _side_by_side(rows: Sequence[Row], width: int) -> list[tuple[int, int]]:
    """Return the offsets of each row's prompt and of its continuation in the flattened ids."""
    return [(b * width, b * width + len(row.prompt_ids)) for b, row in enumerate(rows)]


def _packed(rows: Sequence[Row], lengths: Sequence[int]) -> tuple[tuple[Part, ...], list[tuple[int, int]]]:
    """Return the parts of packed rows, and the offsets of each row's prompt and continuation.

    A prompt that several rows share is one part.
    """
    prompts = [row.prompt_ids.tobytes() for row in rows]
    shared = {prompt for prompt, n in Counter(prompts).items() if prompt and n > 1}
    parts: list[Part] = []
    offsets: list[tuple[int, int]] = []
    first: dict[bytes, tuple[int, int]] = {}
    end = 0

    def add(length: int, before: int | None = None) -> int:
        nonlocal end
        if length:
            parts.append(Part(length=length, before=before))
            end += length
        return end - length

    for row, prompt, n in zip(rows, prompts, lengths, strict=True):
        n_prompt = len(row.prompt_ids)
        if prompt not in shared:
            begin = add(n)
            offsets.append((begin, begin + n_prompt))
            continue
        if prompt not in first:
            first[prompt] = len(parts), add(n_prompt)
        number, begin = first[prompt]
        offsets.append((begin, add(n - n_prompt, number)))
    return tuple(parts), offsets


def without_rows(device: torch.device) -> MicroBatch:
    """Make a micro-batch of no rows: one token is scored, and nothing is trained."""
    tokens = Tokens.generated((0,), (0.0,), (0,))
    row = Row(prompt_ids=(0,), tokens=tokens, advantage=0.0, group=0)
    return evolve(collate([row], device), rows=())
