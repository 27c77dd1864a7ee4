"""Losses of published methods."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from attrs import evolve

from grpo_core import LossInputs, needs
from grpo_core.losses import LARGEST_LOG_RATIO, bounded_exp, hints_chosen_by
from grpo_plugin_algorithms.corrections import Correction, Off, TokenMask, TokenTruncate
from grpo_plugin_algorithms.hints import Environment, RightRollout, Teach, chosen_hints
from grpo_plugin_algorithms.kl import Kl
from grpo_plugin_algorithms.ranges import CLIP, FACTOR, POSITIVE, RATIO_CAP, SHARE
from grpo_plugin_algorithms.ratios import Sequence, SequenceToken, Token, sums
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


@checked(coefficient=FACTOR, clip=POSITIVE, clip_low=SHARE, clip_high=CLIP)
@hints_chosen_by(chosen_hints)
@needs("scores.hinted")
def self_distillation(
    inputs: LossInputs,
    *,
    teach: Teach = "wrong_only",
    hint: Environment | RightRollout = Environment(),
    coefficient: float = 1.0,
    clip: float = 2.0,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    correction: Correction = TokenTruncate(),
    kl: Kl = Kl(),
    entropy: Entropy = Entropy(),
    mask: Mask = Mask(),
    nll_coefficient: float = 0.0,
    on_policy: bool = False,
) -> LossOutput:
    """Self-distillation: what the policy would have said with a hint teaches it without one.

    The score ``hinted`` is log p of the sampled tokens in the hinted context.  Where a hint teaches, the
    advantage of a token is ::

        A = coefficient clip(sg(score - log policy), -clip, clip)

    with sg the stopped gradient, and its loss is that of ``grpo``: in the first update, its gradient is
    -w A grad log policy, an estimate of the gradient of the reverse KL divergence from the policy to itself
    with the hint (SDPO, arXiv 2601.20802; OPSD, arXiv 2601.18734).  Elsewhere A is the advantage of the
    rewards.  That rollouts which are right learn from rewards and the others from hints is SRPO's (arXiv
    2604.02288).

    Metrics: those of ``grpo``, and of tokens that a hint teaches ``hinted`` (their share),
    ``hinted_difference`` (score - log policy; 0 elsewhere) and ``hinted_clipped``.

    Args:
        inputs: the sampled tokens of one micro-batch.
        teach: a hint teaches rollouts that are not right ("wrong_only"), or all that have one ("all"), or
            adds to the advantage of the rewards of all ("mix").  Right is the environment's success.
        hint: "environment" for its hints, or "right_rollout" for the last reply of another rollout of the
            group.
        coefficient: factor of what hints teach.
        clip: bound of a token's difference, in nats, on both sides.  OPSD bounds each token's divergence, as
            words of style differ 6 to 15 times as much as others; this bound, a factor of 7, is our choice.
        clip_low: the ratio of a token with a negative advantage is clipped below 1 minus this.
        clip_high: the ratio of a token with a positive advantage is clipped above 1 plus this.
        correction: weight w of tokens that older weights sampled.
        kl: the KL divergence to the reference model.
        entropy: a bonus for the entropy.
        mask: the tokens that the objective trains.
        nll_coefficient: factor of the negative logprobs' mean over the tokens of right rollouts (VAPO).
        on_policy: the policy stands for the proximal one, so that every ratio is 1; one update per step.
    """
    difference = inputs.scores["hinted"] - inputs.policy_logprobs.detach()
    hinted = ~difference.isnan()
    difference = difference.where(hinted, 0.0)
    rewards = inputs.advantages if teach == "mix" else inputs.advantages.where(~hinted, 0.0)
    inputs = evolve(inputs, advantages=rewards + coefficient * difference.clamp(-clip, clip))
    given = prepare(inputs, correction, kl, Teacher(), mask, on_policy)
    r = Token().of(given.inputs)
    losses, metrics = _clipped(given, r, clip_low, clip_high)
    taught = {
        "hinted": hinted.to(r.dtype),
        "hinted_difference": difference,
        "hinted_clipped": (difference.abs() > clip).to(r.dtype),
    }
    return with_terms(given, losses, metrics | taught, kl, Teacher(), entropy, nll_coefficient, r)


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


@checked(k_positive=FACTOR, lambda_positive=POSITIVE, k_negative=FACTOR, lambda_negative=POSITIVE)
@needs("sequences")
def vespo(
    inputs: LossInputs,
    *,
    k_positive: float = 2.0,
    lambda_positive: float = 3.0,
    k_negative: float = 3.0,
    lambda_negative: float = 2.0,
    correction: Off | TokenTruncate | TokenMask = TokenTruncate(),
    kl: Kl = Kl(),
    teacher: Teacher = Teacher(),
    entropy: Entropy = Entropy(),
    mask: Mask = Mask(),
    nll_coefficient: float = 0.0,
    on_policy: bool = False,
) -> LossOutput:
    """Policy gradient with a smooth weight of the whole rollout's ratio (VESPO, arXiv 2602.10693).

    With W the product over the rollout of policy / proximal and of the importance weights, a token's loss
    is::

        - sg(phi(W)) A log policy,  phi(W) = exp(lambda) W^k exp(- lambda W)

    phi(1) is 1.  Logarithms are limited to [log 1e-8, 20], and those of policy / proximal to [-20, 20].
    Metrics: ``sequence_weight`` (phi).

    Args:
        inputs: the sampled tokens of one micro-batch, whose rollouts are whole.
        k_positive: k where the advantage is at least 0.
        lambda_positive: lambda where the advantage is at least 0.
        k_negative: k where the advantage is negative.
        lambda_negative: lambda where the advantage is negative.
        correction: importance weights of the tokens, a part of W.
        kl: the KL divergence to the reference model.
        teacher: the divergence to a teacher, and the weight of rewards beside it.
        entropy: a bonus for the entropy.
        mask: the tokens that the objective trains.
        nll_coefficient: factor of the negative logprobs' mean over the tokens of right rollouts (VAPO).
        on_policy: the policy stands for the proximal one, so that every ratio is 1; one update per step.
    """
    given = prepare(inputs, correction, kl, teacher, mask, on_policy)
    inputs, least = given.inputs, math.log(1e-8)
    moved = (inputs.policy_logprobs - inputs.proximal_logprobs).detach()
    moved = moved.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    weighted = moved + given.weights.log().clamp(least, LARGEST_LOG_RATIO)
    product = sums(weighted, inputs.sequences).clamp(least, LARGEST_LOG_RATIO)
    positive, full = inputs.advantages >= 0, inputs.advantages.new_full
    k = full((), k_positive).where(positive, k_negative)
    rate = full((), lambda_positive).where(positive, lambda_negative).clamp(min=1e-4)
    phi = (rate + k * product - rate * product.exp()).exp()
    losses = -phi * inputs.advantages * inputs.policy_logprobs
    metrics, r = {"sequence_weight": phi}, Token().of(inputs)
    return with_terms(given, losses, metrics, kl, teacher, entropy, nll_coefficient, r)


@checked(mask_low=SHARE, mask_high=SHARE, drift_coefficient=FACTOR)
def dppo(
    inputs: LossInputs,
    *,
    mask_low: float = 0.2,
    mask_high: float = 0.2,
    drift_coefficient: float = 1e-3,
    kl: Kl = Kl(),
    teacher: Teacher = Teacher(),
    entropy: Entropy = Entropy(),
    mask: Mask = Mask(),
    nll_coefficient: float = 0.0,
) -> LossOutput:
    """Policy gradient that drops tokens whose probability has moved too far (DPPO, arXiv 2602.04879).

    With r = policy / generation, a token's loss is::

        - keep r A + drift_coefficient (log r)^2

    keep is 0 if A > 0 and policy - generation > ``mask_high``, or if A <= 0 and policy - generation < -
    ``mask_low``, as probabilities (the binary total variation); otherwise 1.  prime-rl trains with this loss.

    Args:
        inputs: the sampled tokens of one micro-batch.
        mask_low: how much less likely a token without a positive advantage may be than when it was sampled.
        mask_high: how much likelier a token with a positive advantage may be than when it was sampled.
        drift_coefficient: factor of the squared log ratio of every token.
        kl: the KL divergence to the reference model.
        teacher: the divergence to a teacher, and the weight of rewards beside it.
        entropy: a bonus for the entropy.
        mask: the tokens that the objective trains.
        nll_coefficient: factor of the negative logprobs' mean over the tokens of right rollouts (VAPO).
    """
    given = prepare(inputs, Off(), kl, teacher, mask, on_policy=False)
    policy, generation = inputs.policy_logprobs, inputs.generation_logprobs
    advantages = given.inputs.advantages
    r = bounded_exp(policy - generation)
    moved = (policy.exp() - generation.exp()).detach()
    dropped = ((advantages > 0) & (moved > mask_high)) | ((advantages <= 0) & (moved < -mask_low))
    losses = -(r * advantages).where(~dropped, 0.0) + drift_coefficient * (policy - generation).square()
    metrics = {
        "clip_fraction_low": (dropped & (advantages < 0)).to(r.dtype),
        "clip_fraction_high": (dropped & (advantages > 0)).to(r.dtype),
    }
    return with_terms(given, losses, metrics, kl, teacher, entropy, nll_coefficient, r)


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
