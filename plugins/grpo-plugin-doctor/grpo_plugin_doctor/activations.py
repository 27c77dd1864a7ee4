"""Computes the activation memory of a model without weights and without arithmetic.

The trainer's forward and backward pass runs on fake tensors, which have shapes but no contents, and counts
every allocation.  The result therefore reflects the model's code, the attention kernel that torch selects,
and the chunks of the head, for any architecture.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from attrs import evolve, field, frozen
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from grpo_core import ModelError, errors
from grpo_core.config import TrainerConfig
from grpo_core.training import packing
from grpo_core.training.budget import token_budget
from grpo_core.training.logprobs import extra_bytes_on_gpu
from grpo_core.training.microbatch import MicroBatch
from grpo_core.training.model import Scorer
from grpo_core.training.passes import Passes, for_training


@frozen(kw_only=True)
class Shapes:
    """The sizes of a model, as determined by its configuration."""

    parameters: int
    """Number of parameters; tied ones count once."""
    vocabulary: int
    tensors: Mapping[str, tuple[int, ...]]
    """Shapes of the parameters by name; tied ones once."""


@frozen(kw_only=True)
class Pass:
    """The micro-batch of a forward and backward pass."""

    rows: int
    tokens: int
    """Number of tokens of each row."""
    sampled: int
    """Number of tokens of each row that are trained."""
    dtype: str
    passes: Passes = field(factory=Passes)
    offloads: bool = False
    """Whether saved activations are offloaded to another device."""
    again: bool = True
    """Whether gradients of an earlier micro-batch are allocated already."""

    def microbatch(self) -> MicroBatch:
        """Return the micro-batch; call this in fake tensor mode."""
        n = self.rows * min(self.sampled, self.tokens)
        places, numbers = torch.zeros(n, dtype=torch.int64), torch.zeros(n)
        shape = (1, self.rows * self.tokens) if self.passes.packing else (self.rows, self.tokens)
        return MicroBatch(
            rows=(),
            input_ids=torch.zeros(shape, dtype=torch.int64),
            packed=(packing.Part(length=self.tokens),) * self.rows if self.passes.packing else (),
            positions=places,
            targets=places,
            row_of=places,
            generation_logprobs=numbers,
            advantages=numbers,
            sequences=places,
            correct=places > 0,
            weights=numbers,
        )


class _Count(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of storages that operations allocate, until they are freed."""

    def __init__(self, known: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._live: dict[int, int] = dict.fromkeys(known, 0)
        self._now = 0
        self.peak: int = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for each in tree_iter(result):
            if isinstance(each, Tensor):
                self._add(each.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._live:
            self._live[key] = storage.nbytes()
            self._now += storage.nbytes()
            self.peak = max(self.peak, self._now)
            weakref.finalize(storage, self._drop, key).atexit = False

    def _drop(self, key: int) -> None:
        self._now -= self._live.pop(key, 0)


def _moved() -> AbstractContextManager[Any]:
    """Replace saved tensors by empty ones until the backward pass; fake tensors have no contents to keep."""
    hooks: Any = torch.autograd.graph.saved_tensors_hooks
    return hooks(  # type: ignore[no-any-return]
        lambda tensor: (tensor.shape, tensor.dtype),
        lambda kept: torch.empty(kept[0], dtype=kept[1]),
    )


class _GroupedProduct(torch.autograd.Function):
    """A stand-in for the grouped matrix product of experts: the routing does not change any size."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.bfloat16)  # type: ignore[untyped-decorator]
    def forward(ctx: Any, tokens: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(tokens, weights)
        return tokens.new_empty(len(tokens), weights.shape[2])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        tokens, weights = ctx.saved_tensors
        return torch.empty_like(tokens), torch.empty_like(weights)


@contextmanager
def _fake_experts() -> Iterator[None]:
    """Patch transformers' mixtures of experts to run on fake tensors, without data-dependent kernels.

    The patched function is private; if it is missing, the estimate fails for such models.
    """
    from transformers.integrations import moe

    before = getattr(moe, "_grouped_mm", None)

    def product(tokens: Tensor, weights: Tensor, offs: Tensor) -> Any:
        return _GroupedProduct.apply(tokens.to(weights.dtype), weights)  # type: ignore[no-untyped-call]

    moe._grouped_mm = product
    try:
        yield
    finally:
        moe._grouped_mm = before


def model_shapes(path: str, *, trust_remote_code: bool = False) -> Shapes:
    """Return the sizes of the model in a directory or of a hub id, from its configuration.

    Raises ModelError if transformers cannot construct the model.
    """
    with torch.device("meta"):
        module = _make(path, trust_remote_code)
    embedding: Any = module.get_input_embeddings()
    return Shapes(
        parameters=sum(parameter.numel() for parameter in module.parameters()),
        vocabulary=int(embedding.weight.shape[0]),
        tensors={name: tuple(parameter.shape) for name, parameter in module.named_parameters()},
    )


def trained_pass(
    config: TrainerConfig,
    *,
    rows: int,
    tokens: int,
    sampled: int,
    vocabulary: int,
    dtype: str,
    on_gpu: bool,
    copies: bool,
) -> Pass:
    """Return the largest micro-batch of a trainer with updates of ``rows`` rows.

    ``copies``: see ``Passes.copies``.
    """
    budget = token_budget(config, vocabulary, torch.device("cuda" if on_gpu else "cpu"))
    at_once = max(1, min(budget // tokens, rows))
    return Pass(
        rows=at_once,
        tokens=tokens,
        sampled=min(tokens, sampled),
        dtype=dtype,
        passes=evolve(Passes.of(config), copies=copies),
        offloads=on_gpu and config.activations == "offload",
        again=rows > at_once,
    )


def pass_bytes(path: str, work: Pass, *, vocabulary: int, on_gpu: bool, trust_remote_code: bool) -> int:
    """Return the bytes of a pass in addition to weights and gradients.  Raises ModelError if unknown."""
    extra = extra_bytes_on_gpu(work.rows * work.sampled, vocabulary) if on_gpu else 0
    return activation_bytes(path, work, trust_remote_code=trust_remote_code) + extra


def activation_bytes(path: str, work: Pass, *, trust_remote_code: bool = False) -> int:
    """Return the peak bytes that a forward and backward pass adds to weights and gradients.

    Raises ModelError if the model's code depends on the contents of tensors.
    """
    from torch._subclasses import fake_tensor

    log = logging.getLogger(fake_tensor.__name__)  # it logs errors that it also raises
    before, log.disabled = log.disabled, True
    try:
        with fake_tensor.FakeTensorMode(), _fake_experts():
            dtype = torch.bfloat16 if work.passes.copies else torch.float32
            made = _make(path, trust_remote_code, dtype)
            module = for_training(made, evolve(work.passes, compiled=False))
            if work.passes.packing:
                packing.exchange_attention(module)
            parameters = list(module.parameters())
            known = {tensor.untyped_storage()._cdata for tensor in (*parameters, *module.buffers())}
            scorer = Scorer(
                module,
                getattr(torch, work.dtype),
                plain_head=_looks_plain(module),
                around=_moved if work.offloads else nullcontext,
                autocast=not work.passes.copies,
            )
            with _Count(known) as count:
                for _ in range(1 + work.again):
                    logprobs, _ = scorer.score(work.microbatch(), 1.0)
                    torch.autograd.backward(logprobs.sum())
                    del logprobs
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(
            f"the activations cannot be computed ahead ({type(error).__name__}: {errors.one_line(error)})"
        ) from error
    finally:
        log.disabled = before
    gradients = sum(parameter.nbytes for parameter in parameters)
    return int(count.peak - gradients)


def _make(path: str, trust_remote_code: bool, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    except Exception as error:  # the model's code may raise any error
        raise ModelError(
            f"model {str(path)!r}: there is no configuration of a causal language model "
            f"({type(error).__name__}: {errors.one_line(error)})"
        ) from error


def _looks_plain(module: Any) -> bool:
    """Predict, without computing logits, whether ``Scorer`` finds a plain head."""
    config = module.config.get_text_config()
    scaled = any(getattr(config, name, None) for name in ("final_logit_softcapping", "logit_scale"))
    return isinstance(module.get_output_embeddings(), torch.nn.Linear) and not scaled
