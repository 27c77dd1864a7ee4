"""An engine of any plugin in a Ray worker, and its client on the driver.

    EnginePool -> RayEngine   -- submit, once per turn of the loop -->   EngineWorker -> the plugin's engine
                              <-- collect, what has finished --------
                              -- update_weights, a reference -------->   a copy in the worker's memory

Requests that arrive together share a call, and so do completions that finish together, across groups, because
Ray's overhead on the driver is per call.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from attrs import evolve, field, frozen

from grpo_core import (
    Completion,
    DeadlineExceeded,
    Engine,
    EngineError,
    EngineSetup,
    GenerationRequest,
    GrpoError,
    ModelError,
    Weights,
    WeightSyncError,
)
from grpo_core.engines import wire
from grpo_core.engines.wrapped import engine_metrics
from grpo_core.kit import BackgroundMetrics, PluginHost, reported_to, transport_of
from grpo_core.storage import copies
from grpo_plugin_ray.cluster import Incidents, PluginRequirement, brief, call, load, report_again, where

LINGER = 0.005
"""Seconds that a finished completion waits for others to share a call."""

START_SHARE = 0.9
"""Fraction of ``engine.deadline`` for the start, so that this error is raised before the pool's timeout."""

SAID: Mapping[str, Any] = {"dtype": "", "positions": 0, "keeps_adapters": False}
"""Attributes of an engine that it sets with its first weights, and what they are without it."""


@frozen(kw_only=True)
class WorkerSetup:
    """Everything that a worker needs to create its engine; plain data."""

    origin: PluginRequirement
    setup: EngineSetup
    options: Mapping[str, Any] = field(factory=dict)
    env_vars: Mapping[str, str] = field(factory=dict)
    """Environment variables, set before the plugin is loaded."""


# ---------------------------------------------------------------------------------- in the worker


class EngineWorker:
    """The actor.  ``start`` creates the engine on the event loop of all its methods."""

    def __init__(self, name: str, made_from: WorkerSetup) -> None:
        self._who = f"{name} ({where()})"
        self._made_from = made_from
        self._engine: Engine | None = None
        self._copies = copies.Copies()
        self._held: copies.WeightsLease | None = None
        self._running: dict[int, asyncio.Task[None]] = {}
        self._finished: list[tuple[int, wire.Packed | None, str]] = []
        self._some = asyncio.Event()
        self._incidents: Incidents = []
        """Incidents since the last answer."""

    async def start(self) -> str:
        """Create the engine; return where it runs.  Raises PluginError, ConfigError, ModelError."""
        made_from = self._made_from
        os.environ.update(made_from.env_vars)
        made_from.origin.check(self._who)
        _prepare_files(self._who, made_from.setup)
        host = PluginHost.of(made_from.origin.plugins)
        self._engine = host.make("engine", made_from.origin.name, made_from.setup, **made_from.options)
        return self._who

    async def update_weights(self, weights: Weights, data: Any) -> tuple[Incidents, dict[str, Any]]:
        """Update the engine's weights.

        Returns the incidents since the last answer, and what the engine then says of itself.

        ``data``: all bytes, uint8 [nbytes], in the machine's shared memory.  None: the engine fetches them by
        ``relay``.
        """
        assert self._engine is not None
        self._held = None  # hold one copy at a time, like the trainer's block
        if data is not None:
            self._held = await asyncio.to_thread(self._copies.copy, weights, memoryview(data))
            weights = self._held.weights
        with reported_to(self._incidents.append):
            await self._engine.update_weights(weights)
        return self._new_incidents(), {
            name: getattr(self._engine, name, usual) for name, usual in SAID.items()
        }

    async def submit(self, requests: Sequence[tuple[int, Any]], cancelled: Sequence[int]) -> None:
        """Start requests under their tickets, and cancel others."""
        for ticket, packed in requests:
            (request,) = wire.unpack_requests([packed])
            with reported_to(self._incidents.append):
                self._running[ticket] = asyncio.create_task(self._generate(ticket, request))
        for ticket in cancelled:
            if (task := self._running.pop(ticket, None)) is not None:
                task.cancel()

    async def collect(self) -> tuple[list[tuple[int, wire.Packed | None, str]], Incidents]:
        """Wait for finished requests.

        Returns pairs of ticket and completion or error, and the incidents since the last answer.
        """
        while not self._finished:
            self._some.clear()
            await self._some.wait()
        await asyncio.sleep(LINGER)
        finished, self._finished = self._finished, []
        return finished, self._new_incidents()

    async def metrics(self) -> dict[str, float]:
        return {} if self._engine is None else dict(engine_metrics(self._engine))

    async def aclose(self) -> None:
        if self._engine is not None:
            await self._engine.aclose()

    def _new_incidents(self) -> Incidents:
        incidents, self._incidents[:] = [*self._incidents], []
        return incidents

    async def _generate(self, ticket: int, request: GenerationRequest) -> None:
        assert self._engine is not None
        try:
            answer = wire.pack_completions(await self._engine.generate([request]))
            self._finished.append((ticket, answer, ""))
        except GrpoError as error:
            self._finished.append((ticket, None, str(error)))
        except Exception as error:
            self._finished.append((ticket, None, f"{type(error).__name__}: {error}"))
        finally:
            self._running.pop(ticket, None)
            self._some.set()


def _prepare_files(who: str, setup: EngineSetup) -> None:
    model = Path(setup.model)
    if model.is_absolute() and not model.exists():
        raise ModelError(
            f"{who}: there is no {model} on this machine; put the model (of a hub id: HF_HOME) "
            "on a file system that all machines share, under the same path"
        )
    if setup.log_directory:
        Path(setup.log_directory).mkdir(parents=True, exist_ok=True)


# ---------------------------------------------------------------------------------- on the driver's side


class RayEngine:
    """An ``Engine`` in a Ray worker, which ``started`` or the first ``update_weights`` starts.

    Accepts weights from ``Store.hold``.  After the death of the worker all calls raise EngineError; a pool
    then replaces the engine.

    Args:
        name: name in messages ("engine 0").
        made_from: setup of the worker's engine.
        store: store of the weights.
        resources: options of the Ray actor (``num_gpus``, ``scheduling_strategy``).
    """

    def __init__(
        self, name: str, made_from: WorkerSetup, *, store: Store, resources: Mapping[str, Any]
    ) -> None:
        self.name = self._name = name
        self.dtype = ""
        """Dtype of the worker's engine, once reported."""
        self.keeps_adapters = False
        """Whether the worker's engine keeps the model and its adapters apart, once reported."""
        self.positions = 0
        """Largest number of tokens of a prompt with its completion, once reported."""
        self.metrics = BackgroundMetrics(self._measure)
        self._store = store
        self._resources = resources
        self._deadline = made_from.setup.deadline
        self._made_from = made_from
        self._worker: Any = None
        self._started = False
        self._tickets = itertools.count()
        self._open: dict[int, asyncio.Future[Completion]] = {}
        self._outbox: list[tuple[int, Any]] = []
        self._cancelled: list[int] = []
        self._scheduled = False
        self._collector: asyncio.Task[None] | None = None
        self._death: EngineError | None = None

    async def started(self) -> None:
        """Start the worker without waiting for it."""
        if self._worker is None:
            actor: Any = load().remote(EngineWorker)
            options = actor.options(max_restarts=0, **self._resources)
            self._worker = options.remote(self._name, self._made_from)

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Return one completion for each request, in order.  Raises EngineError.  Cancelling is allowed."""
        packed = wire.pack_requests(requests)
        tickets = [self._send(one) for one in packed]
        try:
            return [await self._open[ticket] for ticket in tickets]
        finally:
            unfinished = [ticket for ticket in tickets if not self._open.pop(ticket).done()]
            if unfinished:
                self._cancelled += unfinished
                self._schedule()

    async def update_weights(self, weights: Weights) -> None:
        """Update the weights of the worker's engine.

        Raises the engine's errors; ChildDied if the worker is gone; DeadlineExceeded if it did not start in
        time; PluginError if its software differs from the driver's.
        """
        self._alive()
        await self.started()
        if not self._started:
            seconds = START_SHARE * self._deadline
            try:
                async with asyncio.timeout(seconds):
                    self.name = await self._call("start")
            except TimeoutError:
                raise DeadlineExceeded(
                    f"{self.name}: not started within {seconds:g} s; it needs {dict(self._resources)}, "
                    f"the cluster has {load().available_resources()} free (engine.deadline, "
                    "engine.gpus_per_worker)"
                ) from None
            self._started = True
        incidents, said = await self._call("update_weights", weights, self._store.reference(weights))
        self.dtype, self.positions, self.keeps_adapters = (said[name] for name in SAID)
        self._report(incidents)

    async def aclose(self) -> None:
        """Close the engine, then end the worker."""
        already, self._death = self._death, self._death or EngineError(f"{self.name} is closed")
        self._fail_all(self._death)
        await self.metrics.aclose()
        if self._collector is not None:
            self._collector.cancel()
        try:
            if self._started and already is None:
                await self._call("aclose")
        finally:
            if self._worker is not None:
                load().kill(self._worker)

    # ------------------------------------------------------------------------------ the worker

    async def _measure(self) -> Mapping[str, float] | None:
        return await self._call("metrics") if self._started and self._death is None else None

    async def _call(self, method: str, *args: Any) -> Any:
        return await call(self._worker, method, *args, who=self.name)

    def _alive(self) -> None:
        if self._death is not None:
            raise self._death

    def _send(self, packed: Any) -> int:
        self._alive()
        ticket = next(self._tickets)
        self._open[ticket] = asyncio.get_running_loop().create_future()
        self._outbox.append((ticket, packed))
        self._schedule()
        return ticket

    def _schedule(self) -> None:
        """Send one call for all requests of this iteration of the event loop."""
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._scheduled = False
        if self._death is not None:
            return
        self._worker.submit.remote(self._outbox, self._cancelled)
        self._outbox, self._cancelled = [], []
        if self._collector is None or self._collector.done():
            self._collector = asyncio.create_task(self._collect(), name=f"collector of {self.name}")

    async def _collect(self) -> None:
        """Collect results until no request is open; the death of the worker fails all of them."""
        try:
            while self._open:
                finished, incidents = await self._worker.collect.remote()
                self._report(incidents)
                for ticket, packed, problem in finished:
                    future = self._open.get(ticket)
                    if future is None or future.done():
                        continue  # the caller was cancelled
                    if packed is None:
                        future.set_exception(EngineError(f"{self.name}: {problem}"))
                    else:
                        future.set_result(wire.unpack_completions(packed)[0])
        except load().exceptions.RayError as error:
            self._death = EngineError(f"{self.name} died: {brief(error)}")
            self._fail_all(self._death)

    def _report(self, incidents: Incidents) -> None:
        report_again(incidents, self._name, self.name)

    def _fail_all(self, why: EngineError) -> None:
        for future in self._open.values():
            if not future.done():
                future.set_exception(why)
                future.exception()  # avoids a warning if the caller was cancelled


class Store:
    """Weights in Ray's object store: one put, one copy on each machine."""

    def __init__(self) -> None:
        self._held: WeakValueDictionary[str, copies.WeightsLease] = WeakValueDictionary()

    async def hold(self, weights: Weights) -> copies.WeightsLease:
        """Put published weights of a trainer on this machine, unless it sends them itself.

        Raises WeightSyncError.
        """
        if transport_of(weights.location).remote:
            held = copies.WeightsLease(weights=weights)
        else:
            reference = await asyncio.to_thread(self._put, weights)
            location = f"ray:{reference.hex()}"
            held = copies.WeightsLease(weights=evolve(weights, location=location), memory=reference)
        self._held[held.weights.location] = held
        return held

    def reference(self, weights: Weights) -> Any:
        """Return the reference of the bytes; None if the trainer sends them.

        Raises WeightSyncError for weights that are not in the store.
        """
        held = self._held.get(weights.location)
        if held is None:
            raise WeightSyncError(
                f"version {weights.version}: {weights.location} is not in Ray's object store; a RayEngine "
                "takes what Store.hold made"
            )
        return held.memory

    def _put(self, weights: Weights) -> Any:
        import numpy as np

        return load().put(np.frombuffer(copies.mapped(weights), dtype=np.uint8))
