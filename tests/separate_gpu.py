"""A GPU for machines without one: torch's backend for devices in Python, with memory of the host.

torch refuses to compute with tensors of two devices.  On a CPU there is one device, so a tensor that was left
on the host is found only on a machine with a GPU.  Here it is an error as well, in backward passes, too.
"""

from __future__ import annotations

import importlib
import multiprocessing
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from functools import cache, wraps
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)

GPU = "gpu"
_aten = torch.ops.aten
MAY_MEET = {_aten._to_copy.default, _aten.copy_.default, _aten.index.Tensor, _aten.index_put_.default}
"""Operations that take tensors of two devices."""
ROUNDED = ("linear", "matmul", "scaled_dot_product_attention")
"""Operations whose floating point tensors autocast rounds."""


CUDA = {
    "get_device_capability": lambda device: (8, 0),
    "synchronize": lambda device: None,
    "cudart": lambda: SimpleNamespace(
        cudaHostRegister=lambda *given: 0, cudaHostUnregister=lambda address: 0
    ),
    "check_error": lambda status: None,
}
"""Answers of ``torch.cuda``."""


wide: list[int] = []
"""Rows of each product that is wider than its factors."""


class MixedError(AssertionError):
    """Tensors of the GPU and of the host meet."""


class OnGpu(Tensor):
    """A tensor of the GPU; ``held`` has its values."""

    held: Tensor
    is_cuda = property(lambda self: True)  # for the branches that are NVIDIA's

    @staticmethod
    def __new__(cls, held: Tensor) -> OnGpu:
        made: OnGpu = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=f"{GPU}:0",
        )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(function, args, kwargs or {})

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def tolist(self) -> Any:
        return self.held.tolist()


def _computed(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Compute an operation with the values, and place what it makes."""
    given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    there = any(isinstance(each, OnGpu) for each in given)
    strange = [each for each in given if not isinstance(each, OnGpu) and each.dim()]
    if there and strange and function not in MAY_MEET:
        raise MixedError(f"{function}: a tensor {list(strange[0].shape)} is on the host")
    if kwargs.get("device") is not None:
        there = torch.device(kwargs["device"]).type == GPU
    elif function is _aten.copy_.default:
        there = isinstance(given[0], OnGpu)
    values, options = tree_map_only(OnGpu, lambda each: each.held, (args, kwargs))
    if there and "device" in options:
        options["device"] = "cpu"
    if function is _aten.mm.dtype_out:  # which CPUs cannot
        first, second, dtype = values
        wide.append(len(first))
        made = torch.mm(first.to(dtype), second.to(dtype), **options)
    else:
        made = function(*values, **options)
    if not there:
        return made
    return return_and_correct_aliasing(function, args, kwargs, tree_map_only(Tensor, OnGpu, made))


class _Machine(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees the operations that make tensors from none."""

    def __torch_dispatch__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(function, args, kwargs or {})


class _Module(_DummyBackendModule):
    """``torch.gpu``."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


def _rounding(operation: Any) -> Any:
    def rounded(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype(GPU)
        given, named = tree_map_only(
            Tensor, lambda each: each.to(dtype) if each.is_floating_point() else each, (args, kwargs)
        )
        with torch.autocast(GPU, enabled=False):
            return operation(*given, **named)

    return rounded


# what ``torch.tensor`` calls past the mode:
def _empty(*args: Any, **kwargs: Any) -> OnGpu:
    return OnGpu(torch.empty_strided(*args, **{**kwargs, "device": "cpu"}))


def _copied(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    return _computed(_aten.copy_.default, (target, source), {})  # type: ignore[no-any-return]


def install() -> None:
    """Let torch see the GPU, for good: only in a process that has not computed a gradient yet."""
    _setup_privateuseone_for_python_backend(GPU, _Module())
    _library.impl("empty_strided", _empty, "PrivateUse1")
    _library.impl("_copy_from", _copied, "PrivateUse1")
    for name in ROUNDED:
        _library.impl(name, _rounding(getattr(_aten, name)), "AutocastPrivateUse1")
    _others.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    torch.__future__.set_swap_module_params_on_conversion(True)  # tied tensors stay tied
    # in it, a view of another tensor has no wrapper
    torch.inference_mode = lambda on=True: torch.no_grad() if on else nullcontext()  # type: ignore[misc,assignment]
    for name, stand_in in CUDA.items():
        setattr(torch.cuda, name, stand_in)
    _Machine().__enter__()  # type: ignore[no-untyped-call]


def on_a_gpu(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test in a process with a GPU, to which its fixtures are sent."""

    @wraps(test)
    def run(**given: Any) -> None:
        _process().submit(_run, test.__module__, test.__name__, given).result()

    return pytest.mark.long(run)  # the process starts


def _run(module: str, name: str, given: dict[str, Any]) -> None:
    try:
        getattr(importlib.import_module(module), name).__wrapped__(**given)
    except Exception:  # torch's are not all pickled
        raise AssertionError(traceback.format_exc()) from None


@cache
def _process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=install)


_library, _others = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")
