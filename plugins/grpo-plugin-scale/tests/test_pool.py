"""A pool of engines behaves like an engine, whatever its members do, under the virtual clock."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pooled import statistics
from test_pipeline import Run

from grpo_core.contracts.errors import EngineError, PluginError, WeightSyncError
from grpo_core.contracts.events import IncidentReported, StepEnded
from grpo_core.contracts.incidents import report, reported_to
from grpo_core.contracts.records import Canary, Completion, GenerationRequest, Weights
from grpo_core.storage.copies import WeightsLease
from grpo_core.testing import FakeEngine, run
from grpo_plugin_scale.engines.members import MAX_FAILURES
from grpo_plugin_scale.engines.pool import ATTEMPTS, EnginePool

PROBE = (0,)
"""Prompt of the canary."""


class World:
    """Everything that the members of a pool did."""

    def __init__(self):
        self.made: list[Worker] = []
        self.finished = Counter()
        self.asked = Counter()
        self.incidents: list[IncidentReported] = []

    def make(self, number):
        self.made.append(Worker(self, number))
        return self.made[-1]

    def pool(self, workers, **options):
        with reported_to(self.incidents.append):
            return EnginePool(self.make, workers, **options)

    def of(self, number):
        """The engine that is the member of this number now."""
        return [worker for worker in self.made if worker.number == number][-1]


class Worker:
    """An engine that samples a token every ``pace`` seconds and may die at any moment.

    Says its own version of each token when it is sampled; the tokens depend on the seed alone.
    """

    def __init__(self, world, number):
        self.world, self.number = world, number
        self.pace, self.update_seconds, self.canary_seconds = 1.0, 0.1, 0.01
        self.version, self.lies = None, False
        self.finished = 0
        self.seeds: list[int] = []
        self.closed = False
        self.death: asyncio.Future | None = None

    def die(self):
        self._end().set_result(None)

    def _end(self):
        self.death = self.death or asyncio.get_running_loop().create_future()
        return self.death

    async def _live(self, seconds):
        await asyncio.wait([self._end()], timeout=seconds)
        if self._end().done() or self.closed:
            raise EngineError(f"worker {self.number} died")

    async def generate(self, requests):
        return list(await asyncio.gather(*map(self._one, requests)))

    async def _one(self, request):
        assert self.version is not None, "asked before it was given weights"
        if tuple(request.prompt_ids) == PROBE:
            await self._live(self.canary_seconds)
            says = -0.5 if not self.lies else -3.0
            return Completion(
                token_ids=(7,), logprobs=(says,), versions=(self.version,), finish_reason="length"
            )
        self.seeds.append(request.seed)
        self.world.asked[request.seed] += 1
        versions = []
        for _ in range(request.max_tokens):
            await self._live(self.pace)
            versions.append(self.version)
        self.finished += 1
        self.world.finished[request.seed] += 1
        return reply(request, versions)

    async def update_weights(self, weights):
        await self._live(self.update_seconds)
        self.version = weights.version

    async def aclose(self):
        self.closed = True


def reply(request, versions):
    return Completion(
        token_ids=tuple(random.Random(request.seed).randrange(100) for _ in versions),
        logprobs=(-1.0,) * len(versions),
        versions=tuple(versions),
        finish_reason="length",
    )


def weights(version):
    canary = Canary(prompt_ids=PROBE, token_ids=(7,), logprobs=(-0.5,))
    return Weights(version=version, location="", nbytes=0, tensors=(), canary=(canary,))


def group(name, size=4, *, tokens=3):
    return [
        GenerationRequest(prompt_ids=(1, 2), max_tokens=tokens, seed=1000 * name + i, group=str(name))
        for i in range(size)
    ]


def now():
    return asyncio.get_running_loop().time()


# ---------------------------------------------------------------------------------- who gets what


def test_a_group_stays_together_and_groups_go_to_the_least_loaded_member():
    async def story():
        world = World()
        pool = world.pool(3)
        await pool.update_weights(weights(0))
        await asyncio.gather(*(pool.generate(group(n)) for n in range(9)))
        by_group = [{seed // 1000 for seed in worker.seeds} for worker in world.made]
        assert [len(groups) for groups in by_group] == [3, 3, 3]
        assert sorted(g for groups in by_group for g in groups) == list(range(9)), "no group is torn apart"
        assert statistics(pool).tokens == 0
        await pool.aclose()
        assert all(worker.closed for worker in world.made)

    run(story())


def test_one_call_with_many_groups_is_spread_and_answered_in_order():
    async def story():
        world = World()
        pool = world.pool(2)
        await pool.update_weights(weights(0))
        requests = [request for pair in zip(*map(group, range(4)), strict=True) for request in pair]
        answers = await pool.generate(requests)
        assert answers == [reply(request, [0] * 3) for request in requests]
        assert [len(worker.seeds) for worker in world.made] == [8, 8]
        await pool.aclose()

    run(story())


def test_a_rollout_must_fit_into_the_engine_with_the_least_room():
    async def story():
        world = World()
        pool = world.pool(3)
        assert pool.positions == 0, "none has said so"
        world.of(1).positions, world.of(2).positions = 200, 100
        await pool.update_weights(weights(0))
        assert pool.positions == 100
        await pool.aclose()

    run(story())


def test_a_long_group_counts_for_more_than_a_short_one():
    async def story():
        world = World()
        pool = world.pool(2)
        await pool.update_weights(weights(0))
        await asyncio.gather(
            pool.generate(group(0, tokens=90)), *(pool.generate(group(n)) for n in range(1, 6))
        )
        assert [{seed // 1000 for seed in w.seeds} for w in world.made] == [{0}, {1, 2, 3, 4, 5}]
        await pool.aclose()

    run(story())


def test_later_turns_of_a_group_go_where_the_first_went_unless_that_has_far_more_to_do():
    async def story():
        world = World()
        pool = world.pool(2)
        await pool.update_weights(weights(0))
        await asyncio.gather(pool.generate(group(0)), pool.generate(group(1)))
        running = [asyncio.create_task(pool.generate(group(n, tokens=9))) for n in (2, 3)]
        await asyncio.sleep(0.5)
        for name in (1, 0, 1):
            await pool.generate(group(name, 1))
        assert [{s for s in w.seeds if s < 2000} for w in world.made] == [
            {0, 1, 2, 3},
            {1000, 1001, 1002, 1003},
        ]
        burden = asyncio.create_task(pool.generate(group(4, tokens=500)))  # to the first of both
        await asyncio.sleep(0)
        await pool.generate(group(0, 1))
        assert 0 in world.made[1].seeds
        burden.cancel()
        await asyncio.gather(burden, *running, return_exceptions=True)
        await pool.aclose()

    run(story())


def test_the_member_of_the_newest_group_is_remembered_when_too_many_are(monkeypatch):
    monkeypatch.setattr("grpo_plugin_scale.engines.pool.HOMES", 1)

    async def story():
        world = World()
        pool = world.pool(2)
        await pool.update_weights(weights(0))
        await asyncio.gather(pool.generate(group(0)), pool.generate(group(1)))
        running = asyncio.create_task(pool.generate(group(1, tokens=9)))
        await asyncio.sleep(0.5)
        await pool.generate(group(1, 1))
        assert not any(seed >= 1000 for seed in world.made[0].seeds), "though it has nothing to do"
        await running
        await pool.aclose()

    run(story())


# ---------------------------------------------------------------------------------- death


def test_completions_of_a_dead_member_are_kept_and_the_rest_goes_elsewhere():
    async def story():
        world = World()
        pool = world.pool(2)
        await pool.update_weights(weights(0))
        requests = [GenerationRequest(prompt_ids=(1,), max_tokens=n, seed=n, group="g") for n in range(1, 9)]
        told = []
        with reported_to(told.append):
            call = asyncio.create_task(pool.generate(requests))
        await asyncio.sleep(5.5)
        world.made[0].die()
        assert await call == [reply(request, [0] * request.max_tokens) for request in requests]
        assert world.made[0].finished == 5
        assert world.made[1].seeds == [6, 7, 8], "three are lost, five are kept"
        assert [(one.kind, one.component) for one in told] == [("retried", "engine 0")]
        assert told[0].message == "3 of its requests are generated again: worker 0 died"
        assert set(world.finished.values()) == {1}
        await asyncio.sleep(1)
        assert statistics(pool).serving == 2
        assert world.of(0) is world.made[2]
        assert world.of(0).version == 0, "the new one has been given the last weights"
        assert world.incidents[0].component == "engine 0"
        assert world.incidents[0].message == "it is replaced: worker 0 died"
        await pool.aclose()

    run(story())


def test_what_an_engine_reports_has_the_name_of_its_member():
    class Reporting(Worker):
        async def generate(self, requests):
            report("died", "engine local", "while it generated")
            return await super().generate(requests)

        async def update_weights(self, weights):
            report("died", "engine local", "while it took weights")
            await super().update_weights(weights)

    async def story():
        world = World()
        incidents = []
        with reported_to(incidents.append):
            pool = EnginePool(lambda number: Reporting(world, number), 2)
            await pool.update_weights(weights(0))
            await pool.generate(group(0))
        told = Counter((one.component, one.message) for one in incidents)
        assert told == {
            ("engine 0", "while it took weights"): 1,
            ("engine 1", "while it took weights"): 1,
            ("engine 0", "while it generated"): 1 + 4,
            ("engine 1", "while it generated"): 1,
        }, "the canary asks each once"
        await pool.aclose()

    run(story())


def test_a_member_that_never_works_is_given_up_and_the_others_continue():
    async def story():
        world = World()

        def make(number):
            worker = world.make(number)
            if number == 1:
                worker.die()
            return worker

        with reported_to(world.incidents.append):
            pool = EnginePool(make, 2)
        await pool.update_weights(weights(0))
        await asyncio.sleep(1)
        counted = statistics(pool)
        assert (counted.members, counted.given_up, counted.serving) == (1, 1, 1)
        assert len([w for w in world.made if w.number == 1]) == MAX_FAILURES
        assert world.incidents[-1].kind == "given_up"
        assert len(await pool.generate(group(0))) == 4
        world.of(0).die()
        await pool.generate(group(1))
        await pool.aclose()

    run(story())


def test_a_timeout_inside_an_engine_is_a_failure_and_not_reported_as_the_deadline_of_the_pool():
    async def story():
        world = World()

        class Impatient(Worker):
            async def update_weights(self, weights):
                raise TimeoutError

        with reported_to(world.incidents.append):
            pool = EnginePool(lambda number: (Impatient if number else Worker)(world, number), 2)
        await pool.update_weights(weights(0))
        await asyncio.sleep(1)
        assert [(one.kind, one.message) for one in world.incidents] == [
            ("replaced", "it is replaced: TimeoutError"),
            ("replaced", "it is replaced: TimeoutError"),
            ("given_up", "it failed 3 times and is not replaced any more: TimeoutError"),
        ]
        assert len(await pool.generate(group(0))) == 4
        await pool.aclose()

    run(story())


def test_when_no_member_is_left_the_error_gives_the_reasons():
    async def story():
        world = World()

        def make(number):
            worker = world.make(number)
            worker.die()
            return worker

        pool = EnginePool(make, 2)
        with pytest.raises(WeightSyncError, match=r"no member is left; engine 0: worker 0 died; engine 1"):
            await pool.update_weights(weights(0))
        with pytest.raises(EngineError, match="before the first update_weights"):
            await pool.generate(group(0))
        await pool.aclose()
        assert all(worker.closed for worker in world.made)

    run(story())


def test_a_request_that_every_engine_refuses_is_to_blame_and_not_they():
    async def story():
        def fault(request):
            return EngineError("too long") if request.seed == 1 else None

        pool = EnginePool(lambda number: FakeEngine(fault=fault), 2)
        await pool.update_weights(weights_without_canary(0))
        with pytest.raises(EngineError, match=f"failed {ATTEMPTS} times, the last time: too long"):
            await pool.generate(group(0))
        assert len(await pool.generate(group(1))) == 4
        assert statistics(pool).replaced == 0
        await pool.aclose()

    run(story())


def test_an_engine_that_breaks_its_contract_ends_the_run():
    async def story():
        class Twice(FakeEngine):
            async def generate(self, requests):
                return 2 * await super().generate(requests)

        pool = EnginePool(lambda number: Twice(), 2)
        await pool.update_weights(weights_without_canary(0))
        with pytest.raises(PluginError, match="returned 2 completions for one request"):
            await pool.generate(group(0))
        await pool.aclose()

    run(story())


def test_a_pool_reports_the_tokens_of_each_engine_since_the_last_report():
    async def story():
        world = World()
        pool = world.pool(2)
        await pool.update_weights(weights(0))
        pool.metrics()
        await asyncio.gather(*(pool.generate(group(name, 1, tokens=10)) for name in (1, 2)))
        world.of(1).metrics = lambda: {"cache_use": 0.5}
        told = pool.metrics()
        rates = [told[f"tokens_per_second/engine_{number}"] for number in (0, 1)]
        assert sum(rates) == pytest.approx(2.0), "twenty tokens in ten seconds"
        assert told["cache_use/engine_1"] == 0.5
        assert not any(value for name, value in pool.metrics().items() if "tokens" in name)
        await pool.aclose()

    run(story())


def test_calls_that_wait_for_a_closed_pool_raise():
    async def story():
        world = World()
        pool = world.pool(1)
        await pool.update_weights(weights(0))
        call = asyncio.create_task(pool.generate(group(0)))
        await asyncio.sleep(0.5)
        await pool.aclose()
        with pytest.raises(EngineError, match="closed"):
            await call
        with pytest.raises(EngineError, match="closed"):
            await pool.generate(group(0))

    run(story())


def test_a_call_that_is_cancelled_frees_its_members():
    async def story():
        world = World()
        pool = world.pool(2)
        await pool.update_weights(weights(0))
        call = asyncio.create_task(pool.generate(group(0) + group(1)))
        await asyncio.sleep(0.5)
        assert statistics(pool).tokens > 0
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        assert statistics(pool).tokens == 0
        await pool.aclose()

    run(story())


def test_a_member_that_fails_a_request_while_it_takes_weights_is_given_them_again():
    """It may have died after its canary was asked."""

    async def story():
        given = []

        class Once(FakeEngine):
            async def update_weights(self, weights):
                given.append(weights.version)
                await super().update_weights(weights)

        engine = Once(latency=lambda rng: 1.0, update_seconds=2.0)
        pool = EnginePool(lambda number: engine, 1)
        await pool.update_weights(weights_without_canary(0))
        call = asyncio.create_task(pool.generate(group(0)))
        await asyncio.sleep(0.5)
        engine.fault = lambda request: EngineError("died")
        updating = asyncio.create_task(pool.update_weights(weights_without_canary(1)))
        await asyncio.sleep(1)
        engine.fault = lambda request: None
        await updating
        assert len(await call) == 4
        assert given == [0, 1, 1]
        await pool.aclose()

    run(story())


def test_what_an_engine_sampled_after_a_weight_sync_counts_once_its_canary_has_confirmed_the_weights():
    """It may die before the canary is asked: nobody will know then which weights it used."""

    async def story():
        world = World()
        pool = world.pool(2)
        await pool.update_weights(weights(0))
        first = world.of(0)
        first.canary_seconds = 100.0
        call = asyncio.create_task(pool.generate(group(0)))
        await asyncio.sleep(0.5)
        updating = asyncio.create_task(pool.update_weights(weights(1)))
        await asyncio.sleep(3)
        assert first.finished == 4
        assert first.version == 1
        assert not call.done()
        first.die()
        done = await call
        assert {world.finished[request.seed] for request in group(0)} == {2}
        assert {v for completion in done for v in completion.versions} == {1}
        await updating
        await pool.aclose()

    run(story())


def test_what_an_engine_sampled_before_a_weight_sync_does_not_wait_for_the_canary():
    async def story():
        world = World()
        pool = world.pool(2)
        await pool.update_weights(weights(0))
        first = world.of(0)
        first.update_seconds, first.canary_seconds = 4.0, 100.0
        call = asyncio.create_task(pool.generate(group(0)))
        await asyncio.sleep(0.5)
        updating = asyncio.create_task(pool.update_weights(weights(1)))
        await asyncio.sleep(3)
        assert call.done()
        await updating
        await pool.aclose()

    run(story())


# ---------------------------------------------------------------------------------- weights


def weights_without_canary(version):
    return Weights(version=version, location="", nbytes=0, tensors=())


def test_a_slow_member_delays_no_other_and_gets_no_request_before_it_holds_the_new_weights():
    async def story():
        world = World()
        pool = world.pool(2, lag=1.0)
        await pool.update_weights(weights(0))
        slow, quick = world.made
        slow.update_seconds = 60.0
        running = asyncio.create_task(pool.generate(group(0, tokens=30)))
        await asyncio.sleep(0.5)
        assert slow.seeds, "it is in the middle of a group"
        began = now()
        await pool.update_weights(weights(1))
        assert 1.0 < now() - began < 1.5, "twice the quickest, and the lag"
        later = await pool.generate([r for n in range(1, 5) for r in group(n)])
        assert {v for completion in later for v in completion.versions} == {1}
        assert {seed // 1000 for seed in slow.seeds} == {0}
        assert {v for completion in await running for v in completion.versions} == {0}, "its true version"
        await asyncio.sleep(60)
        assert statistics(pool).serving == 2
        await asyncio.gather(pool.generate(group(8)), pool.generate(group(9)))
        assert {seed // 1000 for seed in slow.seeds} & {8, 9}
        assert slow.version == 1
        assert quick.version == 1
        await pool.aclose()

    run(story())


def test_an_update_waits_twice_as_long_as_the_quickest_member_took():
    async def story():
        world = World()
        pool = world.pool(2, lag=1.0)
        await pool.update_weights(weights(0))
        quick, slow = world.made
        quick.update_seconds, slow.update_seconds = 3.0, 5.0
        began = now()
        await pool.update_weights(weights(1))
        assert slow.version == 1, "it came within twice the time of the quickest"
        assert now() - began == pytest.approx(5.0, abs=0.1)
        await pool.aclose()

    run(story())


def test_after_a_cancelled_update_all_members_go_back_to_the_version_before():
    async def story():
        world = World()
        pool = world.pool(2, lag=100.0)
        await pool.update_weights(weights(0))
        quick, slow = world.made
        slow.update_seconds = 10.0
        updating = asyncio.create_task(pool.update_weights(weights(1)))
        await asyncio.sleep(1.0)
        assert quick.version == 1
        updating.cancel()
        await asyncio.gather(updating, return_exceptions=True)
        await asyncio.sleep(60.0)
        assert [quick.version, slow.version] == [0, 0]
        answers = await pool.generate(group(0) + group(1))
        assert {version for answer in answers for version in answer.versions} == {0}
        await pool.aclose()

    run(story())


def test_a_member_that_is_behind_goes_straight_to_the_newest_and_delays_no_later_update():
    async def story():
        world = World()
        pool = world.pool(2, lag=1.0)
        await pool.update_weights(weights(0))
        slow = world.made[0]
        slow.update_seconds = 10.0
        seen = []

        async def watched(given, update=slow.update_weights):
            seen.append(given.version)
            await update(given)

        slow.update_weights = watched
        await pool.update_weights(weights(1))
        for version in (2, 3, 4):
            began = now()
            await pool.update_weights(weights(version))
            assert now() - began < 0.2
        await asyncio.sleep(30)
        assert seen == [1, 4]
        assert slow.version == 4
        await pool.aclose()

    run(story())


def test_running_requests_continue_with_the_new_weights_and_say_so():
    async def story():
        world = World()
        pool = world.pool(2)
        await pool.update_weights(weights(0))
        call = asyncio.create_task(pool.generate(group(0, tokens=6)))
        await asyncio.sleep(2.5)
        await pool.update_weights(weights(1))
        assert {tuple(completion.versions) for completion in await call} == {(0, 0, 1, 1, 1, 1)}
        await pool.aclose()

    run(story())


def test_a_member_that_does_not_take_weights_is_replaced_by_one_that_does():
    async def story():
        world = World()
        pool = world.pool(2, deadline=5.0)
        await pool.update_weights(weights(0))
        world.made[1].update_seconds = 1e6
        told = []
        with reported_to(told.append):
            await pool.update_weights(weights(1))
        assert statistics(pool).serving == 1
        await asyncio.sleep(10)
        assert statistics(pool).serving == 2
        assert world.of(1) is world.made[2]
        assert [(one.kind, one.component) for one in told] == [("late", "engine 1")]
        assert told[0].message.startswith("it does not hold version 1, 1.11 s after another member did")
        assert world.incidents[0].component == "engine 1"
        assert world.incidents[0].message == "it is replaced: no answer within 5 s"
        await pool.aclose()

    run(story())


def test_an_update_that_no_member_takes_is_an_error_and_the_version_before_is_served(monkeypatch):
    real = Worker.update_weights

    async def slow_for_version_1(self, weights):
        self.update_seconds = 50.0 if weights.version == 1 else 0.1
        await real(self, weights)

    async def story():
        world = World()
        pool = world.pool(2, deadline=5.0)
        await pool.update_weights(weights(0))
        monkeypatch.setattr(Worker, "update_weights", slow_for_version_1)
        with pytest.raises(
            WeightSyncError,
            match=r"no member holds version 1: none took them within 5 s \(engine.deadline\), twice",
        ):
            await pool.update_weights(weights(1))
        assert len(world.made) >= 4, "both were replaced, and the new ones were asked"
        assert {v for c in await pool.generate(group(0)) for v in c.versions} == {0}
        await pool.aclose()

    run(story())


def test_if_no_member_answers_new_ones_take_the_weights():
    async def story():
        world = World()
        pool = world.pool(2, deadline=5.0)
        await pool.update_weights(weights(0))
        for worker in world.made:
            worker.update_seconds = 1e6
        await pool.update_weights(weights(1))
        assert {v for c in await pool.generate(group(0)) for v in c.versions} == {1}
        assert statistics(pool).replaced == 2
        await pool.aclose()

    run(story())


class Choosy(FakeEngine):
    """Refuses odd versions."""

    async def update_weights(self, weights):
        if weights.version % 2:
            raise WeightSyncError("a tensor is not what the trainer wrote")
        await super().update_weights(weights)


def test_weights_that_all_refuse_are_an_error_and_all_continue_as_they_were():
    async def story():
        pool = EnginePool(lambda number: Choosy(), 2)
        await pool.update_weights(weights_without_canary(0))
        with pytest.raises(
            WeightSyncError, match=r"no member holds version 1: all refuse them.*not what the"
        ):
            await pool.update_weights(weights_without_canary(1))
        assert now() < 10
        assert {v for c in await pool.generate(group(0)) for v in c.versions} == {0}
        await pool.update_weights(weights_without_canary(2))
        assert (statistics(pool).serving, statistics(pool).replaced) == (2, 0)
        await pool.aclose()

    run(story())


def test_a_member_that_refuses_weights_that_another_takes_is_replaced():
    async def story():
        made = []

        def make(number):
            made.append(Choosy() if len(made) == 1 else FakeEngine())
            return made[-1]

        pool = EnginePool(make, 2)
        for version in (0, 1):
            await pool.update_weights(weights_without_canary(version))
        await asyncio.sleep(1)
        assert (statistics(pool).serving, statistics(pool).replaced) == (2, 1)
        assert made[1].closed
        assert made[2].version == 1
        await pool.aclose()

    run(story())


class Fallen(FakeEngine):
    """Dies at a request, and is not started again for the weights that it held."""

    fell = False

    async def generate(self, requests):
        if self.version == 0 and any(request.group for request in requests):
            self.fell = True
            raise EngineError("it died")
        return await super().generate(requests)

    async def update_weights(self, weights):
        if self.fell and weights.version == 0:
            raise WeightSyncError("it died once too often")
        await super().update_weights(weights)


def test_a_member_that_cannot_get_its_weights_is_reported_even_if_newer_ones_come_at_once():
    incidents = []

    async def story():
        pool = EnginePool(lambda number: FakeEngine() if number else Fallen(), 2)
        await pool.update_weights(weights_without_canary(0))
        generating = asyncio.create_task(pool.generate(group(0)))
        await asyncio.sleep(0.5)
        await pool.update_weights(weights_without_canary(1))
        await generating
        await asyncio.sleep(2)
        assert (statistics(pool).serving, statistics(pool).replaced) == (2, 0)
        await pool.aclose()

    with reported_to(incidents.append):
        run(story())
    assert [(one.kind, one.component) for one in incidents] == [("retried", "engine 0"), ("late", "engine 0")]
    assert incidents[1].message == (
        "it did not take version 0, and gets newer weights: it died once too often"
    )


@pytest.mark.parametrize("liar", [0, 1])
def test_the_canary_of_every_member_is_asked(liar):
    async def story():
        world = World()
        pool = world.pool(2)
        await pool.update_weights(weights(0))
        world.made[liar].lies = True
        with pytest.raises(WeightSyncError, match=f"engine {liar} of the pool.*does not use the weights"):
            await pool.update_weights(weights(1))
        with pytest.raises(WeightSyncError, match="does not use"):
            await pool.generate(group(0))
        await pool.aclose()

    run(story())


def test_weights_last_until_the_last_member_has_them():
    """The trainer writes the next version over what it published; a member may start or catch up later."""

    async def story():
        world, kept = World(), []

        class Memory:
            def __del__(self):
                kept.remove(self.version)

        async def hold(given):
            memory = Memory()
            memory.version = given.version
            kept.append(given.version)
            return WeightsLease(weights=given, memory=memory)

        pool = world.pool(2, hold=hold)
        await pool.update_weights(weights(0))
        world.made[0].update_seconds = 20.0
        for version in (1, 2):
            await pool.update_weights(weights(version))
        assert 1 in kept, "the slow one may still be reading"
        assert 2 in kept
        await asyncio.sleep(60)
        assert kept == [2]
        assert pool.join() == 2
        await asyncio.sleep(1)
        assert world.of(2).version == 2
        await pool.aclose()

    run(story())


# ---------------------------------------------------------------------------------- the laws

ACTS = st.one_of(
    st.tuples(st.just("ask"), st.integers(1, 4), st.integers(1, 6)),
    st.tuples(st.just("ask"), st.integers(1, 4), st.integers(1, 6)),
    st.tuples(st.just("update"), st.integers(0, 1), st.integers(0, 0)),
    st.tuples(st.just("die"), st.integers(0, 9), st.integers(0, 0)),
    st.tuples(st.just("slow"), st.integers(0, 9), st.sampled_from([0, 2, 30])),
    st.tuples(st.just("join"), st.integers(0, 0), st.integers(0, 0)),
)


class Story:
    """Random things happen to a pool; what is asked and answered is kept."""

    def __init__(self, workers):
        self.world = World()
        self.pool = self.world.pool(workers, deadline=20.0, lag=0.5)
        self.version = 0
        self.acknowledged = 0
        self.calls: list[asyncio.Task] = []

    async def ask(self, size, tokens):
        requests = group(len(self.calls), size, tokens=tokens)
        self.calls.append(asyncio.create_task(self._asked(requests, self.acknowledged)))

    async def _asked(self, requests, oldest):
        answers = await self.pool.generate(requests)
        for request, answer in zip(requests, answers, strict=True):
            assert answer == reply(request, answer.versions), "in order, and what was sampled"
            assert len(answer.versions) == request.max_tokens
            assert oldest <= min(answer.versions), "asked after an update had returned"
            assert list(answer.versions) == sorted(answer.versions)

    async def update(self, patient, _):
        self.version += 1
        await self.pool.update_weights(weights(self.version))
        self.acknowledged = self.version
        if patient:
            await asyncio.sleep(40)

    async def die(self, which, _):
        """One that has worked: others may be given up, which is another story."""
        living = [w for w in self.world.made if w.finished and not w.closed and not w._end().done()]
        if living:
            living[which % len(living)].die()

    async def slow(self, which, seconds):
        self.world.made[which % len(self.world.made)].update_seconds = 0.1 + seconds

    async def join(self, *_):
        self.pool.join()


@pytest.mark.long
@given(
    workers=st.integers(1, 3),
    acts=st.lists(st.tuples(st.sampled_from([0.0, 0.4, 1.3, 5.0]), ACTS), max_size=25),
    seed=st.integers(0, 2**16),
)
def test_whatever_happens_every_request_is_answered_once_with_its_true_versions(workers, acts, seed):
    async def story():
        told = Story(workers)
        await told.pool.update_weights(weights(0))
        for pause, (act, first, second) in acts:
            await asyncio.sleep(pause)
            await getattr(told, act)(first, second)
        await asyncio.gather(*told.calls)
        assert set(told.world.finished.values()) <= {1}, "what is finished is not generated again"
        assert told.world.finished.keys() == told.world.asked.keys()
        assert statistics(told.pool).tokens == 0
        await told.pool.aclose()
        assert all(worker.closed for worker in told.world.made), "none is left behind"

    run(story(), seed=seed)


# ---------------------------------------------------------------------------------- the pipeline


class Mortal(FakeEngine):
    """Dies for good when its time has come."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds, self.ends = seconds, None

    async def _one(self, request):
        loop = asyncio.get_running_loop()
        self.ends = self.ends or loop.time() + self.seconds
        try:
            async with asyncio.timeout_at(self.ends):
                return await super()._one(request)
        except TimeoutError:
            raise EngineError("died") from None

    async def update_weights(self, given):
        if self.ends is not None and asyncio.get_running_loop().time() >= self.ends:
            raise EngineError("is dead")
        await super().update_weights(given)


@pytest.mark.long
@pytest.mark.parametrize("max_staleness", [0, 2])
def test_the_pipeline_cannot_tell_a_pool_from_an_engine(max_staleness):
    """And nothing is lost or doubled when its members die again and again."""

    class Pooled:
        """Made when the loop runs."""

        def __init__(self):
            self.pool = None

        async def update_weights(self, given):
            self.pool = self.pool or EnginePool(lambda number: Mortal(5.0 + number), 3)
            await self.pool.update_weights(given)

        async def generate(self, requests):
            return await self.pool.generate(requests)

    engine = Pooled()
    done = Run(engine=engine, max_staleness=max_staleness)(seed=3)
    assert done.result == "finished"
    assert sorted(map(int, done.trained)) == list(range(48))
    assert all(event.metrics["staleness_max"] <= max_staleness for event in done.of(StepEnded))
    assert statistics(engine.pool).replaced > 3
    assert statistics(engine.pool).given_up == 0
