"""The worker's part of ``grpo_plugin_vllm.transfer``; imported by vLLM alone.

Weights are fetched and verified during decoding, and then loaded between two steps: once a parameter is
written there is no way back.  Weights that were sent are kept between the two where there is memory for them;
otherwise they are sent again.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from attrs import evolve
from safetensors.torch import save_file
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.platforms import current_platform

from grpo_core import Weights, WeightSyncError
from grpo_core.kit import read_buckets, read_weights, transport_of
from grpo_plugin_vllm.transfer import KEEP, LAYERWISE, PLAIN_LINEAR, from_table, rank_of


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Do nothing: there is nothing to agree on."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """See ``transfer.as_table``."""

    version: int
    location: str
    nbytes: int
    tensors: list[dict[str, Any]]
    base: str


class Fetching:
    """Methods of vLLM's workers that fetch weights; vLLM mixes this class into theirs."""

    device: torch.device
    rank: int

    def fetch_weights(self, table: dict[str, Any], adapters: str | None = None, keep: bool = False) -> None:
        """Begin to fetch and verify the weights that ``transfer.as_table`` describes, in a thread.

        Args:
            adapters: directory for adapters as vLLM loads them; None: they are not loaded by vLLM itself.
            keep: whether what was sent may take free memory until it is loaded.
        """
        writes_to = Path(adapters) if adapters and not self.rank else None
        self._fetching: Future[str] = _fetcher.submit(_fetch, table, self.device, writes_to, keep)

    def fetched_weights(self, wait: bool) -> str | None:
        """Return the fault of the fetched weights, "" without one, or None while it is unknown."""
        return self._fetching.result() if wait or self._fetching.done() else None


MARGIN = 1 << 30
"""Bytes of a GPU that stay free beside weights that are kept."""

_fetcher = ThreadPoolExecutor(1)

_kept: dict[str, deque[dict[str, torch.Tensor]]] = {}
"""Buckets of the weights at a location that were sent, verified, and not loaded yet."""


def _fetch(table: dict[str, Any], device: torch.device, adapters: Path | None, keep: bool) -> str:
    _kept.clear()  # of an update that did not come about
    if device.type == "cuda":
        torch.cuda.set_device(device)  # of this thread
    try:
        if adapters is not None:
            write_adapters(from_table(**table), adapters, device)
            return ""
        weights = from_table(**table)
        kept = keep and _has_room(weights, device)
        buckets = deque(read_buckets(weights, device=device), maxlen=None if kept else 0)
        if kept:
            _kept[weights.location] = buckets
    except WeightSyncError as error:
        return str(error)
    return ""


def _has_room(weights: Weights, device: torch.device) -> bool:
    """Return whether weights that are sent can be kept; others are where the trainer put them."""
    if weights.base or not transport_of(weights.location).stream:
        return False
    if device.type == "cuda":
        return bool(torch.cuda.mem_get_info(device)[0] > weights.nbytes + MARGIN)
    return os.environ.get(KEEP) == "1"


def _fetched(weights: Weights, device: torch.device) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the buckets that were kept, or read them again.  Raises WeightSyncError if that is impossible."""
    kept = _kept.pop(weights.location, None)
    if kept is None:
        yield from read_buckets(weights, verify=False, device=device)
        return
    while kept:
        yield kept.popleft()
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the next update looks for free memory, and so may the trainer


def write_adapters(weights: Weights, directory: Path, device: torch.device) -> None:
    """Write published adapters as peft does, for vLLM to load.  Raises WeightSyncError."""
    tensors = read_weights(evolve(weights, base=""), device=device)
    named = {f"base_model.model.{name}": tensor.cpu().contiguous() for name, tensor in tensors.items()}
    save_file(named, directory / "adapter_model.safetensors")
    layers = sorted({name.rpartition(".lora_")[0].rpartition(".")[2] for name in tensors})
    # the trainer has multiplied by alpha / rank already
    rank = rank_of(weights)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": layers}
    (directory / "adapter_config.json").write_text(json.dumps(config))


class Backend(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Copies the fetched weights into the parameters: in place on a CPU, layer by layer on a GPU."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._in_place = current_platform.is_cpu() and os.environ.get(LAYERWISE) != "1"
        self._names: set[str] = set()
        """Parameters that an update must bring; a tied one is named once."""
        if current_platform.is_cpu() and os.environ.get(PLAIN_LINEAR) != "1":
            raise RuntimeError(
                f"vLLM on a CPU cannot take weights from grpo-core as it is: start it with {PLAIN_LINEAR}=1 "
                "in its environment"
            )

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        # a quantised model has parameters that no checkpoint names; and the names are taken first, since a
        # layerwise reload gives each of two tied modules a parameter of its own
        quantised = self.model_config.quantization is not None
        self._names = set() if quantised else {name for name, _ in self.model.named_parameters()}
        if not self._in_place:
            _reload_layerwise(self.model, all_layers=quantised)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        _synchronize()  # the trainer may write there again once this returns

    def receive_weights(self, update_info: UpdateInfo) -> None:
        missing = set(self._names)
        try:
            for tensors in _fetched(from_table(**vars(update_info)), self.device):
                loaded = self.model.load_weights(iter(tensors.items()))
                del tensors  # the next ones need memory
                missing = missing - loaded if loaded is not None else set()
        except WeightSyncError as error:
            raise RuntimeError(f"the weights have been written in part: {error}") from error
        if missing:
            raise ValueError(f"version {update_info.version} has nothing for {sorted(missing)}")

    def finish_weight_update(self) -> None:
        if not self._in_place:
            from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

            finalize_layerwise_reload(self.model, self.model_config)
            _synchronize()  # padded layers are copied only now

    def shutdown(self) -> None:
        pass


def _reload_layerwise(model: torch.nn.Module, *, all_layers: bool) -> None:
    """Let vLLM collect the tensors of each layer, and process them when the layer is complete.

    Layers that are the tensors of the checkpoint are loaded in place unless ``all_layers``: collected tensors
    keep their whole bucket in memory, and vLLM makes each complete layer a second time.
    """
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    in_place = [] if all_layers else [layer for layer in model.modules() if _is_as_loaded(layer)]
    for layer in in_place:
        get_layerwise_info(layer).load_numel_total = 0  # vLLM passes over a layer that is being loaded
    initialize_layerwise_reload(model)
    for layer in in_place:
        get_layerwise_info(layer).reset()


def _is_as_loaded(layer: torch.nn.Module) -> bool:
    """Return whether vLLM computes with the tensors of a layer as they are in a checkpoint."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    if hasattr(layer, "process_weights_after_loading") or current_platform.is_xpu():
        return False
    method = getattr(layer, "quant_method", None)
    return method is None or type(method) in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)


def _synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
