"""Engines and environments run where the placement puts them; these tests need no cluster."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from attrs import evolve

from grpo_core.app import making
from grpo_core.app.make import make
from grpo_core.cli import _with_values
from grpo_core.config import Config, EngineConfig, EnvironmentConfig, build
from grpo_core.contracts.errors import ConfigError, EngineError, GrpoError, WeightSyncError
from grpo_core.contracts.records import (
    EngineSetup,
    Episode,
    Feedback,
    GenerationRequest,
    SessionStart,
    Weights,
)
from grpo_core.demo.tiny import make_tiny_model
from grpo_core.engines.wrapped import BackgroundMetrics
from grpo_core.environments.pool import EnvironmentPool
from grpo_core.loop.agreement import Tolerance
from grpo_core.plugins.host import PluginHost
from grpo_core.storage.copies import Copies, mapped
from grpo_core.testing import FakeEngine, FakeEnvironment, prompts, run
from grpo_plugin_scale.engines.pool import EnginePool

# ---------------------------------------------------------------------------------- copies of weights


def published(path, data: bytes, version: int = 0) -> Weights:
    path.write_bytes(data)
    return Weights(version=version, location=str(path), nbytes=len(data), tensors=())


def test_a_copy_is_unchanged_when_the_trainer_publishes_again(tmp_path):
    copies = Copies()
    first = asyncio.run(copies.hold(published(tmp_path / "memory", b"first")))
    second = asyncio.run(copies.hold(published(tmp_path / "memory", b"other", 1)))
    assert mapped(first.weights)[:] == b"first"
    assert mapped(second.weights)[:] == b"other"
    assert (first.weights.version, second.weights.version) == (0, 1)


def test_memory_of_released_copies_is_reused(tmp_path):
    copies = Copies()
    location = copies.copy(
        weights := published(tmp_path / "memory", b"a" * 9), mapped(weights)
    ).weights.location
    held = copies.copy(weights, mapped(weights))
    assert held.weights.location == location
    larger = published(tmp_path / "memory", b"b" * 5000)
    del held
    assert mapped(copies.copy(larger, mapped(larger)).weights)[:] == b"b" * 5000


def test_weights_of_a_collective_transport_need_no_copy():
    """Whatever a pool's own configuration says: the trainer decides how its weights come."""
    weights = Weights(version=3, location="collective:[]", nbytes=9, tensors=())
    assert asyncio.run(Copies().hold(weights)).weights is weights


def test_memory_that_is_gone_is_an_error_of_the_sync(tmp_path):
    weights = published(tmp_path / "memory", b"data")
    (tmp_path / "memory").unlink()
    with pytest.raises(WeightSyncError, match=r"version 0: the trainer's shared memory .* cannot be read"):
        asyncio.run(Copies().hold(weights))


# ---------------------------------------------------------------------------------- environments


class Worker(FakeEnvironment):
    """An environment that remembers its sessions."""

    def __init__(self, number: int, **options) -> None:
        super().__init__(lambda episode: Feedback(reward=float(number)), **options)
        self.number, self.sessions, self.closed = number, [], False
        self.about = evolve(self.about, has_sessions=True)
        self.seen: list[str] = []

    async def start(self):
        self.about = evolve(self.about, max_turns=3)

    async def open(self, some):
        self.sessions += some
        return [SessionStart()] * len(some)

    async def evaluate(self, episodes):
        self.seen += [episode.group for episode in episodes]
        return await super().evaluate(episodes)

    async def close(self, sessions):
        for session in sessions:
            self.sessions.remove(session)

    async def aclose(self):
        self.closed = True


def episodes(group: str, n: int = 4, session: str | None = None) -> list[Episode]:
    prompt = prompts(1)[0]
    return [Episode(prompt=prompt, messages=prompt.messages, group=group, session=session)] * n


def environments(n: int, **options) -> tuple[list[Worker], EnvironmentPool]:
    workers = [Worker(number, **options) for number in range(n)]
    return workers, EnvironmentPool(workers, EnvironmentConfig(max_wait=0.0))


def test_episodes_are_shared_by_groups_and_answered_in_order():
    async def story():
        workers, pool = environments(2)
        await pool.start()
        assert pool.about.max_turns == 3
        asked = [episode for pair in zip(episodes("a"), episodes("b"), strict=True) for episode in pair]
        feedback = await pool.evaluate(asked)
        assert [each.reward for each in feedback] == [0.0, 1.0] * 4
        assert [set(worker.seen) for worker in workers] == [{"a"}, {"b"}]
        await pool.aclose()
        assert all(worker.closed for worker in workers)

    run(story())


def test_a_call_that_waits_for_others_when_the_workers_end_raises_and_evaluates_nothing():
    async def story():
        workers = [Worker(0), Worker(1)]
        pool = EnvironmentPool(workers, EnvironmentConfig(max_wait=60.0))
        await pool.start()
        waiting = asyncio.create_task(pool.evaluate(episodes("a")))
        await asyncio.sleep(1.0)
        await pool.aclose()
        with pytest.raises(GrpoError, match="closed before its call began"):
            await waiting
        assert not workers[0].seen

    run(story())


def test_a_slow_worker_gets_less():
    async def story():
        workers, pool = environments(2)
        await pool.start()
        workers[0].seconds = 10.0
        calls = [asyncio.create_task(pool.evaluate(episodes("slow")))]
        for name in "bcdef":
            await asyncio.sleep(0.2)
            calls.append(asyncio.create_task(pool.evaluate(episodes(name))))
        await asyncio.gather(*calls)
        assert set(workers[0].seen) == {"slow"}
        await pool.aclose()

    run(story())


def test_a_rollout_with_a_session_is_judged_where_that_was_opened():
    async def story():
        workers, pool = environments(3)
        await pool.start()
        first, second, third = prompts(3)
        assert await pool.open({"s0": first, "s1": first, "s2": second, "s3": third}) == [SessionStart()] * 4
        assert [worker.sessions for worker in workers] == [["s0", "s1"], ["s2"], ["s3"]]
        for session, worker in (("s3", 2), ("s0", 0), ("s2", 1), ("s3", 2)):
            feedback = await pool.evaluate(episodes("g", 1, session))
            assert [each.reward for each in feedback] == [worker]
        await pool.close(["s0", "s1", "unknown"])
        assert [worker.sessions for worker in workers] == [[], ["s2"], ["s3"]]
        await pool.open({"s4": first})
        assert workers[0].sessions == ["s4"], "who has fewer sessions gets the next"
        await pool.aclose()

    run(story())


# ---------------------------------------------------------------------------------- configuration


def test_one_worker_is_the_engine_itself_and_several_are_a_pool(tmp_path):
    async def story():
        (tmp_path / "fake.py").write_text(
            "from grpo_core.testing import FakeEngine\n"
            "def fake(setup):\n"
            "    engine = FakeEngine(); engine.setup = setup; return engine\n"
        )
        setup = EngineSetup(model="", threads=4, log_directory=str(tmp_path / "logs"))
        host = PluginHost.discover(["scale"])

        def of(**changes):
            config = EngineConfig(name=f"{tmp_path}/fake.py:fake", **changes)
            return host.make("placement", "local", host).engine(config, setup, [{}], Tolerance())

        assert isinstance(of(), FakeEngine)
        pool = of(workers=2)
        assert isinstance(pool, EnginePool)
        setups = [member.engine.setup for member in pool._members]
        assert [given.threads for given in setups] == [2, 2], "they share the cores"
        assert len({given.log_directory for given in setups}) == 2
        assert [given.number for given in setups] == [0, 1]
        assert [member.engine.setup.threads for member in of(workers=2, threads=3)._members] == [3, 3]
        await pool.aclose()

    run(story())


def test_several_engines_without_their_plugin_are_answered_with_the_line_that_installs_it():
    wanted = r"engine\.workers = 2: several engines are a pool; .* pip install grpo-plugin-scale\."
    with pytest.raises(ConfigError, match=wanted):
        making.workers_of(EngineConfig(workers=2), PluginHost.discover([]))


COUNTING = """
import asyncio
from grpo_core.testing import FakeEngine

class Counting(FakeEngine):
    def __init__(self, setup):
        super().__init__()
        self.given, self.running, self.most = setup.max_requests, 0, 0

    async def generate(self, requests):
        self.running += len(requests)
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(1)
            return await super().generate(requests)
        finally:
            self.running -= len(requests)
"""


@pytest.mark.parametrize("workers", [1, 2])
def test_an_engine_is_given_as_many_requests_at_once_as_the_user_allows(tmp_path, workers):
    (tmp_path / "counting.py").write_text(COUNTING)
    requests = [GenerationRequest(prompt_ids=(i,), max_tokens=1, group=str(i // 4)) for i in range(40)]
    weights = published(tmp_path / "memory", b"data")

    async def story():
        host, made = PluginHost.discover(["scale"]), []

        placement, make_one = host.make("placement", "local", host), host.make
        host.make = lambda *args, **options: made.append(make_one(*args, **options)) or made[-1]
        config = EngineConfig(name=f"{tmp_path}/counting.py:Counting", max_requests=3, workers=workers)
        setup = making.engine_setup(Config(), config, "m", logs=None, colocated=True, trains=True)
        engine = placement.engine(config, setup, [{}], Tolerance())
        await engine.update_weights(weights)
        answers = await engine.generate(requests)
        cancelled = asyncio.create_task(engine.generate(requests))
        await asyncio.sleep(0.5)
        cancelled.cancel()
        await asyncio.wait([cancelled])
        assert len(await engine.generate(requests[:4])) == 4, "cancelled requests give their places back"
        await engine.aclose()
        assert len(answers) == 40
        assert [(one.given, one.most, one.running) for one in made] == [(3, 3, 0)] * workers

    run(story())


def test_metrics_that_are_asked_for_in_the_background_survive_errors_and_end_with_their_engine():
    answers = [{"cache_use": 0.1}, EngineError("gone"), None, {"cache_use": 0.2}]

    async def ask():
        if not answers:
            await asyncio.Event().wait()
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def story():
        metrics, seen = BackgroundMetrics(ask), []
        for _ in range(7):
            seen.append(metrics().get("cache_use"))
            await asyncio.sleep(0)
        assert seen == [None, 0.1, 0.1, 0.1, 0.2, 0.2, 0.2]
        await metrics.aclose()
        assert metrics() == {"cache_use": 0.2}, "a pool may read them while it replaces the engine"
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(story())


@pytest.mark.parametrize("engine", [{"gpus_per_worker": 1}, {"env_vars": {"A": "1"}}], ids=str)
def test_cluster_options_are_errors_on_this_machine(engine):
    config = build([{"tasks": {"sort": {"env": "math:sort"}}, "engine": engine}])
    with pytest.raises(ConfigError, match=r"engine\.\w+ = .* does nothing without .* a cluster \(--ray\)"):
        make(config, PluginHost.discover())


def test_an_engine_is_given_an_absolute_path_which_any_worker_can_look_up():
    named = {"logs": Path("runs/a/logs"), "colocated": True, "trains": True}
    setup = making.engine_setup(Config(), EngineConfig(), "runs/a/model", **named)
    assert setup.model == f"{Path.cwd()}/runs/a/model"
    assert setup.log_directory == f"{Path.cwd()}/runs/a/logs"


def test_ray_stands_alone_or_with_an_address():
    assert _with_values(["train", "--ray"]) == ["train", "--ray", ""]
    assert _with_values(["train", "--ray", "--env", "x"]) == ["train", "--ray", "", "--env", "x"]
    assert _with_values(["train", "--ray", "a.toml"]) == ["train", "--ray", "", "a.toml"]
    assert _with_values(["train", "--ray", "host:6379"]) == ["train", "--ray", "host:6379"]


def test_the_shortest_engine_bounds_the_rollouts_of_a_run(tmp_path):
    make_tiny_model(tmp_path / "m", (), width=16, layers=1, warm_start_steps=0)
    section, model = Config().model, str(tmp_path / "m")
    longest = making.load_renderer(section, model, [EngineConfig()]).context
    engines = [EngineConfig(options={"max_model_len": length}) for length in (longest - 40, longest - 90)]
    assert making.load_renderer(section, model, engines).context == longest - 90
    assert making.load_renderer(section, model, engines[:1]).context == longest - 40
