"""The options of the engine ``vllm``, and the resulting arguments of vLLM."""

from __future__ import annotations

import os
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import field, frozen, validators

from grpo_core import ConfigError, EngineSetup, ModelError, Weights
from grpo_core.kit import Config, as_table
from grpo_plugin_vllm.transfer import BACKEND, PLAIN_LINEAR

CPU_CACHE_MIB = 256
BATCHED_TOKENS = 16384
"""Number of tokens of a decoding step on a GPU, as in vLLM's offline class.  The engine's default of 2048
would take eight times as many steps for prompts that are recomputed after an update."""

INVARIANT = 90
"""Smallest compute capability, times ten, with batch-invariant kernels for all of vLLM."""


@frozen(kw_only=True)
class Options:
    """The options of ``grpo_plugin_vllm.engine.VllmEngine``; see there."""

    device: str = field(validator=validators.in_(("auto", "cpu", "cuda")))
    dtype: str = field(validator=validators.in_(("auto", "float32", "bfloat16", "float16")))
    max_rows: int = field(validator=validators.ge(1))
    max_model_len: int | None
    tensor_parallel: int = field(validator=validators.ge(1))
    memory_fraction: float | None = field(validator=validators.optional([validators.gt(0), validators.le(1)]))
    cache_mib: int | None
    keep_cache: bool
    seeds: bool
    in_turn: bool
    native_lora: bool | None
    vllm: Mapping[str, Any] = field()

    @vllm.validator
    def _check_vllm(self, attribute: Any, value: Mapping[str, Any]) -> None:
        replicas = value.get("data_parallel_size", 1)
        if replicas != 1:
            raise ValueError(
                f"'vllm' has data_parallel_size = {replicas!r}: only the first replica would get weights; "
                "use engine.workers for several engines"
            )

    def dtype_of(self, weights: Weights) -> str:
        """Return the dtype of the engine's weights."""
        return weights.tensors[0].dtype if self.dtype == "auto" else self.dtype

    def keeps_adapters(self, weights: Weights) -> bool:
        """Whether vLLM computes adapters separately; an untrained model has none."""
        native = self.native_lora
        return bool(weights.base) and (self.dtype_of(weights) != "float32" if native is None else native)


def share_of_gpu(shares_gpu: bool) -> float:
    """Return the default share of a GPU's memory for vLLM; a trainer on the GPU gets the larger part."""
    return 0.4 if shares_gpu else 0.85


def check_run(*, config: Config, native_lora: bool | None = None, in_turn: bool = False, **_: Any) -> None:
    """Raise ValueError for ``native_lora`` without adapters in weight syncs, or ``in_turn`` in a pool."""
    table = as_table(config)
    lora, engine = table["model"].get("lora"), table["engine"]
    if in_turn and (engine["workers"] > 1 or engine["gpus_per_worker"]):
        raise ValueError(
            "in_turn = true is for one engine of this machine, which rests while the trainer computes; leave "
            "it out, or engine.workers and engine.gpus_per_worker"
        )
    if native_lora and (lora is None or lora["publish"] != "adapters"):
        raise ValueError(
            'native_lora = true needs adapters: a section [model.lora] with publish = "adapters"; or leave '
            "it out"
        )


def arguments(
    options: Options, setup: EngineSetup, *, device: str, dtype: str, rank: int = 0
) -> dict[str, Any]:
    """Return the arguments of ``vllm.EngineArgs``.  Weights are random until the first update.

    Args:
        rank: rank of adapters that vLLM computes on the weights in the model's files; 0 for none.
    """
    chosen: dict[str, Any] = {
        "model": setup.model,
        "load_format": "dummy",
        "dtype": dtype,
        "seed": setup.seed,
        "trust_remote_code": setup.trust_remote_code,
        "skip_tokenizer_init": not has_tokenizer(setup.model),
        "max_model_len": options.max_model_len,
        "max_num_seqs": options.max_rows,
        "tensor_parallel_size": options.tensor_parallel,
        "scheduling_policy": "priority",
        # cached prompts are computed with other matrix shapes, which round differently
        "enable_prefix_caching": not setup.reproducible,
        "generation_config": "vllm",  # the model's defaults would change sampling
        "logprobs_mode": "processed_logprobs",  # of the sampling distribution
        "weight_transfer_config": {"backend": BACKEND},
        "worker_extension_cls": "grpo_plugin_vllm.worker.Fetching",
        "disable_log_stats": False,  # metrics of the run need cache use and preemptions
    }
    if options.cache_mib is not None or device == "cpu":
        chosen["kv_cache_memory_bytes"] = (options.cache_mib or CPU_CACHE_MIB) << 20
    if device == "cpu":
        chosen["enforce_eager"] = True
        chosen["async_scheduling"] = False  # no benefit on the same cores
        chosen["block_size"] = 32  # with the default of 128, shorter prompts are not shared
        chosen["enable_chunked_prefill"] = False  # a seeded request with a split prompt crashes the engine
    else:
        chosen["max_num_batched_tokens"] = BATCHED_TOKENS
        chosen["gpu_memory_utilization"] = options.memory_fraction or share_of_gpu(setup.shares_gpu)
        chosen["enable_sleep_mode"] = options.in_turn
    if rank:
        chosen |= {
            "load_format": "auto",
            "enable_lora": True,
            "max_loras": 1,
            "max_lora_rank": _allowed(rank),
        }
    given = dict(options.vllm)
    if dtype != "float32":  # rounded logits would add noise to ratios
        given["hf_overrides"] = {"head_dtype": "float32", **given.get("hf_overrides", {})}
    return chosen | given


def _allowed(rank: int) -> int:
    """Return the smallest sufficient value of vLLM's ``max_lora_rank``.  Raises ModelError."""
    from vllm.config.lora import MaxLoRARanks

    ranks = [each for each in typing.get_args(MaxLoRARanks) if each >= rank]
    if not ranks:
        raise ModelError(
            f"engine vllm: vLLM computes no adapters of rank {rank}: choose a smaller model.lora.rank, or "
            "set engine.options.native_lora = false"
        )
    return int(min(ranks))


def has_tokenizer(model: str) -> bool:
    return (Path(model) / "tokenizer.json").is_file()


def use_exact_products(device: str, dtype: str) -> None:
    """Make vLLM's attention use exact float32 products, unless the user has chosen otherwise.

    Its float32 kernels use Triton, which rounds factors to TF32 on a GPU: an error of 0.4% in each logprob,
    more than the canary allows.
    """
    if device == "cuda" and dtype == "float32":
        os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")


def check_invariance() -> None:
    """Raise ConfigError unless this GPU has batch-invariant kernels for the whole model.

    On older GPUs they do not cover the output layer, which accumulates in float32.
    """
    from vllm.platforms import current_platform

    if not (current_platform.is_cuda() and current_platform.has_device_capability(INVARIANT)):
        raise ConfigError(
            'engine vllm: pipeline.policy = "in_order" without updates of running requests needs '
            "completions that depend on nothing but their request, which vLLM computes on NVIDIA's GPUs from "
            f"compute capability {INVARIANT // 10}.{INVARIANT % 10} on; set pipeline.policy = "
            '"deadline", or pipeline.in_flight_updates = true with pipeline.max_staleness above 0'
        )


def prepare(device: str, *, reproducible: bool = False) -> None:
    """Set environment variables that vLLM reads during its import."""
    if reproducible and device == "cuda":
        os.environ["VLLM_BATCH_INVARIANT"] = "1"
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # a fork would inherit the socket and CUDA's state
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if "expandable_segments" in os.environ.get(name, ""):  # incompatible with vLLM's sleep mode
            given = os.environ[name].split(",")
            others = [each for each in given if not each.strip().startswith("expandable_segments")]
            os.environ[name] = ",".join([*others, "expandable_segments:False"])
    if device == "cpu":
        os.environ[PLAIN_LINEAR] = "1"
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # one process, as cores are scarce
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # compiling takes 25 s without a benefit
