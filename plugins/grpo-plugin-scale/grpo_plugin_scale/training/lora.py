"""A frozen model with trained adapters: LoRA (Hu et al., arXiv 2106.09685), by peft.

The weights that a run started from are the same model with disabled adapters, so there is no second model.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from attrs import frozen
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from torch import Tensor, nn

from grpo_core import Canary, ModelError, errors
from grpo_core.kit import ModelSource, checkpoint_tensors, files
from grpo_core.processes import cpu
from grpo_core.training.microbatch import MicroBatch
from grpo_core.training.model import Scorer
from grpo_core.weights import layout
from grpo_plugin_scale import factors
from grpo_plugin_scale.training.resting import memory_of

if TYPE_CHECKING:
    from grpo_plugin_scale.training.group import Group

ADAPTER = "default"
"""Name of the adapters in peft."""
PREFIX = "base_model.model."
"""Prefix of layer names in that file."""
FREED = 256 << 20
"""Number of freed bytes after which memory is returned to the system."""


class LoraModel:
    """Trains, publishes and saves adapters.

    Args:
        policy: the model with its adapters.
        whole: tensors of the model without adapters, as in its checkpoint.
        layers: layers with an adapter, by the name of their weight in the checkpoint.
        config: peft's configuration, which is saved with the adapters.
        source: source of the model.
        merged: whether engines receive merged weights; otherwise they add adapters to the model's files.
    """

    def __init__(
        self,
        policy: Scorer,
        *,
        whole: Mapping[str, Tensor],
        layers: Mapping[str, Any],
        config: LoraConfig,
        source: ModelSource,
        merged: bool,
    ) -> None:
        self.policy, self.base = policy, "" if merged else str(Path(source.start).absolute())
        self._whole, self._layers, self._config = whole, layers, config
        self._source, self._tokenizer = source, source.tokenizer()
        self._named = [
            (f"{PREFIX}{name}".replace(f".{ADAPTER}.", "."), parameter)
            for name, parameter in policy.module.named_parameters()
            if parameter.requires_grad
        ]
        self._moved: dict[str, dict[str, Tensor]] = {}
        """Adapters of other weights that have moved from the start, by the names of the weights."""
        self._dropouts = [
            dropout for layer in self._layers.values() for dropout in layer.lora_dropout.modules()
        ]
        self.parameters = sum(parameter.numel() for parameter in policy.module.parameters())
        self.vocabulary = policy.vocabulary

    @classmethod
    def build(
        cls, source: ModelSource, config: LoraConfig, *, targets: Sequence[str], merged: bool
    ) -> LoraModel:
        """Load the initial weights, and saved adapters.  Raises ModelError.

        Args:
            source: source of the model.
            config: section of the configuration.
            targets: names of layers with adapters; empty for all linear layers except the output layer.
            merged: see the class.
        """
        made = source.ranks.in_turn(lambda: cls._loaded(source, config, targets, merged))
        if made.base:
            _check_files(made.base, made.sums())
        if source.saved:
            made.load(source.saved)
        return made

    @classmethod
    def _loaded(
        cls, source: ModelSource, config: LoraConfig, targets: Sequence[str], merged: bool
    ) -> LoraModel:
        # on the host, since float32 weights or a sharded model may not fit on a GPU
        module = source.load(source.start, device=torch.device("cpu"))
        policy: Scorer = source.scorer(module)  # its test passes compute in float32
        whole = checkpoint_tensors(module)  # with the names of a model without adapters
        _inject(config, module, source, targets)
        layers = _adapted(module, whole)
        views = _views(module, whole)
        del whole  # releases the memory before it is returned to the system
        if policy.compute_dtype is torch.bfloat16:
            _halve(module)
        group = _group(source)
        if group is None:
            module.to(source.device)
        here = _tensors(module)
        whole = {name: view.of(here) for name, view in views.items()}
        if group is not None:
            from grpo_plugin_scale.training.sharded import divided  # slow to import

            policy, whole = divided(group, module, policy, whole, copies=source.passes.copies)
        return cls(policy, whole=whole, layers=layers, config=config, source=source, merged=merged)

    def trainable(self) -> Sequence[tuple[str, nn.Parameter]]:
        return self._named

    def weights(self) -> Iterator[Tensor]:
        yield from self.policy.module.parameters()
        for adapters in self._moved.values():
            yield from adapters.values()

    def score(
        self, micro: MicroBatch, temperature: float, *, entropy_gradient: bool = False
    ) -> tuple[Tensor, Tensor]:
        for dropout in self._dropouts:
            dropout.train(torch.is_grad_enabled())
        return self.policy.score(micro, temperature, entropy_gradient=entropy_gradient)

    @torch.no_grad()
    def kept_logprobs(self, name: str, micro: MicroBatch, temperature: float) -> Tensor:
        with self._with_weights(name):
            return self.score(micro, temperature)[0]

    @torch.no_grad()
    def refresh(self, name: str, share: float) -> None:
        assert share == 1, "a mixture of two adapters is not an adapter of the same rank"
        self._moved[name] = {place: parameter.detach().clone() for place, parameter in self._named}

    def saved_kept(self) -> Mapping[str, Tensor]:
        return {
            f"{name}/{place}": tensor for name, its in self._moved.items() for place, tensor in its.items()
        }

    def restore_kept(self, tensors: Mapping[str, Tensor]) -> None:
        devices = {place: parameter.device for place, parameter in self._named}
        for key, tensor in tensors.items():
            name, _, place = key.partition("/")
            if name in self._source.kept:
                self._moved.setdefault(name, {})[place] = tensor.to(devices[place])

    @torch.no_grad()
    def next_tokens(self, prompts: Sequence[tuple[int, ...]]) -> tuple[Canary, ...]:
        for dropout in self._dropouts:
            dropout.eval()
        return self.policy.next_tokens(prompts)

    def published(self) -> Sequence[tuple[str, Tensor | layout.LowRankSum]]:
        if not self.base:
            return self.sums()
        found = []
        for name in self._whole:
            if name in self._layers:
                layer, (left, right) = name.removesuffix(".weight"), _factors(self._layers[name])
                found += [(f"{layer}.lora_A.weight", right), (f"{layer}.lora_B.weight", left)]
        return found

    def sums(self) -> list[tuple[str, Tensor | layout.LowRankSum]]:
        """Return the tensors of the model; tensors with an adapter as low-rank sums."""
        return [
            (
                name,
                layout.LowRankSum(tensor, *_factors(self._layers[name])) if name in self._layers else tensor,
            )
            for name, tensor in self._whole.items()
        ]

    @torch.no_grad()
    def write_merged(self, directory: Path, dtype: torch.dtype) -> float:
        """Write the merged model in transformers' format; return the share of the change that is left."""
        module, change, left = self.policy.module, 0.0, 0.0
        for _, tensor in self.sums():
            if isinstance(tensor, layout.LowRankSum):
                total, base = tensor.computed(), tensor.base.float()
                full, rounded = total - base, total.to(dtype).float() - base.to(dtype).float()
                change, left = change + float(full.square().sum()), left + float((full * rounded).sum())
                tensor.base.copy_(total)
        for place, layer in list(module.named_modules()):
            if isinstance(layer, LoraLayer):
                module.set_submodule(place, layer.get_base_layer())
        for parameter in module.parameters():
            parameter.data = layout.cast_weights(parameter.data, torch.empty_like(parameter, dtype=dtype))
        module.save_pretrained(directory)  # type: ignore[operator]
        self._tokenizer.save(directory)
        return left / change if change and dtype.itemsize < 4 else 1.0

    def saved(self) -> Mapping[str, Tensor]:
        """Return the whole adapters, which are small, for rank 0 to write."""
        group = _group(self._source)
        return {name: group.whole(tensor) if group else tensor.detach() for name, tensor in self._named}

    def write(self, directory: Path, tensors: Mapping[str, Tensor]) -> None:
        if self._source.ranks.rank:
            return
        directory.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.detach() for name, tensor in tensors.items()}, directory / factors.FILE)
        self._config.save_pretrained(str(directory))
        self._tokenizer.save(directory)

    @torch.no_grad()
    def load(self, directory: Path) -> None:
        """Load adapters that ``write`` wrote.  Raises ModelError if they do not fit the model."""
        path, tensors = directory / factors.FILE, factors.read(directory)
        found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        expected = {name: tuple(parameter.shape) for name, parameter in self._named}
        if found != expected:
            wrong = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
            raise ModelError(
                f"{path}: {len(wrong)} of its tensors do not fit the model's adapters: {wrong[0]} is "
                f"{found.get(wrong[0], 'missing')}, expected {expected.get(wrong[0], 'no such tensor')}"
            )
        if self._source.published is not None and self.base:
            scale = self._config.lora_alpha / self._config.r
            tensors = factors.published(tensors, scale, self._source.published)
            for layer in self._layers.values():
                layer.scaling[ADAPTER] = 1.0
        for name, parameter in self._named:
            parameter.copy_(self._source.ranks.part(tensors[name], parameter))

    def _enable(self, adapters: bool) -> None:
        """Enable or disable the adapters.

        peft's ``enable_adapters`` would also change ``requires_grad``, which FSDP2 reads in the first pass
        only.
        """
        for layer in self._layers.values():
            layer._disable_adapters = not adapters

    @contextmanager
    def _with_weights(self, name: str) -> Iterator[None]:
        """Compute with other weights: without adapters, or with those that have moved."""
        if name not in self._moved:
            self._enable(False)
            try:
                yield
            finally:
                self._enable(True)
            return
        trained = {place: parameter.data for place, parameter in self._named}
        for place, parameter in self._named:
            parameter.data = self._moved[name][place]
        try:
            yield
        finally:
            for place, parameter in self._named:
                parameter.data = trained[place]


def _group(source: ModelSource) -> Group | None:
    """Return the group that shards the model; None for an unsharded model."""
    return cast("Group", source.ranks) if source.ranks.size > 1 or source.passes.copies else None


def _is_linear(layer: nn.Module) -> bool:
    """Whether a layer is linear: torch's class, or ``Conv1D`` of transformers."""
    return isinstance(layer, nn.Linear) or type(layer).__name__ == "Conv1D"


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return views of a module's parameters (tied ones once) and buffers by name."""
    named: dict[str, Tensor] = {name: tensor.detach() for name, tensor in module.named_parameters()}
    return named | {name: nn.Buffer(value.detach()) for name, value in module.named_buffers()}


def _halve(module: nn.Module) -> None:
    """Store weights of linear layers in bfloat16 if this is exact.

    Most checkpoints are in bfloat16.  These weights are frozen, and bfloat16 products round them anyway, so
    results do not change.
    """
    head, freed = module.get_output_embeddings(), 0  # type: ignore[operator]
    for layer in module.modules():
        weight: Any = layer.weight if _is_linear(layer) and layer is not head else None
        if weight is None or weight.requires_grad:  # an adapter
            continue
        if torch.equal((small := weight.data.bfloat16()).float(), weight.data):
            freed += weight.data.nbytes
            weight.data = small
        if freed >= FREED:  # this thread's allocator does not reuse memory that loader threads freed
            cpu.return_freed_memory()
            freed = 0


@frozen(eq=False)
class _View:
    """A checkpoint's tensor as a view of a module's tensor."""

    name: str
    """Name of the module's tensor."""
    shape: Sequence[int]
    strides: Sequence[int]
    offset: int
    """Offset of the view in elements."""

    def of(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the view into one of these tensors, which are given by their names in the module."""
        tensor = tensors[self.name]
        view = tensor.as_strided(self.shape, self.strides, int(tensor.storage_offset()) + self.offset)
        return nn.Buffer(view) if isinstance(tensor, nn.Buffer) else view


def _views(module: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, _View]:
    """Return each of these tensors as a view of the module."""
    homes: dict[int, list[tuple[int, int, str]]] = {}
    for name, tensor in _tensors(module).items():
        begin = int(tensor.storage_offset())
        homes.setdefault(memory_of(tensor), []).append((begin, begin + tensor.numel(), name))

    def found(view: Tensor) -> _View:
        at = int(view.storage_offset())
        of_storage = homes[memory_of(view)]
        begin, _, name = next((home for home in of_storage if home[0] <= at < home[1]), of_storage[0])
        return _View(name, view.shape, view.stride(), at - begin)

    return {name: found(view) for name, view in tensors.items()}


def _inject(config: LoraConfig, module: nn.Module, source: ModelSource, targets: Sequence[str]) -> None:
    """Add adapters to a model, initialised by the seed.  Raises ModelError."""
    problem = _problem(targets, module)
    with torch.random.fork_rng([]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "fan_in_fan_out is set to False")  # for transposed layers
        torch.default_generator.manual_seed(source.seed)  # the module is on the host
        try:
            if not problem:
                inject_adapter_in_model(config, module, adapter_name=ADAPTER)
        except ValueError as error:
            problem = errors.one_line(error)
    if not problem:
        return
    with errors.wrong_input():
        head = module.get_output_embeddings()  # type: ignore[operator]
        linear = dict.fromkeys(
            name.rpartition(".")[2]
            for name, layer in module.named_modules()
            if _is_linear(layer) and layer is not head
        )
        raise ModelError(
            f"model.lora.targets = {json.dumps(list(targets))}: {problem}; the linear layers of "
            f"{source.start!r} are {', '.join(linear)}"
        )


def _problem(targets: Sequence[str], module: nn.Module) -> str:
    """Return the error in the targets; "" if each is a layer that supports adapters."""
    names = [name for name, _ in module.named_modules()]
    for target in targets:
        if not target or not any(f".{name}".endswith(f".{target}") for name in names):
            return f"the model has no layer {target!r}"
    head = module.get_output_embeddings()  # type: ignore[operator]
    inputs = module.get_input_embeddings()  # type: ignore[operator]
    for name, layer in module.named_modules():
        chosen = any(f".{name}".endswith(f".{target}") for target in targets)
        if chosen and (layer is head or layer is inputs):
            return f"{name} is the model's output layer or embedding, which gets no adapter"
        if chosen and not _is_linear(layer):
            return f"{name} is not a linear layer"
    return ""


def _adapted(module: nn.Module, base: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the layers with an adapter, by the checkpoint's name of their weight.  Raises ModelError."""
    names = {(tensor.data_ptr(), tensor.shape): name for name, tensor in base.items()}
    layers = {}
    for place, layer in module.named_modules():
        if isinstance(layer, LoraLayer):
            weight: Any = layer.get_base_layer().weight
            name = names.get((weight.data_ptr(), weight.shape))
            if name is None:
                raise ModelError(
                    f"{place} is not one tensor of the model's checkpoint, so engines could not take its "
                    "adapter; leave it out of model.lora.targets"
                )
            layers[name] = layer
    return layers


def _check_files(directory: str, sums: Sequence[tuple[str, Tensor | layout.LowRankSum]]) -> None:
    """Raise ModelError unless the model's files contain each layer with an adapter, as engines need."""
    there = files.ModelFiles(Path(directory)).tensors
    for name, tensor in sums:
        if isinstance(tensor, layout.LowRankSum) and (
            name not in there or there[name].shape != tensor.base.shape
        ):
            raise ModelError(
                f"the files of the model in {directory} have no {name} of shape {tuple(tensor.base.shape)}, "
                'so engines could not add an adapter to it; set model.lora.publish = "merged"'
            )


def _factors(layer: Any) -> tuple[Tensor, Tensor]:
    """Return the two matrices whose product is added to the layer's weight."""
    down, up = layer.lora_A[ADAPTER].weight.detach(), layer.lora_B[ADAPTER].weight.detach()
    up = up * layer.scaling[ADAPTER]
    return (down.t(), up.t()) if layer.fan_in_fan_out else (up, down)
