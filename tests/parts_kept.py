"""Checks the contracts of transports, data planes, sources of models and placements for any of them."""

from __future__ import annotations

import asyncio
import functools
import gc
import json
import multiprocessing
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import numpy as np
import torch

from grpo_core import (
    EngineSetup,
    Episode,
    GenerationRequest,
    Group,
    GrpoError,
    Prompt,
    Rollout,
    Segment,
    Tokens,
    TrainerSetup,
    load_object,
)
from grpo_core.config import EngineConfig, TrainerConfig, build
from grpo_core.contracts.tokens import fetched
from grpo_core.kit import (
    EnvironmentSpec,
    ModelRequest,
    PluginHost,
    SharedMemoryWriter,
    StartModel,
    checkpoint_tensors,
    files,
    read_buckets,
    read_weights,
    transport_of,
)
from grpo_core.loop.agreement import Tolerance
from grpo_core.testing import HostedEnvironment, prompts
from grpo_core.text.rendering import Renderer
from grpo_core.weights import publishing
from grpo_plugin_devkit.decoding import load_test_model, make_test_model

# ---------------------------------------------------------------------------------- transports


def check_transport(name: str) -> None:
    """Check that engines read what a transport's writer wrote, and nothing that is damaged."""
    transport = PluginHost.discover().make("transport", name)
    writer = load_object(transport.writer, who="transport")(
        TrainerSetup(transport=name), torch.device("cpu"), publishing.ALONE
    )

    def write(version):
        return writer.write(version, iter(_tensors(version).items()))

    assert transport_of(write(1).location) in (transport, transport_of(""))
    for version in (2, 3, 4):
        weights = write(version)
        _equal(read_weights(weights), version)
        parts = {name: part.clone() for bucket in read_buckets(weights) for name, part in bucket.items()}
        _equal(parts, version)
    old, new = write(5), write(6)
    try:
        _equal(read_weights(old), 5)
    except GrpoError:
        return  # refused, because it was overwritten
    assert old.location != new.location


def _tensors(version):
    generator = torch.Generator().manual_seed(version)
    return {
        "matrix": torch.randn(33, 65, generator=generator),
        "half": torch.randn(7, generator=generator).bfloat16(),
        "scalar": torch.tensor(float(version)),
    }


def _equal(found, version):
    expected = _tensors(version)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name].cpu(), tensor), f"the tensor {name!r} of version {version} differs"


# ---------------------------------------------------------------------------------- data planes


def check_data_plane(plane) -> None:
    """Check that what is put there is what is read, by this process and by others."""

    async def story():
        await plane.started()
        group, *others = [_group(seed) for seed in range(1, 9)]
        there, *placed = await asyncio.gather(*map(plane.put, (group, *others)))
        assert (there.prompt, there.rewards) == (group.prompt, group.rewards)
        for handle, segment in zip(_segments(there), _segments(group), strict=True):
            assert np.array_equal(handle.tokens.sampled, segment.tokens.sampled)
            assert np.array_equal(handle.tokens.versions, segment.tokens.versions)
            assert len(handle.prompt_ids) == len(segment.prompt_ids)
        for one, other in zip((group, *others), (there, *placed), strict=True):
            assert _read(_segments(other)) == _read(_segments(one))
        del placed, other
        for seed in range(20):
            await plane.put(_group(seed))
        gc.collect()
        await asyncio.sleep(0)  # groups without references are discarded here
        ForkingPickler.dumps(_segments(there))
        assert _read(_segments(there)) == _read(_segments(group)), "a group that is held was discarded"
        if plane.remote:
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                found = pool.apply_async(_read, (_segments(there),)).get(60)
            assert found == _read(_segments(group))
        await plane.aclose()

    asyncio.run(story())


def _group(seed: int) -> Group:
    """Return a group of three rollouts: with one segment, with two, and without tokens."""
    chance = np.random.default_rng(seed)

    def tokens(n: int) -> Tokens:
        ids, logprobs = chance.integers(0, 50_000, n), -chance.random(n).astype(np.float32)
        sampled = Tokens.generated(ids, logprobs, np.full(n, seed))
        return Tokens.concatenate([sampled, Tokens.context(range(seed % 3)), sampled])

    segments = [[tokens(5 + seed)], [tokens(3), tokens(1)], [tokens(0)]]
    return Group(
        prompt=Prompt(messages="a prompt", id=f"prompt {seed}", environment="task"),
        rollouts=tuple(
            Rollout(
                segments=[Segment(prompt_ids=range(1, 3 + 5 * n), tokens=its) for n, its in enumerate(some)],
                reward=float(number),
            )
            for number, some in enumerate(segments)
        ),
        generation_version=seed,
        target_version=seed + 1,
        slot=seed,
    )


def _segments(group: Group) -> list[Segment]:
    return [segment for rollout in group.rollouts for segment in rollout.segments]


def _read(segments: Sequence[Segment]):
    """Return prompt, ids and logprobs of each segment, fetched in one call."""
    first = fetched([segment.prompt_ids for segment in segments])
    tokens = fetched([segment.tokens for segment in segments])
    pairs = zip(first, tokens, strict=True)
    return [(ids.tolist(), each.ids.tolist(), each.logprobs.tolist()) for ids, each in pairs]


# ---------------------------------------------------------------------------------- sources of models


class Solved:
    """An environment with a solution of each prompt."""

    max_turns = 1

    def prompts(self, split):
        return prompts(20)

    def evaluate(self, episodes):
        return [float(episode.reply == "ab") for episode in episodes]

    def solve(self, prompt):
        return "ab"


def check_model_source(make, directory: Path) -> None:
    """Check that a source makes a model that engines and trainers load, the same for the same seed."""
    build([make().preset])
    assert make().check() is None
    first = _started(make(), directory / "first" / "model")
    path = Path(first.path)
    renderer = Renderer.load(first.path, trust_remote_code=False, chat_template=files.chat_template(""))
    assert renderer.prompt_ids([{"role": "user", "content": "ab"}])
    config = json.loads((path / "config.json").read_text())
    assert first.positions <= config.get("max_position_embeddings", first.positions)
    declared = getattr(make(), "configuration", dict)()
    assert {key: config.get(key, value) for key, value in declared.items()} == declared
    written = {file: file.stat().st_mtime_ns for file in path.rglob("*")}
    assert Path(_started(make(), directory / "first" / "model").path) == path
    assert {file: file.stat().st_mtime_ns for file in path.rglob("*")} == written, "it was made again"
    other = Path(_started(make(), directory / "second" / "model").path)
    for file in path.rglob("*.safetensors"):
        assert file.read_bytes() == (other / file.relative_to(path)).read_bytes(), "of the same seed"


def _started(source, directory: Path) -> StartModel:
    directory.parent.mkdir(exist_ok=True)

    async def offered():
        return {"task": prompts(20)}

    async def story():
        environments = {"task": HostedEnvironment(Solved(), task="task")}
        request = ModelRequest(directory=directory, prompts=offered, environments=environments, seed=7)
        return await source.start_model(request)

    found = asyncio.run(story())
    if found.prepare is not None:
        ForkingPickler.loads(ForkingPickler.dumps(found.prepare))()  # in the trainer's process
    return found


# ---------------------------------------------------------------------------------- placements

ENVIRONMENT = '''\
import grpo_core as grpo

class Counting(grpo.Environment):
    """A session counts what was said in it."""
    max_turns = 2
    success = 1.0

    def prompts(self, split):
        return [grpo.Prompt(messages=f"{split} {i}", answer=str(i)) for i in range(5)]

    def open(self, prompt):
        return []

    def evaluate(self, episodes):
        return [self._judged(episode) for episode in episodes]

    def _judged(self, episode):
        episode.session.append(episode.reply)
        if episode.reply == "raise":
            raise ValueError("said so")
        done = len(episode.session) == 2
        reward = float(episode.reply == episode.prompt.answer)
        return grpo.Feedback(reward=reward, done=done, messages=() if done else "on")
'''


def check_placement(placement, directory: Path) -> None:
    """Check that environments and engines of a placement are those of a run."""
    (directory / "environment.py").write_text(ENVIRONMENT)
    trainer, engine = TrainerConfig(device="cpu"), EngineConfig(options={"max_rows": 8})
    assert isinstance(placement.pooled, bool)
    assert isinstance(placement.remote, bool)
    placement.check(trainer, {"engine": engine})
    with placement.connected(2):
        placement.devices(trainer, {"engine": engine})
        for story in (_environment, functools.partial(_engine, config=engine)):
            asyncio.run(asyncio.wait_for(story(placement, directory), 240))


async def _environment(placement, directory):
    spec = EnvironmentSpec(task="task", env=f"{directory / 'environment.py'}:Counting")
    worker = placement.environment(0, spec)
    try:
        await worker.start()
        asked = await worker.prompts("train")
        assert [prompt.answer for prompt in asked] == list("01234")
        assert (worker.about.success, worker.about.max_turns) == (1.0, 2)
        sessions = {f"session {prompt.id}": prompt for prompt in asked}
        await worker.open(sessions)
        for turn in range(2):
            feedback = await worker.evaluate([_episode(p, name, turn) for name, p in sessions.items()])
            assert [(f.reward, f.done, f.error) for f in feedback] == [(1.0, turn == 1, None)] * 5
        await worker.close(list(sessions))
        await worker.open({"one": asked[0], "other": asked[1]})
        (failed,) = await worker.evaluate([_episode(asked[0], "one", 0, said="raise")])
        assert "said so" in failed.error
        (fine,) = await worker.evaluate([_episode(asked[1], "other", 0)])
        assert fine.error is None
    finally:
        await worker.aclose()


def _episode(prompt, session, turn, said=None):
    messages = (*prompt.messages, {"role": "assistant", "content": said or str(prompt.answer)})
    return Episode(prompt=prompt, messages=messages, turn=turn, session=session, group=prompt.id)


async def _engine(placement, directory, *, config):
    model = make_test_model(directory, width=32)
    setup = EngineSetup(model=str(model), log_directory=str(directory), deadline=120)
    engine = placement.engine(config, setup, [{}], Tolerance())
    try:
        writer = SharedMemoryWriter()
        tensors = list(checkpoint_tensors(load_test_model(model)).items())
        await engine.update_weights(writer.write(3, tensors))
        request = GenerationRequest(prompt_ids=(5, 6, 7), max_tokens=4, seed=1)
        (said,) = await engine.generate([request])
        assert set(said.versions.tolist()) == {3}
    finally:
        await engine.aclose()
