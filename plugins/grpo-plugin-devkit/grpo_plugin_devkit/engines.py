"""The contract of ``grpo_core.Engine`` as a sequence of calls.

    asyncio.run(check_engine(MyEngine(setup), publish, prompt_ids=(5, 8, 2)))

It applies to engines in pools, in Ray workers and behind HTTP without changes.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Sequence

from attrs import define, evolve, field

from grpo_core import (
    Canary,
    Completion,
    Engine,
    EngineError,
    GenerationRequest,
    Weights,
    WeightSyncError,
    errors,
)
from grpo_core.testing import check_canary, check_completions
from grpo_plugin_devkit.contracts import error_of

MAX_TOKENS = 48
"""Largest length of a completion."""
TOLERANCE = 1e-3
"""Tolerance of the canary."""


async def check_engine(
    engine: Engine,
    publish: Callable[[int], Weights],
    *,
    prompt_ids: tuple[int, ...],
) -> None:
    """Check an engine and close it.  Raises AssertionError for a violation.

    Args:
        engine: an engine without weights.
        publish: publishes the weights of a version, each with a different canary; earlier weights may be
            overwritten.
        prompt_ids: token ids of a prompt whose completions usually have ``MAX_TOKENS`` tokens.
    """
    story = _Story(engine, publish, prompt_ids)
    clauses: list[tuple[str, Callable[[], Awaitable[None]]]] = [
        ("generate before the first update_weights", story.refuses_to_generate_without_weights),
        ("update_weights, and the canary", functools.partial(story.takes, 0)),
        ("several requests in one call", story.answers_in_order_and_within_limits),
        ("requests with the same seeds", story.samples_by_the_seed_alone),
        ("a request with a stop token", story.stops_where_it_is_told),
        ("update_weights while requests run", story.goes_on_with_new_weights),
        ("a call that is cancelled", story.forgets_what_is_cancelled),
        ("update_weights with a damaged tensor", story.keeps_what_it_has_when_new_weights_are_spoilt),
    ]
    try:
        for call, clause in clauses:
            await _checked(call, clause)
    finally:
        await _checked("aclose", engine.aclose)
    await _checked("aclose for the second time", engine.aclose)
    await _checked("generate after aclose", story.is_closed)


async def _checked(what: str, clause: Callable[[], Awaitable[None]]) -> None:
    """Await a clause.  Any error becomes an AssertionError that names the call."""
    try:
        await clause()
    except AssertionError as error:
        raise AssertionError(f"{what}: {error}") from error
    except Exception as error:
        raise AssertionError(f"{what}: raised {errors.describe(error)}") from error


@define(eq=False)
class _Story:
    engine: Engine
    publish: Callable[[int], Weights]
    prompt_ids: tuple[int, ...]
    version: int = -1
    said: dict[tuple[int, ...], Canary] = field(factory=dict)
    """The canary of the previous version, by context."""

    def requests(self, n: int = 8, *, seed: int = 0, temperature: float = 1.0) -> list[GenerationRequest]:
        """Return the requests of a group, all with different lengths."""
        return [
            GenerationRequest(
                prompt_ids=self.prompt_ids,
                max_tokens=MAX_TOKENS - i,
                temperature=temperature,
                seed=seed + i,
                group=f"group {seed}",
            )
            for i in range(n)
        ]

    async def ask(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        completions = await self.engine.generate(requests)
        check_completions(completions, requests)
        return completions

    async def takes(self, version: int) -> None:
        weights = self.publish(version)
        assert weights.canary, "publish() gives no canary: nothing would show which weights are used"
        assert not self.said or max(map(self._moved, weights.canary)) > TOLERANCE, (
            f"publish() gives version {version} the canary of the version before: an engine that ignores its "
            "weights would pass"
        )
        await self.engine.update_weights(weights)
        await check_canary(self.engine, weights, tolerance=TOLERANCE)
        self.version, self.said = version, {each.prompt_ids: each for each in weights.canary}

    def _moved(self, canary: Canary) -> float:
        """Return the largest change of a context's logprobs since the previous version."""
        before = self.said.get(canary.prompt_ids, canary)
        known = dict(zip(canary.token_ids, canary.logprobs, strict=True))
        return abs(known.get(before.token_ids[0], min(canary.logprobs)) - before.logprobs[0])

    # ------------------------------------------------------------------------------ the clauses

    async def refuses_to_generate_without_weights(self) -> None:
        error = await error_of(self.engine.generate(self.requests(1)), EngineError)
        assert error, "generate before the first update_weights did not raise EngineError"

    async def answers_in_order_and_within_limits(self) -> None:
        assert await self.engine.generate([]) == []
        requests = self.requests()
        for request, completion in zip(requests, await self.ask(requests), strict=True):
            assert set(completion.versions) == {self.version}, f"versions {completion.versions}"
            if completion.finish_reason == "length":
                assert len(completion.token_ids) == request.max_tokens, "the answers are not in order"

    async def samples_by_the_seed_alone(self) -> None:
        alone = await self.ask(self.requests(2, seed=100))
        beside, again = await asyncio.gather(
            self.ask(self.requests(5, seed=500)), self.ask(self.requests(2, seed=100))
        )
        assert ids_of(alone) == ids_of(again), "the batch changes what is sampled"
        assert ids_of(alone)[0][:-1] != ids_of(beside)[0][:-1], "the seed changes nothing"

    async def stops_where_it_is_told(self) -> None:
        (greedy,) = await self.ask(self.requests(1, temperature=0.0))
        stop = int(greedy.token_ids[0])
        request = evolve(self.requests(1, temperature=0.0)[0], stop_token_ids=(stop,))
        (stopped,) = await self.ask([request])
        assert stopped.finish_reason == "stop", f"{stopped} after stop {stop}"
        assert stopped.token_ids.tolist() == [stop], f"{stopped} after stop {stop}"

    async def goes_on_with_new_weights(self) -> None:
        running = asyncio.create_task(self.ask(self.requests(seed=200)))
        await self.ask(self.requests(1, seed=300))
        old = self.version
        await self.takes(old + 1)
        later = await self.ask(self.requests(seed=400))
        assert {v for c in later for v in c.versions} == {old + 1}, "a later token of other weights"
        for completion in await running:
            assert list(completion.versions) == sorted(completion.versions)
            assert set(completion.versions) <= {old, old + 1}

    async def forgets_what_is_cancelled(self) -> None:
        call = asyncio.create_task(self.ask(self.requests(seed=600)))
        await self.ask(self.requests(1, seed=700))
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await self.ask(self.requests(seed=800))

    async def keeps_what_it_has_when_new_weights_are_spoilt(self) -> None:
        published = self.publish(self.version + 1)
        first, *rest = published.tensors
        spoilt = evolve(published, tensors=(evolve(first, checksum=first.checksum ^ 1), *rest))
        error = await error_of(self.engine.update_weights(spoilt), WeightSyncError)
        assert error, "a damaged tensor was accepted"
        assert first.name in str(error), f"the error does not name the tensor {first.name!r}: {error}"
        completions = await self.ask(self.requests())
        assert {v for c in completions for v in c.versions} == {self.version}
        await self.takes(self.version + 1)

    async def is_closed(self) -> None:
        error = await error_of(self.engine.generate(self.requests(1)), EngineError)
        assert error, "generate after aclose did not raise EngineError"


def ids_of(completions: Sequence[Completion]) -> list[list[int]]:
    """Return the token ids of completions as lists, which ``==`` can compare."""
    return [completion.token_ids.tolist() for completion in completions]
