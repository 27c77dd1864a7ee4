"""The child process of the engine ``vllm``: holds an LLMEngine, and takes calls between decoding steps.

On a CPU vLLM decodes in this process; on GPUs in processes of its own, while this one does the bookkeeping.
"""

from __future__ import annotations

import os
import time
import traceback
from typing import Any, NoReturn

from attrs import define, field

from grpo_core.engines import wire
from grpo_core.errors import EngineError, GrpoError, ModelError, WeightSyncError
from grpo_core.processes import Call, Connection
from grpo_core.records import Completion, EngineSetup, GenerationRequest, Weights
from grpo_plugin_vllm import completing
from grpo_plugin_vllm.options import Options, arguments, has_tokenizer, prepare
from grpo_plugin_vllm.transfer import as_table, difference

SOON, LATER = 0, 1
"""Priorities of requests."""


@define
class _Open:
    """A ``generate`` that is not answered yet."""

    call: int
    ids: list[str]
    """vLLM's names of its requests, in order; those without a token to sample have none there."""
    completions: dict[str, Completion] = field(factory=dict)


class Server:
    """Consumes calls, produces answers; blocks only while it has nothing to decode.

    Whatever goes wrong inside of vLLM ends the process: the parent starts another, with the last weights.
    So no token is ever sampled from half an update, or by an engine in an unknown state.
    """

    def __init__(self, setup: EngineSetup, *, options: Options) -> None:
        self._setup = setup
        self._options = options
        self._device = _resolve(options.device)
        prepare(self._device)
        import vllm.v1.engine.llm_engine  # takes seconds: while the trainer starts

        del vllm
        self._engine: Any = None
        self._limits = (0, 0)
        """The model's tokens, and the longest prompt with its completion."""
        self._held: Weights | None = None
        self._open: dict[int, _Open] = {}
        self._fetching: Call | None = None
        """The ``update_weights`` whose weights the workers fetch."""
        self._asleep = False

    def serve(self, connection: Connection) -> None:
        while True:
            call = connection.receive(wait=self._patience())
            if call is None and not self._open and self._fetching is None:
                self._sleep()
            while call is not None:
                self._take(connection, call)
                call = connection.receive(wait=False)
            if self._fetching is not None:
                self._update(connection, self._fetching)
            if self._open:
                self._step(connection)

    def _patience(self) -> bool | float:
        """Whether, or how many seconds, to wait for a call."""
        if self._open or self._fetching is not None:
            return False
        return self._options.sleep_after if self._options.sleep_after and not self._asleep else True

    def _take(self, connection: Connection, call: Call) -> None:
        if call.method == "generate":
            try:
                self._generate(connection, call)
            except Exception as error:  # vLLM refuses this request: it is no worse than before
                self._forget(int(call.args[0]))
                connection.fail(call.id, error)
        elif call.method == "update_weights":
            try:
                self._fetch(call.args[0])
            except GrpoError as error:
                connection.fail(call.id, error)
            else:
                self._fetching = call
        else:
            connection.answer(call, self)

    # ------------------------------------------------------------------------------ generation

    def _generate(self, connection: Connection, call: Call) -> None:
        ticket, requests = int(call.args[0]), wire.unpack_requests(call.args[1])
        if self._held is None:
            raise EngineError("engine vllm: generate before the first update_weights")
        for request in requests:
            if (problem := self._problem(request)) is not None:
                raise EngineError(problem)
        self._wake()
        open_ = _Open(call.id, [f"{ticket}:{i}" for i in range(len(requests))])
        self._open[ticket] = open_
        for id, request in zip(open_.ids, requests, strict=True):
            if request.max_tokens:
                self._engine.add_request(
                    id,
                    self._prompt(request),
                    completing.parameters(request, seeds=self._options.seeds),
                    priority=SOON if request.max_tokens == 1 else LATER,
                )
            else:
                open_.completions[id] = completing.EMPTY
        self._answer_if_complete(connection, ticket)

    def _prompt(self, request: GenerationRequest) -> dict[str, Any]:
        prompt: dict[str, Any] = {"prompt_token_ids": list(request.prompt_ids)}
        if self._options.keep_cache:  # no new request may find keys and values of older weights
            assert self._held is not None
            prompt["cache_salt"] = str(self._held.version)
        return prompt

    def _problem(self, request: GenerationRequest) -> str | None:
        if request.stop and not has_tokenizer(self._setup.model):
            return (
                f"engine vllm: stop strings need a tokenizer.json in {self._setup.model}; there is none; "
                "save a fast tokenizer there, or use stop token ids"
            )
        return wire.problem(request, "vllm", *self._limits)

    def _step(self, connection: Connection) -> None:
        try:
            outputs = self._engine.step()
        except Exception as error:
            _end(f"decoding failed: {error!r}")
        for output in outputs:
            if output.finished:
                ticket = int(output.request_id.split(":")[0])
                self._open[ticket].completions[output.request_id] = completing.completion(output)
                self._answer_if_complete(connection, ticket)

    def _answer_if_complete(self, connection: Connection, ticket: int) -> None:
        open_ = self._open[ticket]
        if len(open_.completions) == len(open_.ids):
            del self._open[ticket]
            connection.reply(open_.call, wire.pack_completions([open_.completions[id] for id in open_.ids]))

    def cancel(self, ticket: int) -> None:
        """Free the rows of a ``generate`` whose caller has gone away; it is not answered."""
        self._forget(ticket)

    def _forget(self, ticket: int) -> None:
        open_ = self._open.pop(ticket, None)
        if open_ is not None:
            self._engine.abort_request([id for id in open_.ids if id not in open_.completions])

    # ------------------------------------------------------------------------------ weights

    def _fetch(self, weights: Weights) -> None:
        """Let the workers fetch and verify them, beside decoding."""
        if self._held is not None and (problem := difference(weights, self._held)):
            raise WeightSyncError(f"engine vllm: version {weights.version} is not this model's: {problem}")
        if self._engine is None:
            self._start(weights)
        self._ask_workers("fetch_weights", as_table(weights))

    def _update(self, connection: Connection, call: Call) -> None:
        """Between two decoding steps, once the workers have what they need."""
        weights: Weights = call.args[0]
        found = self._ask_workers("fetched_weights", not self._open)
        if None in found:
            return
        self._fetching = None
        if any(found):
            connection.fail(call.id, WeightSyncError("; ".join(sorted({*found} - {""}))))
            return
        began = time.perf_counter()
        self._load(weights)
        seconds = time.perf_counter() - began
        print(f"engine vllm: version {weights.version}, {seconds:.4f} s without decoding", flush=True)
        connection.reply(call.id, {"description": self.description(), "version": weights.version})

    def _ask_workers(self, method: str, argument: Any) -> list[Any]:
        try:
            answers: list[Any] = self._engine.collective_rpc(method, args=(argument,))
        except Exception as error:
            _end(f"{method} failed: {error!r}")
        return answers

    def _load(self, weights: Weights) -> None:
        """vLLM's own sequence for RL: pause, start, update, finish, resume."""
        engine = self._engine
        try:
            self._wake()
            engine.sleep(level=0, mode="keep")  # schedules no step, keeps all requests
            engine.collective_rpc("start_weight_update")
            engine.collective_rpc("update_weights", kwargs={"update_info": as_table(weights)})
            engine.collective_rpc("finish_weight_update")
            engine.set_weight_version(str(weights.version))
            if not self._options.keep_cache:
                engine.reset_prefix_cache(reset_running_requests=True)
            engine.wake_up(tags=["scheduling"])
        except Exception as error:
            _end(f"version {weights.version} could not be loaded: {error!r}")
        self._held = weights

    def _start(self, weights: Weights) -> None:
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        dtype = weights.tensors[0].dtype if self._options.dtype == "auto" else self._options.dtype
        chosen = arguments(self._options, self._setup, device=self._device, dtype=dtype)
        try:
            engine = LLMEngine.from_engine_args(EngineArgs(**chosen))
            engine.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": {}})
        except Exception as error:
            traceback.print_exc()
            raise WeightSyncError(
                f"engine vllm: vLLM does not start: {type(error).__name__}: {error}"
            ) from error
        if self._device == "cpu":
            _check_heads(engine.model_config.get_head_size())
        self._engine = engine
        self._limits = (engine.model_config.get_vocab_size(), engine.model_config.max_model_len)

    def description(self) -> str:
        if self._engine is None:
            return "no model yet"
        import vllm

        config = self._engine.model_config
        return (
            f"vLLM {vllm.__version__} ({config.architecture}), {self._device}, {config.dtype}, "
            f"{self._options.tensor_parallel} worker(s), {self._setup.threads} threads"
        )

    # ------------------------------------------------------------------------------ one GPU for two

    def _sleep(self) -> None:
        """Give the GPU's memory back: the weights go to the host's, keys and values are dropped."""
        if self._engine is not None and not self._asleep:
            self._engine.sleep(level=1)
            self._asleep = True

    def _wake(self) -> None:
        if self._asleep:
            self._engine.wake_up()
            self._asleep = False


def _check_heads(width: int) -> None:
    """Raises ModelError for what vLLM's attention on CPUs finds out at the first token only."""
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


def _end(why: str) -> NoReturn:
    """Leave at once; the parent reads the last words from the log, and starts another."""
    traceback.print_exc()
    print(f"engine vllm: {why}", flush=True)
    os._exit(1)
