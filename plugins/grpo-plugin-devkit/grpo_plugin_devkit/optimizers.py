"""The contract of optimizers, as checks for authors.

    def test_mine_keeps_the_contract():
        check_optimizer(my_optimizer, momentum=0.9)

Each check raises AssertionError, or PluginError where the core does.  The optimizer trains a small regression
with the trainer's code for learning rates and checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from grpo_core import Offer, OptimizerFunction, ParameterGroup
from grpo_core.testing import Optimization, bound, flat
from grpo_plugin_devkit.contracts import Contract

LR = 1e-2
"""Learning rate of the checks."""
STEPS = 60
"""Updates after which the loss must be lower."""
BETAS = (0.9, 0.95)


def check_optimizer(function: OptimizerFunction | Offer, **options: Any) -> None:
    """Check an optimizer's contract.  Raises AssertionError or PluginError."""
    OptimizerContract(function, options).check()


class OptimizerContract(Contract):
    """The contract of an optimizer.

    Args:
        function: the function that makes optimizers from groups of parameters, or its offer.
        options: its options.
    """

    def __init__(self, function: OptimizerFunction | Offer, options: Mapping[str, Any]) -> None:
        self._made = bound("optimizer", function, options)

    def it_trains_each_parameter_once(self) -> None:
        """Check groups of one parameter, and a group without a matrix."""
        _Regression(self._made)
        _Regression(self._made, lrs={"bias": 2 * LR})

    def it_lowers_the_loss(self) -> None:
        task = _Regression(self._made)
        before = task.loss().item()
        task.train(STEPS)
        after = task.loss().item()
        assert after < 0.9 * before, (
            f"after {STEPS} updates with the learning rate {LR:g} the loss of a regression went from "
            f"{before:.4g} to {after:.4g}, expected less"
        )

    def it_follows_the_learning_rate_of_each_group(self) -> None:
        """Check scheduled learning rates, which may be 0."""
        task = _Regression(self._made, lrs={"second": 0.0})
        before = task.weights()
        task.train(2)
        for name, was in before.items():
            moved = not torch.equal(was, task.parameters[name].detach())
            if name == "second":
                assert not moved, f"{name} has the learning rate 0, and was changed"
            else:
                assert moved, f"{name} has the learning rate {LR:g}, and was not changed"
        paused = task.weights()
        task.train(2, factor=0.0)
        for name, was in paused.items():
            assert torch.equal(was, task.parameters[name].detach()), (
                f"the schedule's factor is 0, and {name} was changed; the learning rate is read from "
                "param_groups at each step"
            )

    def it_decays_only_what_has_a_weight_decay(self) -> None:
        """Check weight decay with zero gradients, since it is decoupled from the gradient."""
        task = _Regression(self._made, decays={"first": 0.5})
        before = task.weights()
        task.train(3, gradient=0.0)
        for name, was in before.items():
            now = task.parameters[name].detach()
            if name == "first":
                assert now.norm() < was.norm(), f"{name} has a weight decay, and did not become smaller"
            else:
                assert torch.equal(now, was), f"{name} has neither a gradient nor a weight decay, and changed"

    def it_computes_the_same_each_time(self) -> None:
        one, other = _Regression(self._made), _Regression(self._made)
        one.train(5)
        other.train(5)
        _same(one, other, "two runs of the same updates")

    def it_keeps_the_state_that_it_declares(self) -> None:
        """Check the declared ``state``; an offer without one declares nothing."""
        task = _Regression(self._made)
        task.train(1)
        for name, parameter in task.parameters.items():
            if (state := self._made.selected.offer.state) is None:
                return
            declared = self._made.selected.loaded(state)(name, tuple(parameter.shape), **self._made.options)
            found = {
                slot: (tuple(value.shape), str(value.dtype)[6:]) if isinstance(value, Tensor) else ((), "int")
                for slot, value in flat(task.optimization.state(parameter)).items()
            }
            assert found == dict(declared), (
                f"for {name} {list(parameter.shape)} its state() declares {dict(declared)}, and it keeps "
                f"{found}"
            )

    def it_continues_exactly_from_its_saved_state(self) -> None:
        """Check that the state, tensors and numbers by parameter and slot, is restored exactly."""
        went_on = _Regression(self._made)
        went_on.train(3)
        tensors, about = went_on.optimization.saved()
        copies = {name: tensor.clone() for name, tensor in tensors.items()}
        continued = _Regression(self._made, weights=went_on.weights())
        continued.optimization.restore(copies, about, torch.device("cpu"))
        went_on.train(3)
        continued.train(3)
        _same(went_on, continued, "an optimizer that continues from the saved state of its parameters")


class _Regression:
    """A regression with three layers, the middle one large enough for 8-bit states.

    Args:
        made: returns an optimizer for groups of parameters.
        lrs: learning rates by the parameter's name; ``LR`` for others.
        decays: weight decays by the parameter's name; 0 for others.
        weights: initial values of the parameters.
    """

    def __init__(
        self,
        made: Any,
        *,
        lrs: Mapping[str, float] | None = None,
        decays: Mapping[str, float] | None = None,
        weights: Mapping[str, Tensor] | None = None,
    ) -> None:
        chance = torch.Generator().manual_seed(0)
        shapes = {"first": (64, 8), "second": (64, 64), "third": (4, 64), "bias": (64,)}
        self.parameters = {
            name: nn.Parameter(torch.randn(shape, generator=chance) / shape[-1] ** 0.5)
            for name, shape in shapes.items()
        }
        if weights is not None:
            for name, value in weights.items():
                self.parameters[name].data.copy_(value)
        self._inputs = torch.randn(32, 8, generator=chance)
        self._targets = torch.randn(32, 4, generator=chance)
        settings = {name: ((lrs or {}).get(name, LR), (decays or {}).get(name, 0.0)) for name in shapes}
        groups = [
            ParameterGroup(
                parameters={name: self.parameters[name] for name in shapes if settings[name] == chosen},
                lr=chosen[0],
                weight_decay=chosen[1],
                betas=BETAS,
            )
            for chosen in dict.fromkeys(settings.values())
        ]
        self.optimization = Optimization(list(self.parameters.items()), made, groups)

    def loss(self) -> Tensor:
        hidden = torch.tanh(self._inputs @ self.parameters["first"].T)
        hidden = torch.tanh(hidden @ self.parameters["second"].T + self.parameters["bias"])
        return nn.functional.mse_loss(hidden @ self.parameters["third"].T, self._targets)

    def train(self, steps: int, *, factor: float = 1.0, gradient: float = 1.0) -> None:
        """Make updates; ``gradient`` is a factor of the gradients."""
        for _ in range(steps):
            torch.autograd.backward(gradient * self.loss())
            self.optimization.step(factor)
            self.optimization.zero_grad()

    def weights(self) -> dict[str, Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.parameters.items()}


def _same(one: _Regression, other: _Regression, what: str) -> None:
    for name, parameter in one.parameters.items():
        difference = (parameter - other.parameters[name]).abs().max().item()
        assert difference < 1e-7, f"{what}: {name} differs by {difference:.3g}"
