"""Optimizers with a smaller state than AdamW; torch is imported when one is constructed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from fnmatch import fnmatchcase
from math import inf, prod
from typing import TYPE_CHECKING, Any, Literal

from grpo_core import ParameterGroup

if TYPE_CHECKING:
    from torch.optim import Optimizer

State = Mapping[str, tuple[tuple[int, ...], str]]
"""Shape and dtype of each slot of a parameter's state; the dtype "int" is a plain number."""

EMBEDDINGS = ("*embed*", "*lm_head*", "*wte*", "*wpe*")
"""Patterns of the names of embedding and output matrices in the models of transformers."""
BLOCK = 256
"""Number of elements that share a scale in an 8-bit state."""
SMALLEST_8BIT = 4096
"""Number of elements below which a parameter's state stays float32: bitsandbytes' default."""


def check_eps(*, eps: float = 1e-8, **options: Any) -> None:
    if not 0 <= eps < inf:
        raise ValueError(f"eps is {eps}; expected a finite number >= 0")


def _of_adamw(shape: tuple[int, ...]) -> State:
    return {"step": ((), "float32"), "exp_avg": (shape, "float32"), "exp_avg_sq": (shape, "float32")}


def adamw_8bit_state(name: str, shape: tuple[int, ...], **options: Any) -> State:
    n = prod(shape)
    if n < SMALLEST_8BIT:
        return {"step": ((), "int"), "state1": (shape, "float32"), "state2": (shape, "float32")}
    blocks, levels = (-(-n // BLOCK),), (256,)
    return {"step": ((), "int")} | {
        f"{slot}{moment}": (of, dtype)
        for moment in (1, 2)
        for slot, of, dtype in (
            ("state", shape, "uint8"),
            ("absmax", blocks, "float32"),
            ("qmap", levels, "float32"),
        )
    }


def adamw_8bit(groups: Sequence[ParameterGroup], *, eps: float = 1e-8) -> list[Optimizer]:
    """AdamW with 8-bit moments in blocks of 256 elements (arXiv 2110.02861), by bitsandbytes.

    Parameters with fewer than 4,096 elements keep float32 moments.  ``pip install 'grpo-core[optimizers]'``.

    Args:
        groups: parameters with their learning rates.
        eps: number that is added to the root of the second moment.
    """
    from bitsandbytes.optim import AdamW8bit

    return [AdamW8bit([group.for_torch() for group in groups], eps=eps)]


def adamw_torchao_state(name: str, shape: tuple[int, ...], **options: Any) -> State:
    n = prod(shape)
    if n < SMALLEST_8BIT or n % BLOCK:
        return _of_adamw(shape)
    return {"step": ((), "float32")} | {
        f"{moment}.{part}": (of, dtype)
        for moment in ("exp_avg", "exp_avg_sq")
        for part, of, dtype in (
            ("codes", shape, "uint8"),
            ("scale", (n // BLOCK,), "float32"),
            ("qmap", (256,), "float32"),
        )
    }


def adamw_torchao_restored(slot: str, parts: Mapping[str, Any]) -> Any:
    """Rebuild a moment of torchao from its parts."""
    import torch
    from torchao.optim.subclass_8bit import OptimState8bit

    signed = slot == "exp_avg"
    return OptimState8bit(parts["codes"], parts["scale"], parts["qmap"], signed, dtype=torch.float32)


def adamw_torchao(groups: Sequence[ParameterGroup], *, eps: float = 1e-8) -> list[Optimizer]:
    """AdamW with 8-bit moments in blocks of 256 elements (arXiv 2110.02861), by torchao.

    Parameters with fewer than 4,096 elements, or a number of elements that is not a multiple of 256, keep
    float32 moments.  On a GPU torch compiles the update of each shape.  ``pip install 'grpo-core[torchao]'``.

    Args:
        groups: parameters with their learning rates.
        eps: number that is added to the root of the second moment.
    """
    import torch
    from torchao.optim import AdamW8bit

    class OnAnyDevice(AdamW8bit):  # type: ignore[misc]  # torchao has no types
        @torch.no_grad()
        def step(self, closure: None = None) -> None:
            on_cpu = all(each.device.type == "cpu" for group in self.param_groups for each in group["params"])
            # on a CPU compiling needs a C++ compiler and 20 seconds for each shape, and gains little
            with torch.compiler.set_stance("force_eager") if on_cpu else nullcontext():
                super().step()

    return [OnAnyDevice([group.for_torch() for group in groups], eps=eps)]


def _is_hidden(name: str, shape: Sequence[int], adamw: Sequence[str]) -> bool:
    return len(shape) == 2 and not any(fnmatchcase(name, pattern) for pattern in adamw)


def muon_state(
    name: str, shape: tuple[int, ...], *, adamw: Sequence[str] = EMBEDDINGS, **options: Any
) -> State:
    if _is_hidden(name, shape, adamw):
        return {"momentum_buffer": (shape, "float32")}
    return _of_adamw(shape)


def check_muon(*, momentum: float = 0.95, ns_steps: int = 5, **options: Any) -> None:
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum is {momentum}; expected at least 0 and less than 1")
    if not 1 <= ns_steps < 100:
        raise ValueError(f"ns_steps is {ns_steps}; expected 1 to 99")
    check_eps(**options)


def muon(
    groups: Sequence[ParameterGroup],
    *,
    momentum: float = 0.95,
    nesterov: bool = True,
    ns_steps: int = 5,
    lr_scale: Literal["match_rms_adamw", "original"] = "match_rms_adamw",
    adamw: Sequence[str] = EMBEDDINGS,
    eps: float = 1e-8,
) -> list[Optimizer]:
    """Muon for the matrices of hidden layers, which orthogonalises their momentum (arXiv 2502.16982).

    AdamW trains the embeddings and all tensors that are not matrices (gains, biases, stacked experts).

    Args:
        groups: parameters with their learning rates.
        momentum: decay of the momentum.
        nesterov: whether to use Nesterov momentum.
        ns_steps: number of Newton-Schulz iterations.
        lr_scale: factor of the learning rate by a matrix's shape: "match_rms_adamw" matches the size of
            AdamW's updates, so that its learning rates fit (Moonshot); "original" is Keller Jordan's.
        adamw: patterns of the names of matrices that AdamW trains.
        eps: number that AdamW adds to the root of the second moment.
    """
    import torch

    def part(group: ParameterGroup, hidden: bool) -> dict[str, Any]:
        kept = [p for n, p in group.parameters.items() if _is_hidden(n, p.shape, adamw) is hidden]
        return {**group.for_torch(), "params": kept}

    parts = {hidden: [part(group, hidden) for group in groups] for hidden in (True, False)}
    mine, others = ([each for each in parts[hidden] if each["params"]] for hidden in (True, False))
    made: list[Optimizer] = []
    if mine:
        for each in mine:
            del each["betas"]
        made.append(
            torch.optim.Muon(
                mine, momentum=momentum, nesterov=nesterov, ns_steps=ns_steps, adjust_lr_fn=lr_scale
            )
        )
    if others:
        made.append(torch.optim.AdamW(others, eps=eps, fused=True))
    return made
