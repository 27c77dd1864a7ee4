"""The worker's part of ``grpo_plugin_vllm.transfer``; imported by vLLM only.

Weights are verified during decoding and then loaded between two steps, because writing parameters cannot be
undone.  Weights that are sent are verified during loading, since they arrive only once.
"""

from __future__ import annotations

import json
import os
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
from grpo_plugin_vllm.transfer import LAYERWISE, PLAIN_LINEAR, from_table, rank_of


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Empty: the backend needs no initialisation."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """The fields of ``transfer.as_table``."""

    version: int
    location: str
    nbytes: int
    tensors: list[dict[str, Any]]
    base: str


class Fetching:
    """Methods for fetching weights; vLLM mixes this class into its workers."""

    device: torch.device
    rank: int

    def fetch_weights(self, table: dict[str, Any], adapters: str | None = None) -> None:
        """Start to verify the weights of a ``transfer.as_table`` in a thread.

        Args:
            adapters: directory for adapters in vLLM's format; None if vLLM does not load them separately.
        """
        writes_to = Path(adapters) if adapters and not self.rank else None
        self._fetching: Future[str] = _fetcher.submit(_fetch, from_table(table), self.device, writes_to)

    def fetched_weights(self, wait: bool) -> str | None:
        """Return the error in the weights, "" without one, or None before the end of the verification."""
        return self._fetching.result() if wait or self._fetching.done() else None


_fetcher = ThreadPoolExecutor(1)


def _fetch(weights: Weights, device: torch.device, adapters: Path | None) -> str:
    if device.type == "cuda":
        torch.cuda.set_device(device)  # for this thread
    try:
        if adapters is not None:
            write_adapters(weights, adapters, device)
        elif not _is_sent(weights):
            for _ in read_buckets(evolve(weights, base=""), device=device):
                pass  # a base model has no checksums
    except WeightSyncError as error:
        return str(error)
    return ""


def _is_sent(weights: Weights) -> bool:
    """Whether reading the weights receives them over a connection."""
    return bool(transport_of(weights.location).stream)


def write_adapters(weights: Weights, directory: Path, device: torch.device) -> None:
    """Write published adapters in peft's format for vLLM.  Raises WeightSyncError."""
    tensors = read_weights(evolve(weights, base=""), device=device)
    named = {f"base_model.model.{name}": tensor.cpu().contiguous() for name, tensor in tensors.items()}
    save_file(named, directory / "adapter_model.safetensors")
    layers = sorted({name.rpartition(".lora_")[0].rpartition(".")[2] for name in tensors})
    # published adapters include the factor alpha / rank
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
        """Names of the parameters in an update; tied parameters once."""
        if current_platform.is_cpu() and os.environ.get(PLAIN_LINEAR) != "1":
            raise RuntimeError(
                f"vLLM on a CPU cannot take weights from grpo-core as it is: start it with {PLAIN_LINEAR}=1 "
                "in its environment"
            )

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        # a quantised model has parameters that are not in checkpoints; read the names first, because a
        # layerwise reload separates tied parameters
        quantised = self.model_config.quantization is not None
        self._names = set() if quantised else {name for name, _ in self.model.named_parameters()}
        if not self._in_place:
            from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

            initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        _synchronize()  # the trainer may overwrite the block after this returns

    def receive_weights(self, update_info: UpdateInfo) -> None:
        missing = set(self._names)
        weights = from_table(vars(update_info))
        try:
            for tensors in read_buckets(weights, verify=_is_sent(weights), device=self.device):
                loaded = self.model.load_weights(iter(tensors.items()))
                del tensors  # frees memory for the next ones
                missing = missing - loaded if loaded is not None else set()
        except WeightSyncError as error:
            raise RuntimeError(f"the weights have been written in part: {error}") from error
        if missing:
            raise ValueError(f"version {update_info.version} has nothing for {sorted(missing)}")

    def finish_weight_update(self) -> None:
        if not self._in_place:
            from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

            finalize_layerwise_reload(self.model, self.model_config)
            _synchronize()  # padded layers are copied here

    def shutdown(self) -> None:
        pass


def _synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
