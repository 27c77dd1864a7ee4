"""The child process of the engine ``local``: takes calls between decoding steps."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, cast

import torch
from attrs import define, field

from grpo_core import cpu
from grpo_core.engines import wire
from grpo_core.engines.local.batch import Model
from grpo_core.engines.local.decoder import Decoder
from grpo_core.engines.local.llama import Llama, Shape
from grpo_core.engines.local.stopping import StopStrings
from grpo_core.errors import EngineError, ModelError
from grpo_core.processes import Call, Connection
from grpo_core.records import Completion, EngineSetup, Weights
from grpo_core.weights import reading


@define
class _Open:
    """A ``generate`` that is not answered yet."""

    call: int
    missing: int
    results: list[Completion | EngineError | None] = field(factory=list)


class Server:
    """Consumes calls, produces answers; blocks only while it has nothing to decode."""

    def __init__(self, setup: EngineSetup, *, device: str, dtype: str, max_rows: int) -> None:
        cpu.prepare(setup.threads)
        self._setup = setup
        self._device = device
        self._dtype = dtype
        self._max_rows = max_rows
        self._model: Model | None = None
        self._decoder: Decoder | None = None
        self._open: dict[int, _Open] = {}

    def serve(self, connection: Connection) -> None:
        while True:
            call = connection.receive(wait=not self._busy)
            while call is not None:
                self._take(connection, call)
                call = connection.receive(wait=False)
            if self._busy:
                self._step(connection)

    @property
    def _busy(self) -> bool:
        return self._decoder is not None and self._decoder.busy

    def _take(self, connection: Connection, call: Call) -> None:
        if call.method == "generate":
            self._generate(connection, call)
        else:
            connection.answer(call, self)

    def _generate(self, connection: Connection, call: Call) -> None:
        ticket, requests = int(call.args[0]), wire.unpack_requests(call.args[1])
        if self._decoder is None:
            connection.fail(call.id, EngineError("engine local: generate before the first update_weights"))
        elif not requests:
            connection.reply(call.id, [])
        else:
            self._open[ticket] = _Open(call.id, len(requests), [None] * len(requests))
            self._decoder.add(((ticket, i), request) for i, request in enumerate(requests))

    def _step(self, connection: Connection) -> None:
        assert self._decoder is not None
        try:
            finished = self._decoder.step()
        except Exception as error:  # out of memory, say: these requests fail, and others may fit
            self._decoder.clear()
            for open_ in self._open.values():
                connection.fail(open_.call, EngineError(f"engine local: decoding failed: {error!r}"))
            self._open.clear()
            return
        for key, result in finished:
            ticket, index = cast("tuple[int, int]", key)
            open_ = self._open[ticket]
            open_.results[index] = result
            open_.missing -= 1
            if not open_.missing:
                del self._open[ticket]
                problem = next((r for r in open_.results if isinstance(r, EngineError)), None)
                if problem is not None:
                    connection.fail(open_.call, problem)
                else:
                    completions = cast("list[Completion]", open_.results)
                    connection.reply(open_.call, wire.pack_completions(completions))

    # ------------------------------------------------------------------------------ calls

    def update_weights(self, weights: Weights) -> dict[str, Any]:
        """Read, check and apply; returns what the engine is."""
        begin = time.perf_counter()
        tensors = reading.read(weights)
        if self._decoder is None:
            model = self._make_model(tensors)
            decoder = Decoder(model, max_rows=self._max_rows, stops=StopStrings(self._setup.model))
            decoder.load(tensors, weights.version)
            self._model, self._decoder = model, decoder
            print(f"engine local: {self.description()}", flush=True)
        else:
            self._decoder.load(tensors, weights.version)
        print(f"engine local: version {weights.version} in {time.perf_counter() - begin:.3f} s", flush=True)
        return {"description": self.description(), "version": weights.version}

    def cancel(self, ticket: int) -> None:
        """Free the rows of a ``generate`` whose caller has gone away; it is not answered."""
        open_ = self._open.pop(ticket, None)
        if open_ is not None and self._decoder is not None:
            self._decoder.cancel({(ticket, i) for i in range(len(open_.results))})

    def description(self) -> str:
        if self._model is None:
            return "no model yet"
        return f"{self._model.description}, {self._model.device}, {torch.get_num_threads()} threads"

    def _make_model(self, tensors: dict[str, torch.Tensor]) -> Model:
        device = cpu.resolve_device(self._device)
        dtype = next(iter(tensors.values())).dtype if self._dtype == "auto" else getattr(torch, self._dtype)
        shape = Shape.of(_read_config(self._setup.model, self._setup.trust_remote_code))
        if shape is not None:
            return Llama(shape, device=device, dtype=dtype)
        from grpo_core.engines.local.hf import TransformersModel

        return TransformersModel(
            self._setup.model, device=device, dtype=dtype, trust_remote_code=self._setup.trust_remote_code
        )


def _read_config(model: str, trust_remote_code: bool) -> dict[str, Any]:
    """``config.json`` of a directory, without transformers; of a hub id, with it."""
    directory = Path(model)
    if directory.is_dir():
        import json

        try:
            config: dict[str, Any] = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ModelError(
                f"engine local: {directory / 'config.json'} cannot be read ({error}); expected the "
                f"configuration of a transformers causal language model"
            ) from None
        return config
    from transformers import AutoConfig

    try:
        remote = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"engine local: model {model!r} is neither a directory nor a hub id ({error})"
        ) from None
    return dict(remote.to_dict())
