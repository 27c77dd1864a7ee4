"""The contracts of losses and advantage functions, as checks for authors.

    def test_mine_keep_their_contracts():
        check_loss(my_loss, kl_coefficient=0.1)
        check_advantage(my_advantage)

Each check raises AssertionError, or PluginError where the core itself would.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attrs import evolve, fields

from grpo_core import Group, LossInputs, Prompt, Rollout, Segment, Tokens
from grpo_core.contracts.loss import needs_of, score_names
from grpo_core.loop import rows
from grpo_plugin_devkit.contracts import Contract, Noted

if TYPE_CHECKING:
    from torch import Tensor

    LossOutput = tuple[Tensor, dict[str, Tensor]]

LENGTHS = (5, 1, 9, 3)
"""Number of sampled tokens of each row of a loss's inputs."""
REWARDS = ((0.0, 1.0, 1.0, 0.25), (1.0, 1.0, 1.0, 1.0), (-3.0, 2.0, 0.5, 0.5), (0.0, 0.0, 0.0, 1.0))
"""Rewards of groups."""


def check_loss(function: Callable[..., Any], **options: Any) -> None:
    """Check a loss's contract.  Raises AssertionError."""
    LossContract(lambda inputs: function(inputs, **options), needs_of(function, options)).check()


def check_advantage(function: Callable[..., Any], **options: Any) -> None:
    """Check an advantage function's contract.  Raises AssertionError or PluginError."""
    AdvantageContract(lambda groups: function(groups, **options)).check()


# ---------------------------------------------------------------------------------- losses


class LossContract(Contract):
    """The contract of a loss.

    Args:
        loss: the loss with its options filled in.
        needs: its declared needs.
    """

    def __init__(self, loss: Callable[[LossInputs], LossOutput], needs: frozenset[str]) -> None:
        self._loss, self._needs = loss, needs

    def what_it_needs(self) -> None:
        raise Noted(", ".join(sorted(self._needs)) or "nothing")

    def it_returns_one_loss_and_one_of_each_metric_for_each_token(self) -> None:
        import torch

        inputs = self._inputs()
        losses, metrics = self._loss(inputs)
        shape = inputs.policy_logprobs.shape
        assert losses.shape == shape, f"losses have shape {tuple(losses.shape)}, expected {tuple(shape)}"
        for name, values in metrics.items():
            kind = type(values).__name__
            assert isinstance(values, torch.Tensor), f"metric {name!r} is {kind}, expected a tensor"
            found = tuple(values.shape)
            assert values.shape == shape, f"metric {name!r} has shape {found}, expected {tuple(shape)}"

    def it_trains_the_policy(self) -> None:
        """Check that the gradient reaches ``policy_logprobs`` or ``entropy``, the differentiable inputs."""
        import torch

        inputs = self._inputs()
        losses, _ = self._loss(inputs)
        assert losses.requires_grad, "its result does not depend on policy_logprobs: nothing would be trained"
        outputs = [each for each in (inputs.policy_logprobs, inputs.entropy) if each is not None]
        gradients = torch.autograd.grad(losses.sum(), outputs, materialize_grads=True)
        assert any(gradient.any() for gradient in gradients), "the gradient is 0 for every token"

    def extreme_inputs_have_finite_losses_and_gradients(self) -> None:
        """Check logprobs down to -1e4 and advantages up to 1e3; a row that is not finite would be dropped."""
        import torch

        extremes = [0.0, -1e-7, -1.0, -50.0, -1e4]
        for dtype in (torch.float64, torch.float32):
            for there in extremes:
                for here in extremes:
                    inputs = self._inputs(dtype=dtype)
                    for name, value in (("policy", here), ("proximal", there), ("generation", there)):
                        getattr(inputs, f"{name}_logprobs").data.fill_(value)
                    inputs.advantages.data.mul_(1e3)
                    losses, _ = self._loss(inputs)
                    (gradient,) = torch.autograd.grad(
                        losses.sum(), inputs.policy_logprobs, materialize_grads=True
                    )
                    where = f"policy logprobs {here:g}, proximal and generation {there:g}, {dtype}"
                    advice = "; limit a log ratio before exp(), as in log_ratio.clamp(-20, 20)"
                    assert bool(losses.isfinite().all()), f"{where}: the loss is not finite{advice}"
                    assert bool(gradient.isfinite().all()), f"{where}: the gradient is not finite{advice}"

    def the_order_of_rows_does_not_matter(self) -> None:
        import torch

        inputs = self._inputs()
        order = [2, 0, 3, 1]  # row i of the reordered inputs is row order[i] of the original ones
        indices = torch.cat([(inputs.rows == row).nonzero()[:, 0] for row in order])
        others = _picked(inputs, indices)
        self._same(self._loss(inputs)[0][indices], self._loss(others)[0], "rows in another order")

    def it_does_not_matter_how_rows_are_split(self) -> None:
        """Check that micro-batches do not change the result, since their size depends on memory."""
        inputs = self._inputs()
        whole, _ = self._loss(inputs)
        for first in (0, 2):
            indices = (inputs.rows // 2 == first // 2).nonzero()[:, 0]
            part, _ = self._loss(_picked(inputs, indices))
            self._same(whole[indices], part, f"rows {first} and {first + 1} in their own micro-batch")

    def it_returns_the_same_each_time_and_changes_no_input(self) -> None:
        inputs, untouched = self._inputs(), self._inputs()
        first = self._loss(inputs)[0].detach().clone()
        for name, tensor in _tensors(inputs).items():
            assert bool((tensor == _tensors(untouched)[name]).all()), f"it changed its input {name}"
        self._same(first, self._loss(inputs)[0], "a second call")

    def _same(self, a: Tensor, b: Tensor, what: str) -> None:
        assert a.shape == b.shape, f"{what}: shape {tuple(b.shape)}, expected {tuple(a.shape)}"
        off = float((a - b).detach().abs().max())
        assert off < 1e-9, f"{what}: the losses differ by {off:.3g}"

    def _inputs(self, *, dtype: Any = None) -> LossInputs:
        """Return deterministic random inputs, without those that the loss does not need."""
        import torch

        chance = torch.Generator().manual_seed(0)
        n = sum(LENGTHS)
        dtype = dtype or torch.float64

        def logprobs(near: Tensor | None = None) -> Tensor:
            noise = torch.rand(n, generator=chance, dtype=torch.float64)
            return (-4 * noise if near is None else near + 0.3 * (noise - 0.5)).to(dtype)

        generation = logprobs()
        made: dict[str, Any] = {
            "policy_logprobs": logprobs(generation),
            "proximal_logprobs": logprobs(generation),
            "generation_logprobs": generation,
            "entropy": -logprobs() if "entropy" in self._needs else None,
            "advantages": torch.tensor([1.0, -0.5, 0.0, 2.0], dtype=dtype)[_rows()],
            "rows": _rows(),
            "correct": _rows() % 2 == 0,
        }
        if "update_entropies" in self._needs:
            made["entropy"] = -logprobs() if made["entropy"] is None else made["entropy"]
            made["update_entropies"] = made["entropy"].clone()
        for name, tensor in made.items():
            trained = name in ("policy_logprobs", "entropy")
            if tensor is not None and tensor.is_floating_point():
                made[name] = tensor.detach().clone().requires_grad_(trained)
        return LossInputs(
            **made,
            scores={name: logprobs(generation.detach()) for name in score_names(self._needs)},
            entropy_coefficient=0.01 if "entropy_control" in self._needs else 0.0,
            step=3,
            update=1,
            update_tokens=n,
            update_rows=len(LENGTHS),
            update_correct_tokens=int(made["correct"].sum()),
        )


def _rows() -> Tensor:
    import torch

    return torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))


def _picked(inputs: LossInputs, indices: Tensor) -> LossInputs:
    """Return the inputs of these tokens, which form whole rows; rows are renumbered by first appearance."""
    import torch

    picked: dict[str, Any] = {name: tensor[indices] for name, tensor in _tensors(inputs).items()}
    seen = list(dict.fromkeys(picked["rows"].tolist()))
    picked["rows"] = torch.tensor([seen.index(row) for row in picked["rows"].tolist()])
    picked["sequences"] = picked["rows"]
    scores = {name: tensor[indices] for name, tensor in inputs.scores.items()}
    return evolve(inputs, **picked, scores=scores)


def _tensors(inputs: LossInputs) -> Mapping[str, Tensor]:
    """Return the inputs with one number for each token."""
    given = {each.name: getattr(inputs, each.name) for each in fields(LossInputs)}
    return {
        name: value
        for name, value in given.items()
        if getattr(value, "shape", None) == inputs.rows.shape and name != "update_entropies"
    }


# ---------------------------------------------------------------------------------- advantages


class AdvantageContract(Contract):
    """The contract of an advantage function.

    Args:
        advantages: the function with its options filled in.
    """

    def __init__(self, advantages: Callable[[Sequence[Group]], Sequence[Sequence[Any]]]) -> None:
        self._advantages = advantages

    def it_returns_a_finite_number_or_none_for_each_rollout(self) -> None:
        for sizes in ((4, 4, 4, 4), (2,), (3, 2, 8)):
            rewards = [[float(i % 3) for i in range(size)] for size in sizes]
            self._scores([a_group(each, index) for index, each in enumerate(rewards)])

    def extreme_rewards_have_finite_advantages(self) -> None:
        for rewards in ((1e30, -1e30, 0.0), (1e-200, 0.0, 0.0), (1.0, 1.0 + 1e-15, 1.0), (-1e9, -1e9, 1e-9)):
            self._scores([a_group(rewards)])

    def equal_rewards_are_worth_nothing(self) -> None:
        """Check single groups with equal rewards and equal lengths."""
        for value in (0.0, 1.0, 0.3, -5.0):
            scores = self._scores([a_group([value] * 4, lengths=(6, 6, 6, 6))])[0]
            message = f"four rewards of {value} have advantages {scores}; expected 0 or None"
            assert all(abs(number) < 1e-9 for score in scores for number in _numbers(score)), message

    def the_order_within_a_group_does_not_matter(self) -> None:
        groups = [a_group(rewards, index) for index, rewards in enumerate(REWARDS)]
        order = [2, 0, 3, 1]
        turned = [evolve(group, rollouts=tuple(group.rollouts[i] for i in order)) for group in groups]
        for group, straight, other in zip(groups, self._scores(groups), self._scores(turned), strict=True):
            expected = [straight[i] for i in order]
            assert _close(expected, other), (
                f"rewards {group.rewards} have advantages {straight}; in the order {order} they have {other}"
            )

    def it_returns_the_same_each_time(self) -> None:
        groups = [a_group(rewards, index) for index, rewards in enumerate(REWARDS)]
        first, second = self._scores(groups), self._scores(groups)
        same = all(_close(one, other, off=0.0) for one, other in zip(first, second, strict=True))
        assert same, f"it returned {first}, and then {second} for the same groups"

    def _scores(self, groups: Sequence[Group]) -> rows.Scores:
        return rows.checked_scores(self._advantages(groups), groups, "it")


def a_group(rewards: Sequence[float], index: int = 0, lengths: Sequence[int] = (3, 6, 2, 9)) -> Group:
    """Return a group with these rewards and lengths."""

    def rollout(reward: float, length: int) -> Rollout:
        tokens = Tokens.generated([5] * length, [-1.0] * length, [0] * length)
        return Rollout(
            segments=[Segment(prompt_ids=(1, 2), tokens=tokens)],
            reward=reward,
            turns=1,
            finish_reason="length" if length == max(lengths) else "stop",
        )

    return Group(
        prompt=Prompt(messages="x", id=f"prompt {index}", environment="task"),
        rollouts=tuple(rollout(reward, lengths[i % len(lengths)]) for i, reward in enumerate(rewards)),
        generation_version=0,
        target_version=0,
        slot=index,
    )


def _close(a: Sequence[Any], b: Sequence[Any], off: float = 1e-9) -> bool:
    """Whether floats, arrays and None are equal up to rounding."""

    def same(x: Any, y: Any) -> bool:
        if x is None or y is None:
            return x is y
        one, other = _numbers(x), _numbers(y)
        return len(one) == len(other) and all(
            math.isclose(p, q, rel_tol=off, abs_tol=off) for p, q in zip(one, other, strict=True)
        )

    return all(same(x, y) for x, y in zip(a, b, strict=True))


def _numbers(score: Any) -> list[float]:
    """Return the advantages of a rollout: one for all tokens or one for each; none if it is masked."""
    if score is None:
        return []
    return [score] if isinstance(score, float) else list(map(float, score))
