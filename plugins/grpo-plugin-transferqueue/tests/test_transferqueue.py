"""Tokens of finished rollouts in storage units of the real TransferQueue, in a Ray cluster of this machine.

TransferQueue is not among the packages that the project is developed with: its hydra and grpo-plugin-math ask
for different releases of one package.  Most tests need it in the Python that runs them; one runs them in
another virtual environment, whose Python GRPO_TRANSFERQUEUE_PYTHON names.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from parts_kept import check_data_plane
from plane_runs import nothing_is_lost_or_left, the_same_is_trained_with, train
from test_planes import group as group_of
from test_planes import sent

from grpo_core.app.placement import LocalPlacement
from grpo_core.contracts.errors import ConfigError, DataPlaneError
from grpo_core.contracts.records import Group, Prompt, Rollout, Segment
from grpo_core.contracts.tokens import Tokens, fetched
from grpo_core.plugins.host import PluginHost
from grpo_plugin_transferqueue import servers
from grpo_plugin_transferqueue.data_plane import TransferQueuePlane

ROOT = Path(__file__).parents[3]
OTHER = os.environ.get("GRPO_TRANSFERQUEUE_PYTHON", "")
INSTALLED = all(importlib.util.find_spec(name) for name in ("transfer_queue", "grpo_plugin_ray"))
needs_it = [
    pytest.mark.slow,
    pytest.mark.skipif(not INSTALLED, reason=f"needs TransferQueue and grpo-plugin-ray: {servers.INSTALL}"),
    # of Ray's and TransferQueue's own making
    pytest.mark.filterwarnings("ignore"),
]


class Cluster:
    """A placement that joins a cluster at this address."""

    def __init__(self, address: str = "") -> None:
        self.address = address


def test_tokens_go_to_a_cluster_only_if_the_run_has_one():
    with pytest.raises(ConfigError, match="needs a Ray cluster: add --ray"):
        TransferQueuePlane(LocalPlacement(PluginHost.discover()))
    with pytest.raises(ConfigError, match="only one process reaches the cluster"):
        TransferQueuePlane(Cluster("ray://head:10001"))
    with pytest.raises(ConfigError, match=r"units = 0: expected at least 1"):
        TransferQueuePlane(Cluster(), units=0)


@pytest.mark.skipif(importlib.util.find_spec("transfer_queue") is not None, reason="it is installed")
def test_without_transferqueue_the_message_says_what_to_install():
    host = PluginHost.discover()
    with pytest.raises(ConfigError, match=r"transfer_queue is not installed: pip install TransferQueue"):
        host.make("data_plane", "transferqueue", Cluster())


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(INSTALLED, reason="these tests run here")
@pytest.mark.skipif(
    not OTHER, reason="needs GRPO_TRANSFERQUEUE_PYTHON: a virtual environment with TransferQueue and Ray"
)
def test_they_pass_in_a_separate_virtual_environment():
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [OTHER, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", Path(__file__)]
    told = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert told.returncode == 0, told.stdout[-8000:] + told.stderr
    assert "2 skipped" in told.stdout, told.stdout


# ---------------------------------------------------------------------------------- the plane


def group(lengths: Sequence[int]) -> Group:
    chance = np.random.default_rng(0)
    tokens = [Tokens.generated(chance.integers(0, 9999, n), -chance.random(n), [3] * n) for n in lengths]
    return Group(
        prompt=Prompt(messages="1+1=", id="0", environment="task"),
        rollouts=tuple(Rollout(segments=[Segment(prompt_ids=(1, 2), tokens=each)]) for each in tokens),
        generation_version=3,
        target_version=4,
    )


async def held(plane: TransferQueuePlane) -> tuple[int, int, int]:
    """Count rows and their bytes inside of the units, and the rows that the controller knows."""

    def kept(unit):
        values = [value for column in unit.storage_data.field_data.values() for value in column.values()]
        return len(values), sum(map(len, values))

    def known(controller):
        return sum(len(partition.keys_mapping) for partition in controller.partitions.values())

    controller, *units = plane._actors
    counted = [await unit.__ray_call__.remote(kept) for unit in units]
    rows = await controller.__ray_call__.remote(known)
    return sum(rows for rows, _ in counted), sum(nbytes for _, nbytes in counted), rows


async def settles(plane: TransferQueuePlane, expected: tuple[int, int, int]) -> None:
    """Wait for the calls that clear what nobody holds any more."""
    await asyncio.sleep(0.1)
    for _ in range(100):
        if await held(plane) == expected:
            return
        await asyncio.sleep(0.1)
    assert await held(plane) == expected


async def pid_of(actor) -> int:
    def pid(_):
        return os.getpid()

    return await actor.__ray_call__.remote(pid)


RANK = """
import pickle, sys
from grpo_core.contracts.tokens import Tokens, fetched
tokens = fetched(pickle.load(sys.stdin.buffer))
sys.stdout.buffer.write(pickle.dumps(tokens))
"""


@pytest.fixture
def alone():
    from grpo_plugin_ray import cluster

    with cluster.connected("", cpus=2):
        yield


def told(story, **options) -> None:
    """Run a story with a plane that has been started."""

    async def with_a_plane() -> None:
        plane = PluginHost.discover().make("data_plane", "transferqueue", Cluster(), **options)
        await plane.started()
        try:
            await story(plane)
        finally:
            await plane.aclose()

    asyncio.run(with_a_plane())


@pytest.mark.usefixtures("alone")
class TestPlane:
    pytestmark = needs_it

    @pytest.mark.parametrize("units", [1, 3])
    def test_it_keeps_the_contract(self, units):
        check_data_plane(TransferQueuePlane(Cluster(), units=units))

    def test_another_process_fetches_what_was_put_and_nothing_is_left_when_all_handles_have_gone(self):
        lengths = [16384, 5, 1000, 0, 9000]
        given = [rollout.segments[0].tokens for rollout in group(lengths).rollouts]

        async def story(plane) -> None:
            import torch

            assert await held(plane) == (0, 0, 0)
            placed = await plane.put(group(lengths))
            kept = 6, 8 * sum(lengths) + 4 * 2, 6  # five rollouts, and their prompt of two tokens once
            assert await held(plane) == kept
            handles = [rollout.segments[0].tokens for rollout in placed.rollouts]
            rank = await asyncio.create_subprocess_exec(
                sys.executable, "-c", RANK, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            said, _ = await rank.communicate(pickle.dumps(handles[::-1]))
            assert rank.returncode == 0
            assert pickle.loads(said) == given[::-1]
            torch.set_num_threads(3)
            assert fetched([*handles, handles[0]]) == [*given, given[0]]
            with ThreadPoolExecutor(1) as fresh:
                assert fresh.submit(torch.get_num_threads).result() == 3, "training is computed as before"
            last = handles[1]
            del handles, placed
            await settles(plane, kept)
            del last
            await settles(plane, (0, 0, 0))
            alike = await plane.put(group([3] * 3))
            assert len({each.tokens.ids.tobytes() for r in alike.rollouts for each in r.segments}) == 3
            empty = await plane.put(group([]))
            assert empty.rollouts == ()

        told(story, units=2)

    def test_the_bytes_of_a_rollout_on_the_way_to_the_trainer_do_not_grow_with_its_tokens(self):
        async def story(plane) -> None:
            sizes = {tokens: sent(await plane.put(group_of(tokens))) for tokens in (1024, 4096, 16384)}
            assert max(sizes.values()) - min(sizes.values()) <= 4, sizes
            assert max(sizes.values()) < 400, sizes

        told(story)

    def test_a_group_that_is_cancelled_while_it_is_put_leaves_nothing(self):
        async def story(plane) -> None:
            for delay in (0.0, 0.002, 0.01, 0.05):
                putting = asyncio.create_task(plane.put(group([50_000] * 16)))
                await asyncio.sleep(delay)
                putting.cancel()
                with suppress(asyncio.CancelledError):
                    await putting
                del putting
                await asyncio.sleep(1.0)  # its thread goes on
                await settles(plane, (0, 0, 0))

        told(story)

    @pytest.mark.parametrize("number", [0, 1], ids=["controller", "unit"])
    def test_it_says_within_seconds_that_a_process_is_dead(self, number):
        async def story(plane) -> None:
            placed = await plane.put(group([5]))
            os.kill(await pid_of(plane._actors[number]), signal.SIGKILL)
            began = time.monotonic()
            with pytest.raises(DataPlaneError, match=r"is gone"):
                fetched([placed.rollouts[0].segments[0].tokens])
            with pytest.raises(DataPlaneError, match=r"is gone"):
                await plane.put(group([3]))
            del placed
            await asyncio.sleep(0)
            await asyncio.gather(*plane._clearing)
            assert time.monotonic() - began < 15.0

        told(story)

    def test_it_does_not_wait_longer_than_its_deadline(self, monkeypatch):
        async def story(plane) -> None:
            pid = await pid_of(plane._actors[1])
            os.kill(pid, signal.SIGSTOP)
            try:
                with pytest.raises(DataPlaneError, match=r"no answer in 3 s"):
                    await plane.put(group([3]))
            finally:
                os.kill(pid, signal.SIGCONT)

        monkeypatch.setattr(servers, "DEADLINE", 3.0)
        told(story)


# ---------------------------------------------------------------------------------- whole runs


@pytest.mark.slow
@pytest.mark.skipif(not INSTALLED, reason="needs TransferQueue and grpo-plugin-ray")
def test_two_ranks_train_the_same_weights_in_order_with_every_plane(tmp_path):
    the_same_is_trained_with(["ray", "transferqueue"], tmp_path)


COUNTED = """
import asyncio, json
from grpo_plugin_transferqueue.data_plane import TransferQueuePlane

class Counted(TransferQueuePlane):
    '''Writes which rows its units hold after each call, and at the end.'''

    async def keep(self, key, step, parts):
        await super().keep(key, step, parts)
        await self.count("keep", step)

    async def _clear(self, keys):
        await super()._clear(keys)
        await self.count("clear", len(keys))

    async def aclose(self):
        for _ in range(100):
            await asyncio.sleep(0.05)
            if not self._clearing:
                break
        await self.count("end", 0)
        await super().aclose()

    async def count(self, what, number):
        def rows(unit):
            columns = unit.storage_data.field_data.values()
            return [len(value) for column in columns for value in column.values()]
        found = await self._actors[1].__ray_call__.remote(rows)
        with open("counted.jsonl", "a") as file:
            print(json.dumps([what, number, len(found), sum(found)]), file=file)
"""


@pytest.mark.slow
@pytest.mark.skipif(not INSTALLED, reason="needs TransferQueue and grpo-plugin-ray")
def test_filtered_groups_never_enter_the_plane_and_a_step_leaves_it_when_it_is_trained(tmp_path):
    (tmp_path / "counted.py").write_text(COUNTED)
    run = train(
        tmp_path, "run", "--ray", "--set", "data_plane.name=./counted.py:Counted", "--set", "trainer.steps=4",
        "--set", "dynamic_sampling.enabled=true", "--set", "dynamic_sampling.max_extra_groups=400",
        untrained=2,
    )  # fmt: skip
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    filtered = [line[name] for line in lines for name in line if name.startswith("filtered_fraction/")]
    assert max(filtered) > 0
    counted = [json.loads(line) for line in (tmp_path / "counted.jsonl").read_text().splitlines()]
    kept = [step for what, step, _, _ in counted if what == "keep"]
    assert kept == [0, 0, 1, 1, 2, 2, 3, 3], "the groups that are trained and no others"
    assert max(rows for _, _, rows, _ in counted) <= 2 * 2 * 3, "one step, and one that is being written"
    assert counted[-1] == ["end", 0, 0, 0]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not INSTALLED, reason="needs TransferQueue and grpo-plugin-ray")
def test_nothing_is_lost_and_nothing_left_when_the_plane_dies_and_when_the_run_is_killed(tmp_path):
    nothing_is_lost_or_left(tmp_path, "transferqueue", "SimpleStorageUnit", "TransferQueueController")
