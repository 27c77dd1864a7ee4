"""Tokens of finished rollouts in the object store of a real Ray cluster of this machine."""

from __future__ import annotations

import asyncio
import importlib.util
import pickle
import subprocess
import sys
from collections.abc import Sequence

import numpy as np
import pytest
from plane_runs import nothing_is_lost_or_left, the_same_is_trained_with

pytest.importorskip("grpo_plugin_ray")

from grpo_core.app.placement import LocalPlacement
from grpo_core.contracts.errors import DataPlaneError, SelectionError
from grpo_core.contracts.records import Group, Prompt, Rollout, Segment
from grpo_core.contracts.tokens import Tokens, fetched
from grpo_core.plugins.host import PluginHost
from grpo_plugin_ray import cluster
from grpo_plugin_ray.data_plane import RayPlane
from grpo_plugin_ray.placement import RayPlacement

needs_ray = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
    # of Ray's own making, whose files and sockets are closed when they are collected
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
]


def made(placement) -> RayPlane:
    return PluginHost.discover().make("data_plane", "ray", placement)


def test_tokens_go_to_a_cluster_only_if_the_run_has_one():
    host = PluginHost.discover()
    with pytest.raises(SelectionError, match="keeps tokens in a Ray cluster: add --ray"):
        made(LocalPlacement(host))
    with pytest.raises(SelectionError, match="only one process reaches the cluster"):
        made(RayPlacement(host, address="ray://head:10001"))
    assert isinstance(made(RayPlacement(host, address="auto")), RayPlane)


def group(lengths: Sequence[int]) -> Group:
    chance = np.random.default_rng(0)
    tokens = [Tokens.generated(chance.integers(0, 9999, n), -chance.random(n), [3] * n) for n in lengths]
    return Group(
        prompt=Prompt(messages="1+1=", id="0", environment="task"),
        rollouts=tuple(Rollout(segments=[Segment(prompt_ids=(1, 2), tokens=each)]) for each in tokens),
        generation_version=3,
        target_version=4,
    )


RANK = """
import pickle, sys
from grpo_core.contracts.tokens import Tokens, fetched
tokens = fetched(pickle.load(sys.stdin.buffer))
sys.stdout.buffer.write(pickle.dumps(tokens))
"""


@pytest.mark.usefixtures("alone")
class TestPlane:
    pytestmark = needs_ray

    @pytest.fixture
    def alone(self):
        with cluster.connected("", cpus=2):
            yield

    def test_another_process_fetches_what_was_put_and_nothing_is_left_when_all_handles_have_gone(self):
        lengths = [16384, 5, 1000, 0, 9000]
        given = [rollout.segments[0].tokens for rollout in group(lengths).rollouts]

        async def story() -> None:
            plane = made(RayPlacement(PluginHost.discover()))
            await plane.started()
            before = await left_after_start()
            placed = await plane.put(group(lengths))
            assert await settles(before + 3), "short rollouts share an object; the prompt is in the last"
            assert await plane.held() == (6, 8 * sum(lengths) + 4 * 2), "five rollouts, and their prompt once"
            handles = [rollout.segments[0].tokens for rollout in placed.rollouts]
            rank = await asyncio.create_subprocess_exec(
                sys.executable, "-c", RANK, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            said, _ = await rank.communicate(pickle.dumps(handles[::-1]))
            assert pickle.loads(said) == given[::-1]
            assert fetched(handles) == given
            last = handles[1]
            del handles, placed
            await asyncio.sleep(0)
            assert (await plane.held())[0] == 6, "a group is kept whole"
            del last
            await asyncio.sleep(0)
            assert await plane.held() == (0, 0)
            assert await settles(before)
            await plane.aclose()
            with pytest.raises(DataPlaneError, match="tokens of finished rollouts are lost"):
                await plane.put(group([3]))

        asyncio.run(story())


async def left_after_start() -> int:
    """Objects of this process when Ray frees no more of those that the start needed."""
    found = [owned()]
    while len(found) < 5 or len(set(found[-5:])) > 1:
        await asyncio.sleep(0.05)
        found.append(owned())
    return found[-1]


async def settles(number: int) -> bool:
    """Whether this many objects are left, after the moment that Ray takes to free others."""
    for _ in range(200):
        if owned() == number:
            return True
        await asyncio.sleep(0.05)
    return False


def owned() -> int:
    """Objects of this process that somebody in the cluster refers to."""
    import ray

    return len(ray._private.worker.global_worker.core_worker.get_all_reference_counts())


# ---------------------------------------------------------------------------------- whole runs


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
def test_two_ranks_train_the_same_weights_in_order_with_either_plane(tmp_path):
    the_same_is_trained_with(["ray"], tmp_path)


@pytest.mark.nightly
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
def test_nothing_is_lost_and_nothing_left_when_the_plane_dies_and_when_the_run_is_killed(tmp_path):
    nothing_is_lost_or_left(tmp_path, "ray", "TokenStore")
