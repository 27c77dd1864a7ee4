"""A member of a pool of engines, and its state."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Mapping

from attrs import define, field

from grpo_core import (
    ChildDied,
    Completion,
    DeadlineExceeded,
    Engine,
    EngineError,
    GenerationRequest,
    PluginError,
    WeightSyncError,
)
from grpo_core.contracts.incidents import reported_as
from grpo_core.kit import aio
from grpo_core.loop import canary
from grpo_core.loop.agreement import Tolerance
from grpo_core.loop.timeline import during
from grpo_core.storage import copies

CLOSE = 10.0
"""Time limit for closing an engine in seconds."""

MAX_FAILURES = 3
"""Number of consecutive engines without a finished request after which a member is given up."""

RECOVERABLE_ERRORS = (EngineError, ChildDied, WeightSyncError, DeadlineExceeded, TimeoutError)
"""Errors after which another engine is tried; other errors, such as a violated contract, end the run."""


class CanaryMismatch(Exception):  # noqa: N818 - distinguishes a canary's finding from a failed sync
    """Raised when a canary shows that an engine does not use its new weights."""


@define(eq=False)
class Member:
    """A numbered member of the pool, whose engine can be replaced."""

    number: int
    engine: Engine
    changed: Callable[[], None]
    """Called when the engine has failed."""
    holds: copies.WeightsLease | None = None
    """Weights of the engine; None if it has none or unknown ones."""
    refuses: copies.WeightsLease | None = None
    """Weights that the engine refused while it kept the previous version."""
    tokens: int = 0
    """Number of tokens of its running requests: prompts plus the limits of completions."""
    sampled: int = 0
    """Number of sampled tokens since the last call of ``EnginePool.metrics``."""
    failures: int = 0
    """Number of consecutive engines without a finished request."""
    supervisor: asyncio.Task[None] | None = None
    _unconfirmed: float = math.inf
    """Version of the engine's weights until its canary has confirmed them."""
    _confirmed: asyncio.Event = field(factory=asyncio.Event)
    _doubts: int = 0
    _calls: dict[asyncio.Task[Completion], None] = field(factory=dict)
    """Unfinished calls, oldest first, so that cancellation is deterministic."""

    @property
    def name(self) -> str:
        """Name of the member in messages."""
        return f"engine {self.number}"

    async def ask(
        self, requests: Mapping[int, GenerationRequest], found: dict[int, Completion]
    ) -> Exception | None:
        """Add the engine's completions to ``found``; return an error if some are missing.

        Each request is a separate call, so finished completions survive the engine's death.
        """
        calls = {i: self._call(request) for i, request in requests.items()}
        answers = await asyncio.gather(*calls.values(), return_exceptions=True)
        error: Exception | None = None
        for i, answer in zip(calls, answers, strict=True):
            if not isinstance(answer, BaseException):
                found[i] = answer
            elif isinstance(answer, EngineError | ChildDied | asyncio.CancelledError):
                error = EngineError(str(answer) or f"{self.name} was replaced")
            else:
                raise answer
        return error

    def _call(self, request: GenerationRequest) -> asyncio.Task[Completion]:
        """Start a call that counts as load until it ends, even if it is cancelled before it begins."""
        call = asyncio.create_task(self._generate(request))
        tokens = tokens_of(request)
        self.tokens += tokens
        self._calls[call] = None

        def finished(call: asyncio.Task[Completion]) -> None:
            self.tokens -= tokens
            self._calls.pop(call, None)

        call.add_done_callback(finished)
        return call

    async def _generate(self, request: GenerationRequest) -> Completion:
        try:
            with reported_as(self.name), during(self.name, "generate"):
                answer = await self.engine.generate([request])
        except (EngineError, ChildDied):
            self.holds = None  # the supervisor checks whether the engine is alive and which weights it has
            self._doubts += 1
            self.changed()
            raise
        if len(answer) != 1:
            raise PluginError(f"{self.name}: generate() returned {len(answer)} completions for one request")
        self.failures = 0
        self.sampled += len(answer[0].token_ids)
        # wait until the canary has confirmed all weights that sampled the tokens; if the engine is
        # replaced before, the call is cancelled, and another member generates the tokens
        while answer[0].versions.max(initial=0) >= self._unconfirmed:
            await self._confirmed.wait()
        return answer[0]

    async def give(self, held: copies.WeightsLease, *, tolerance: Tolerance, deadline: float) -> None:
        """Update the engine's weights, and check its canary.

        Raises DeadlineExceeded after ``deadline`` seconds, CanaryMismatch, and the engine's errors.
        """
        doubts, self._unconfirmed = self._doubts, held.weights.version
        with reported_as(self.name):
            async with aio.time_limit(deadline, lambda: DeadlineExceeded(f"no answer within {deadline:g} s")):
                with during(self.name, "update weights"):
                    await self.engine.update_weights(held.weights)
                try:
                    await canary.verify(self.engine, held.weights, tolerance=tolerance, deadline=None)
                except WeightSyncError as error:
                    raise CanaryMismatch(f"{self.name} of the pool: {error}") from error
        if doubts == self._doubts:
            self.holds, self._unconfirmed = held, math.inf
            self._confirmed.set()
            self._confirmed = asyncio.Event()

    def give_back(self) -> None:
        """Cancel the unfinished requests, which go to another member."""
        self.holds = None
        for call in list(self._calls):
            call.cancel()

    async def close(self) -> None:
        with contextlib.suppress(Exception):  # errors do not matter any more
            async with asyncio.timeout(CLOSE):
                await self.engine.aclose()


def tokens_of(request: GenerationRequest) -> int:
    return len(request.prompt_ids) + request.max_tokens
