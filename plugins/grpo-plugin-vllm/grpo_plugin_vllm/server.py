"""The child process of the engine ``vllm``: runs an LLMEngine, and handles calls between decoding steps.

On a CPU vLLM decodes in this process, on GPUs in separate processes.
"""

from __future__ import annotations

import multiprocessing.connection
import os
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

from grpo_core import (
    Completion,
    EngineError,
    EngineSetup,
    GenerationRequest,
    ModelError,
    Weights,
    WeightSyncError,
)
from grpo_core.kit import DecodingServer, check_request, scratch_directory
from grpo_plugin_vllm import completing
from grpo_plugin_vllm.options import (
    Options,
    arguments,
    check_invariance,
    has_tokenizer,
    prepare,
    use_exact_products,
)
from grpo_plugin_vllm.transfer import as_table, difference, rank_of

SOON, LATER = 0, 1
"""Priorities of requests."""


class Server(DecodingServer):
    """Decodes with a vLLM ``LLMEngine``, which starts with the first weights.

    Any failure inside of vLLM ends the process, and the parent starts a new one with the last weights.  So no
    token is sampled from a partial update, or by an engine in an unknown state.

    Reproducible completions use vLLM's batch-invariant kernels on a GPU.  On a CPU, without such kernels,
    calls are decoded one after the other.
    """

    name = "vllm"

    def __init__(self, setup: EngineSetup, *, options: Options) -> None:
        super().__init__()
        self._setup = setup
        self._options = options
        self._device = _resolve(options.device)
        prepare(self._device, reproducible=setup.reproducible)
        self._queue = Queue() if setup.reproducible and self._device == "cpu" else None
        import vllm.v1.engine.llm_engine  # takes seconds, in parallel to the trainer's start

        del vllm
        self._engine: Any = None
        self._vocabulary = 0
        self._held: Weights | None = None
        self._lora: Any = None
        """vLLM's request for the adapters that it computes, used by every request."""
        self._prompt_tokens = self._cached_tokens = 0
        """Number of prompt tokens of finished requests, and of cached ones among them."""

    # ------------------------------------------------------------------------------ generation

    def check(self, request: GenerationRequest) -> None:
        if request.stop and not has_tokenizer(self._setup.model):
            raise EngineError(
                f"engine vllm: stop strings need a tokenizer.json in {self._setup.model}; there is none; "
                "save a fast tokenizer there, or use stop token ids"
            )
        check_request(request, engine="vllm", vocabulary=self._vocabulary, positions=self.positions)

    def add(self, key: int, request: GenerationRequest) -> None:
        prompt: dict[str, Any] = {"prompt_token_ids": request.prompt_ids.tolist()}
        if self._options.keep_cache:  # new requests must not use keys and values of older weights
            assert self._held is not None
            prompt["cache_salt"] = str(self._held.version)
        try:
            self._engine.add_request(
                str(key),
                prompt,
                completing.parameters(request, seeds=self._options.seeds),
                lora_request=self._lora,
                priority=SOON if request.max_tokens == 1 else LATER,
            )
        except Exception as error:  # vLLM rejects the request, and its state is unchanged
            raise EngineError(
                f"engine vllm: vLLM refuses a request: {type(error).__name__}: {error}"
            ) from error

    def add_call(self, entries: Sequence[tuple[int, GenerationRequest]]) -> None:
        if self._queue is None:
            super().add_call(entries)
        else:
            self._queue.put(entries)

    def step(self) -> Iterator[tuple[int, Completion | EngineError]]:
        if self._queue is not None and (call := self._queue.next()):
            try:
                super().add_call(call)
            except EngineError as error:
                self._queue.forget({key for key, _ in call})
                yield call[0][0], error  # fails the whole call
                return
        for output in self._engine.step():
            if output.finished:
                self._prompt_tokens += len(output.prompt_token_ids)
                self._cached_tokens += output.num_cached_tokens or 0
                try:
                    result: Completion | EngineError = completing.completion(output)
                except EngineError as error:  # of this request only
                    result = error
                if self._queue is not None:
                    self._queue.ended(int(output.request_id))
                yield int(output.request_id), result

    def forget(self, keys: set[int]) -> None:
        running = keys if self._queue is None else self._queue.forget(keys)
        if running:
            self._engine.abort_request([str(key) for key in running])

    def statistics(self) -> dict[str, float]:
        """Return the current use of the cache, and counts since the start.

        Counts are prompt tokens of finished requests, cached ones among them, and preemptions.
        """
        found = {
            "cache_use": 0.0,
            "preemptions": 0.0,
            "prompt_tokens": float(self._prompt_tokens),
            "cached_tokens": float(self._cached_tokens),
        }
        for metric in self._engine.get_metrics() if self._engine is not None else ():
            if metric.name == "vllm:kv_cache_usage_perc":
                found["cache_use"] = max(found["cache_use"], float(metric.value))
            elif metric.name == "vllm:num_preemptions":
                found["preemptions"] += float(metric.value)
        return found

    # ------------------------------------------------------------------------------ weights

    def load(self, weights: Weights) -> Iterator[None]:
        """Load weights between two steps, after the workers have verified them during decoding."""
        if self._held is not None and (problem := difference(weights, self._held)):
            raise WeightSyncError(f"engine vllm: version {weights.version} is not this model's: {problem}")
        if self._engine is None:
            self._start(weights)
        native = self._options.keeps_adapters(weights)
        with scratch_directory() if native else nullcontext() as adapters:
            self._engine.collective_rpc("fetch_weights", args=(as_table(weights), adapters))
            while None in (found := self._engine.collective_rpc("fetched_weights", args=(not self.busy,))):
                yield
            if any(found):
                raise WeightSyncError("; ".join(sorted({*found} - {""})))
            began = time.perf_counter()
            # vLLM's sequence for RL: pause, start, update, finish, resume
            engine = self._engine
            engine.sleep(level=0, mode="keep")  # stops scheduling and keeps all requests
            if adapters is None:
                engine.collective_rpc("start_weight_update")
                engine.collective_rpc("update_weights", kwargs={"update_info": as_table(weights)})
                engine.collective_rpc("finish_weight_update")
            else:
                from vllm.lora.request import LoRARequest

                # One set of adapters stays loaded, so that none is evicted while a request uses it, and vLLM
                # reads the directory once.  Running requests continue with the new adapters.
                self._lora = LoRARequest("policy", 1, adapters)
                engine.add_lora(LoRARequest("policy", 1, adapters, load_inplace=True))
            engine.set_weight_version(str(weights.version))
            if not self._options.keep_cache:
                engine.reset_prefix_cache(reset_running_requests=True)
            engine.wake_up(tags=["scheduling"])
            self._held = weights
        seconds = time.perf_counter() - began
        print(f"engine vllm: version {weights.version}, {seconds:.4f} s without decoding", flush=True)

    def _start(self, weights: Weights) -> None:
        import vllm
        from vllm.v1.engine.llm_engine import LLMEngine

        dtype = self._options.dtype_of(weights)
        rank = rank_of(weights) if self._options.keeps_adapters(weights) else 0
        chosen = arguments(self._options, self._setup, device=self._device, dtype=dtype, rank=rank)
        use_exact_products(self._device, dtype)
        if self._setup.reproducible and self._device == "cuda":
            check_invariance()
        try:
            engine = LLMEngine.from_engine_args(vllm.EngineArgs(**chosen))
            engine.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": {}})
        except Exception as error:
            traceback.print_exc()
            raise WeightSyncError(
                f"engine vllm: vLLM does not start: {type(error).__name__}: {error}"
            ) from error
        _watch(engine)
        if self._device == "cpu":
            _check_heads(engine.model_config.get_head_size())
        self._engine = engine
        config = engine.model_config
        self._vocabulary, self.positions = config.get_vocab_size(), config.max_model_len
        print(
            f"engine vllm: vLLM {vllm.__version__} ({config.architecture}), {self._device}, {config.dtype}, "
            f"{self._options.tensor_parallel} worker(s), {self._setup.threads} threads"
            f"{', each call alone' if self._queue is not None else ''}",
            flush=True,
        )

    # ------------------------------------------------------------------------------ one GPU for two

    def rest(self) -> None:
        """Free the GPU's memory and keep all requests: weights are offloaded, keys and values dropped.

        vLLM's sleep level 2 would drop the weights as well, but requests of a validation still need them.
        """
        self._engine.sleep(level=1, mode="keep")

    def wake(self) -> None:
        try:
            self._engine.wake_up()
        except Exception as error:
            traceback.print_exc()
            raise EngineError(
                f"engine vllm: cannot take its GPU memory again ({type(error).__name__}: {error}); "
                "the trainer may hold it: lower engine.options.memory_fraction, or set trainer.offload = true"
            ) from error


def _watch(engine: Any) -> None:
    """End this process when one of vLLM's processes ends; vLLM would wait for it forever."""
    resources = getattr(engine.engine_core, "resources", None)
    manager = getattr(resources, "engine_manager", None)
    if manager is None:  # vLLM decodes in this process
        return

    def wait() -> None:
        multiprocessing.connection.wait(manager.sentinels())
        print("engine vllm: a process of vLLM has ended; this one ends with it", flush=True)
        os._exit(1)

    threading.Thread(target=wait, name="watch over vLLM's processes", daemon=True).start()


def _check_heads(width: int) -> None:
    """Raise ModelError for a head size that vLLM's CPU attention rejects, but only at the first token."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    widths = CPUAttentionBackend.get_supported_head_sizes()
    if width not in widths:
        raise ModelError(
            f"engine vllm: the model's attention heads are {width} wide; on a CPU vLLM computes those of "
            f"{', '.join(map(str, widths))}. Use the engine local, or for the tiny model "
            "--set model.options.width=128"
        )


def _resolve(device: str) -> str:
    if device == "auto":
        import torch

        return "cuda" if torch.cuda.is_available() else "cpu"
    return device


class Queue:
    """A queue of calls; the next one starts when no request runs."""

    def __init__(self) -> None:
        self._waiting: deque[Sequence[tuple[int, GenerationRequest]]] = deque()
        self._running: set[int] = set()

    def put(self, call: Sequence[tuple[int, GenerationRequest]]) -> None:
        """Add a call; greedy calls for one token, such as a canary, go first."""
        if all(request.max_tokens == 1 and request.temperature == 0.0 for _, request in call):
            self._waiting.appendleft(call)
        else:
            self._waiting.append(call)

    def next(self) -> Sequence[tuple[int, GenerationRequest]]:
        """Return the call to start now; empty if there is none, or another one runs."""
        if self._running or not self._waiting:
            return ()
        call = self._waiting.popleft()
        self._running = {key for key, _ in call}
        return call

    def ended(self, key: int) -> None:
        self._running.discard(key)

    def forget(self, keys: set[int]) -> set[int]:
        """Remove requests; return the running ones among them."""
        left = ([entry for entry in call if entry[0] not in keys] for call in self._waiting)
        self._waiting = deque(call for call in left if call)
        running = self._running & keys
        self._running -= keys
        return running
