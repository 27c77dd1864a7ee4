"""An engine in a child process: the parent's side, for any decoder.

The child makes a *server*, usually a ``DecodingServer``: it answers the calls ``generate(ticket, packed
requests)`` (see ``wire``), ``cancel(ticket)`` and ``update_weights(weights)``.  The engine is a process and
not a thread, so that generation overlaps with training and with the pipeline, and so that an engine that dies
or hangs can be replaced.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from grpo_core.contracts.errors import ChildDied, DeadlineExceeded, EngineError, GrpoError, WeightSyncError
from grpo_core.contracts.events import IncidentKind
from grpo_core.contracts.incidents import report
from grpo_core.contracts.records import Completion, EngineSetup, GenerationRequest, Weights
from grpo_core.engines import wire
from grpo_core.processes.child import Child

MAX_DEATHS = 3
"""Deaths in a row, with no finished request in between, after which the child is not started again."""


class ChildEngine:
    """An engine in its own child process; it satisfies ``grpo_core.Engine``.

    ``started`` or the first ``update_weights`` starts the child.  If it dies, running ``generate`` calls
    raise EngineError, and the next call starts another child, which gets the last weights before anything
    else.

    Args:
        setup: the argument of an engine's factory.
        name: the engine's name in messages and in the name of its log.
        server: ``"module:Class"`` or ``"path/to/file.py:Class"`` of the server, usually a
            ``DecodingServer``; made in the child as ``Class(setup=setup, **options)``.
        options: options of the server; pickled.
        env_vars: environment variables added for the child.
        rests: whether it rests in a step of a trainer on its GPU; the server defines ``rest`` and ``wake``.
    """

    def __init__(
        self,
        setup: EngineSetup,
        *,
        name: str,
        server: str,
        options: Mapping[str, Any],
        env_vars: Mapping[str, str] | None = None,
        rests: bool = False,
    ) -> None:
        self.name = f"engine {name}"
        self._setup = setup
        self._server = server
        self._options = dict(options)
        self._env_vars = dict(env_vars or {})
        self._log = Path(setup.log_directory) / f"engine-{name}.log" if setup.log_directory else None
        self._tickets = itertools.count()
        self._starting = asyncio.Lock()
        self._rests = rests
        self._weights: Weights | None = None
        """The newest weights that a child loaded; the next child gets them first."""
        self._deaths = 0
        """Number of deaths since the last finished request."""
        self._closed = False
        self._cancelling: set[asyncio.Task[Any]] = set()
        self.positions = 0
        """Largest number of tokens of a prompt with its completion; 0 until the child reports it."""
        self._child: Child | None = None
        self._ready = False
        """Whether the child holds ``_weights``."""

    async def started(self) -> None:
        """Start the child without waiting for it."""
        self._living_child()

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Return one completion for each request, in order.

        Cancelling the task frees the rows.  Raises EngineError if the child died (retry), if it died
        ``MAX_DEATHS`` times in a row (do not), or if a request cannot be decoded.
        """
        try:
            child = await self._ready_child()
        except WeightSyncError as error:
            raise EngineError(f"{self.name} could not be started again: {error}") from error
        ticket = next(self._tickets)
        try:
            answer = await child.call("generate", ticket, wire.pack_requests(requests), seconds=None)
        except asyncio.CancelledError:
            self._cancel(child, ticket)
            raise
        except (ChildDied, DeadlineExceeded) as error:  # without a deadline here, it was another call's
            self._died(child, error)
            raise EngineError(f"{self.name} died while it generated; retry: {error}") from error
        self._deaths = 0
        return wire.unpack_completions(answer)

    async def update_weights(self, weights: Weights) -> None:
        """Load ``weights``; return when every later token is sampled from them.

        Raises WeightSyncError if they could not be read or are not the model's, or if neither the child nor a
        new one answered within the setup's deadline; ModelError if the model's configuration cannot be used.
        """
        async with self._starting:
            try:
                await self._give(weights)
            except EngineError as error:
                raise WeightSyncError(
                    f"{self.name} does not hold version {weights.version}: {error}"
                ) from error

    async def rest(self) -> None:
        """Give the GPU's memory back; new requests, weights and children wait for ``wake``."""
        if self._rests:
            await self._starting.acquire()
            await self._say("rest")

    async def wake(self) -> None:
        """Take the GPU's memory again.  Raises EngineError if there is too little."""
        if self._rests:
            await self._say("wake")
            self._starting.release()

    async def _say(self, method: str) -> None:
        """Call a method of the child; a child that dies in it has returned its memory."""
        child = self._child
        try:
            await self.ask(method)
        except (ChildDied, DeadlineExceeded) as error:
            assert child is not None
            self._died(child, error)

    async def ask(self, method: str, *args: Any) -> Any:
        """Call a method of the server between two steps; return None if no child holds weights now.

        Raises ChildDied, or DeadlineExceeded if the setup's deadline passes.
        """
        if self._child is None or not self._ready:
            return None
        return await self._child.call(method, *args, seconds=self._setup.deadline)

    @property
    def pid(self) -> int | None:
        """Process id of the child; None while no child runs."""
        return self._child.pid if self._child is not None else None

    async def aclose(self) -> None:
        """End the child; running calls raise EngineError."""
        self._closed = True
        if self._child is not None:
            await self._child.aclose()
        await asyncio.gather(*self._cancelling, return_exceptions=True)

    # ------------------------------------------------------------------------------ the child

    def _start(self) -> Child:
        threads = str(self._setup.threads)
        return Child(
            self._server,
            {"setup": self._setup, **self._options},
            name=self.name,
            environ={
                "OMP_NUM_THREADS": threads,
                "MKL_NUM_THREADS": threads,
                "TOKENIZERS_PARALLELISM": "false",
                **self._env_vars,
                **self._setup.env_vars,
            },
            log=self._log,
        )

    async def _ready_child(self) -> Child:
        """Return a child that holds the last weights."""
        async with self._starting:
            child = self._living_child()
            if not self._ready:
                if self._weights is None:
                    raise EngineError(f"{self.name}: generate before the first update_weights")
                await self._give(self._weights)
                child = self._living_child()
            return child

    async def _give(self, weights: Weights) -> None:
        """Send the weights to the child; start a new one if it died, and once if it does not answer."""
        seconds, late = self._setup.deadline, False
        while True:
            child = self._living_child()
            try:
                await child.started(seconds=seconds)
                self.positions = await child.call("update_weights", weights, seconds=seconds) or 0
            except ChildDied as error:
                self._died(child, error)
                continue  # at most MAX_DEATHS times
            except DeadlineExceeded as error:
                self._died(child, error)
                if late:
                    raise WeightSyncError(
                        f"{self.name} does not hold version {weights.version}, and neither does the process "
                        f"that replaced it when it did not answer: {error}"
                    ) from error
                late = True
                continue
            self._weights, self._ready = weights, True
            return

    def _living_child(self) -> Child:
        """Return the child, or a new one.  Raises EngineError if closed, or after too many deaths."""
        if self._closed:
            raise EngineError(f"{self.name} is closed")
        if self._child is not None and not self._child.alive:
            why = self._child.death or ChildDied("it died while nobody waited for it")
            self._died(self._child, why)
        if self._child is None:
            self._child = self._start()
        return self._child

    def _died(self, child: Child, why: GrpoError) -> None:
        """Record a death once, for any number of reports.  Raises EngineError after too many deaths."""
        if child is self._child:
            child.kill()
            self._child, self._ready = None, False
            self._deaths += 1
            if not self._closed and self._deaths < MAX_DEATHS:
                kind: IncidentKind = "deadline" if isinstance(why, DeadlineExceeded) else "died"
                report(kind, self.name, f"restarting its process: {why}")
        if self._deaths >= MAX_DEATHS:
            where = f"see {self._log}" if self._log else "its output is above"
            raise EngineError(
                f"{self.name} died {self._deaths} times without finishing a request in between "
                f"({where}); the last time: {why}"
            ) from why

    def _cancel(self, child: Child, ticket: int) -> None:
        async def cancel() -> None:
            with suppress(GrpoError):  # a dead child decodes nothing
                await child.call("cancel", ticket, seconds=self._setup.deadline)

        task = asyncio.get_running_loop().create_task(cancel(), name=f"{self.name}: cancel")
        self._cancelling.add(task)
        task.add_done_callback(self._cancelling.discard)
