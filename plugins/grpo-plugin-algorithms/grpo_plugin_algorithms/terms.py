"""The options that losses share: corrections, masks, KL, an entropy bonus, a likelihood term for successes.

``composed`` turns an objective into a loss by adding these options.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any, Literal

import attrs
from attrs import evolve, field, frozen

from grpo_core import LossInputs, needs
from grpo_core.losses import LossSetting, Remark, bounded_exp, options_checked_by
from grpo_plugin_algorithms.combinations import Declared, Lack, problems
from grpo_plugin_algorithms.corrections import BY_SEQUENCE, importance_weights, off_policy_kept
from grpo_plugin_algorithms.kl import kl_estimate, score_weights
from grpo_plugin_algorithms.ranges import FINITE, NOT_NEGATIVE, POSITIVE, Range

if TYPE_CHECKING:
    from torch import Tensor

    LossOutput = tuple[Tensor, dict[str, Tensor]]


def _option(default: Any, meaning: str, within: Range = FINITE, *, only_with: str = "") -> Any:
    """Declare an option, which has no effect unless the option ``only_with`` is set."""
    return field(default=default, metadata={"meaning": meaning, "within": within, "only_with": only_with})


FACTOR = Range(at_least=0, why="since a negative factor would push the policy away")


@frozen(kw_only=True)
class Terms:
    """The options that all losses share."""

    correction: Literal[
        "off", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "geometric_mask"
    ] = _option(
        "token_truncate",
        'correction for tokens that older weights sampled, a weight of the objective: "token_truncate" '
        '(truncated importance sampling), "token_mask" (IcePop: tokens outside of the bounds are dropped), '
        '"sequence_truncate", "sequence_mask" (the product over a rollout), "geometric_mask" (rollouts whose '
        'geometric mean is outside of the bounds are dropped) or "off".',
    )
    importance_floor: float = _option(0.0, "lower bound of the importance weight.", NOT_NEGATIVE)
    importance_cap: float = _option(
        2.0, "upper bound of the importance weight.", Range(above=0, infinite=True)
    )
    off_policy_limit: float | None = _option(
        None,
        "rollouts with a negative advantage are not trained by the objective if their mean of generation "
        "minus policy logprobs is above this; None trains all.",
        POSITIVE,
    )
    on_policy: bool = _option(
        False, "the policy itself stands for the proximal one, so that every ratio is 1; one update per step."
    )
    top_entropy: float | None = _option(
        None,
        "the objective trains only this share of an update's tokens, those of highest entropy.",
        Range(above=0, at_most=1, why="since it is a share of tokens"),
    )
    kl_coefficient: float = _option(
        0.0, "factor of the KL divergence to the reference model; 0 needs no reference model.", FACTOR
    )
    kl_estimator: Literal["k1", "k2", "k3"] = _option(
        "k3", "estimate of the KL divergence.", only_with="kl_coefficient"
    )
    kl_in: Literal["loss", "reward"] = _option(
        "loss",
        "where the KL divergence counts: as a term of the loss, or it lowers the advantage of each token "
        '("reward"), with proximal instead of policy logprobs.',
        only_with="kl_coefficient",
    )
    kl_weight: Literal["score", "none", "ratio", "generation"] = _option(
        "score",
        'weight of the estimate: "score" (the gradient is that of the divergence), "none" (that of the '
        'estimate), "ratio" (times the ratio of the objective) or "generation" (times policy / generation).',
        only_with="kl_coefficient",
    )
    kl_input_clamp: float | None = _option(
        None,
        "difference of logprobs at which the estimate is clamped and loses its gradient.",
        POSITIVE,
        only_with="kl_coefficient",
    )
    kl_output_clamp: float | None = _option(
        None, "value at which the weighted estimate is clamped.", POSITIVE, only_with="kl_coefficient"
    )
    teacher_coefficient: float = _option(
        0.0,
        "factor of the reverse KL divergence to the teacher, in the advantage of each token or as a term of "
        "the loss; 0 needs no teacher.",
        FACTOR,
    )
    teacher_in: Literal["advantage", "loss"] = _option(
        "advantage",
        "where the teacher counts: log teacher minus log proximal, times the factor, is added to the "
        'advantage of each token, or the divergence is a term of the loss ("loss"; k3, with its gradient).',
        only_with="teacher_coefficient",
    )
    teacher_clip: float | None = _option(
        None,
        "bound of the difference of logprobs to the teacher, on both sides; None has no bound.",
        POSITIVE,
        only_with="teacher_coefficient",
    )
    reward_coefficient: float = _option(
        1.0,
        "factor of the advantages of rewards; 0 learns from the teacher alone.",
        Range(at_least=0, why="since a negative factor would reward failures"),
    )
    entropy_coefficient: float = _option(
        0.0, "factor of the entropy's mean over the update's tokens, which the loss raises."
    )
    entropy_target: float | None = _option(
        None,
        "entropy in nats near which a changing factor holds the policy: it begins with entropy_coefficient, "
        "rises after an update at or below the target, falls after others, and applies only at or below it; "
        "None keeps the factor.",
        POSITIVE,
    )
    entropy_delta: float = _option(
        0.005, "change of the factor after an update.", POSITIVE, only_with="entropy_target"
    )
    entropy_min: float = _option(0.0, "lower bound of the factor.", only_with="entropy_target")
    entropy_max: float = _option(1.0, "upper bound of the factor.", only_with="entropy_target")
    nll_coefficient: float = _option(
        0.0, "factor of the negative logprobs' mean over the tokens of right rollouts (VAPO).", FACTOR
    )


@frozen(kw_only=True, eq=False)
class Objective:
    """The result of an objective."""

    losses: Tensor
    """Loss of each token, with the importance weights, [N]."""
    metrics: Mapping[str, Tensor]
    ratio: Tensor | None = None
    """Ratio of the objective with its gradient, [N]; None without a ratio."""


ObjectiveFunction = Callable[..., Objective]
"""A function of (inputs, weights) and keyword options."""


def composed(
    *,
    defaults: Mapping[str, Any] | None = None,
    within: Mapping[str, Range] | None = None,
    lacks: Collection[Lack] = (),
) -> Callable[[ObjectiveFunction], Callable[..., LossOutput]]:
    """Return a decorator that turns an objective into a loss, with the options of ``Terms`` added.

    Args:
        defaults: defaults of shared options that differ from ``Terms``.
        within: ranges of the objective's options; other options may be any finite number.
        lacks: "ratio" if the objective has neither a ratio of policy to proximal logprobs nor another bound,
            so that it trains one update for each step; "proximal" if only importance weights may depend on
            the proximal logprobs.
    """
    shared = attrs.fields_dict(Terms)
    other = defaults or {}

    def make(objective: ObjectiveFunction) -> Callable[..., LossOutput]:
        @wraps(objective)
        def loss(inputs: LossInputs, **options: Any) -> LossOutput:
            terms = Terms(**{**other, **{name: options.pop(name) for name in shared if name in options}})
            return _with_terms(objective, inputs, options, terms)

        mine = [p for p in inspect.signature(objective).parameters.values() if p.name != "weights"]
        parameters = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=other.get(name, attribute.default),
                annotation=Terms.__annotations__[name],
            )
            for name, attribute in shared.items()
        ]
        loss.__signature__ = inspect.Signature([*mine, *parameters])  # type: ignore[attr-defined]
        own = inspect.cleandoc(objective.__doc__ or "")  # its last section is ``Args:``
        meanings = [f"    {name}: {attribute.metadata['meaning']}" for name, attribute in shared.items()]
        loss.__doc__ = "\n".join([own, *meanings])
        ranges = {name: attribute.metadata["within"] for name, attribute in shared.items()}
        only_with = {name: attribute.metadata["only_with"] for name, attribute in shared.items()}
        return _declared(
            loss, Declared(ranges={**ranges, **(within or {})}, only_with=only_with, lacks=lacks)
        )

    return make


def _declared(loss: Callable[..., LossOutput], declared: Declared) -> Callable[..., LossOutput]:
    """Attach the requirements of the shared options to a loss, and the checks of their combinations."""
    parameters = inspect.signature(loss).parameters
    if "ratio" in parameters:
        loss = needs("sequences", when="ratio", values=("sequence", "sequence_token"))(loss)
    loss = needs("sequences", when="correction", values=BY_SEQUENCE)(loss)
    loss = needs("sequences", when="off_policy_limit")(loss)
    loss = needs("update_entropies", when="top_entropy")(loss)
    loss = needs("reference", "all_rows", when="kl_coefficient")(loss)
    loss = needs("teacher", "all_rows", when="teacher_coefficient")(loss)
    loss = needs("entropy", "all_rows", when="entropy_coefficient")(loss)
    loss = needs("entropy", "all_rows", "entropy_control", when="entropy_target")(loss)
    loss = needs("all_rows", when="nll_coefficient")(loss)

    def check(given: Mapping[str, Any], setting: LossSetting) -> Iterator[str | Remark]:
        full = {name: p.default for name, p in parameters.items() if p.default is not p.empty} | dict(given)
        return problems(given, full, setting, declared)

    return options_checked_by(check)(loss)


def _with_terms(
    objective: ObjectiveFunction, inputs: LossInputs, options: Mapping[str, Any], terms: Terms
) -> LossOutput:
    """Compute the objective and add the terms."""
    if terms.on_policy:
        inputs = evolve(inputs, proximal_logprobs=inputs.policy_logprobs.detach())
    weights = importance_weights(
        inputs.proximal_logprobs,
        inputs.generation_logprobs,
        inputs.sequences,
        terms.correction,
        low=terms.importance_floor,
        high=terms.importance_cap,
    )
    metrics: dict[str, Tensor] = {}
    inputs = _weighed(inputs, terms, metrics)
    highest = _of_high_entropy(inputs, terms)
    kept = _kept(inputs, terms, highest, metrics)
    has_kl = bool(terms.kl_coefficient) and inputs.reference_logprobs is not None
    if has_kl and terms.kl_in == "reward":
        inputs = evolve(inputs, advantages=inputs.advantages - _kl_of_reward(inputs, terms, metrics))
    made = objective(inputs, weights, **options)
    losses = made.losses if kept is None else made.losses.where(kept, 0.0)
    if has_kl and terms.kl_in == "loss":
        kl = _kl_of_loss(inputs, terms, made.ratio)
        losses = losses + terms.kl_coefficient * kl
        metrics["kl"] = kl.detach()
    if terms.teacher_coefficient and terms.teacher_in == "loss" and inputs.teacher_logprobs is not None:
        kl = _kl_to_teacher(inputs, inputs.teacher_logprobs, terms)
        losses = losses + terms.teacher_coefficient * kl
        metrics["teacher_kl"] = kl.detach()
    controlled = terms.entropy_target is not None
    if (controlled or terms.entropy_coefficient) and inputs.entropy is not None:
        coefficient = inputs.entropy_coefficient if controlled else terms.entropy_coefficient
        entropy = _mean_entropy(inputs, inputs.entropy, highest)
        losses = losses - coefficient * entropy
        if controlled:
            metrics["bonus_entropy"] = entropy.detach() * inputs.weights * inputs.update_tokens
    if terms.nll_coefficient and inputs.correct is not None and inputs.update_correct_tokens:
        nll = -inputs.policy_logprobs * inputs.correct.to(losses.dtype)
        losses = losses + terms.nll_coefficient * nll / (inputs.weights * inputs.update_correct_tokens)
    return losses, {
        **made.metrics,
        "importance_weight_mean": weights,
        "importance_weight_max": weights,
        **metrics,
    }


def _weighed(inputs: LossInputs, terms: Terms, metrics: dict[str, Tensor]) -> LossInputs:
    """Weight the advantages of rewards, and add the advantages of the teacher."""
    advantages = terms.reward_coefficient * inputs.advantages
    if terms.teacher_coefficient and terms.teacher_in == "advantage" and inputs.teacher_logprobs is not None:
        difference = inputs.teacher_logprobs - inputs.proximal_logprobs.detach()
        metrics["teacher_kl"] = -difference
        if terms.teacher_clip is not None:
            difference = difference.clamp(-terms.teacher_clip, terms.teacher_clip)
        advantages = advantages + terms.teacher_coefficient * difference
    return evolve(inputs, advantages=advantages)


def _kl_to_teacher(inputs: LossInputs, teacher: Tensor, terms: Terms) -> Tensor:
    policy = inputs.policy_logprobs
    return kl_estimate(policy, teacher, "k3", input_clamp=terms.teacher_clip, weights=score_weights(policy))


def _kept(
    inputs: LossInputs, terms: Terms, highest: _HighEntropy | None, metrics: dict[str, Tensor]
) -> Tensor | None:
    """Return a mask [N] of the tokens that the objective trains; None if it trains all."""
    kept: Tensor | None = None
    if terms.off_policy_limit is not None:
        kept = off_policy_kept(
            inputs.policy_logprobs,
            inputs.generation_logprobs,
            inputs.advantages,
            inputs.sequences,
            limit=terms.off_policy_limit,
        )
        metrics["off_policy_masked"] = (~kept).to(inputs.advantages.dtype)
    if highest is not None:
        kept = highest.here if kept is None else kept & highest.here
    return kept


@frozen(eq=False)
class _HighEntropy:
    """The tokens of highest entropy."""

    here: Tensor
    """Whether each token of the micro-batch is one of them, [N]."""
    count: Tensor
    """Number of these tokens in the update."""


def _of_high_entropy(inputs: LossInputs, terms: Terms) -> _HighEntropy | None:
    """Select the share ``top_entropy`` of the update's tokens with the highest entropy; None selects all."""
    if not terms.top_entropy or inputs.entropy is None:
        return None
    entropies = inputs.entropy if inputs.update_entropies is None else inputs.update_entropies
    ordered = entropies.detach().sort().values  # quantile() takes 16 million numbers at most
    rank = (1 - terms.top_entropy) * (len(ordered) - 1)
    below, above = ordered[int(rank)], ordered[min(int(rank) + 1, len(ordered) - 1)]
    threshold = below.lerp(above, rank - int(rank))
    return _HighEntropy(inputs.entropy.detach() >= threshold, (ordered >= threshold).sum())


def _mean_entropy(inputs: LossInputs, entropy: Tensor, highest: _HighEntropy | None) -> Tensor:
    """Return the entropy of each token, scaled so that the loss sums to the mean of the selected tokens."""
    if highest is None:
        return entropy / (inputs.weights * inputs.update_tokens)
    return entropy.where(highest.here, 0.0) / (inputs.weights * highest.count)


def _kl_of_loss(inputs: LossInputs, terms: Terms, ratio: Tensor | None) -> Tensor:
    policy, reference = inputs.policy_logprobs, inputs.reference_logprobs
    assert reference is not None
    weights: Tensor | None = None
    if terms.kl_weight == "score":
        weights = score_weights(policy)
    elif terms.kl_weight == "generation":
        weights = bounded_exp(policy - inputs.generation_logprobs)
    elif terms.kl_weight == "ratio":
        weights = ratio
    return kl_estimate(
        policy,
        reference,
        terms.kl_estimator,
        input_clamp=terms.kl_input_clamp,
        output_clamp=terms.kl_output_clamp,
        weights=weights,
    )


def _kl_of_reward(inputs: LossInputs, terms: Terms, metrics: dict[str, Tensor]) -> Tensor:
    """Return the KL penalty to subtract from the advantage of each token, [N], without gradient."""
    assert inputs.reference_logprobs is not None
    kl = kl_estimate(
        inputs.proximal_logprobs.detach(),
        inputs.reference_logprobs,
        terms.kl_estimator,
        input_clamp=terms.kl_input_clamp,
        output_clamp=terms.kl_output_clamp,
    )
    metrics["kl"] = kl
    return terms.kl_coefficient * kl
