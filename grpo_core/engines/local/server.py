"""The child process of the engine ``local``: handles calls between decoding steps."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch

from grpo_core.contracts.errors import EngineError, ModelError, WeightSyncError
from grpo_core.contracts.playing import check_request
from grpo_core.contracts.records import Completion, EngineSetup, GenerationRequest, Weights
from grpo_core.engines.local.batch import EngineModel
from grpo_core.engines.local.decoder import Decoder, SeparateCalls
from grpo_core.engines.local.decoding_server import DecodingServer
from grpo_core.engines.local.llama import Llama, Shape
from grpo_core.engines.local.stopping import StopStrings
from grpo_core.processes import cpu
from grpo_core.weights.reading import read_buckets


class Server(DecodingServer):
    """Decodes with a ``Decoder``, which it makes when the first weights arrive."""

    name = "local"

    def __init__(self, setup: EngineSetup, *, device: str, dtype: str, max_rows: int) -> None:
        super().__init__()
        cpu.prepare(setup.threads)
        self._setup = setup
        self._device = cpu.resolve_device(device, "engine.options.device")
        self._dtype = dtype
        self._max_rows = max_rows
        self._model: EngineModel | None = None
        self._decoder: Decoder | None = None
        self._freed = cpu.FreedMemory()

    def load(self, weights: Weights) -> Iterator[None]:
        """Read the weights twice: once to verify all of them during decoding, once to apply them."""
        shapes: dict[str, tuple[int, ...]] = {}
        for bucket in read_buckets(weights, device=self._device):
            shapes |= {name: tuple(tensor.shape) for name, tensor in bucket.items()}
            del bucket  # the next one needs memory
            yield
        begin = time.perf_counter()
        model, decoder = self._model, self._decoder
        if model is None or decoder is None:
            model = self._make_model(weights)
            kind = SeparateCalls if self._setup.reproducible else Decoder
            decoder = kind(model, max_rows=self._max_rows, stops=StopStrings(self._setup.model))
            threads = torch.get_num_threads()
            alone = ", each call alone" if self._setup.reproducible else ""
            print(f"engine local: {model.description}, {model.device}, {threads} threads{alone}", flush=True)
        decoder.check(shapes)
        try:
            decoder.load(read_buckets(weights, verify=False, device=self._device), weights.version)
        except WeightSyncError as error:
            raise RuntimeError(f"the weights have been written in part: {error}") from error
        self._model, self._decoder = model, decoder
        self._freed.limit()
        self.positions = model.max_positions
        print(f"engine local: version {weights.version} in {time.perf_counter() - begin:.3f} s", flush=True)

    def check(self, request: GenerationRequest) -> None:
        assert self._model is not None
        check_request(request, engine="local", vocabulary=self._model.vocabulary, positions=self.positions)

    def add(self, key: int, request: GenerationRequest) -> None:
        self.add_call([(key, request)])

    def add_call(self, entries: Sequence[tuple[int, GenerationRequest]]) -> None:
        assert self._decoder is not None
        self._decoder.add(entries)

    def step(self) -> Iterable[tuple[int, Completion | EngineError]]:
        assert self._decoder is not None
        try:
            return self._decoder.step()
        except Exception as error:  # such as out of memory: these requests fail, and others may fit
            self._decoder.clear()
            raise EngineError(f"engine local: decoding failed: {error!r}") from error

    def sampled(self) -> list[list[int]]:
        """Return the tokens that each running request has so far."""
        assert self._decoder is not None
        return self._decoder.sampled()

    def forget(self, keys: set[int]) -> None:
        assert self._decoder is not None
        self._decoder.cancel(keys)

    def _make_model(self, weights: Weights) -> EngineModel:
        sent = weights.tensors[0].dtype
        dtype: torch.dtype = getattr(torch, sent if self._dtype == "auto" else self._dtype)
        path = Path(self._setup.model, "config.json")
        try:
            shape = Shape.of(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise ModelError(
                f"engine local: {path} cannot be read ({error}); expected the configuration of a "
                "transformers causal language model"
            ) from None
        if shape is not None:
            return Llama(shape, device=self._device, dtype=dtype)
        from grpo_core.engines.local.hf import TransformersModel

        return TransformersModel(
            self._setup.model,
            device=self._device,
            dtype=dtype,
            trust_remote_code=self._setup.trust_remote_code,
        )
