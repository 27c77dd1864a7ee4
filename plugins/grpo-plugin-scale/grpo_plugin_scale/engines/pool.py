"""A pool of engines that acts as one engine.

    generate          ------>   the member with the fewest outstanding tokens, whole groups at a time
    update_weights    ------>   every member; each switches as soon as it can

A member serves requests if it holds the weights of the last ``update_weights`` (or of a running one), and its
canary has confirmed it.  One supervisor task per member makes sure that the member holds them:
it gives them again to one that has failed a request, and replaces an engine that does not take them.

``update_weights`` returns when every member that held the version before holds the new one.  It waits at most
twice as long as the quickest member took, plus ``lag`` seconds; a slower member is *behind*.  From then on

* every later request is sampled from the new weights or from newer ones: a member that is behind, has failed,
  or has just joined gets no request before it holds them;
* requests that run on a member that is behind continue.  Each of their tokens carries the version that
  sampled it, which is at least the version that was current when the request began.  The staleness bound
  counts from that version, so it holds for them, too.

Completions that a dying member has finished are kept; only unanswered requests go to another member.  A
completion with tokens from new weights counts once the member's canary has confirmed them.  The pool is pure
asyncio: members may be child processes, Ray workers or fakes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from typing import TypeVar

from attrs import evolve

from grpo_core import (
    Completion,
    DeadlineExceeded,
    Engine,
    EngineError,
    EngineSetup,
    GenerationRequest,
    Weights,
    WeightSyncError,
)
from grpo_core.config import EngineConfig
from grpo_core.engines.wrapped import engine_metrics
from grpo_core.kit import aio, report
from grpo_core.loop.agreement import Tolerance
from grpo_core.storage import copies
from grpo_plugin_scale.engines.members import (
    CLOSE,
    MAX_FAILURES,
    RECOVERABLE_ERRORS,
    CanaryMismatch,
    Member,
    tokens_of,
)

T = TypeVar("T")

ATTEMPTS = 4
"""Number of attempts after which a request itself is considered faulty."""

AFFINITY = 4
"""A group stays on its member unless this exceeds the load of another member by AFFINITY times the
group's running tokens."""

HOMES = 10_000
"""Number of groups with a remembered member."""


Hold = Callable[[Weights], Awaitable[copies.WeightsLease]]
"""Takes a lease of published weights that outlives the trainer's next publication."""


async def as_published(weights: Weights) -> copies.WeightsLease:
    """Return a lease of the published weights themselves, valid until the trainer publishes again."""
    return copies.WeightsLease(weights=weights)


class EnginePool:
    """Several engines behind the ``Engine`` protocol; construct it inside of a running event loop.

    Args:
        make: returns an engine for the member with this number; called again for replacements.
        workers: number of members at the start, numbered from 0.
        tolerance: tolerance of each member's canary; see ``grpo_core.loop.canary``.
        deadline: seconds for a member to start, take weights and answer its canary.
        lag: extra seconds for slower members; see the module's docstring.
        hold: takes a lease of published weights, for members that start, are replaced or catch up after the
            trainer has published newer ones.
    """

    def __init__(
        self,
        make: Callable[[int], Engine],
        workers: int,
        *,
        tolerance: Tolerance = Tolerance(),  # noqa: B008 - immutable
        deadline: float = 600.0,
        lag: float = 1.0,
        hold: Hold = as_published,
    ) -> None:
        self._make, self._hold = make, hold
        self._tolerance, self._deadline, self._lag = tolerance, deadline, lag
        self._members: list[Member] = []
        self._given_up: set[int] = set()
        self._failed: dict[int, str] = {}
        """Reason for which each member's last engine was replaced."""
        self._replaced = 0
        self._next = 0
        self._current: copies.WeightsLease | None = None
        """Weights of the last completed ``update_weights``."""
        self._target: copies.WeightsLease | None = None
        """Weights that every member should hold."""
        self._homes: OrderedDict[Hashable, Member] = OrderedDict()
        self._running: Counter[Hashable] = Counter()
        """Number of tokens of each group's open requests."""
        self._fault: Exception | None = None
        self._changed = asyncio.Event()
        self._measured_at = asyncio.get_running_loop().time()
        """Time of the last call of ``metrics``."""
        for _ in range(workers):
            self.join()

    # ------------------------------------------------------------------------------ the engine

    @property
    def dtype(self) -> str:
        """Dtype of the engines, if one reports it."""
        return next((said for each in self._members if (said := getattr(each.engine, "dtype", ""))), "")

    @property
    def keeps_adapters(self) -> bool:
        """Whether the engines keep the model and its adapters apart."""
        return any(getattr(each.engine, "keeps_adapters", False) for each in self._members)

    @property
    def positions(self) -> int:
        """Smallest limit of the engines for the tokens of a prompt with its completion."""
        said = (int(getattr(each.engine, "positions", 0)) for each in self._members)
        return min((room for room in said if room), default=0)

    def metrics(self) -> dict[str, float]:
        """Return each engine's tokens per second since the last call, and its own metrics."""
        now = asyncio.get_running_loop().time()
        seconds, self._measured_at = max(now - self._measured_at, 1e-9), now
        found: dict[str, float] = {}
        for member in self._members:
            name = member.name.replace(" ", "_")
            found[f"tokens_per_second/{name}"] = member.sampled / seconds
            member.sampled = 0
            found |= {f"{key}/{name}": value for key, value in engine_metrics(member.engine).items()}
        return found

    async def started(self) -> None:
        """Start the members' engines without waiting for them."""
        for each in self._members:
            if (start := getattr(each.engine, "started", None)) is not None:
                await start()

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Return one completion for each request, in order.

        Waits while no member serves requests.  Raises EngineError if a request failed ``ATTEMPTS`` times, or
        if no member is left.
        """
        if self._current is None:
            raise EngineError("engine pool: generate before the first update_weights")
        indices: dict[Hashable, list[int]] = defaultdict(list)
        for i, request in enumerate(requests):
            indices[request.group or request.prompt_ids.tobytes()].append(i)
        found: dict[int, Completion] = {}
        groups = [self._group(key, requests, some, found) for key, some in indices.items()]
        if len(groups) == 1:  # the usual case, without an extra task
            await groups[0]
        else:
            await aio.gather(groups)
        return [found[i] for i in range(len(requests))]

    async def update_weights(self, weights: Weights) -> None:
        """Update the weights of all members; see the module's docstring for when it returns.

        Raises WeightSyncError if no member accepts them within the deadline, or a canary shows that a member
        does not use them.  Members then return to the previous version.
        """
        before = self._target
        held = await self._hold(weights)
        self._aim(held)
        began = asyncio.get_running_loop().time()
        try:
            # enough to replace engines that do not answer, and to update their replacements
            async with asyncio.timeout(2 * self._deadline + CLOSE):
                await self._until(lambda: self._holders(held) or self._all_refuse(held, before))
            if not self._holders(held):
                raise EngineError(f"all refuse them{self._reasons()}")
            seconds = asyncio.get_running_loop().time() - began + self._lag
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._until(lambda: not self._holders(before))
        except (TimeoutError, EngineError) as error:
            self._aim(before)
            late = f"none took them within {self._deadline:g} s (engine.deadline), twice{self._reasons()}"
            why = str(error) or late
            raise WeightSyncError(f"engine pool: no member holds version {weights.version}: {why}") from error
        except BaseException:
            self._aim(before)
            raise
        for member in self._holders(before):
            what = f"it does not hold version {weights.version}, {seconds:.3g} s after another member did"
            report("late", member.name, f"{what}, and gets no requests until it does")
        self._current = held
        self._notify()

    async def aclose(self) -> None:
        """Close all members; waiting calls raise EngineError."""
        self._fault = self._fault or EngineError("engine pool is closed")
        self._notify()
        await aio.cancel([member.supervisor for member in self._members if member.supervisor is not None])
        for member in self._members:
            member.give_back()
        await asyncio.gather(*(member.close() for member in self._members))
        self._members.clear()

    # ------------------------------------------------------------------------------ its members

    def join(self) -> int:
        """Add a member, which serves requests once it has the weights; return its number."""
        member = Member(self._next, self._make(self._next), self._notify)
        self._next += 1
        self._members.append(member)
        member.supervisor = asyncio.get_running_loop().create_task(
            self._keep(member), name=f"supervisor of engine {member.number}"
        )
        return member.number

    def _holders(self, held: copies.WeightsLease | None) -> list[Member]:
        return [member for member in self._members if member.holds is held]

    def _all_refuse(self, held: copies.WeightsLease, before: copies.WeightsLease | None) -> bool:
        holders = self._holders(before)
        return bool(holders) and all(member.refuses is held for member in holders)

    def _serving(self) -> list[Member]:
        good = [held for held in (self._current, self._target) if held is not None]
        return [m for m in self._members if any(m.holds is held for held in good)]

    # ------------------------------------------------------------------------------ generating

    async def _group(
        self,
        key: Hashable,
        requests: Sequence[GenerationRequest],
        indices: Sequence[int],
        found: dict[int, Completion],
    ) -> None:
        """Send a group's requests to one member, and unfinished requests to another."""
        for attempt in range(1, ATTEMPTS + 1):
            missing = {i: requests[i] for i in indices if i not in found}
            if not missing:
                return
            tokens = sum(map(tokens_of, missing.values()))
            self._running[key] += tokens
            try:
                member = await self._choose(key)
                error = await member.ask(missing, found)
            finally:
                self._running[key] -= tokens
                if not self._running[key]:
                    del self._running[key]
            if error is not None and attempt < ATTEMPTS and self._fault is None:
                lost = len(missing.keys() - found.keys())
                report("retried", member.name, f"{lost} of its requests are generated again: {error}")
        if error is not None:
            raise EngineError(f"engine pool: a request failed {ATTEMPTS} times, the last time: {error}")

    async def _choose(self, key: Hashable) -> Member:
        """Return the least loaded member, or the group's last member if its load is not much higher."""
        ready = await self._until(self._serving)
        least = min(ready, key=lambda member: member.tokens)
        home = self._homes.pop(key, least)
        near = home.tokens <= least.tokens + AFFINITY * self._running[key]
        chosen = home if home in ready and near else least
        self._homes[key] = chosen
        if len(self._homes) > HOMES:
            self._homes.popitem(last=False)
        return chosen

    # ------------------------------------------------------------------------------ keeping

    async def _keep(self, member: Member) -> None:
        """Keep a member on the target weights until it is given up or the pool is closed."""
        try:
            while True:
                await self._until(lambda: self._target is not None and member.holds is not self._target)
                if self._target is not None:
                    await self._sync(member, self._target)
        except Exception as error:  # raised again by waiting calls
            self._fault = self._fault or (None if member.number in self._given_up else error)
        self._members.remove(member)
        member.give_back()
        self._notify()
        await member.close()

    async def _sync(self, member: Member, held: copies.WeightsLease) -> None:
        try:
            await member.give(held, tolerance=self._tolerance, deadline=self._deadline)
        except CanaryMismatch as error:
            raise WeightSyncError(str(error)) from error
        except WeightSyncError as error:  # it keeps the old version, which is acceptable if all members do
            member.refuses, self._failed[member.number] = held, str(error)
            self._notify()
            await self._until(lambda: self._target is not held or self._holders(held) or not member.holds)
            with contextlib.suppress(TimeoutError):  # if there are newer weights, the member is only late
                async with asyncio.timeout(self._lag):
                    await self._until(lambda: self._target is not held)
            if self._target is held:
                await self._replace(member, error)
            elif self._target is not None and self._target.weights.version > held.weights.version:
                what = f"it did not take version {held.weights.version}, and gets newer weights"
                report("late", member.name, f"{what}: {error}")
        except RECOVERABLE_ERRORS as error:
            await self._replace(member, error)
        self._notify()

    async def _replace(self, member: Member, error: Exception) -> None:
        """Replace a failed engine.  Raises the error if the member is given up."""
        member.give_back()
        self._notify()
        await member.close()
        why = self._failed[member.number] = str(error) or type(error).__name__
        if not isinstance(error, DeadlineExceeded):  # it may still wait for a machine
            member.failures += 1
        if member.failures >= MAX_FAILURES:
            self._given_up.add(member.number)
            report(
                "given_up",
                member.name,
                f"it failed {member.failures} times and is not replaced any more: {why}",
            )
            raise error
        self._replaced += 1
        report("replaced", member.name, f"it is replaced: {why}")
        member.engine = self._make(member.number)

    # ------------------------------------------------------------------------------ waiting

    def _aim(self, at: copies.WeightsLease | None) -> None:
        self._target = at
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _reasons(self) -> str:
        """Return the reason of each member's last replacement."""
        return "".join(f"; engine {number}: {why}" for number, why in self._failed.items())

    async def _until(self, condition: Callable[[], T | None]) -> T:
        """Wait until ``condition()`` is true and return its value.  Raises the error that ended the pool."""
        while True:
            if self._fault is not None:
                raise self._fault
            if answer := condition():
                return answer
            if not self._members:
                raise EngineError(f"engine pool: no member is left{self._reasons()}")
            await self._changed.wait()


def pool_of(
    one: Callable[[EngineConfig, EngineSetup, Sequence[Mapping[str, str]], Tolerance], Engine],
    config: EngineConfig,
    setup: EngineSetup,
    env_vars: Sequence[Mapping[str, str]],
    tolerance: Tolerance,
    hold: Hold = as_published,
) -> EnginePool:
    """Make the pool of a section's engines: each has its share of the cores, and a directory for its logs.

    Args:
        one: makes a single engine.
        config: section of the engines.
        setup: setup of a single engine.
        env_vars: environment variables of each engine's process.
        tolerance: of each member's canary.
        hold: see ``EnginePool``.
    """

    def member(number: int) -> Engine:
        threads = config.threads or max(1, setup.threads // config.workers)
        logs = f"{setup.log_directory}/engine-{number}" if setup.log_directory else None
        own = evolve(setup, number=number, threads=threads, log_directory=logs)
        return one(config, own, [env_vars[number % len(env_vars)]], tolerance)

    return EnginePool(member, config.workers, tolerance=tolerance, deadline=config.deadline, hold=hold)
