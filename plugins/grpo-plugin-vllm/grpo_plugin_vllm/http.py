"""The engine ``vllm:http``: a running vLLM server.

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --host 127.0.0.1 --enable-scale-out --generation-config vllm \\
        --logprobs-mode processed_logprobs --weight-transfer-config '{"backend": "grpo_core"}'

The server needs this plugin (vLLM loads the backend ``grpo_core`` from it), and access to the weights: the
trainer's shared memory on the same machine, a file in ``directory``, or a connection to the trainer
(``engine.transport = "collective"``, which needs grpo-plugin-scale on the server).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from attrs import evolve

from grpo_core import (
    Completion,
    ConfigError,
    EngineError,
    EngineSetup,
    GenerationRequest,
    PluginError,
    Weights,
    WeightSyncError,
)
from grpo_core.kit import BackgroundMetrics, Service, check_request, read_weights, report, transport_of
from grpo_plugin_vllm.client import NAME, Client, ServerError, UnreachableError, checked_url
from grpo_plugin_vllm.completing import EMPTY, checked, sampling
from grpo_plugin_vllm.files import connections
from grpo_plugin_vllm.statistics import between, of_page
from grpo_plugin_vllm.transfer import as_table

T = TypeVar("T")

URL = "http://127.0.0.1:8000"

ANSWER_BYTES, TOKEN_BYTES = 1 << 20, 1 << 10
"""Largest size of an answer, and its increment for each requested token; several times vLLM's need."""

REQUESTS = 512
"""Default of ``engine.max_requests``: largest number of concurrent requests at a server."""

START_PAUSE, START_MARGIN = 1.0, 10.0
"""Polling interval for a starting server, and margin before the deadline, in seconds."""

INFO = 60.0
"""Time limit in seconds for a server's description, which it computes once from its whole machine."""

TORN = "updating"
"""The server's version during an update; tokens with it are discarded."""


def workers(*, url: str | list[str] = URL, remote: bool = False, **options: Any) -> int:
    """Return the number of engines: one for each server.  Raises ConfigError."""
    return len(_addresses(url, remote=remote))


class HttpEngine:
    """An engine that calls a running vLLM server over HTTP.

    Args:
        url: address of the server, or a list of addresses.  The requests of a group go to one server;
            requests that it does not answer go to another one.
        directory: directory for weights for a server that cannot read the trainer's memory; shared by
            trainer and server.  None: the server reads the trainer's memory, or receives weights with
            ``engine.transport = "collective"``.
        request_deadline: time limit of a completion in seconds.
        connect_deadline: time limit of connecting in seconds.
        unavailable_for: longest tolerated outage of a single server in seconds; after that the run ends with
            a checkpoint.  With several servers, requests go to another one.
        keep_cache, seeds: as for the engine ``vllm``.
        remote: allow a server on another machine.  Everybody who can reach such a server can replace its
            model.
        api_key_variable: environment variable with the key of ``vllm serve --api-key``.

    The first weight update waits for a starting server, at most ``engine.deadline`` seconds.  A restarted
    server receives the last weights before any request.

    A server gets at most ``engine.max_requests`` concurrent requests (default 512), or fewer if this process
    cannot open as many files, since each request has a connection.
    """

    def __init__(
        self,
        setup: EngineSetup,
        *,
        url: str | list[str] = URL,
        directory: Path | None = None,
        request_deadline: float = 600.0,
        connect_deadline: float = 10.0,
        unavailable_for: float = 600.0,
        keep_cache: bool = False,
        seeds: bool = True,
        remote: bool = False,
        api_key_variable: str = "",
    ) -> None:
        urls = _addresses(url, remote=remote)
        if setup.reproducible:
            raise ConfigError(
                f'{NAME}: pipeline.policy = "in_order" without updates of running requests needs '
                "completions that depend on nothing but their request, which a server that others may use "
                'cannot promise; use the engine vllm, or set pipeline.policy = "deadline", or '
                "pipeline.in_flight_updates = true with pipeline.max_staleness above 0"
            )
        self._client = Client(
            urls[setup.number % len(urls)],
            seconds=request_deadline,
            connect_seconds=connect_deadline,
            remote=remote,
            api_key=_api_key(api_key_variable),
        )
        self._service = (
            Service(NAME, unavailable_for, key="engine.options.unavailable_for") if len(urls) == 1 else None
        )
        self._places = asyncio.Semaphore(connections(setup.max_requests or REQUESTS, servers=len(urls)))
        self._setup = setup
        self._directory = directory
        self._file = f"weights-{setup.number}" if len(urls) > 1 else "weights"
        self._keep_cache = keep_cache
        self._seeds = seeds
        self._weights: Weights | None = None
        """Last weights of the server."""
        self._ready = False
        """Whether the server is known to hold ``_weights``."""
        self._newest = -1
        """Largest version sent to the server."""
        self.dtype = ""
        """Dtype of the server, once reported; it may differ from the weights' dtype."""
        self.positions = 0
        """Largest number of tokens of a prompt with its completion, once reported."""
        self._statistics: Mapping[str, float] = {}
        self.metrics = BackgroundMetrics(self._measure)
        self._closed = False
        self._syncing = asyncio.Lock()

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Return one completion for each request, in order.  Cancelling the task frees the server's rows.

        Raises EngineError if the server refused, failed or was restarted (retry); Unavailable after too long
        an outage.
        """
        tasks = [asyncio.ensure_future(self._answer(request)) for request in requests]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _answer(self, request: GenerationRequest) -> Completion:
        if self._service is None:
            return await self._complete(request)
        return await self._service.call(request.group or str(request.seed), lambda: self._complete(request))

    async def update_weights(self, weights: Weights) -> None:
        """Return when every later token is sampled from ``weights``.

        Raises WeightSyncError with the server's message if the update fails; Unavailable after too long an
        outage.
        """
        if self._service is None or self._weights is None:
            return await self._update(weights)
        return await self._service.call("weights", lambda: self._update(weights))

    async def _update(self, weights: Weights) -> None:
        async with self._syncing:
            try:
                async with asyncio.timeout(self._setup.deadline):
                    await self._push(weights)
            except TimeoutError:
                raise WeightSyncError(
                    f"engine vllm:http does not hold version {weights.version}: no answer within "
                    f"{self._setup.deadline:g} s (engine.deadline)"
                ) from None
            except (EngineError, OSError) as error:
                raise WeightSyncError(
                    f"engine vllm:http does not hold version {weights.version}: {error}"
                ) from error

    async def aclose(self) -> None:
        self._closed = True
        await self.metrics.aclose()
        await self._client.aclose()

    async def _measure(self) -> Mapping[str, float]:
        now = of_page(await self._client.page("/metrics", seconds=INFO))
        before, self._statistics = self._statistics, now
        return between(before, now)

    # ------------------------------------------------------------------------------ generation

    async def _complete(self, request: GenerationRequest) -> Completion:
        await self._make_ready()
        check_request(request, engine="vllm:http", vocabulary=2**31, positions=self.positions)
        if not request.max_tokens:
            return EMPTY
        body: dict[str, Any] = {
            "token_ids": request.prompt_ids.tolist(),
            "sampling_params": sampling(request, seeds=self._seeds),
        }
        if self._keep_cache:
            assert self._weights is not None
            body["cache_salt"] = str(self._weights.version)
        try:
            async with self._places:
                answer = await self._client.post(
                    "/inference/v1/generate",
                    body,
                    largest=ANSWER_BYTES + TOKEN_BYTES * request.max_tokens,
                )
            return self._read(answer)
        except ServerError:
            self._ready = False  # a restarted server has lost its weights
            raise

    def _read(self, answer: Any) -> Completion:
        """Parse an answer.  Raises EngineError if it is invalid, ServerError for unknown weights."""
        try:
            (choice,) = answer["choices"]
            token_ids = _all(int, choice["token_ids"])
            logprobs = _all(float, [entry["logprob"] for entry in choice["logprobs"]["content"]])
            spans = choice["weight_versions"] or ()
            versions = _all(str, [span["version"] for span in spans])
            ranges = [_all(int, [span["start"], span["end"]]) for span in spans]
            finish_reason = choice["finish_reason"]
        except (LookupError, TypeError, ValueError) as error:
            raise EngineError(
                f"engine vllm:http: the server's answer lacks {str(error)[:200]}; "
                "expected the one of vLLM >= 0.32"
            ) from None
        if not all(_is_version(version, self._newest) for version in versions):
            said = str(sorted(set(versions)))[:200]
            raise ServerError(
                f"engine vllm:http: the server sampled with weights {said}, expected those that it was sent; "
                "it was started again, or somebody else changes its weights. Retry"
            )
        try:
            return checked(
                token_ids=token_ids,
                logprobs=logprobs,
                spans=[(int(version), *range_) for version, range_ in zip(versions, ranges, strict=True)],
                finish_reason=finish_reason,
            )
        except PluginError as error:
            raise EngineError(f"engine vllm:http: the server's answer is wrong: {error}") from None

    async def _make_ready(self) -> None:
        """Check that the server still holds the last weights; resend them if not."""
        async with self._syncing:
            if self._closed:
                raise EngineError("engine vllm:http is closed")
            if self._weights is None:
                raise EngineError("engine vllm:http: generate before the first update_weights")
            if self._ready:
                return
            held = _found(await self._client.get("/weight_info"), str, "weight_version")
            if held != str(self._weights.version):
                wanted = self._weights.version
                report(
                    "died",
                    NAME,
                    f"the server has lost version {wanted} (it holds {held!r}); it is sent again",
                )
                try:
                    await self._push(self._weights)
                except (WeightSyncError, OSError) as error:
                    raise EngineError(
                        f"engine vllm:http: the server holds weights {held!r}, and version "
                        f"{self._weights.version} could not be sent again: {error}"
                    ) from error
            self._ready = True

    # ------------------------------------------------------------------------------ weights

    async def _push(self, weights: Weights) -> None:
        """Update the server's weights; after a failure its tokens are rejected until an update succeeds."""
        where = await asyncio.to_thread(self._published, weights)
        self._newest = max(self._newest, weights.version)
        if not self._ready:
            await self._meet()
        self._ready = False
        post, seconds = self._client.post, self._setup.deadline
        query = {"mode": "keep", "clear_cache": str(not self._keep_cache).lower()}
        await post("/pause", query=query, seconds=seconds)
        try:
            await post("/update_weight_version", {"new_version": TORN})
            await post("/start_weight_update")
            try:
                await post("/update_weights", {"update_info": as_table(where)}, seconds=seconds)
            except ServerError as error:
                if where is not weights or transport_of(where.location).stream:
                    raise
                raise ServerError(
                    f"{error}. If the server cannot read this machine's memory, as in a container or on "
                    'another machine, set engine.transport = "collective", which sends the weights'
                ) from error
            await post("/finish_weight_update", {"weight_version": str(weights.version)}, seconds=seconds)
        except BaseException:
            with contextlib.suppress(ServerError):  # the first error is the reason
                await post("/resume")
            raise
        await post("/resume")
        self._weights, self._ready = weights, True

    async def _meet(self) -> None:
        """Query a new or possibly restarted server."""
        models = await (self._started() if self._weights is None else self._client.get("/v1/models"))
        self.positions = _found(models, int, "data", 0, "max_model_len")
        self.dtype = await self._dtype()
        await self._client.post("/init_weight_transfer_engine", {"init_info": {}})

    async def _dtype(self) -> str:
        """Return the server's dtype; "" if it does not report it."""
        with contextlib.suppress(ServerError):
            info = await self._client.get("/server_info", query={"config_format": "json"}, seconds=INFO)
            return _found(info, str, "vllm_config", "model_config", "dtype").removeprefix("torch.")
        return ""

    async def _started(self) -> Any:
        """Wait for a starting server; return its models."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._setup.deadline - START_MARGIN
        while True:
            try:
                return await self._client.get("/v1/models")
            except UnreachableError as error:
                if loop.time() >= until:
                    raise
                report("retried", NAME, f"waiting for the server to start: {error}")
                await asyncio.sleep(START_PAUSE)

    def _published(self, weights: Weights) -> Weights:
        """Return the weights' description for the server.  Raises WeightSyncError if they are damaged."""
        import torch

        if self._directory is None and transport_of(weights.location).stream:
            return weights  # the server receives and verifies them
        tensors = read_weights(evolve(weights, base=""))  # unmerged adapters; the server adds them
        if self._directory is None:
            return weights
        self._directory.mkdir(parents=True, exist_ok=True)
        path, partial = (self._directory / f"{self._file}.{end}" for end in ("bin", "part"))
        with partial.open("wb") as file:
            for info in weights.tensors:
                file.seek(info.offset)
                file.write(tensors[info.name].contiguous().view(-1).view(torch.uint8).numpy().data)
            file.truncate(weights.nbytes)
        partial.replace(path)
        return evolve(weights, location=str(path.absolute()))


def _addresses(url: str | list[str], *, remote: bool) -> list[str]:
    """Return the addresses of the servers.  Raises ConfigError if there are none or duplicates."""
    given: list[Any] = [url] if isinstance(url, str) else list(url)
    if not all(isinstance(each, str) for each in given):
        raise ConfigError(f"engine vllm:http: url = {url!r}; expected an address or a list of addresses")
    urls = [checked_url(each, remote=remote) for each in given]
    if not urls or len(set(urls)) < len(urls):
        raise ConfigError(
            f"engine vllm:http: url = {url!r}; expected at least one address, each of them once"
        )
    return urls


def _api_key(variable: str) -> str:
    """Return the key from an environment variable; empty without a name.  Raises ConfigError."""
    if variable and not os.environ.get(variable):
        raise ConfigError(
            f"engine vllm:http: api_key_variable = {variable!r}, and there is no such environment variable, "
            "or it is empty"
        )
    return os.environ[variable] if variable else ""


def _all(kind: type, values: Any) -> list[Any]:
    """Validate a list of values of one JSON type.  Raises TypeError."""
    kinds = (int, float) if kind is float else (kind,)
    if not isinstance(values, list) or any(type(value) not in kinds for value in values):
        raise TypeError(f"a list of {kind.__name__}: {repr(values)[:80]}")
    return values


def _found(answer: Any, kind: type[T], *keys: str | int) -> T:
    """Return a nested value of an answer.  Raises ServerError if it is missing."""
    with contextlib.suppress(LookupError, TypeError):
        for key in keys:
            answer = answer[key]
        if isinstance(answer, kind):
            return answer
    raise ServerError(
        f"engine vllm:http: the server's answer has no {'.'.join(map(str, keys))}; is this a vLLM server?"
    )


def _is_version(label: str, newest: int) -> bool:
    """Whether a label is a version that was sent to the server."""
    return label.isascii() and label.isdecimal() and len(label) < 10 and int(label) <= newest
