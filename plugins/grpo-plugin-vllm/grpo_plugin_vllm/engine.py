"""The engine ``vllm``: vLLM in a child process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo_core import ConfigError, EngineSetup, Weights
from grpo_core.kit import BackgroundMetrics, ChildEngine
from grpo_plugin_vllm.options import Options
from grpo_plugin_vllm.statistics import between


class VllmEngine(ChildEngine):
    """Decodes with vLLM in a child process, on the CPU or on GPUs.

    Args:
        device: "cpu", "cuda", or "auto": a GPU if there is one.
        dtype: dtype of weights, keys and values: "float32", "bfloat16", "float16", or "auto": the trainer's.
        max_rows: largest number of concurrently decoded requests.  Others wait in order; requests for one
            token go first.
        max_model_len: largest number of tokens of prompt and completion.  None: the model's positions.
        tensor_parallel: number of GPUs that share each tensor.
        memory_fraction: share of a GPU's memory for weights, keys and values.  None: 0.4 if the trainer uses
            the same GPU, otherwise 0.85.
        cache_mib: memory for keys and values in MiB.  None: 256 on a CPU, the rest of the fraction on a GPU.
        keep_cache: whether running requests keep the keys and values of older weights after an update.  By
            default they are recomputed, so that each token's logprob depends on a single version.
        seeds: sample by the seed of each request.  Otherwise vLLM uses its own generator, which is faster in
            large batches but not reproducible.
        in_turn: free the GPU's memory for each step of a trainer on the same GPU: weights are offloaded to
            host memory, and running requests wait and recompute their keys and values.
        native_lora: whether vLLM computes adapters (``[model.lora]``) separately, or merges them into the
            weights (false), which costs nothing during decoding.  None merges in float32 only, since 16-bit
            weights lose small changes.
        vllm: further arguments of ``vllm.EngineArgs``, which override the others.

    Raises ValueError for an option out of its range, and ConfigError if completions must be reproducible
    (``EngineSetup.reproducible``) without ``seeds``, or with a prefix cache.
    """

    def __init__(
        self,
        setup: EngineSetup,
        *,
        device: str = "auto",
        dtype: str = "auto",
        max_rows: int = 256,
        max_model_len: int | None = None,
        tensor_parallel: int = 1,
        memory_fraction: float | None = None,
        cache_mib: int | None = None,
        keep_cache: bool = False,
        seeds: bool = True,
        in_turn: bool = False,
        native_lora: bool | None = None,
        vllm: Mapping[str, Any] | None = None,
    ) -> None:
        options = Options(
            device=device,
            dtype=dtype,
            max_rows=max_rows,
            max_model_len=max_model_len,
            tensor_parallel=tensor_parallel,
            memory_fraction=memory_fraction,
            cache_mib=cache_mib,
            keep_cache=keep_cache,
            seeds=seeds,
            in_turn=in_turn,
            native_lora=native_lora,
            vllm=dict(vllm or {}),
        )
        if setup.reproducible and not seeds:
            raise ConfigError(
                "engine vllm: engine.options.seeds = false draws tokens that depend on other requests, and "
                'pipeline.policy = "in_order" without updates of running requests needs reproducible '
                'ones; leave out seeds, or set pipeline.policy = "deadline"'
            )
        if setup.reproducible and options.vllm.get("enable_prefix_caching"):
            raise ConfigError(
                "engine vllm: engine.options.vllm has enable_prefix_caching = true, and pipeline.policy = "
                '"in_order" without updates of running requests needs completions that do not depend on the '
                'cache; leave it out, or set pipeline.policy = "deadline"'
            )
        super().__init__(
            setup,
            name="vllm",
            server="grpo_plugin_vllm.server:Server",
            options={"options": options},
            rests=in_turn,
            # spinning threads would occupy the trainer's cores
            env_vars={
                "VLLM_NO_USAGE_STATS": "1",
                "OMP_WAIT_POLICY": "passive",
                "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # detection must not initialise CUDA
            },
        )
        self._chosen, self.keeps_adapters = options, False
        self._statistics: Mapping[str, float] = {}
        self.metrics = BackgroundMetrics(self._measure)

    async def update_weights(self, weights: Weights) -> None:
        await super().update_weights(weights)
        self.keeps_adapters = self._chosen.keeps_adapters(weights)

    async def aclose(self) -> None:
        await super().aclose()
        await self.metrics.aclose()

    async def _measure(self) -> Mapping[str, float] | None:
        if (now := await self.ask("statistics")) is None:
            return None
        before, self._statistics = self._statistics, now
        return between(before, now)
