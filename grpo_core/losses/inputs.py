"""Makes the inputs of a loss from padded tensors, for uses outside of the trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from grpo_core.contracts.loss import LossInputs
from grpo_core.losses.aggregation import Aggregation, row_weights

if TYPE_CHECKING:
    from torch import Tensor


def padded(
    *,
    policy_logprobs: Tensor,
    mask: Tensor,
    advantages: Tensor,
    proximal_logprobs: Tensor | None = None,
    generation_logprobs: Tensor | None = None,
    scores: Mapping[str, Tensor] | None = None,
    entropy: Tensor | None = None,
    correct: Tensor | None = None,
    prompts: Sequence[int] | None = None,
    aggregation: Aggregation = "token",
    constant: float | None = None,
    empty_rows: bool = False,
) -> LossInputs:
    """Make the inputs of a loss for a whole update from tensors [B, T], one row for each rollout.

    Args:
        policy_logprobs: logprobs [B, T] with gradient.
        mask: which tokens [B, T] are trained; the others are ignored, also in divisors.
        advantages: [B], or [B, T] with one for each token.
        proximal_logprobs: logprobs [B, T] of the weights that the step started from; None: the policy itself.
        generation_logprobs: logprobs [B, T] by the engine; None: the proximal ones, which also replace NaN
            (unknown), so that the importance weight is 1.
        scores: logprobs [B, T] by the names of scores, such as "reference".
        entropy: entropies [B, T] of the policy, with gradient or without.
        correct: whether each rollout [B] is right.
        prompts: a number [B] for each row that is equal for the rollouts of one prompt; None: all are of one.
        aggregation: see ``row_weights``.
        constant: see ``row_weights``.
        empty_rows: count rows without a trained token as sequences and prompts, too.
    """
    picked = mask.bool()
    of = [0] * len(picked) if prompts is None else list(prompts)
    weights = _weights(picked.sum(1).tolist(), of, aggregation, constant, empty_rows)
    all_rows = advantages.new_zeros(len(of)).double()
    for row, weight in weights.items():
        all_rows[row] = weight
    rows = picked.nonzero()[:, 0]

    def flat(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        return tensor[rows] if tensor.dim() == 1 else tensor[picked]

    policy = policy_logprobs[picked]
    proximal = policy.detach() if proximal_logprobs is None else proximal_logprobs[picked]
    generation = proximal if generation_logprobs is None else generation_logprobs[picked]
    generation = generation.where(~generation.isnan(), proximal)
    right = None if correct is None else correct[rows].bool()
    given = flat(advantages)
    entropies = flat(entropy)
    assert given is not None
    return LossInputs(
        policy_logprobs=policy,
        proximal_logprobs=proximal,
        generation_logprobs=generation,
        scores={name: tensor[picked] for name, tensor in (scores or {}).items()},
        entropy=entropies,
        advantages=given,
        rows=rows,
        weights=all_rows[rows].to(policy.dtype),
        step=0,
        update=0,
        update_tokens=len(rows),
        update_rows=len(weights),
        update_sequences=len(weights),
        update_prompts=len({of[row] for row in weights}),
        correct=right,
        update_correct_tokens=0 if right is None else int(right.sum()),
        update_entropies=None if entropies is None else entropies.detach(),
    )


def _weights(
    tokens: Sequence[int],
    prompts: Sequence[int],
    aggregation: Aggregation,
    constant: float | None,
    empty_rows: bool,
) -> dict[int, float]:
    """Return the weight of each token of the rows that count."""
    counted = [row for row, n in enumerate(tokens) if n or empty_rows]
    weights = row_weights(
        [tokens[row] for row in counted],
        sequences=counted,
        prompts=[prompts[row] for row in counted],
        aggregation=aggregation,
        constant=constant,
    )
    return dict(zip(counted, weights, strict=True))
