"""The optimizers of a trainer: parameter groups, learning rates, and state in checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from grpo_core.config import OptimizerConfig, ParameterGroupConfig, TrainerConfig
from grpo_core.contracts.errors import ConfigError, PluginError
from grpo_core.contracts.protocols import ParameterGroup
from grpo_core.plugins.offers import Bound
from grpo_core.training.optimizers import state_of

Named = Sequence[tuple[str, nn.Parameter]]


def divided(named: Named, optimizer: OptimizerConfig, trainer: TrainerConfig) -> list[ParameterGroup]:
    """Divide parameters into groups of one learning rate and one weight decay.

    Raises ConfigError if a group of the configuration has no parameter.
    """
    rest = ParameterGroupConfig(parameters=["*"])
    members: dict[str, list[tuple[str, nn.Parameter]]] = {name: [] for name in optimizer.groups}
    left: list[tuple[str, nn.Parameter]] = []
    for name, parameter in named:
        fitting = (
            key
            for key, group in optimizer.groups.items()
            if any(fnmatchcase(name, pattern) for pattern in group.parameters)
        )
        key = next(fitting, None)
        (left if key is None else members[key]).append((name, parameter))
    for key, found in members.items():
        if not found:
            patterns = optimizer.groups[key].parameters
            more = f" and {len(named) - 12} more" if len(named) > 12 else ""
            raise ConfigError(
                f"optimizer.groups.{key}: no parameter fits {', '.join(patterns)}, or an earlier group has "
                f"it; the model's parameters are {', '.join(name for name, _ in named[:12])}{more}"
            )
    pairs = [*((members[key], group) for key, group in optimizer.groups.items()), (left, rest)]
    return [made for found, group in pairs for made in _by_decay(found, group, optimizer, trainer)]


def _by_decay(
    members: Named, group: ParameterGroupConfig, optimizer: OptimizerConfig, trainer: TrainerConfig
) -> Iterator[ParameterGroup]:
    def decay(parameter: nn.Parameter) -> float:
        if group.weight_decay is not None:
            return group.weight_decay
        return trainer.weight_decay if optimizer.decay == "all" or parameter.dim() > 1 else 0.0

    for each in dict.fromkeys(decay(parameter) for _, parameter in members):
        yield ParameterGroup(
            parameters={name: p for name, p in members if decay(p) == each},
            lr=trainer.lr if group.lr is None else group.lr,
            weight_decay=each,
            betas=trainer.betas,
        )


class Optimization:
    """One or more optimizers that train all parameters.

    Args:
        named: the parameters by name.
        make: makes the optimizers from groups of parameters.
        groups: the parameters again, divided; with learning rates at the peak of the schedule.

    Raises PluginError if the optimizers do not train each parameter once.
    """

    def __init__(
        self, named: Named, make: Bound[Sequence[ParameterGroup], Any], groups: Sequence[ParameterGroup]
    ) -> None:
        self._named, self._make = named, make
        made = make(groups)
        self._optimizers: list[torch.optim.Optimizer] = list(made) if isinstance(made, Sequence) else [made]
        self._of = {
            parameter: optimizer
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        trained = sum(len(group["params"]) for each in self._optimizers for group in each.param_groups)
        if trained != len(named) or any(parameter not in self._of for _, parameter in named):
            raise PluginError(f"{make}: its optimizers train {trained} of {len(named)} parameters once each")
        self._peaks = [[float(group["lr"]) for group in each.param_groups] for each in self._optimizers]

    def step(self, factor: float) -> None:
        """Update all parameters with ``factor`` times the learning rates at the peak."""
        for optimizer, peaks in zip(self._optimizers, self._peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(peak * factor)
                else:
                    group["lr"] = peak * factor
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad()

    def state(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Return the state of a parameter by slot; empty before its first update."""
        state: dict[str, Any] = self._of[parameter].state.get(parameter, {})
        return state

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors of all states."""
        for _, parameter in self._named:
            yield from (each for each in flat(self.state(parameter)).values() if isinstance(each, Tensor))

    # ------------------------------------------------------------------------------ checkpoints

    def saved(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the tensors of all states, each once, and all other values, for a JSON file."""
        tensors: dict[str, Tensor] = {}
        numbers: dict[str, float] = {}
        twins: dict[str, str] = {}
        places: dict[tuple[int, int, torch.Size], str] = {}
        for name, parameter in self._named:
            for slot, value in flat(self.state(parameter)).items():
                key = f"{name}/{slot}"
                if not isinstance(value, Tensor):
                    numbers[key] = value
                elif (first := places.setdefault(_place(value), key)) != key:
                    twins[key] = first
                else:
                    tensors[key] = value
        return tensors, {"optimizer": self._make.selected.name, "numbers": numbers, "twins": twins}

    def restore(self, tensors: Mapping[str, Tensor], about: Mapping[str, Any], device: torch.device) -> None:
        """Continue from a saved state.  Raises ValueError or KeyError if it belongs to other optimizers."""
        if about["optimizer"] != self._make.selected.name:
            raise ValueError(f"it belongs to {about['optimizer']!r}, not to {self._make.selected.name!r}")
        moved = {key: tensor.to(device) for key, tensor in tensors.items()}
        moved |= {key: moved[first] for key, first in about["twins"].items()}
        by_name = dict(self._named)
        parts: dict[tuple[str, str], dict[str, Tensor]] = {}
        for key, value in {**moved, **about["numbers"]}.items():
            name, _, slot = key.rpartition("/")
            slot, _, part = slot.partition(".")
            if part:
                parts.setdefault((name, slot), {})[part] = value
            else:
                self._keep(by_name[name], slot, value)
        selected = self._make.selected
        for (name, slot), found in parts.items():
            if selected.offer.restored is None:
                raise ValueError(f"{self._make} does not restore tensors that consist of several")
            self._keep(by_name[name], slot, selected.loaded(selected.offer.restored)(slot, found))
        for name, parameter in self._named:
            self._check(name, parameter)

    def _keep(self, parameter: nn.Parameter, slot: str, value: Any) -> None:
        self._of[parameter].state[parameter][slot] = value

    def _check(self, name: str, parameter: nn.Parameter) -> None:
        """Raise ValueError unless the state fits the optimizer: fused kernels do not check shapes."""
        expected = state_of(self._make.selected, self._make.options, name, parameter.shape)
        found = {
            slot: (tuple(value.shape), str(value.dtype)[6:]) if isinstance(value, Tensor) else ((), "int")
            for slot, value in flat(self.state(parameter)).items()
        }
        if found and expected is not None and found != expected:
            raise ValueError(f"{name} has {_spelled(found)}, expected {_spelled(expected)}")


def flat(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state of plain tensors: a tensor that consists of several becomes slots "SLOT.PART".

    DTensors, whose parts the ranks hold, stay as they are.
    """
    found: dict[str, Any] = {}
    for slot, value in state.items():
        several = hasattr(value, "__tensor_flatten__") and not hasattr(value, "full_tensor")
        names = value.__tensor_flatten__()[0] if several else ()
        found |= {f"{slot}.{name}": getattr(value, name) for name in names} if names else {slot: value}
    return found


def _place(tensor: Tensor) -> tuple[int, int, torch.Size]:
    """Return an identity that is equal for two names of one tensor.  DTensors have one name."""
    if hasattr(tensor, "full_tensor"):
        return id(tensor), 0, tensor.shape
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset()), tensor.shape  # or one that rests


def _spelled(state: Mapping[str, tuple[tuple[int, ...], str]]) -> str:
    return ", ".join(f"{slot} {list(shape)} {dtype}" for slot, (shape, dtype) in sorted(state.items()))
