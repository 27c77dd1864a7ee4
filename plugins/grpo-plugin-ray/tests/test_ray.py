"""Engines and environments in workers of a real Ray cluster of this machine."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import attrs
import killing
import pytest
import torch
from bare import bare_venv
from killing import GRPO, Run, left_after
from measured import MEASURED
from pooled import statistics

pytest.importorskip("grpo_plugin_ray")

from grpo_core.config import EnvironmentConfig
from grpo_core.contracts.errors import ConfigError, EngineError, ModelError, PluginError, WeightSyncError
from grpo_core.contracts.incidents import reported_to
from grpo_core.contracts.playing import PlayerSetup
from grpo_core.contracts.records import Canary, EngineSetup, Episode, GenerationRequest, Prompt, Weights
from grpo_core.demo.tiny import encode, make_tiny_model
from grpo_core.engines.local.engine import LocalEngine
from grpo_core.environments.pool import EnvironmentPool
from grpo_core.kit import EnvironmentSpec
from grpo_core.loop.rollout import RolloutRequest, SamplingParams, play
from grpo_core.plugins.host import PluginHost
from grpo_core.storage.copies import Copies
from grpo_core.testing import FakeEngine, FakeRenderer
from grpo_core.weights.shm import SharedMemoryWriter
from grpo_plugin_agents.server import AgentServer
from grpo_plugin_devkit.engines import check_engine
from grpo_plugin_ray import cluster
from grpo_plugin_ray.cluster import PluginRequirement
from grpo_plugin_ray.engines import RayEngine, Store, WorkerSetup
from grpo_plugin_ray.environments import EnvironmentSetup, RayEnvironment
from grpo_plugin_ray.placement import RayPlacement
from grpo_plugin_scale.engines.pool import EnginePool
from grpo_plugin_scale.weights.collective import CollectiveWriter

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
    # of Ray's own making, whose files and sockets are closed when they are collected
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
]

PROMPT = encode("12=")
VLLM = pytest.param(
    "vllm",
    1,
    128,  # vLLM's kernels for CPUs want heads of at least 32
    marks=pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None or importlib.util.find_spec("grpo_plugin_vllm") is None,
        reason="vLLM is not installed",
    ),
)


class Publisher:
    """A trainer's side: a model whose weights change with each version."""

    def __init__(self, directory: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.directory = directory
        self.model = AutoModelForCausalLM.from_pretrained(directory)
        self.writer = SharedMemoryWriter()

    def __call__(self, version: int) -> Weights:
        torch.manual_seed(version)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
            logprobs = self.model(torch.tensor([PROMPT])).logits[0, -1].float().log_softmax(-1)
        best = logprobs.topk(3)
        canary = Canary(
            prompt_ids=PROMPT, token_ids=tuple(best.indices.tolist()), logprobs=tuple(best.values.tolist())
        )
        return attrs.evolve(self.writer.write(version, self.model.named_parameters()), canary=(canary,))


@pytest.fixture(scope="module")
def ray() -> Iterator[None]:
    with cluster.connected("", cpus=100):
        yield


def published(directory: Path, width: int) -> Publisher:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    make_tiny_model(directory, [("12=", "12"), ("21=", "12")], warm_start_steps=1, width=width)
    torch.set_num_threads(threads)
    return Publisher(directory)


@pytest.fixture(scope="module")
def publisher(tmp_path_factory: pytest.TempPathFactory) -> Publisher:
    return published(tmp_path_factory.mktemp("model") / "model", 64)


def origin(kind: str, name: str) -> PluginRequirement:
    return PluginRequirement.of(PluginHost.discover().find(kind, name))


def ray_pool(publisher: Publisher, workers: int, engine: str = "local", **changes) -> EnginePool:
    store = Store()
    made_from = WorkerSetup(
        origin=changes.pop("origin", None) or origin("engine", engine),
        setup=EngineSetup(model=str(publisher.directory), log_directory=changes.pop("logs", None)),
        env_vars={"GRPO_TEST": "1"},
    )
    return EnginePool(
        lambda number: RayEngine(f"engine {number}", made_from, store=store, resources={"num_cpus": 1}),
        workers,
        hold=store.hold,
        **{"deadline": 60.0, **changes},
    )


def local_pool(publisher: Publisher, workers: int, **changes) -> EnginePool:
    setup = EngineSetup(model=str(publisher.directory), log_directory=changes.pop("logs", None))
    return EnginePool(
        lambda number: LocalEngine(setup), workers, hold=Copies().hold, **{"deadline": 60.0, **changes}
    )


def groups(n: int, *, max_tokens: int = 40) -> list[GenerationRequest]:
    return [
        GenerationRequest(prompt_ids=PROMPT, max_tokens=max_tokens, seed=i, group=str(i // 8))
        for i in range(8 * n)
    ]


def processes_of_engines() -> set[int]:
    """Child processes in which `local` decodes, of whichever parent."""
    listed = subprocess.run(["pgrep", "-f", "grpo_core.*processes.main"], capture_output=True, text=True)
    return {int(pid) for pid in listed.stdout.split()}


# ---------------------------------------------------------------------------------- the contract


@pytest.mark.parametrize(("engine", "workers", "width"), [("local", 2, 64), VLLM])
def test_an_engine_in_ray_workers_keeps_the_contract(ray, tmp_path, engine, workers, width):
    publisher = published(tmp_path / "model", width)

    async def story():
        pool = ray_pool(publisher, workers, engine, deadline=240.0)
        await check_engine(pool, publisher, prompt_ids=PROMPT)

    asyncio.run(story())


@pytest.mark.parametrize("workers", [0, 2])
def test_an_engine_in_child_processes_keeps_it_too(publisher, workers):
    async def story():
        alone = LocalEngine(EngineSetup(model=str(publisher.directory)))
        engine = local_pool(publisher, workers) if workers else alone
        if workers:
            await alone.aclose()
        await check_engine(engine, publisher, prompt_ids=PROMPT)

    asyncio.run(story())


@pytest.mark.nightly
def test_weights_are_sent_to_workers_that_come_late(ray, tmp_path):
    """By relay: no copy in the object store; a worker that is late is refused and gets the next version."""
    publisher = published(tmp_path / "model", 64)
    publisher.writer = CollectiveWriter(torch.device("cpu"), "127.0.0.1")

    async def story():
        pool = ray_pool(publisher, 2)
        await pool.update_weights(publisher(0))
        calm = await pool.generate(groups(2))
        late = publisher(1)  # not told of yet
        pool.join()
        await asyncio.sleep(0)
        await pool.update_weights(late)
        await asyncio.wait_for(until(lambda: statistics(pool).serving == 3), 60)
        after = await pool.generate(groups(2))
        assert {v for c in after for v in c.versions} == {1}
        assert tokens(after) != tokens(calm)
        await pool.aclose()

    asyncio.run(story())


# ---------------------------------------------------------------------------------- death


@pytest.mark.parametrize("victim", ["actor", pytest.param("engine", marks=pytest.mark.nightly)])
def test_a_worker_or_its_engine_dies_and_nothing_is_lost(ray, publisher, victim, tmp_path):
    async def story():
        incidents = []
        with reported_to(incidents.append):
            pool = ray_pool(publisher, 2, logs=str(tmp_path))
            await pool.update_weights(publisher(0))
            calm = await pool.generate(groups(4))
            calls = [asyncio.create_task(pool.generate(groups(4))) for _ in range(3)]
        await pool.generate(groups(1, max_tokens=1))
        pid = children_of_worker(pool, 0)[0] if victim == "engine" else pid_of_worker(pool, 0)
        os.kill(pid, signal.SIGKILL)
        for call in calls:
            assert tokens(await call) == tokens(calm), "the same weights and seeds: the same tokens"
        await pool.update_weights(publisher(1))
        assert {v for c in await pool.generate(groups(4)) for v in c.versions} == {1}
        if victim == "actor":
            await asyncio.wait_for(until(lambda: statistics(pool).serving == 2), 60)
            assert statistics(pool).replaced == 1
        told = {one.kind: one for one in incidents}
        ((kind, why),) = [(k, one.message) for k, one in told.items() if k in ("replaced", "died")]
        assert {one.component for one in incidents} == {"engine 0"}, "it has the worker's name"
        assert kind == {"actor": "replaced", "engine": "died"}[victim]
        if victim == "engine":
            assert re.match(r"engine 0 \(.+, process \d+\): restarting its process: .*SIGKILL", why)
        everybody = [pid_of_worker(pool, i) for i in range(2)]
        everybody += [child for i in range(2) for child in children_of_worker(pool, i)]
        await pool.aclose()
        assert left_after(everybody) == []

    asyncio.run(story())


def tokens(completions):
    return [completion.token_ids.tolist() for completion in completions]


def pid_of_worker(pool, number):
    engine = next(m.engine for m in pool._members if m.number == number)
    return int(engine.name.rsplit("process ", 1)[1].rstrip(")"))


def children_of_worker(pool, number):
    """Child processes that any thread of the worker has started, without the one that watches over them."""
    tasks = Path(f"/proc/{pid_of_worker(pool, number)}/task").iterdir()
    found = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    return [child for child in found if b"orphans.py" not in Path(f"/proc/{child}/cmdline").read_bytes()]


async def until(condition):
    while not condition():  # noqa: ASYNC110 - it is true of other processes
        await asyncio.sleep(0.05)


def test_weights_are_put_once_and_a_late_worker_gets_them(ray, publisher):
    async def story():
        pool = ray_pool(publisher, 1)
        store_puts = []
        hold = pool._hold

        async def counted(weights):
            store_puts.append(weights.version)
            return await hold(weights)

        pool._hold = counted
        await pool.update_weights(publisher(0))
        publisher(9)  # the trainer's memory holds other weights now
        number = pool.join()
        await asyncio.wait_for(until(lambda: statistics(pool).serving == 2), 60)
        late = [member for member in pool._members if member.number == number]
        answered = await late[0].engine.generate(groups(1))
        assert {v for c in answered for v in c.versions} == {0}
        assert (number, store_puts) == (1, [0])
        assert pool.positions == 256, "what an engine says of itself comes from its worker"
        await pool.aclose()

    asyncio.run(story())


@pytest.mark.nightly
def test_what_an_engine_in_a_worker_measures_is_written(tmp_path):
    (tmp_path / "mine.py").write_text(MEASURED)
    command = (
        "train --env math:sort --engine ./mine.py:measured --output run "
        "--set tasks.sort.options.length=3 --set trainer.steps=3 --set trainer.prompts_per_step=2 "
        "--set validation.every=0 --ray"
    )
    done = subprocess.run([GRPO, *command.split()], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert '"engine_cache_use/engine_0": 0.5' in (tmp_path / "run" / "metrics.jsonl").read_text()


# ---------------------------------------------------------------------------------- faults that have a name


def test_a_worker_with_other_versions_is_refused_by_name(ray, publisher):
    async def story():
        other = attrs.evolve(
            origin("engine", "local"),
            versions={"grpo-core": "9.9", "grpo-plugin-none": "1.2", "python": "2.7"},
        )
        pool = ray_pool(publisher, 1, origin=other)
        with pytest.raises(PluginError) as refused:
            await pool.update_weights(publisher(0))
        assert "engine 0 (" in str(refused.value)
        assert "grpo-core 0.1.0 (the driver has 9.9)" in str(refused.value)
        assert "grpo-plugin-none is not installed (the driver has 1.2)" in str(refused.value)
        await pool.aclose()

    asyncio.run(story())


def test_a_model_that_is_missing_on_the_workers_machine_is_named(ray, publisher):
    async def story():
        away = Publisher.__new__(Publisher)
        away.directory = Path("/nowhere/model")
        pool = ray_pool(away, 1)
        with pytest.raises(ModelError, match="there is no /nowhere/model on this machine"):
            await pool.update_weights(publisher(0))
        await pool.aclose()

    asyncio.run(story())


def test_a_cluster_without_room_is_an_error_with_the_requested_resources(ray, publisher):
    async def story():
        store = Store()
        made_from = WorkerSetup(
            origin=origin("engine", "local"), setup=EngineSetup(model=str(publisher.directory), deadline=2.0)
        )
        engine = RayEngine("engine 0", made_from, store=store, resources={"num_gpus": 64})
        held = await store.hold(publisher(0))
        with pytest.raises(Exception, match=r"not started within 1.8 s; it needs .'num_gpus': 64"):
            await engine.update_weights(held.weights)
        await engine.aclose()
        with pytest.raises(EngineError, match="closed"):
            await engine.generate(groups(1))

    asyncio.run(story())


def test_weights_that_were_not_put_are_refused(ray, publisher):
    with pytest.raises(WeightSyncError, match=r"is not in Ray's object store"):
        Store().reference(publisher(0))


def test_a_missing_cluster_is_a_configuration_error():
    """In a separate process: this one has a cluster already."""
    train = [GRPO, "train", "--env", "math:sort", "--ray", "127.0.0.1:1"]
    done = subprocess.run(train, capture_output=True, text=True)
    assert done.returncode == ConfigError.exit_status
    assert "--ray 127.0.0.1:1: cannot be joined or started" in done.stderr
    assert "ray start --head" in done.stderr


# ---------------------------------------------------------------------------------- environments


SORT = """
import asyncio
import os
import grpo_core as grpo

class Sort(grpo.Environment):
    def prompts(self, split):
        return [grpo.Prompt(messages=f"{i}=", answer=str(i)) for i in range(4)]
    def evaluate(self, episodes):
        for episode in episodes:
            if episode.reply == "die":
                os.kill(os.getppid(), 9)
            if episode.reply == "exit":
                os._exit(3)
        return [grpo.Feedback(reward=float(e.reply == e.prompt.answer), metrics={"pid": os.getpid()})
                for e in episodes]

class Judge(Sort):
    concurrency = 4
    waiting = None

    async def evaluate(self, episodes):
        if episodes[0].reply == "raise":
            raise RuntimeError("503")
        self.waiting = self.waiting or asyncio.Barrier(4)
        await self.waiting.wait()  # until four calls wait beside each other
        return [1.0]
"""


def ray_environments(directory: Path, workers: int, name: str = "Sort") -> EnvironmentPool:
    (directory / "sort.py").write_text(SORT)
    config = EnvironmentConfig()
    env = f"{directory}/sort.py:{name}"
    spec = EnvironmentSpec(task="sort", env=env, config=config)
    made_from = EnvironmentSetup(spec=spec, origin=origin("environment", env), variables={})
    make = partial(RayEnvironment, made_from=made_from, resources={"num_cpus": 1})
    return EnvironmentPool([make(f"environment sort {i}") for i in range(workers)], config)


def test_environments_in_ray_workers_share_the_episodes(ray, tmp_path):
    async def story():
        pool = ray_environments(tmp_path, 2)
        await pool.start()
        prompts = await pool.prompts("train")
        assert [prompt.id for prompt in prompts] == ["0", "1", "2", "3"]
        assert await pool.solve(prompts) == ["0", "1", "2", "3"]
        feedback = await pool.evaluate([episode(prompt, "1") for prompt in prompts])
        assert [each.reward for each in feedback] == [0.0, 1.0, 0.0, 0.0]
        assert len({each.metrics["pid"] for each in feedback}) == 2
        incidents = []
        with reported_to(incidents.append):
            killed = await asyncio.wait_for(died_of(pool, prompts), 60)
        assert "workers died in a row" in str(killed)
        assert [one.kind for one in incidents] == ["died"] * 2, "the third ends it"
        assert re.match(
            "its worker is replaced: environment sort . .*is gone: ActorDied", incidents[0].message
        )
        feedback = await pool.evaluate([episode(prompt, "2") for prompt in prompts])
        assert [each.reward for each in feedback] == [0.0, 0.0, 1.0, 0.0]
        await pool.aclose()

    asyncio.run(story())


ABROAD = """
import os, sys
import grpo_core as grpo

class Abroad(grpo.Environment):
    def prompts(self, split):
        return [grpo.Prompt(messages="where?")]
    def evaluate(self, episodes):
        return [grpo.Feedback(reward=1.0, answer=f"{sys.prefix} {os.environ['KEY']}") for e in episodes]
"""


def test_an_environment_in_a_ray_worker_runs_in_the_interpreter_of_its_task(ray, tmp_path, monkeypatch):
    bare_venv(tmp_path / "bare")
    (tmp_path / "abroad.py").write_text(ABROAD)
    monkeypatch.setenv("KEY_OF_THE_DRIVER", "from the driver")
    config = EnvironmentConfig(python=str(tmp_path / "bare"), env_vars={"KEY": "$KEY_OF_THE_DRIVER"})
    spec = EnvironmentSpec(task="abroad", env=f"{tmp_path}/abroad.py:Abroad", config=config)

    async def story():
        worker = RayPlacement(PluginHost.discover([])).environment(0, spec)
        await worker.start()
        (prompt,) = await worker.prompts("train")
        (feedback,) = await worker.evaluate([episode(prompt, "here")])
        await worker.aclose()
        return feedback.answer

    assert asyncio.run(story()) == f"{tmp_path / 'bare'} from the driver"


def test_an_async_judge_in_a_ray_worker_has_slots_and_its_incidents_arrive(ray, tmp_path):
    incidents = []

    async def story():
        pool = ray_environments(tmp_path, 1, "Judge")
        await pool.start()
        try:
            prompts = await pool.prompts("train")
            asked = [episode(prompts[0], "wait") for _ in range(4)]
            feedback = await asyncio.gather(*(pool.evaluate([each]) for each in asked))
            assert [each.reward for (each,) in feedback] == [1.0] * 4
            (failed,) = await pool.evaluate([episode(prompts[0], "raise")])
            assert (failed.fault.kind, failed.fault.message) == ("RuntimeError", "503")
        finally:
            await pool.aclose()

    with reported_to(incidents.append):
        asyncio.run(story())
    (incident,) = incidents
    assert (incident.kind, incident.component) == ("call_failed", "environment sort 0")
    assert re.fullmatch(
        r"environment sort 0 \(.+, process \d+\): \w+\.py:\d+ in \w+: RuntimeError: 503", incident.message
    )


AGENT = """
import asyncio, json, os, urllib.request
import grpo_core as grpo

def ask(client, text):
    request = urllib.request.Request(
        client.base_url + "/chat/completions",
        json.dumps({"messages": [{"role": "user", "content": text}]}).encode(),
        {"Authorization": "Bearer " + client.api_key},
    )
    return json.loads(urllib.request.urlopen(request).read())["choices"][0]["message"]["content"]

class Agent(grpo.Environment):
    def prompts(self, split):
        return [grpo.Prompt(messages=f"{i}=", answer="ab") for i in range(4)]

    async def run(self, prompt, client):
        said = await asyncio.to_thread(ask, client, prompt.messages[0]["content"])
        if prompt.answer == "hang":
            await asyncio.sleep(1000)
        if prompt.answer == "die":
            os.kill(os.getppid(), 9)
            await asyncio.sleep(1000)
        return grpo.Feedback(reward=float(said == "ab"), metrics={"pid": os.getpid()})
"""


def test_agents_in_a_ray_worker_find_the_model_and_end_with_their_rollouts(ray, tmp_path):
    """One of them hangs until its deadline; in the end, one takes its worker along."""
    (tmp_path / "agent.py").write_text(AGENT)
    config = EnvironmentConfig()
    env = f"{tmp_path}/agent.py:Agent"
    spec = EnvironmentSpec(task="task", env=env, config=config)
    setup = EnvironmentSetup(spec=spec, origin=origin("environment", env), variables={})
    engine = FakeEngine(reply=lambda request, rng: "ab", latency=lambda rng: 0.0)

    async def played(pool, *answers, deadline=20.0):
        prompts = [
            Prompt(messages="1=", id=f"{i}", environment="task", answer=answer)
            for i, answer in enumerate(answers)
        ]
        return await play(
            [RolloutRequest(prompt=prompt, seed=i) for i, prompt in enumerate(prompts)],
            engine=engine,
            environments={"task": pool},
            renderer=FakeRenderer(),
            sampling=SamplingParams(temperature=1.0, max_tokens=50),
            deadline=deadline,
        )

    async def story():
        server = AgentServer(PlayerSetup())
        await server.start()
        worker = RayEnvironment("environment task 0", setup, resources={"num_cpus": 1})
        pool = EnvironmentPool([worker], config)
        incidents = []
        try:
            await pool.start()
            assert pool.about.runs_agents
            pool.player = server
            await engine.update_weights(Weights(version=0, location="", nbytes=0, tensors=()))
            with reported_to(incidents.append):
                first = await played(pool, "ab", "ab")
                late, *others = await played(pool, "hang", "ab", deadline=5.0)
                lost = await played(pool, "die", "ab", deadline=60.0)
                again = await played(pool, "ab", deadline=60.0)
            assert not server._sessions
        finally:
            await pool.aclose()
            await server.aclose()
        assert [rollout.reward for rollout in [*first, *others, *again]] == [1.0] * 4
        assert (late.lost, late.finish_reason) == (True, "deadline")
        assert len({rollout.metrics["pid"] for rollout in [*first, *others]}) == 1
        assert lost[0].lost
        assert [one.kind for one in incidents] == ["died"]

    asyncio.run(story())


def test_what_an_environment_survives_in_a_worker_is_reported_to_the_driver(ray, tmp_path):
    async def story():
        pool = ray_environments(tmp_path, 1)
        await pool.start()
        prompts = await pool.prompts("train")
        incidents = []
        with reported_to(incidents.append):
            (feedback,) = await pool.evaluate([episode(prompts[0], "exit")])
            (after,) = await pool.evaluate([episode(prompts[0], "0")])
        assert feedback.reward is None
        assert after.reward == 1.0
        assert {one.component for one in incidents} == {"environment sort 0"}, "it has the worker's name"
        died = [one.message for one in incidents if one.kind == "died"]
        assert died
        assert all(
            re.match(r"environment sort 0 \(.+, process \d+\): .*exit status 3", each) for each in died
        )
        await pool.aclose()

    asyncio.run(story())


async def died_of(pool, prompts):
    with pytest.raises(PluginError) as error:
        await pool.evaluate([episode(prompts[0], "die")])
    return error.value


def episode(prompt: Prompt, reply: str) -> Episode:
    said = {"role": "assistant", "content": reply}
    return Episode(prompt=prompt, messages=(*prompt.messages, said), group=prompt.id)


# ---------------------------------------------------------------------------------- whole runs


DRIVER = """
import asyncio, sys
from pathlib import Path
from test_ray import Publisher, cluster, groups, ray_pool

async def story():
    publisher = Publisher(Path(sys.argv[1]))
    with cluster.connected("", cpus=4):
        pool = ray_pool(publisher, 1)
        await pool.update_weights(publisher(0))
        print("ready", flush=True)
        while True:
            await pool.generate(groups(4))

asyncio.run(story())
"""
RAYS_OWN = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
"""They look for Ray's head for a minute, when a driver was killed together with it, and end then."""


class RayRun(Run):
    """A run with two engines and an environment in Ray workers."""

    def _start(self, *arguments: str) -> None:
        more = ["--ray", "--set", "engine.workers=2"]
        super()._start(*arguments, *(more if "--env" in arguments else []))

    def environ(self) -> dict[str, str]:
        """Return nothing: below the test's folder, names of Ray's sockets would have over 107 characters."""
        return {}

    def workers(self) -> list[int]:
        """Actors with an engine."""
        return [pid for pid in below(self.process.pid) if "EngineWorker" in command(pid)]


def below(pid: int) -> list[int]:
    """A process and all its descendants."""
    found, some = [], [pid]
    while some:
        found += some
        listed = subprocess.run(["pgrep", "-P", ",".join(map(str, some))], capture_output=True, text=True)
        some = [int(child) for child in listed.stdout.split()]
    return found


def blocks(pid: int, number: int) -> bool:
    """Whether a process blocks a signal."""
    mask = Path(f"/proc/{pid}/status").read_text().partition("SigBlk:")[2].split()[0]
    return bool(int(mask, 16) >> (number - 1) & 1)


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def verified(directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([GRPO, "verify", directory], capture_output=True, text=True)


@pytest.mark.nightly
def test_a_run_loses_nothing_when_workers_die_and_leaves_no_process_behind(tmp_path):
    run = RayRun(tmp_path)
    try:
        run.wait(lambda: run.steps >= 2)
        assert seen_by(run, "logs/engine-0/engine-local.log") == "", "it asks for no GPU, and sees none"
        victim = random.Random(0).choice(run.workers())
        os.kill(victim, signal.SIGKILL)
        at = run.steps
        run.wait(lambda: run.steps >= at + 3)
        run.wait(lambda: len(run.workers()) == 2)
        everybody = below(run.process.pid)
        heads = [pid for pid in everybody if re.search("gcs_server|raylet", command(pid).partition("\0")[0])]
        assert [blocks(pid, signal.SIGHUP) for pid in heads] == [True, True]
        os.killpg(run.process.pid, signal.SIGHUP)  # a closed terminal reaches all that have it
        said = run.end()
        assert run.process.returncode == 130, said
        assert "interrupted" in said, said
        assert left_after(everybody, 10.0) == []
        assert verified(run.directory).returncode == 0, verified(run.directory).stdout
    finally:
        if run.running:
            os.killpg(run.process.pid, signal.SIGKILL)


class OnThreeGpus(Run):
    """A run on a cluster of this machine that believes to have three GPUs."""

    def _start(self, *arguments: str) -> None:
        super()._start(*arguments, "--ray", "--set", "engine.workers=2", "--set", "engine.gpus_per_worker=1")

    def environ(self) -> dict[str, str]:
        return {"RAY_OVERRIDE_RESOURCES": '{"GPU": 3}'}


def seen_by(run: Run, log: str) -> str:
    """Return the GPUs of a process, which is found by the file of its output."""
    for pid in run.everything():
        with suppress(OSError):
            if os.readlink(f"/proc/{pid}/fd/1").endswith(log):
                environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                variables = dict(line.split(b"=", 1) for line in environ if line)
                return variables[b"CUDA_VISIBLE_DEVICES"].decode()
    return "nothing: it is not there"


@pytest.mark.nightly
def test_ray_gives_no_engine_the_gpu_of_the_trainer(tmp_path):
    run = OnThreeGpus(tmp_path)
    try:
        run.wait(lambda: run.steps >= 1)
        trainer = seen_by(run, "logs/trainer.log")
        engines = [seen_by(run, f"logs/engine-{i}/engine-local.log") for i in range(2)]
        assert sorted([trainer, *engines]) == ["0", "1", "2"]
    finally:
        os.killpg(run.process.pid, signal.SIGINT)
        said = run.end()
    assert f"Ray has reserved GPU {trainer} of this machine for the trainer" in said


CHOICES = """
import os, ray
from grpo_core.config import EngineConfig, TrainerConfig
from grpo_core.kit import PluginHost
from grpo_core.contracts.errors import ConfigError
from grpo_plugin_ray import cluster
from grpo_plugin_ray.placement import RayPlacement

def choose(trainer=TrainerConfig(), address="", **engine):
    placement = RayPlacement(PluginHost.discover(), address=address)
    try:
        devices = placement.devices(trainer, {"engine": EngineConfig(**engine)})
        free = ray.available_resources().get("GPU", 0)
        print(dict(devices.trainer), bool(devices.shared), free)
    except ConfigError as error:
        print(error)

with cluster.connected("", cpus=4):
    choose(gpus_per_worker=0.5)
    choose(gpus_per_worker=1)
    choose(TrainerConfig(device="cpu"), gpus_per_worker=1)
    choose(None, gpus_per_worker=1)
"""


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        pytest.param(0, ["{} False 0"] * 4, marks=pytest.mark.nightly),
        (
            1,
            [
                "{} True 1.0",
                "this machine has 1 GPU; the engines need 1 (engine.workers x engine.gpus_per_worker)",
                "{} False 1.0",
                "{} False 1.0",
            ],
        ),
    ],
)
def test_only_a_trainer_that_needs_its_own_gpu_reserves_one(gpus, expected):
    done = subprocess.run(
        [sys.executable, "-c", CHOICES],
        env=os.environ | {"RAY_OVERRIDE_RESOURCES": f'{{"GPU": {gpus}}}'},
        capture_output=True,
        text=True,
        check=True,
    )
    lines = done.stdout.splitlines()
    assert [line[: len(start)] for line, start in zip(lines, expected, strict=True)] == expected


def test_a_driver_that_is_killed_takes_its_cluster_along(publisher):
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, publisher.directory],
        cwd=Path(__file__).parent,
        env=os.environ | {"PYTHONPATH": str(Path(killing.__file__).parent)},
        stdout=subprocess.PIPE,
        text=True,
    )
    with driver, driver.stdout as said:
        assert said.readline() == "ready\n"
        everybody = [pid for pid in below(driver.pid) if not command(pid).startswith(RAYS_OWN)]
        assert any("EngineWorker" in command(pid) for pid in everybody)
        driver.kill()
    assert left_after(everybody, 20.0) == []
