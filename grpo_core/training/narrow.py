"""AdamW whose moments are stored in fewer bits than they are computed in: our own, and torchao's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

CHUNK = 1 << 18
"""Numbers of a parameter that are updated at a time on a CPU, where they should stay in a cache."""
GPU_CHUNK = 1 << 24
"""The same on a GPU, where each call costs time: their moments take 8 bytes each meanwhile."""


class NarrowAdamW(torch.optim.Optimizer):
    """AdamW whose moments are rounded to bfloat16 after each update, which torch's fused kernel computes.

    Args:
        groups: as of ``torch.optim.AdamW``.
        eps: number that is added to the root of the second moment.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], *, eps: float) -> None:
        super().__init__(groups, {"eps": eps})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            for moment in ("exp_avg", "exp_avg_sq"):
                state[moment] = torch.zeros_like(parameter, dtype=torch.bfloat16)
        stored = [_here(state["exp_avg"]), _here(state["exp_avg_sq"])]
        assert parameter.grad is not None
        for numbers, gradient, *moments in _chunks(_here(parameter), _here(parameter.grad), *stored):
            wide = [moment.to(numbers.dtype) for moment in moments]
            adamw(
                [numbers],
                [gradient],
                [wide[0]],
                [wide[1]],
                [],
                [state["step"].clone()],
                fused=True,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
            for kept, computed in zip(moments, wide, strict=True):
                kept.copy_(computed)
        state["step"] += 1


def torchao_adamw(groups: Iterable[dict[str, Any]], *, eps: float) -> torch.optim.Optimizer:
    """Make torchao's AdamW with moments of 8 bits; on a CPU its updates are not compiled."""
    from torchao.optim import AdamW8bit

    class OnAnyDevice(AdamW8bit):  # type: ignore[misc]  # torchao has no types
        @torch.no_grad()
        def step(self, closure: None = None) -> None:
            on_cpu = all(each.device.type == "cpu" for group in self.param_groups for each in group["params"])
            # compiling takes a C++ compiler and 20 seconds for each shape, and gains little on a CPU
            with torch.compiler.set_stance("force_eager") if on_cpu else nullcontext():
                super().step()

    made: torch.optim.Optimizer = OnAnyDevice(list(groups), eps=eps)
    return made


def _here(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank holds."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def _chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield views of the same places of tensors of one shape; of a strided one, all at once."""
    if not all(tensor.is_contiguous() for tensor in tensors):
        yield tensors
        return
    flat = [tensor.view(-1) for tensor in tensors]
    chunk = GPU_CHUNK if flat[0].is_cuda else CHUNK
    for begin in range(0, flat[0].numel(), chunk):
        yield tuple(each[begin : begin + chunk] for each in flat)
