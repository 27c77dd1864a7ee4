"""Losses of published methods."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grpo_core import LossInputs, needs
from grpo_plugin_algorithms.corrections import Correction, TokenTruncate
from grpo_plugin_algorithms.kl import Kl
from grpo_plugin_algorithms.ranges import CLIP, POSITIVE, RATIO_CAP, SHARE
from grpo_plugin_algorithms.ratios import Sequence, SequenceToken, Token
from grpo_plugin_algorithms.terms import Entropy, Mask, Prepared, Teacher, checked, prepare, with_terms

if TYPE_CHECKING:
    from torch import Tensor

    from grpo_plugin_algorithms.terms import LossOutput


@checked(clip_low=SHARE, clip_high=CLIP, dual_clip=RATIO_CAP, ratio_cap=RATIO_CAP)
def grpo(
    inputs: LossInputs,
    *,
    ratio: Token | Sequence | SequenceToken = Token(),
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = None,
    ratio_cap: float | None = None,
    correction: Correction = TokenTruncate(),
    kl: Kl = Kl(),
    teacher: Teacher = Teacher(),
    entropy: Entropy = Entropy(),
    mask: Mask = Mask(),
    nll_coefficient: float = 0.0,
    on_policy: bool = False,
) -> LossOutput:
    """Clipped policy gradient with a correction for tokens that older weights sampled.

    With r = policy / proximal, w = min(proximal / generation, ``cap``) and advantage A, a token's loss is::

        - w min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)

    the decoupled objective (AReaL, arXiv 2505.24298 eq. 5) with a truncated importance weight (IMPALA, arXiv
    1802.01561).  The clip bounds how far a step moves from where it began, the weight corrects for who
    sampled.  Where proximal is generation, w is 1 and this is PPO's objective (arXiv 1707.06347 eq. 7); an
    asymmetric clip is DAPO's (arXiv 2503.14476).  ``dual_clip`` = c > 1 bounds the loss of a negative
    advantage by - c A (arXiv 1912.09729), ``ratio_cap`` the ratio of the unclipped branch (arXiv 2505.07291).

    Metrics: ``clip_fraction_low``, ``clip_fraction_high`` (tokens whose gradient the clip removes),
    ``importance_weight_mean``, ``importance_weight_max`` (after the bounds), ``kl``.

    Args:
        inputs: the sampled tokens of one micro-batch.
        ratio: "token", the geometric mean over the rollout ("sequence", GSPO), or its value with the
            gradient of the token ("sequence_token").
        clip_low: the ratio of a token with a negative advantage is clipped below 1 minus this.
        clip_high: the ratio of a token with a positive advantage is clipped above 1 plus this.
        dual_clip: bounds the loss of a negative advantage by this times the advantage; more than 1.  None
            does not bound it.
        ratio_cap: bounds the ratio of the unclipped branch, for both signs of the advantage; more than 1.
        correction: weight w of tokens that older weights sampled.
        kl: the KL divergence to the reference model.
        teacher: the divergence to a teacher, and the weight of rewards beside it.
        entropy: a bonus for the entropy.
        mask: the tokens that the objective trains.
        nll_coefficient: factor of the negative logprobs' mean over the tokens of right rollouts (VAPO).
        on_policy: the policy stands for the proximal one, so that every ratio is 1; one update per step.
    """
    given = prepare(inputs, correction, kl, teacher, mask, on_policy)
    r = ratio.of(given.inputs)
    losses, metrics = _clipped(given, r, clip_low, clip_high, dual_clip, ratio_cap)
    return with_terms(given, losses, metrics, kl, teacher, entropy, nll_coefficient, r)


@checked(clip_low=SHARE, clip_high=CLIP)
def distillation(
    inputs: LossInputs,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    correction: Correction = TokenTruncate(),
    kl: Kl = Kl(),
    teacher: Teacher = Teacher(coefficient=1.0, reward_coefficient=0.0),
    entropy: Entropy = Entropy(),
    mask: Mask = Mask(),
    nll_coefficient: float = 0.0,
    on_policy: bool = False,
) -> LossOutput:
    """On-policy distillation: the teacher's logprobs are the advantages of the policy's own tokens.

    With r = policy / proximal and A = log teacher - log proximal, a token's loss is::

        - w min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)

    The mean of - A estimates the reverse KL divergence from the policy to the teacher (GKD with the reverse
    KL on samples of the student, arXiv 2306.13649; MiniLLM, arXiv 2306.08543).  Rewards count with
    ``teacher.reward_coefficient``.

    Args:
        inputs: the sampled tokens of one micro-batch.
        clip_low: the ratio of a token with a negative advantage is clipped below 1 minus this.
        clip_high: the ratio of a token with a positive advantage is clipped above 1 plus this.
        correction: weight w of tokens that older weights sampled.
        kl: the KL divergence to the reference model.
        teacher: the divergence to a teacher, and the weight of rewards beside it.
        entropy: a bonus for the entropy.
        mask: the tokens that the objective trains.
        nll_coefficient: factor of the negative logprobs' mean over the tokens of right rollouts (VAPO).
        on_policy: the policy stands for the proximal one, so that every ratio is 1; one update per step.
    """
    given = prepare(inputs, correction, kl, teacher, mask, on_policy)
    r = Token().of(given.inputs)
    losses, metrics = _clipped(given, r, clip_low, clip_high)
    return with_terms(given, losses, metrics, kl, teacher, entropy, nll_coefficient, r)


@checked(clip_low=SHARE, clip_high=CLIP)
@needs("sequences")
def gspo(
    inputs: LossInputs,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    correction: Correction = TokenTruncate(),
    kl: Kl = Kl(),
    teacher: Teacher = Teacher(),
    entropy: Entropy = Entropy(),
    mask: Mask = Mask(),
    nll_coefficient: float = 0.0,
    on_policy: bool = False,
) -> LossOutput:
    """Clipped policy gradient with one ratio for each rollout (GSPO, arXiv 2507.18071 eq. 5).

    With s the geometric mean of policy / proximal over the tokens of the rollout, a token's loss is::

        - w min(s A, clip(s, 1 - clip_low, 1 + clip_high) A)

    The paper averages over rollouts: ``loss.aggregation = "sequence"``.

    Args:
        inputs: the sampled tokens of one micro-batch, whose rollouts are whole.
        clip_low: the ratio of a rollout with a negative advantage is clipped below 1 minus this.
        clip_high: the ratio of a rollout with a positive advantage is clipped above 1 plus this.
        correction: weight w of tokens that older weights sampled.
        kl: the KL divergence to the reference model.
        teacher: the divergence to a teacher, and the weight of rewards beside it.
        entropy: a bonus for the entropy.
        mask: the tokens that the objective trains.
        nll_coefficient: factor of the negative logprobs' mean over the tokens of right rollouts (VAPO).
        on_policy: the policy stands for the proximal one, so that every ratio is 1; one update per step.
    """
    given = prepare(inputs, correction, kl, teacher, mask, on_policy)
    r = Sequence().of(given.inputs)
    losses, metrics = _clipped(given, r, clip_low, clip_high)
    return with_terms(given, losses, metrics, kl, teacher, entropy, nll_coefficient, r)


@checked(clip_low=SHARE, clip_high=CLIP)
def cispo(
    inputs: LossInputs,
    *,
    ratio: Token | Sequence = Token(),
    clip_low: float = 1.0,
    clip_high: float = 4.0,
    correction: Correction = TokenTruncate(),
    kl: Kl = Kl(),
    teacher: Teacher = Teacher(),
    entropy: Entropy = Entropy(),
    mask: Mask = Mask(),
    nll_coefficient: float = 0.0,
    on_policy: bool = False,
) -> LossOutput:
    """Policy gradient whose clipped ratio is a weight, so that no token loses its gradient (CISPO).

    With r = policy / proximal, and sg the stopped gradient, a token's loss is::

        - w sg(clip(r, 1 - clip_low, 1 + clip_high)) A log policy

    (MiniMax-M1, arXiv 2506.13585 eq. 4).  With the default ``clip_low`` = 1 there is no lower bound.

    Args:
        inputs: the sampled tokens of one micro-batch.
        ratio: "token", or the geometric mean over the rollout ("sequence").
        clip_low: the ratio is clipped below 1 minus this.
        clip_high: the ratio is clipped above 1 plus this; 4 caps it at 5.
        correction: weight w of tokens that older weights sampled.
        kl: the KL divergence to the reference model.
        teacher: the divergence to a teacher, and the weight of rewards beside it.
        entropy: a bonus for the entropy.
        mask: the tokens that the objective trains.
        nll_coefficient: factor of the negative logprobs' mean over the tokens of right rollouts (VAPO).
        on_policy: the policy stands for the proximal one, so that every ratio is 1; one update per step.
    """
    given = prepare(inputs, correction, kl, teacher, mask, on_policy)
    r = ratio.of(given.inputs)
    factor = r.clamp(1 - clip_low, 1 + clip_high).detach()
    losses = given.weights * (-factor * given.inputs.advantages * inputs.policy_logprobs)
    metrics = {
        "clip_fraction_low": (r < 1 - clip_low).to(r.dtype),
        "clip_fraction_high": (r > 1 + clip_high).to(r.dtype),
    }
    return with_terms(given, losses, metrics, kl, teacher, entropy, nll_coefficient, r)


@checked(temperature_positive=POSITIVE, temperature_negative=POSITIVE)
def sapo(
    inputs: LossInputs,
    *,
    ratio: Token | Sequence = Token(),
    temperature_positive: float = 1.0,
    temperature_negative: float = 1.05,
    correction: Correction = TokenTruncate(),
    kl: Kl = Kl(),
    teacher: Teacher = Teacher(),
    entropy: Entropy = Entropy(),
    mask: Mask = Mask(),
    nll_coefficient: float = 0.0,
    on_policy: bool = False,
) -> LossOutput:
    """Policy gradient with a soft gate instead of a clip (SAPO, arXiv 2511.20347).

    With r = policy / proximal, and t the temperature for the sign of the advantage, a token's loss is::

        - w 4 / t sigmoid(t (r - 1)) A

    Args:
        inputs: the sampled tokens of one micro-batch.
        ratio: "token", or the geometric mean over the rollout ("sequence").
        temperature_positive: t of tokens with a positive advantage; a higher t makes the gate narrower.
        temperature_negative: t of the other tokens.
        correction: weight w of tokens that older weights sampled.
        kl: the KL divergence to the reference model.
        teacher: the divergence to a teacher, and the weight of rewards beside it.
        entropy: a bonus for the entropy.
        mask: the tokens that the objective trains.
        nll_coefficient: factor of the negative logprobs' mean over the tokens of right rollouts (VAPO).
        on_policy: the policy stands for the proximal one, so that every ratio is 1; one update per step.
    """
    given = prepare(inputs, correction, kl, teacher, mask, on_policy)
    r = ratio.of(given.inputs)
    advantages = given.inputs.advantages
    t = advantages.new_full((), temperature_positive).where(advantages > 0, temperature_negative)
    losses = given.weights * (-(t * (r - 1)).sigmoid() * 4 / t * advantages)
    return with_terms(given, losses, {}, kl, teacher, entropy, nll_coefficient, r)


@checked(has_ratio=False)
def reinforce(
    inputs: LossInputs,
    *,
    correction: Correction = TokenTruncate(),
    kl: Kl = Kl(),
    teacher: Teacher = Teacher(),
    entropy: Entropy = Entropy(),
    mask: Mask = Mask(),
    nll_coefficient: float = 0.0,
    on_policy: bool = False,
) -> LossOutput:
    """Policy gradient without a clip (REINFORCE; with leave-one-out advantages RLOO, arXiv 2402.14740).

    A token's loss is::

        - w A log policy

    There is no ratio that bounds the change of the policy: use one update (``trainer.updates_per_step = 1``).

    Args:
        inputs: the sampled tokens of one micro-batch.
        correction: weight w of tokens that older weights sampled.
        kl: the KL divergence to the reference model.
        teacher: the divergence to a teacher, and the weight of rewards beside it.
        entropy: a bonus for the entropy.
        mask: the tokens that the objective trains.
        nll_coefficient: factor of the negative logprobs' mean over the tokens of right rollouts (VAPO).
        on_policy: the policy stands for the proximal one, so that every ratio is 1; one update per step.
    """
    given = prepare(inputs, correction, kl, teacher, mask, on_policy)
    losses = given.weights * -given.inputs.advantages * inputs.policy_logprobs
    return with_terms(given, losses, {}, kl, teacher, entropy, nll_coefficient)


def _clipped(
    given: Prepared,
    r: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    ratio_cap: float | None = None,
) -> LossOutput:
    """Compute the clipped objective with a ratio [N], and the fractions of clipped tokens."""
    advantages = given.inputs.advantages
    capped = r if ratio_cap is None else r.clamp(max=ratio_cap)
    objective = (capped * advantages).minimum(r.clamp(1 - clip_low, 1 + clip_high) * advantages)
    if dual_clip is not None:
        objective = objective.maximum(dual_clip * advantages).where(advantages < 0, objective)
    metrics = {
        "clip_fraction_low": ((r < 1 - clip_low) & (advantages < 0)).to(r.dtype),
        "clip_fraction_high": ((r > 1 + clip_high) & (advantages > 0)).to(r.dtype),
    }
    return given.weights * -objective, metrics
