"""Where engines and environments run: what does not need a cluster to be true."""

from __future__ import annotations

import asyncio
import sys

import pytest

from grpo_core.cli import _with_values
from grpo_core.config import Config, EngineConfig, EnvironmentConfig, RayConfig, build
from grpo_core.engines.pool import EnginePool
from grpo_core.environments.pool import EnvironmentPool
from grpo_core.errors import ConfigError, PluginError, WeightSyncError
from grpo_core.plugins.host import PluginHost
from grpo_core.ray_workers import cluster
from grpo_core.ray_workers.cluster import PluginRequirement, absolute, brief
from grpo_core.records import EngineSetup, Episode, Feedback, SessionStart, Weights
from grpo_core.testing import FakeEngine, FakeEnvironment, prompts, run
from grpo_core.weights.copies import Copies, mapped
from grpo_core.workers import cluster as cluster_of
from grpo_core.workers import make_engine

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

    first_traceback = ""

    def __init__(self, number: int, **options) -> None:
        super().__init__(lambda episode: Feedback(reward=float(number)), **options)
        self.number, self.sessions, self.closed = number, [], False
        self.seen: list[str] = []

    async def start(self):
        self.max_turns = 3

    async def prompts(self, split):
        return prompts(4)

    async def solve(self, some):
        return [prompt.answer for prompt in some]

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
        assert pool.max_turns == 3
        asked = [episode for pair in zip(episodes("a"), episodes("b"), strict=True) for episode in pair]
        feedback = await pool.evaluate(asked)
        assert [each.reward for each in feedback] == [0.0, 1.0] * 4
        assert [set(worker.seen) for worker in workers] == [{"a"}, {"b"}]
        await pool.aclose()
        assert all(worker.closed for worker in workers)

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
        host = PluginHost.discover([])

        def of(**changes):
            config = Config(engine=EngineConfig(name=f"{tmp_path}/fake.py:fake", **changes))
            return make_engine(config, host, setup, tolerance=1e-3, tell=print)

        assert isinstance(of(), FakeEngine)
        pool = of(workers=2)
        assert isinstance(pool, EnginePool)
        setups = [member.engine.setup for member in pool._members]
        assert [given.threads for given in setups] == [2, 2], "they share the cores"
        assert len({given.log_directory for given in setups}) == 2
        assert [member.engine.setup.threads for member in of(workers=2, threads=3)._members] == [3, 3]
        await pool.aclose()

    run(story())


@pytest.mark.parametrize(
    "config",
    [
        Config(engine=EngineConfig(gpus_per_worker=1)),
        Config(engine=EngineConfig(env_vars={"A": "1"})),
        Config(ray=RayConfig(address="auto")),
    ],
)
def test_ray_options_are_errors_without_ray(config):
    with pytest.raises(ConfigError, match="is for Ray workers; add --ray"), cluster_of(config):
        pass


def test_ray_stands_alone_or_with_an_address():
    assert _with_values(["train", "--ray"]) == ["train", "--ray", ""]
    assert _with_values(["train", "--ray", "--env", "x"]) == ["train", "--ray", "", "--env", "x"]
    assert _with_values(["train", "--ray", "a.toml"]) == ["train", "--ray", "", "a.toml"]
    assert _with_values(["train", "--ray", "host:6379"]) == ["train", "--ray", "host:6379"]
    assert build([{"ray": {"enabled": True, "address": ""}}]).ray == RayConfig(enabled=True)


def test_without_ray_the_message_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'grpo-core\[ray\]'"):
        cluster.load()


# ---------------------------------------------------------------------------------- what workers share


def test_versions_that_differ_are_named():
    ours = PluginRequirement.of(PluginHost.discover([]).find("engine", "local"))
    ours.check("here")
    assert ours.allow == (), "no plugin but the core is loaded"
    assert set(ours.versions) == {"python", "grpo-core"}
    other = PluginRequirement(
        name="x", allow=None, versions={**ours.versions, "grpo-core": "9.9", "grpo-none": "1"}
    )
    with pytest.raises(PluginError) as refused:
        other.check("engine 3 (elsewhere)")
    assert "engine 3 (elsewhere): " in str(refused.value)
    assert "(the driver has 9.9), grpo-none is not installed (the driver has 1)" in str(refused.value)


def test_an_engine_of_a_file_is_found_from_any_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert absolute("./mine.py:Engine") == f"{tmp_path}/mine.py:Engine"
    assert absolute("vllm") == "vllm"


def test_rays_words_without_its_identifiers():
    error = RuntimeError(
        "The actor died because of X.\n\tclass_name: EngineWorker\n\tactor_id: 01\nIt was killed."
    )
    assert brief(error) == "RuntimeError: The actor died because of X. It was killed."
