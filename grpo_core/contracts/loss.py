"""The seam between a loss and the trainer: what a loss receives, and what it declares.

A loss is a function of ``LossInputs`` and its own options that returns one loss and any number of metrics
for each sampled token.  It never averages: the core multiplies each token's loss by ``weights``, which
``loss.aggregation`` chooses, and sums over the whole optimizer update, so the gradient
does not depend on how the rows were split, padded or ordered.  A loss that works on sequences sums over
``rows``, which are whole within one call, or over ``sequences``, which are whole if it needs "sequences".
``grpo_core.losses`` has the losses of the core.

    def reinforce(inputs: LossInputs) -> LossOutput:
        return -inputs.advantages * inputs.policy_logprobs, {}

Metrics of an update are means over its sampled tokens; a name that ends in ``_max`` is a maximum.  A loss
declares what it ``needs`` in addition to the sampled tokens and their logprobs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any, TypeVar

from attrs import Factory, field, frozen

if TYPE_CHECKING:
    from torch import Tensor

    from grpo_core.contracts.records import Group

    LossOutput = tuple[Tensor, dict[str, Tensor]]

SCORE = "scores."
"""Beginning of the need of a score."""
Need = str
NEEDS = ("entropy", "entropy_control", "all_rows", "hints", "sequences", "update_entropies")
"""Needs that a loss can declare, in addition to scores.

``"scores.NAME"``: ``scores["NAME"]``, as ``[scores.NAME]`` of the configuration defines it.  Without a table,
"reference" is by the weights of the start, and so is "hinted", in the hinted context.
``"entropy"``: ``entropy``, with a gradient.
``"entropy_control"``: ``entropy_coefficient``, which the trainer adapts by the loss's metric
``bonus_entropy`` and its option ``entropy``; see ``grpo_core.losses.EntropyControl``.
``"all_rows"``: rows with advantage 0 as well, because another term of the loss trains on them.
``"hints"``: environments that give hints; a run without any ends after its first step.
``"sequences"``: all segments of a rollout in one call; a rollout of several segments is then a micro-batch of
its own, whatever its length.
``"update_entropies"``: ``update_entropies``; costs one more forward pass for each update.
"""

_Function = TypeVar("_Function", bound=Callable[..., Any])


@frozen(kw_only=True)
class LossSetting:
    """The parts of a configuration that decide whether options of a loss make sense."""

    proximal: str = "recompute"
    """``trainer.proximal``."""
    updates_per_step: int = 1
    """``trainer.updates_per_step``."""
    max_staleness: int = 0
    """``pipeline.max_staleness``."""


@frozen
class Remark:
    """A sentence about options that work but may not do what one expects."""

    message: str
    costs: bool = False
    """Whether it is a warning: the options make training worse."""


OptionsCheck = Callable[[Mapping[str, Any], LossSetting], Iterable[str | Remark]]
"""Returns the problems of a loss's options in a configuration, each as a clause."""


def needs(*names: Need, when: str | None = None) -> Callable[[_Function], _Function]:
    """Declare what a loss needs; several declarations of one function add up.

        @needs("entropy")
        @needs("scores.reference", "all_rows", when="kl_coefficient")
        def my_loss(inputs, *, kl_coefficient=0.0): ...

    The value of an option may have needs as well: its attribute ``needs`` is a collection of names.

    Args:
        names: see ``NEEDS``.
        when: name of an option; the loss needs this only if the option's value is neither 0 nor None nor
            empty.

    Raises:
        ValueError: a name is unknown, or the function has no option ``when``.
    """
    if unknown := {name for name in names if name not in NEEDS and not name.startswith(SCORE)}:
        raise ValueError(f"needs: unknown {sorted(unknown)}; expected some of {(*NEEDS, 'scores.NAME')}")

    def declare(function: _Function) -> _Function:
        if when is not None and when not in signature(function).parameters:
            raise ValueError(f"needs: {function.__qualname__} has no option {when!r}")
        declared = (*getattr(function, "needs", ()), (names, when))
        function.needs = declared  # type: ignore[attr-defined]
        return function

    return declare


def needs_of(function: Callable[..., Any], options: Mapping[str, Any]) -> frozenset[Need]:
    """Return what a loss needs with these options; the other options have their defaults."""
    values = {name: each.default for name, each in signature(function).parameters.items()} | dict(options)
    declared = (names for names, when in getattr(function, "needs", ()) if when is None or values[when])
    return frozenset().union(*declared, *(getattr(value, "needs", ()) for value in values.values()))


def score_names(needs: Iterable[Need]) -> list[str]:
    """Return the names of the scores among the needs of a loss, sorted."""
    return sorted(need.removeprefix(SCORE) for need in needs if need.startswith(SCORE))


def hints_chosen_by(choose: Callable[..., Sequence[str | None]]) -> Callable[[_Function], _Function]:
    """Declare which hints of a group a loss learns from; without it, those of the environment.

    Args:
        choose: returns the hint of each rollout, or None, for a group and the loss's options by name.
    """

    def declare(function: _Function) -> _Function:
        function.hints = choose  # type: ignore[attr-defined]
        return function

    return declare


def hints_of(
    function: Callable[..., Any], options: Mapping[str, Any]
) -> Callable[[Group], Sequence[str | None]]:
    """Return the function that chooses the hints of a group for a loss with these options."""

    def given(group: Group, **_: object) -> list[str | None]:
        return [rollout.hint for rollout in group.rollouts]

    return partial(getattr(function, "hints", given), **dict(options))


def options_checked_by(check: OptionsCheck) -> Callable[[_Function], _Function]:
    """Declare a check of a loss's options, which runs when a configuration is read."""

    def declare(function: _Function) -> _Function:
        function.options_check = check  # type: ignore[attr-defined]
        return function

    return declare


def check_options(
    function: Callable[..., Any], options: Mapping[str, Any], setting: LossSetting
) -> Iterable[str | Remark]:
    """Return the problems of a loss's options, and remarks about them, if it declares a check."""
    check: OptionsCheck | None = getattr(function, "options_check", None)
    return () if check is None else check(options, setting)


@frozen(kw_only=True, eq=False)
class LossInputs:
    """The sampled tokens of one micro-batch.

    Tensors are [N]; only ``policy_logprobs`` and ``entropy`` have a gradient.
    """

    policy_logprobs: Tensor
    """Logprobs by the weights that are being updated."""
    proximal_logprobs: Tensor
    """Logprobs by the trainer's weights before the step's first update (``trainer.proximal = "recompute"``),
    or by the engine (``"generation"``)."""
    generation_logprobs: Tensor
    """Logprobs by the engine when it sampled the token: the behaviour policy."""
    scores: Mapping[str, Tensor] = field(factory=dict)
    """Logprobs by other weights or in another context, by the names of the scores that the loss needs.  In
    the hinted context they are NaN for the tokens of rows without a hint."""
    entropy: Tensor | None = None
    """Entropy of the policy's distribution that each token was sampled from, in nats, at the sampling
    temperature; None unless the loss needs "entropy", or, without a gradient, "update_entropies"."""
    entropy_coefficient: float = 0.0
    """Coefficient of an entropy bonus in this update; 0 unless the loss needs "entropy_control"."""
    advantages: Tensor
    """Advantage of each token; usually its rollout's."""
    rows: Tensor
    """Index of the row that a token belongs to: an integer from 0, below the number of rows."""
    step: int
    """Version of the weights that the step trains."""
    update: int
    """Number of the update within its step, from 0."""
    update_tokens: int
    """Sampled tokens of the whole update."""
    update_rows: int
    """Rows of the whole update."""
    sequences: Tensor = field(default=Factory(lambda self: self.rows, takes_self=True))
    """Index of the rollout that a token belongs to: an integer from 0.  A rollout has one row for each of its
    segments; all of them are here only if the loss needs "sequences"."""
    weights: Tensor = field(
        default=Factory(
            lambda self: self.advantages.new_full(self.rows.shape, 1 / self.update_tokens), takes_self=True
        )
    )
    """Factor by which the core multiplies the token's loss before it sums over the update; see
    ``grpo_core.losses.row_weights``.  A term with a separate divisor d is divided by d and by this."""
    update_sequences: int = field(default=Factory(lambda self: self.update_rows, takes_self=True))
    """Rollouts of the whole update."""
    update_prompts: int = field(default=Factory(lambda self: self.update_sequences, takes_self=True))
    """Prompts of the whole update: groups that have a row in it."""
    correct: Tensor | None = None
    """Whether the token's rollout is right: its environment calls it a success, or, if the environment
    declares none, its reward is above 0.  bool; None outside of training."""
    update_correct_tokens: int = 0
    """Sampled tokens of the update's rollouts that are right."""
    update_entropies: Tensor | None = None
    """Entropies of all sampled tokens of the update by the weights that the update starts from, in no
    particular order; None unless the loss needs "update_entropies"."""
