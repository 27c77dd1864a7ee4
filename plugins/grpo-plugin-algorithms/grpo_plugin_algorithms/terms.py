"""The parts that losses add to objectives: a teacher, masks, an entropy bonus, a term for right rollouts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from inspect import signature
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from attrs import evolve, field, frozen

from grpo_core import needs
from grpo_core.losses import IDLE_CLIP, LossSetting, Remark, options_checked_by
from grpo_plugin_algorithms.corrections import Correction, Off, TokenTruncate
from grpo_plugin_algorithms.kl import Kl, kl_estimate, score_weights
from grpo_plugin_algorithms.ranges import FACTOR, FINITE, POSITIVE, Range, check_idle
from grpo_plugin_algorithms.ratios import means

if TYPE_CHECKING:
    from torch import Tensor

    from grpo_core import LossInputs

    LossOutput = tuple[Tensor, dict[str, Tensor]]

_Loss = TypeVar("_Loss", bound=Callable[..., Any])


@frozen(kw_only=True)
class Teacher:
    """The reverse KL divergence to a teacher."""

    coefficient: float = field(default=0.0, validator=FACTOR)
    """Factor of the divergence; 0 needs no teacher."""
    acts_on: Literal["advantage", "loss"] = "advantage"
    """Whether log teacher minus log proximal, times the factor, is added to the advantage of each token, or
    the divergence is a term of the loss ("loss"; k3, with its gradient)."""
    clip: float | None = field(default=None, validator=POSITIVE)
    """Bound of the difference of logprobs to the teacher, on both sides; None has no bound."""
    reward_coefficient: float = field(default=1.0, validator=FACTOR)
    """Factor of the advantages of rewards; 0 learns from the teacher alone."""

    def __attrs_post_init__(self) -> None:
        if not self.coefficient and not self.reward_coefficient:
            raise ValueError("reward_coefficient = 0 without coefficient leaves nothing to learn from")
        check_idle(self, "acts_on", "clip", without="coefficient")

    @property
    def needs(self) -> tuple[str, ...]:
        return ("scores.teacher", "all_rows") if self.coefficient else ()

    def advantages(self, inputs: LossInputs, metrics: dict[str, Tensor]) -> Tensor:
        """Weight the advantages of rewards, and add the advantages of the teacher."""
        advantages = self.reward_coefficient * inputs.advantages
        if self.coefficient and self.acts_on == "advantage":
            difference = inputs.scores["teacher"] - inputs.proximal_logprobs.detach()
            metrics["teacher_kl"] = -difference
            if self.clip is not None:
                difference = difference.clamp(-self.clip, self.clip)
            advantages = advantages + self.coefficient * difference
        return advantages


@frozen(kw_only=True)
class Entropy:
    """A bonus for the entropy of the policy."""

    coefficient: float = field(default=0.0, validator=FINITE)
    """Factor of the entropy's mean over the update's tokens, which the loss raises."""
    target: float | None = field(default=None, validator=POSITIVE)
    """Entropy in nats near which a changing factor holds the policy: it begins with `coefficient`, rises
    after an update at or below the target, falls after others, and applies only at or below it; None keeps
    the factor."""
    delta: float = field(default=0.005, validator=POSITIVE)
    """Change of the factor after an update."""
    min: float = field(default=0.0, validator=FINITE)
    """Lower bound of the factor."""
    max: float = field(default=1.0, validator=FINITE)
    """Upper bound of the factor."""

    def __attrs_post_init__(self) -> None:
        check_idle(self, "delta", "min", "max", without="target")
        if self.target is not None and not self.min <= self.coefficient <= self.max:
            raise ValueError(
                f"coefficient = {self.coefficient} is not between min = {self.min} and max = {self.max}"
            )

    @property
    def needs(self) -> tuple[str, ...]:
        if self.target is not None:
            return ("entropy", "all_rows", "entropy_control")
        return ("entropy", "all_rows") if self.coefficient else ()


@frozen(kw_only=True)
class Mask:
    """The tokens that the objective trains; without limits all."""

    off_policy_limit: float | None = field(default=None, validator=POSITIVE)
    """Rollouts with a negative advantage are not trained if their mean of generation minus policy logprobs is
    above this."""
    top_entropy: float | None = field(
        default=None,
        validator=Range(lambda x: 0 < x <= 1, "above 0 and at most 1, since it is a share of tokens"),
    )
    """This share of an update's tokens is trained, those of highest entropy; the entropy bonus is theirs."""

    @property
    def needs(self) -> tuple[str, ...]:
        sequences = ("sequences",) if self.off_policy_limit else ()
        return (*sequences, "update_entropies") if self.top_entropy else sequences

    def kept(
        self, inputs: LossInputs, highest: HighEntropy | None, metrics: dict[str, Tensor]
    ) -> Tensor | None:
        """Return a mask [N] of the tokens that the objective trains; None if it trains all."""
        kept: Tensor | None = None
        if self.off_policy_limit is not None:
            kept = off_policy_kept(
                inputs.policy_logprobs,
                inputs.generation_logprobs,
                inputs.advantages,
                inputs.sequences,
                limit=self.off_policy_limit,
            )
            metrics["off_policy_masked"] = (~kept).to(inputs.advantages.dtype)
        if highest is not None:
            kept = highest.here if kept is None else kept & highest.here
        return kept

    def highest(self, inputs: LossInputs) -> HighEntropy | None:
        """Select the share ``top_entropy`` of the update's tokens; None selects all."""
        if not self.top_entropy or inputs.entropy is None:
            return None
        entropies = inputs.entropy if inputs.update_entropies is None else inputs.update_entropies
        ordered = entropies.detach().sort().values  # quantile() takes 16 million numbers at most
        rank = (1 - self.top_entropy) * (len(ordered) - 1)
        below, above = ordered[int(rank)], ordered[min(int(rank) + 1, len(ordered) - 1)]
        threshold = below.lerp(above, rank - int(rank))
        return HighEntropy(inputs.entropy.detach() >= threshold, (ordered >= threshold).sum())


@frozen(eq=False)
class HighEntropy:
    """The tokens of highest entropy."""

    here: Tensor
    """Whether each token of the micro-batch is one of them, [N]."""
    count: Tensor
    """Number of these tokens in the update."""


def off_policy_kept(
    policy: Tensor, generation: Tensor, advantages: Tensor, sequences: Tensor, *, limit: float
) -> Tensor:
    """Return a mask [N] of the tokens with an advantage of at least 0 or a sequence near the policy.

    A sequence is near if the mean of generation - policy over its tokens is at most ``limit`` (nats per
    token): the off-policy sequence mask of DeepSeek-V3.2 (arXiv 2512.02556).
    """
    distance = means((generation - policy).detach(), sequences)
    return (advantages >= 0) | (distance <= limit)


@frozen(kw_only=True, eq=False)
class Prepared:
    """The tensors that an objective computes with."""

    inputs: LossInputs
    """The inputs with the advantages and the proximal logprobs of the objective."""
    weights: Tensor
    """Importance weight of each token, [N]."""
    kept: Tensor | None
    """The tokens that the objective trains, [N]; None trains all."""
    highest: HighEntropy | None
    metrics: dict[str, Tensor]


def prepare(
    inputs: LossInputs, correction: Correction, kl: Kl, teacher: Teacher, mask: Mask, on_policy: bool
) -> Prepared:
    """Apply what acts before the objective."""
    if on_policy:
        inputs = evolve(inputs, proximal_logprobs=inputs.policy_logprobs.detach())
    log_ratio = (inputs.proximal_logprobs - inputs.generation_logprobs).detach()
    weights = correction.weights(log_ratio, inputs.sequences)
    metrics: dict[str, Tensor] = {}
    inputs = evolve(inputs, advantages=teacher.advantages(inputs, metrics))
    highest = mask.highest(inputs)
    kept = mask.kept(inputs, highest, metrics)
    if kl.coefficient and kl.acts_on == "reward":
        metrics["kl"] = kl.of_reward(inputs, inputs.scores["reference"])
        inputs = evolve(inputs, advantages=inputs.advantages - kl.coefficient * metrics["kl"])
    return Prepared(inputs=inputs, weights=weights, kept=kept, highest=highest, metrics=metrics)


def with_terms(
    given: Prepared,
    losses: Tensor,
    metrics: Mapping[str, Tensor],
    kl: Kl,
    teacher: Teacher,
    entropy: Entropy,
    nll_coefficient: float,
    ratio: Tensor | None = None,
) -> LossOutput:
    """Mask the losses [N] of an objective, and add the other terms.

    Args:
        given: what the objective has computed with.
        losses: of the objective, with the importance weights.
        metrics: of the objective.
        kl: divergence to the reference model.
        teacher: divergence to the teacher.
        entropy: the bonus.
        nll_coefficient: factor of the negative logprobs' mean over the tokens of right rollouts.
        ratio: of the objective, [N], with its gradient; None without a ratio.
    """
    inputs, more = given.inputs, dict(given.metrics)
    policy = inputs.policy_logprobs
    if given.kept is not None:
        losses = losses.where(given.kept, 0.0)
    if kl.coefficient and kl.acts_on == "loss":
        divergence = kl.of_loss(inputs, inputs.scores["reference"], ratio)
        losses = losses + kl.coefficient * divergence
        more["kl"] = divergence.detach()
    if teacher.coefficient and teacher.acts_on == "loss":
        divergence = kl_estimate(
            policy, inputs.scores["teacher"], input_clamp=teacher.clip, weights=score_weights(policy)
        )
        losses = losses + teacher.coefficient * divergence
        more["teacher_kl"] = divergence.detach()
    if entropy.needs and inputs.entropy is not None:
        coefficient = entropy.coefficient if entropy.target is None else inputs.entropy_coefficient
        bonus = _mean_entropy(inputs, inputs.entropy, given.highest)
        losses = losses - coefficient * bonus
        if entropy.target is not None:
            more["bonus_entropy"] = bonus.detach() * inputs.weights * inputs.update_tokens
    if nll_coefficient and inputs.correct is not None and inputs.update_correct_tokens:
        nll = -policy * inputs.correct.to(losses.dtype)
        losses = losses + nll_coefficient * nll / (inputs.weights * inputs.update_correct_tokens)
    weights = {"importance_weight_mean": given.weights, "importance_weight_max": given.weights}
    return losses, {**metrics, **weights, **more}


def _mean_entropy(inputs: LossInputs, entropy: Tensor, highest: HighEntropy | None) -> Tensor:
    """Return the entropy of each token, scaled so that the loss sums to the mean of the selected tokens."""
    if highest is None:
        return entropy / (inputs.weights * inputs.update_tokens)
    return entropy.where(highest.here, 0.0) / (inputs.weights * highest.count)


# ---------------------------------------------------------------------------------- checks


def checked(*, has_ratio: bool = True, **ranges: Range) -> Callable[[_Loss], _Loss]:
    """Declare the ranges of a loss's numbers and the need of ``nll_coefficient``; check options together.

    Args:
        has_ratio: whether a ratio of policy to proximal logprobs bounds several updates of a step.
        ranges: the range of each number among the options.
    """
    ranges |= {"nll_coefficient": FACTOR}

    def declare(loss: _Loss) -> _Loss:
        defaults = {name: each.default for name, each in signature(loss).parameters.items()}

        def check(given: Mapping[str, Any], setting: LossSetting) -> Iterator[str | Remark]:
            for name, range in ranges.items():
                if problem := range.problem(name, given.get(name)):
                    yield problem
            full = {**defaults, **given}
            correction = full.get("correction", TokenTruncate())  # a loss without one corrects in its own way
            yield from _problems(
                given, correction, full["kl"], setting, full.get("on_policy", False), has_ratio
            )

        return options_checked_by(check)(needs("all_rows", when="nll_coefficient")(loss))

    return declare


def _problems(
    given: Mapping[str, Any],
    correction: Correction,
    kl: Kl,
    setting: LossSetting,
    on_policy: bool,
    has_ratio: bool,
) -> Iterator[str | Remark]:
    off = isinstance(correction, Off)
    generated = setting.proximal == "generation" and not on_policy
    if generated and "correction" in given and not off:
        yield (
            "correction does nothing with trainer.proximal = 'generation': proximal / generation is 1. "
            "Leave it out, or recompute the proximal logprobs"
        )
    if setting.updates_per_step > 1 and (on_policy or not has_ratio):
        why = "on_policy makes every ratio 1" if on_policy else "this loss has no ratio"
        yield (
            f"{why}, and nothing would bound {setting.updates_per_step} updates of a "
            "step: set trainer.updates_per_step = 1"
        )
    if kl.weight == "ratio" and not has_ratio:
        yield (
            "kl.weight = 'ratio': this loss has no ratio to weight the estimate with; expected 'score', "
            "'generation' or 'none'"
        )
    fixed = on_policy or setting.proximal == "recompute"
    if setting.max_staleness and (off or generated) and (fixed or not has_ratio):
        why = (
            "correction = 'off'"
            if off
            else f"trainer.proximal = {setting.proximal!r} with a loss that has no ratio"
        )
        yield Remark(
            f"{why} with pipeline.max_staleness = {setting.max_staleness}: tokens that older weights sampled "
            "are trained as if the newest had sampled them. The gradient is biased, the more the larger the "
            "steps are, and the run may become unstable: choose loss.options.correction = "
            "'token_truncate', or pipeline.max_staleness = 0",
            costs=True,
        )
    if setting.updates_per_step == 1 and fixed and {"clip_low", "clip_high"} & given.keys():
        yield IDLE_CLIP
