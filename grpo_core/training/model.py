"""The model as the trainer sees it: which parameters are trained, published and saved, and how it scores.

``Model`` is the seam for other ways to hold a model, such as adapters; ``FullModel`` trains all weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from attrs import field, frozen
from torch import Tensor, nn

from grpo_core.config import ModelConfig, ScoreConfig
from grpo_core.contracts.errors import ModelError
from grpo_core.contracts.records import Canary
from grpo_core.models import files
from grpo_core.models.files import chat_template
from grpo_core.training.logprobs import rounded, token_logprobs
from grpo_core.training.microbatch import MicroBatch
from grpo_core.training.packing import packed_inputs, use_packing
from grpo_core.training.passes import Around, Passes, for_training
from grpo_core.training.ranks import Alone, Ranks
from grpo_core.weights.layout import LowRankSum
from grpo_core.weights.names import checkpoint_tensors, module_tensors

SHORT = 64
"""Tokens of a row, padding included, up to which its attention scores are computed as a whole."""


@frozen(kw_only=True)
class ModelSource:
    """The source of a ``Model``."""

    start: str
    """Directory or hub id of the model that the run starts from; it has the tokenizer as well."""
    saved: Path | None
    """Directory that ``Model.write`` wrote, to continue from; None begins at ``start``."""
    published: torch.dtype | None = None
    """Dtype in which engines got the saved part, to read it as they did; None: as its trainer continues."""
    config: ModelConfig
    device: torch.device
    passes: Passes = field(factory=Passes)
    kept: tuple[str, ...] = ()
    """Names of other weights that score: "start", and those that ``refresh`` will move."""
    seed: int = 0
    """Seed of parameters that begin at random."""
    ranks: Ranks = field(factory=Alone)
    """The processes that hold the model together."""

    def load(
        self, path: str | Path, dtype: torch.dtype = torch.float32, *, device: torch.device | None = None
    ) -> nn.Module:
        """Load weights in a directory of the source to a device.  Raises ModelError."""
        return load(
            path,
            device=device or self.device,
            trust_remote_code=self.config.trust_remote_code,
            passes=self.passes,
            dtype=dtype,
            attention=self.config.attention,
        )

    def scorer(self, module: nn.Module) -> Scorer:
        """Make the scorer of a module, which may still be on the host, with the source's choices."""
        if self.passes.packing:
            use_packing(module)
        dtype = compute_dtype(self.config, self.device, sum(map(Tensor.numel, module.parameters())))
        around = self.passes.around(self.device)
        # layers would be compiled for the trial's few tokens, and perhaps for another device
        trial = torch.compiler.set_stance("force_eager") if self.passes.compiled else nullcontext()
        with trial:
            return Scorer(module, dtype, around=around, autocast=not self.passes.copies)

    def tokenizer(self) -> SavedTokenizer:
        """Return the tokenizer that is saved with the weights."""
        return SavedTokenizer(self)


class Model(Protocol):
    """A causal language model in training.  Built by a function ``(ModelSource) -> Model``."""

    parameters: int
    """Number of parameters that a forward pass uses."""
    vocabulary: int
    """Number of different tokens."""
    base: str
    """Directory of the base model if adapters are published; empty if the whole model is."""

    def trainable(self) -> Sequence[tuple[str, nn.Parameter]]:
        """The parameters that the optimizer changes, by name; tied ones once.  Always in the same order."""
        ...

    def weights(self) -> Iterator[Tensor]:
        """The tensors that stay between two steps: all parameters, including those of other weights."""
        ...

    def score(
        self, micro: MicroBatch, temperature: float, *, entropy_gradient: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return logprobs [N] of the sampled tokens, with gradient, and entropies [N] of their distributions.

        The entropy is detached unless ``entropy_gradient``.
        """
        ...

    def kept_logprobs(self, name: str, micro: MicroBatch, temperature: float) -> Tensor:
        """Return logprobs [N] of the sampled tokens by the weights ``name``, without gradient.

        They are the run's first weights, unless they were refreshed.
        """
        ...

    def refresh(self, name: str, share: float) -> None:
        """Move the weights ``name`` toward the trained ones by ``share``; 1 copies them."""
        ...

    def saved_kept(self) -> Mapping[str, Tensor]:
        """The tensors of weights that move, by NAME/PARAMETER; ``restore_kept`` takes them."""
        ...

    def restore_kept(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue with weights that have been saved; the others stay as they are."""
        ...

    def next_tokens(self, prompts: Sequence[tuple[int, ...]]) -> tuple[Canary, ...]:
        """The likeliest tokens after each prompt, at temperature 1, with the published weights."""
        ...

    def published(self) -> Sequence[tuple[str, Tensor | LowRankSum]]:
        """The tensors that engines receive: the model's (``grpo_core.weights.names``), or adapters."""
        ...

    def saved(self) -> Mapping[str, Tensor]:
        """The tensors that ``write`` needs.  They are copied before they are written."""
        ...

    def write(self, directory: Path, tensors: Mapping[str, Tensor]) -> None:
        """Write a copy of what ``saved`` returned, so that ``ModelSource.saved`` can read it.

        transformers or peft can load the directory.  Runs in a thread, while training continues.
        Raises OSError or SafetensorError.
        """
        ...


class FullModel:
    """Trains, publishes and saves all weights; other weights that score are frozen copies of the start.

    Args:
        policy: the model that is trained.
        kept: the frozen copies by name.
        tokenizer: is saved with the weights.

    Raises ModelError if the tensors cannot be published; see ``checkpoint_tensors``.
    """

    base = ""

    def __init__(
        self,
        policy: Scorer,
        kept: Mapping[str, Scorer],
        *,
        tokenizer: SavedTokenizer,
    ) -> None:
        self.policy, self.kept = policy, kept
        self._tokenizer = tokenizer
        self._named = list(policy.module.named_parameters())  # tied tensors once
        self._addresses: list[int] = []
        self._views: list[tuple[str, Tensor]] = []
        self.published()  # refuse a model that cannot be published now
        self.parameters = sum(parameter.numel() for _, parameter in self._named)
        self.vocabulary = policy.vocabulary

    @classmethod
    def build(cls, source: ModelSource) -> FullModel:
        """Load the weights.  Raises ModelError."""

        def scorer(path: str | Path) -> Scorer:
            return source.scorer(source.load(path))

        policy = scorer(source.saved or source.start)
        kept = {name: scorer(source.start) for name in source.kept}
        for each in kept.values():
            each.module.requires_grad_(False)
        return cls(policy, kept, tokenizer=source.tokenizer())

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        return self._named

    def weights(self) -> Iterator[Tensor]:
        for scorer in (self.policy, *self.kept.values()):
            yield from scorer.module.parameters()

    def score(
        self, micro: MicroBatch, temperature: float, *, entropy_gradient: bool = False
    ) -> tuple[Tensor, Tensor]:
        return self.policy.score(micro, temperature, entropy_gradient=entropy_gradient)

    @torch.no_grad()
    def kept_logprobs(self, name: str, micro: MicroBatch, temperature: float) -> Tensor:
        return self.kept[name].score(micro, temperature)[0]

    @torch.no_grad()
    def refresh(self, name: str, share: float) -> None:
        parameters = zip(self.kept[name].module.parameters(), self.policy.module.parameters(), strict=True)
        for mine, trained in parameters:
            mine.lerp_(trained, share)

    def saved_kept(self) -> Mapping[str, Tensor]:
        return {
            f"{name}/{parameter}": tensor
            for name, scorer in self.kept.items()
            if name != "start"
            for parameter, tensor in scorer.module.named_parameters()
        }

    @torch.no_grad()
    def restore_kept(self, tensors: Mapping[str, Tensor]) -> None:
        for name, parameter in self.saved_kept().items():
            if name in tensors:
                parameter.copy_(tensors[name])

    def next_tokens(self, prompts: Sequence[tuple[int, ...]]) -> tuple[Canary, ...]:
        return self.policy.next_tokens(prompts)

    def published(self) -> list[tuple[str, Tensor]]:
        """The views, cached until a tensor of the module moves in memory."""
        addresses = [tensor.data_ptr() for tensor in module_tensors(self.policy.module).values()]
        if addresses != self._addresses:
            self._addresses, self._views = addresses, list(checkpoint_tensors(self.policy.module).items())
        return self._views

    def saved(self) -> Mapping[str, Tensor]:
        state: Mapping[str, Tensor] = self.policy.module.state_dict()
        return state

    def write(self, directory: Path, tensors: Mapping[str, Tensor]) -> None:
        self.policy.module.save_pretrained(directory, state_dict=tensors)  # type: ignore[operator]
        self._tokenizer.save(directory)


class SavedTokenizer:
    """The tokenizer that is saved with the weights, with the chat template of the configuration."""

    def __init__(self, source: ModelSource) -> None:
        self._source = source
        self._template = chat_template(source.config.chat_template)  # the file may change later

    def save(self, directory: Path) -> None:
        self._loaded.save_pretrained(directory)

    @cached_property
    def _loaded(self) -> Any:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(
            self._source.start, trust_remote_code=self._source.config.trust_remote_code
        )
        if self._template is not None:
            tokenizer.chat_template = self._template
        return tokenizer


class Scorer:
    """A causal language model whose sampled tokens can be scored.

    Args:
        module: a transformers causal language model with float32 weights.
        compute_dtype: of its matrix products (bfloat16: autocast); logprobs and the sums in its head are
            always float32.
        plain_head: whether the logits are a linear function of the base model's output; None tests it on a
            few.
        around: makes the context of each pass that has a gradient.
        autocast: whether products round their inputs; if not, the weights have ``compute_dtype`` in a pass.
    """

    def __init__(
        self,
        module: nn.Module,
        compute_dtype: torch.dtype = torch.float32,
        *,
        plain_head: bool | None = None,
        around: Around = nullcontext,
        autocast: bool = True,
    ) -> None:
        self.module = module
        self.compute_dtype, self._around, self._autocast = compute_dtype, around, autocast
        self._plain_head = _has_plain_head(module) if plain_head is None else plain_head

    @property
    def device(self) -> torch.device:
        """Where the weights are now."""
        return next(self.module.parameters()).device

    def score(
        self, micro: MicroBatch, temperature: float, *, entropy_gradient: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return logprobs [N] of the sampled tokens, with gradient, and entropies [N] of their distributions.

        The entropy is detached unless ``entropy_gradient``.
        """
        _choose_attention(micro)
        inputs = {"input_ids": micro.input_ids, "use_cache": False}
        if micro.packed:
            inputs |= packed_inputs(micro.packed, self.device)
        if not self._plain_head:
            with self._precision(), self._around():
                logits = self.module(**inputs).logits
            logits = logits.flatten(0, 1)[micro.positions]
            return _from_logits(logits, micro.targets, temperature, entropy_gradient)
        with self._precision(), self._around():
            hidden = self.module.base_model(**inputs)[0]  # type: ignore[operator]
        head: Any = self.module.get_output_embeddings()  # type: ignore[operator]
        return token_logprobs(
            hidden.flatten(0, 1)[micro.positions],
            head.weight,
            micro.targets,
            bias=head.bias,
            temperature=temperature,
            product_dtype=self.compute_dtype if self.compute_dtype is torch.bfloat16 else None,
            entropy_gradient=entropy_gradient,
        )

    @torch.no_grad()
    def next_tokens(self, prompts: Sequence[tuple[int, ...]], k: int = 16) -> tuple[Canary, ...]:
        """The ``k`` likeliest tokens after each prompt with their logprobs."""
        if not prompts:
            return ()
        ids = torch.zeros(len(prompts), max(map(len, prompts)), dtype=torch.int64)
        for b, prompt in enumerate(prompts):
            ids[b, : len(prompt)] = torch.tensor(prompt)
        last = torch.arange(len(prompts)), torch.tensor([len(prompt) - 1 for prompt in prompts])
        with self._precision():
            if self._plain_head:
                hidden = self.module.base_model(input_ids=ids.to(self.device), use_cache=False)[0]  # type: ignore[operator]
            else:
                logits = self.module(input_ids=ids.to(self.device), use_cache=False).logits[last]
        if self._plain_head:
            head: Any = self.module.get_output_embeddings()  # type: ignore[operator]
            outputs = rounded(hidden[last], self.compute_dtype).float()
            parts = (rounded(part, self.compute_dtype).float() for part in head.weight.split(4096))
            logits = torch.cat([nn.functional.linear(outputs, part) for part in parts], dim=1)
            logits = logits if head.bias is None else logits + head.bias
        log_p = torch.log_softmax(logits.float(), dim=-1)
        best = log_p.topk(min(k, log_p.shape[-1]))
        return tuple(
            Canary(prompt_ids=prompt, token_ids=tuple(tokens), logprobs=tuple(logprobs))
            for prompt, tokens, logprobs in zip(
                prompts, best.indices.tolist(), best.values.tolist(), strict=True
            )
        )

    @property
    def vocabulary(self) -> int:
        embedding: Any = self.module.get_input_embeddings()  # type: ignore[operator]
        return int(embedding.weight.shape[0])

    def _precision(self) -> Any:
        rounds = self._autocast and self.compute_dtype is torch.bfloat16
        return torch.autocast(self.device.type, torch.bfloat16) if rounds else nullcontext()


def compute_dtype(config: ModelConfig | ScoreConfig, device: torch.device, size: int = 0) -> torch.dtype:
    """Return the dtype of the matrix products of a model with ``size`` parameters; 0: a small one."""
    dtype: torch.dtype = getattr(
        torch, files.computed_dtype(config.dtype, size, on_gpu=device.type == "cuda")
    )
    return dtype


def load(
    path: str | Path,
    *,
    device: torch.device,
    trust_remote_code: bool = False,
    passes: Passes = Passes(),  # noqa: B008 - it is frozen
    dtype: torch.dtype = torch.float32,
    attention: str = "",
) -> nn.Module:
    """A transformers model with weights from safetensors (never from pickles), without dropout.

    Raises ModelError, also if its attention differs from the given one.
    """
    import transformers

    transformers.utils.logging.disable_progress_bar()
    try:
        loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
            output_loading_info=True,
            attn_implementation=attention or None,
            ignore_mismatched_sizes=True,  # otherwise the error would not name them; they are refused below
        )
    except Exception as error:
        reason = str(error).strip().splitlines()
        raise ModelError(
            f"model {str(path)!r} cannot be loaded ({type(error).__name__}: {reason[0] if reason else ''}); "
            "expected a directory or hub id of a transformers causal language model in safetensors"
        ) from error
    if faults := _not_loaded(report):
        some = "; ".join(faults[:3]) + ("; ..." if len(faults) > 3 else "")
        raise ModelError(
            f"model {str(path)!r}: {len(faults)} of its tensors cannot be loaded and would be random: "
            f"{some}. Its safetensors are incomplete or do not fit its config.json: copy or download it again"
        )
    module = for_training(loaded.to(device), passes)
    config: Any = module.config
    if attention and config._attn_implementation != attention:
        raise ModelError(
            f"model.attention = {attention!r}: {type(module).__name__} computes with "
            f"{config._attn_implementation!r}, which it needs; leave model.attention out"
        )
    return module


def _not_loaded(report: Mapping[str, Any]) -> list[str]:
    """List the tensors that transformers initialized, because the files lack them or hold another shape."""
    missing = [f"{name} is missing" for name in sorted(report["missing_keys"])]
    other = [
        f"{name} has shape {list(found)}, expected {list(expected)}"
        for name, found, expected in sorted(report["mismatched_keys"])
    ]
    return [*missing, *other, *report["error_msgs"]]


def _choose_attention(micro: MicroBatch) -> None:
    """Compute attention of short rows on a CPU by whole score matrices, not by the fused kernel's blocks.

    With the demo's rows of about 14 tokens a step takes three quarters of the time.  The choice holds until
    the next call, so that checkpointed activations are computed again by the same kernel.
    """
    if micro.input_ids.device.type == "cpu":
        longest = max((part.length for part in micro.packed), default=micro.input_ids.shape[1])
        torch.backends.cuda.enable_flash_sdp(longest > SHORT)  # despite its name, the CPU's too


@torch.no_grad()
def _has_plain_head(model: nn.Module) -> bool:
    """Whether the logits are a linear function of the base model's output: no soft-capping or scaling."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if not isinstance(head, nn.Linear) or not hasattr(model, "base_model"):
        return False
    ids = torch.arange(4, device=head.weight.device).remainder(head.weight.shape[0])[None]
    logits = model(input_ids=ids, use_cache=False).logits
    hidden = model.base_model(input_ids=ids, use_cache=False)[0]  # type: ignore[operator]
    expected = head(hidden) if hidden.shape[-1] == head.weight.shape[1] else None
    return expected is not None and torch.allclose(logits, expected, rtol=1e-4, atol=1e-5)


def _from_logits(
    logits: Tensor, targets: Tensor, temperature: float, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    log_p = torch.log_softmax(logits.float() / temperature, dim=-1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy = -torch.linalg.vecdot(log_p.exp(), log_p)
    return log_p.gather(1, targets[:, None])[:, 0], entropy
