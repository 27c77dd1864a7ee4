"""The trainer `ray`: ranks in workers of a cluster of two machines with separate addresses."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs
import pytest
from killing import left_after
from plane_runs import PlaneRun, train
from test_cli import grpo
from test_ranks import batch, batches, hung, killed_in_a_call, model, ragged, run, running, setup

pytest.importorskip("grpo_plugin_ray")

from grpo_core import ConfigError, PluginError, TrainerError
from grpo_core.app import launch
from grpo_core.app.make import make
from grpo_core.config import parse_settings
from grpo_core.kit import read_weights
from grpo_plugin_ray import trainer as ray_trainer
from grpo_plugin_ray.cluster import ENVIRON, ENVIRON_ALONE
from grpo_plugin_ray.cluster import load as load_ray
from grpo_plugin_ray.trainer import interface_of
from grpo_plugin_scale.training.process import ScaledProcess

model = model  # a fixture of the tests of ranks
CHOSEN = ["--set", "trainer.name=ray", "--set", "trainer.options.spread=true"]


# ---------------------------------------------------------------------------------- without a cluster


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["placement.name=local"], r'workers of placement\.name = "ray", but .* "local"; set it to "ray"'),
        (["trainer.gpus=[0, 1]"], r"trainer\.gpus = \[0, 1\]: Ray chooses the GPUs of the ranks"),
        (["trainer.device=cuda:1"], r'trainer\.device = "cuda:1": Ray chooses'),
        (["engine.transport=shm"], r'engine\.transport = "shm" needs a trainer on this machine'),
        (
            ["engine.transport_options.host=10.0.0.1"],
            r"transport_options\.host = '10\.0\.0\.1': each",
        ),
        (["trainer.options.spraed=true"], "spraed"),
    ],
    ids=str,
)
def test_what_a_trainer_in_workers_cannot_use_is_refused_before_anything_starts(settings, message):
    with pytest.raises((ConfigError, PluginError), match=message):
        make(*chosen(settings))


def test_any_number_of_ranks_with_gpus_is_left_to_ray():
    make(*chosen(["trainer.ranks=16"]))


def chosen(settings: list[str]) -> Any:
    given = ["tasks.t.env=math:sort", "placement.name=ray", "trainer.name=ray", *settings]
    return launch.configure([], parse_settings(given))


def test_the_interface_of_an_address_is_found():
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.77") == ""


def test_gloo_and_nccl_use_that_interface_unless_the_machine_says_otherwise(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    assert ray_trainer._interfaces("127.0.0.1") == {"GLOO_SOCKET_IFNAME": "lo"}
    assert ray_trainer._interfaces("203.0.113.77") == {}


def test_a_machine_without_the_directory_of_the_run_is_named(tmp_path):
    given = attrs.evolve(setup(str(tmp_path)), log=str(tmp_path / "none" / "logs" / "trainer.log"))
    with pytest.raises(
        ConfigError, match=r"rank 3 \(there\): there is no .*/none/logs on this machine; .*--"
    ):
        ray_trainer._prepare_files("rank 3 (there)", "/nowhere", given)


# ---------------------------------------------------------------------------------- two machines


@pytest.fixture(scope="module")
def machines() -> Iterator[Any]:
    """A cluster of two nodes of this machine, each with its own loopback address."""
    for name, value in (ENVIRON | ENVIRON_ALONE).items():
        os.environ.setdefault(name, value)
    ray = load_ray()
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 4, "node_ip_address": "127.0.0.1", "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    cluster.add_node(num_cpus=4, node_ip_address="127.0.0.2")
    try:
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture
def joined(machines: Any) -> Iterator[Any]:
    ray = load_ray()
    ray.init(address=machines.address, log_to_driver=False, logging_level="error")
    yield machines
    ray.shutdown()


def spread(model: str, **options: Any) -> Any:
    given = attrs.evolve(setup(model, device="cpu", **options), transport="collective", plugins=("scale",))
    return ray_trainer.ray_trainer(given, spread=True)


async def trained(trainer: ScaledProcess, directory: Path) -> tuple[list[str], dict[str, Any], list[Any]]:
    """Train some steps; return the ranks' addresses, the published weights, and the metrics."""
    async with running(trainer):
        results = [await trainer.step(each) for each in batches(3)]
        weights = await trainer.publish()
        await (await trainer.save(directory))()
        said = json.loads(weights.location.partition(":")[2].lstrip("/"))
        tensors = await asyncio.to_thread(read_weights, weights)
        copies = {name: tensor.clone() for name, tensor in tensors.items()}
        metrics = [
            {name: value for name, value in result.metrics.items() if not re.search("time|per_second", name)}
            for result in results
        ]
        return [address for address, *_ in said], copies, metrics


@pytest.mark.nightly
def test_ranks_on_two_machines_train_what_two_ranks_of_one_train_bit_for_bit(joined, model, tmp_path):
    here = attrs.evolve(setup(model, device="cpu", ranks=2), transport="collective", plugins=("scale",))
    expected = run(trained(ScaledProcess(here), tmp_path / "here"))
    there = run(trained(spread(model, ranks=2), tmp_path / "there"))
    assert sorted(there[0]) == ["127.0.0.1", "127.0.0.2"], "each rank sends its rows from its own machine"
    assert there[2] == expected[2]
    assert there[1].keys() == expected[1].keys()
    assert all(there[1][name].equal(tensor) for name, tensor in expected[1].items())
    written = sorted(path.relative_to(tmp_path / "here") for path in (tmp_path / "here").rglob("*.safe*"))
    assert len(written) >= 3, "of the model, and of the optimizer in each rank"
    for path in written:
        assert (tmp_path / "here" / path).read_bytes() == (tmp_path / "there" / path).read_bytes(), path


def listening(pid: int) -> set[str]:
    """Return the addresses at which a process listens, as /proc writes them."""
    sockets, found = set(), set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            sockets.add(os.readlink(entry).removeprefix("socket:[").removesuffix("]"))
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in sockets:  # it listens
                found.add(fields[1].partition(":")[0])
    return found


def of_rank(trainer: Any, number: int) -> tuple[int, int]:
    """Return the process ids of a rank's actor, and of the rank itself."""
    actor = int(re.search(r"process (\d+)\)", trainer.process.ranks[number].name)[1])
    return actor, rank_below(actor)


def rank_below(actor: int) -> int:
    """Return the process id of the rank that an actor has started, besides its watcher."""
    (rank,) = [
        int(pid)
        for task in Path(f"/proc/{actor}/task").iterdir()
        for pid in (task / "children").read_text().split()
        if "grpo_core.processes import served" in Path(f"/proc/{pid}/cmdline").read_text()
    ]
    return rank


@pytest.mark.slow
def test_ranks_listen_at_their_machines_address_in_the_cluster_alone(joined, model):
    async def story() -> None:
        async with running(spread(model, ranks=2)) as trainer:
            here = [listening(of_rank(trainer, number)[1]) for number in range(2)]
            assert {address for each in here for address in each} == {"0100007F", "0200007F"}

    run(story())


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("method", "victim", "reason"),
    [
        ("step", "rank", r"trainer rank 1 \(.*\) died \(killed by SIGKILL\)"),
        pytest.param(
            "publish", "actor", r"trainer rank 1 \(.*\) is gone: ActorDiedError", marks=pytest.mark.nightly
        ),
        pytest.param("save", "rank", r"trainer rank 1 \(.*\) died \(killed by", marks=pytest.mark.nightly),
    ],
)
def test_a_rank_that_is_killed_ends_the_trainer_with_its_name(
    joined, model, tmp_path, method, victim, reason
):
    async def story() -> None:
        async with running(spread(model, ranks=3, updates_per_step=1)) as trainer:
            await trainer.step(batch(ragged(groups=3)))
            everybody = [pid for number in range(3) for pid in of_rank(trainer, number)]
            actor, rank = of_rank(trainer, 1)
            pid = rank if victim == "rank" else actor
            await killed_in_a_call(trainer, method, tmp_path, stopped=rank, killed=pid, reason=reason)
            assert left_after(everybody, 5.0) == []

    run(story())


@pytest.mark.slow
@pytest.mark.nightly
def test_a_machine_that_is_lost_ends_the_trainer(joined, model):
    async def story() -> None:
        machine = joined.add_node(num_cpus=4, node_ip_address="127.0.0.3")
        async with running(spread(model, ranks=3)) as trainer:
            watching = asyncio.create_task(trainer.watch())
            await asyncio.sleep(0.5)
            joined.remove_node(machine, allow_graceful=False)
            began = time.monotonic()
            with pytest.raises(TrainerError, match=r"trainer rank \d \(.*\) is gone: Actor"):
                await asyncio.wait_for(watching, 60)
            assert time.monotonic() - began < 5

    run(story())


@pytest.mark.nightly
def test_a_death_between_two_calls_is_noticed(joined, model):
    async def story() -> None:
        async with running(spread(model, ranks=2)) as trainer:
            watching = asyncio.create_task(trainer.watch())
            await asyncio.sleep(0.2)
            assert not watching.done()
            os.kill(of_rank(trainer, 1)[1], signal.SIGKILL)
            with pytest.raises(TrainerError, match=r"trainer rank 1 \(.*\) died \(killed by SIGKILL\)"):
                await asyncio.wait_for(watching, 5)

    run(story())


@pytest.mark.nightly
def test_a_rank_that_hangs_ends_the_trainer_at_its_deadline(joined, model):
    async def story() -> None:
        async with running(spread(model, ranks=2)) as trainer:
            told = r"trainer rank \d \(.*\): no answer to 'train' within 3 s"
            await hung(trainer, of_rank(trainer, 1)[1], told)

    run(story())


@pytest.mark.slow
def test_a_cluster_without_room_is_an_error_with_what_the_ranks_ask_for(joined, model):
    async def story() -> None:
        given = attrs.evolve(setup(model, device="cpu", ranks=50), transport="collective", plugins=("scale",))
        with pytest.raises(TrainerError, match=r"ranks = 50: the cluster has had no room .*2 s.*CPU"):
            async with running(ray_trainer.ray_trainer(given, start_deadline=2.0)):
                pass

    run(story())


@pytest.mark.nightly
def test_an_error_of_a_rank_is_reported_like_an_error_of_this_machine(joined, model):
    async def story() -> None:
        async with running(spread(model, ranks=2)) as trainer:
            with pytest.raises(TrainerError, match="step 7 was requested from a trainer at version 0"):
                await trainer.step(batch(ragged(groups=3), step=7))

    run(story())


def test_a_trainer_without_a_cluster_is_refused(model):
    with pytest.raises(ConfigError, match=r'trainer\.name = "ray" trains in a Ray cluster: add --ray'):
        ray_trainer.ray_trainer(setup(model))


# ---------------------------------------------------------------------------------- whole runs


@pytest.mark.nightly
def test_a_run_on_two_machines_trains_what_one_machine_trains_and_continues_without_a_cluster(
    machines, tmp_path
):
    here = train(tmp_path, "here")
    plane = ["--set", "data_plane.name=ray"]  # each rank fetches its rows from its own machine
    there = train(tmp_path, "there", "--ray", machines.address, *CHOSEN, *plane)
    for path in sorted((here / "checkpoints" / "step-000002").rglob("*.safetensors")):
        assert path.read_bytes() == (there / path.relative_to(here)).read_bytes(), path.name
    logs = {path.name for path in (there / "logs").iterdir()}
    assert {"trainer-0.log", "trainer-1.log"} <= logs
    replayed = grpo(tmp_path, "replay", "there", "--step", "2")
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    again = grpo(
        tmp_path,
        *("train", "--resume", "there", "--set", "trainer.name=torch", "--set", "trainer.options={}"),
        *("--set", "placement.name=local", "--set", "placement.options={}", "--set", "trainer.steps=3"),
        *("--set", "data_plane.name=memory"),
    )
    assert again.returncode == 0, again.stderr
    assert grpo(tmp_path, "verify", "there").returncode == 0


@pytest.mark.slow
@pytest.mark.nightly
def test_a_run_is_continued_after_a_rank_died_and_leaves_nothing(tmp_path):
    class RanksRun(PlaneRun):
        def _start(self, *arguments: str) -> None:
            more = [*CHOSEN, "--set", "trainer.ranks=2", "--set", "trainer.device=cpu"]
            super()._start(*arguments, *(more if "--env" in arguments else []))

    story = RanksRun(tmp_path, "ray")
    try:
        story.wait(lambda: story.steps >= 2, 240.0)
        everybody = story.everything()
        os.kill(rank_below(story.named("RankWorker")[0]), signal.SIGKILL)
        said = story.end()
        assert re.search(r"trainer rank \d .* died \(killed by SIGKILL\)", said), said
        assert left_after(everybody, 20.0) == []
        story.resume()
        said = story.end(240.0)
        assert story.finished, said
    finally:
        if story.running:
            os.killpg(story.process.pid, signal.SIGKILL)
    assert grpo(tmp_path, "verify", str(story.directory)).returncode == 0
