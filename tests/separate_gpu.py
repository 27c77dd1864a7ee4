"""A GPU for machines without one: its tensors are in the host's memory, and meet none of the host's.

torch refuses to compute with tensors of two devices.  On a CPU there is one device, so a tensor that was left
on the host is found only on a machine with a GPU.  Here it is an error as well.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

GPU = torch.device("cuda", 0)
MAY_MEET = (Tensor.copy_, Tensor.__getitem__, Tensor.__setitem__, Tensor.grad.__set__)  # type: ignore[attr-defined]
"""Functions that take tensors of two devices."""


class MixedError(AssertionError):
    """Tensors of the GPU and of the host meet."""


class OnGpu(Tensor):
    """A tensor of the GPU."""

    device = property(lambda self: GPU)
    is_cuda = property(lambda self: True)

    @classmethod
    def __torch_function__(cls, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        others = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        strange = [each for each in others if not isinstance(each, OnGpu) and each.dim()]
        if strange and function not in MAY_MEET and getattr(function, "__name__", "") != "__get__":
            raise MixedError(f"{function.__name__}: a tensor {list(strange[0].shape)} is on the host")
        if function is Tensor.cpu or (function is Tensor.to and _leaves(args[1:], kwargs)):
            return args[0].detach().as_subclass(Tensor).clone()
        if function is torch.mm and "out_dtype" in kwargs:  # CPUs cannot
            wide = kwargs.pop("out_dtype")
            args = tuple(factor.to(wide) for factor in args)
        if isinstance(function, torch._ops.OpOverloadPacket):  # inside of it no mode sees what is made
            with torch._C.DisableTorchFunctionSubclass():
                args, kwargs = tree_map_only(OnGpu, lambda each: each.as_subclass(Tensor), (args, kwargs))
                return tree_map_only(Tensor, placed, function(*args, **kwargs))
        return super().__torch_function__(function, kinds, args, kwargs)


def _is_gpu(device: Any) -> bool:
    return isinstance(device, (str, torch.device)) and torch.device(device).type == "cuda"


def _leaves(args: Any, kwargs: Any) -> bool:
    given = [each for each in (*args, kwargs.get("device")) if isinstance(each, (str, torch.device))]
    return bool(given) and not _is_gpu(given[0])


def placed(tensor: Tensor) -> Tensor:
    return tensor if isinstance(tensor, OnGpu) else tensor.as_subclass(OnGpu)


class Machine(TorchFunctionMode):
    """Makes tensors for "cuda" on the host, and says that they are on the GPU."""

    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function is Tensor.to and (_is_gpu(kwargs.get("device")) or any(map(_is_gpu, args[1:2]))):
            rest = [each for each in args[1:] if isinstance(each, torch.dtype)]
            kwargs = {name: value for name, value in kwargs.items() if name in ("dtype", "copy")}
            return placed(args[0].to(*rest, **kwargs) if rest or kwargs else args[0])
        if _is_gpu(kwargs.get("device")):
            made = function(*args, **{**kwargs, "device": "cpu"})
            return placed(made) if isinstance(made, Tensor) else made
        return function(*args, **kwargs)


def _moved(plain: Any) -> Any:
    """Return ``nn.Module.to`` for modules that move to the GPU."""

    def to(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        if not any(map(_is_gpu, (*args, kwargs.get("device")))):
            moved: nn.Module = plain(module, *args, **kwargs)
            return moved
        plain(module, *(each for each in args if isinstance(each, torch.dtype)))
        made: dict[Tensor, nn.Parameter] = {}  # a tied one is made once
        for part in module.modules():
            for name, tensor in part._parameters.items():
                if tensor is not None and not isinstance(tensor, OnGpu):
                    part._parameters[name] = made.setdefault(tensor, _parameter(tensor))
            for name, buffer in part._buffers.items():
                if buffer is not None:
                    part._buffers[name] = placed(buffer)
        return module

    return to


def _parameter(tensor: nn.Parameter) -> nn.Parameter:
    def place(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad = placed(parameter.grad)

    made = nn.Parameter(placed(tensor.detach()), requires_grad=tensor.requires_grad)
    if made.requires_grad:
        made.register_post_accumulate_grad_hook(place)  # autograd makes plain tensors
    return made


def install(patch: pytest.MonkeyPatch) -> Machine:
    """Let torch see the GPU; it is there while the result is entered."""
    autocast, runtime = (
        torch.autocast,
        SimpleNamespace(cudaHostRegister=lambda *given: 0, cudaHostUnregister=lambda address: 0),
    )
    patch.setattr(nn.Module, "to", _moved(nn.Module.to))
    patch.setattr(torch, "autocast", lambda kind, *given: autocast("cpu", *given))
    for name in ("is_autocast_enabled", "get_autocast_dtype"):
        plain = getattr(torch, name)
        patch.setattr(torch, name, lambda kind="cuda", plain=plain: plain("cpu"))
    for name, stand_in in {
        "is_available": lambda: True,
        "get_device_capability": lambda device: (7, 5),
        "get_device_name": lambda device: "a GPU",
        "get_rng_state": lambda device: torch.zeros(8, dtype=torch.uint8),
        "set_rng_state": lambda state, device: None,
        "synchronize": lambda device: None,
        "empty_cache": lambda: None,
        "cudart": lambda: runtime,
        "check_error": lambda status: None,
    }.items():
        patch.setattr(torch.cuda, name, stand_in)
    return Machine()
