"""The contract of placements, as checks for authors.

    def test_mine_keeps_the_contract():
        check_placement(MyPlacement)

Each check raises AssertionError.  The placement starts an environment, and the engine "local" with a small
random model, which are then used as in a run.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import torch

from grpo_core import EngineSetup, Episode, GenerationRequest, Prompt
from grpo_core.kit import (
    EngineConfig,
    EnvironmentSpec,
    PluginHost,
    SharedMemoryWriter,
    TrainerConfig,
    checkpoint_tensors,
    read_weights,
)
from grpo_plugin_devkit.contracts import Contract, within
from grpo_plugin_devkit.decoding import load_test_model, make_test_model

PATIENCE = 120.0
"""Time limit of a worker's call in seconds."""
METHODS = ("check", "connected", "devices", "engine", "retain", "environment")
WORKERS = 2
"""Number of workers of the simulated run."""

ENGINE = EngineConfig(options={"max_rows": 8})

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


def check_placement(make: Callable[..., Any], **options: Any) -> None:
    """Check a placement's contract; ``make`` is its factory.  Raises AssertionError."""
    PlacementContract(lambda plugins: make(plugins, **options)).check()


class PlacementContract(Contract):
    """The contract of a placement.

    Args:
        make: the factory with its options filled in.
    """

    begun = False

    def __init__(self, make: Callable[[PluginHost], Any]) -> None:
        self._make = make
        self._runner = asyncio.Runner()
        self._directory = tempfile.TemporaryDirectory(prefix="grpo-core-check-")
        self._path = Path(self._directory.name)
        self._connection = contextlib.ExitStack()
        self._placement: Any = None

    def __exit__(self, *raised: Any) -> None:
        try:
            self._connection.close()
        finally:
            self._runner.close()
            self._directory.cleanup()

    def it_connects_for_a_run_with_default_settings(self) -> None:
        placement = self._make(PluginHost.discover(allow=[]))
        for flag in ("pooled", "remote"):
            value = getattr(placement, flag, None)
            assert isinstance(value, bool), f"its attribute {flag} is {value!r}, expected True or False"
        for method in METHODS:
            assert callable(getattr(placement, method, None)), f"it has no method {method!r}"
        trainer, engines = TrainerConfig(device="cpu"), {"engine": ENGINE}
        placement.check(trainer, engines)
        self._connection.enter_context(placement.connected(WORKERS))
        placement.devices(trainer, engines)
        self._placement, self.begun = placement, True

    def its_environments_judge_and_keep_their_sessions(self) -> None:
        async def story(worker: Any) -> None:
            prompts = await worker.prompts("train")
            assert [prompt.answer for prompt in prompts] == list("01234"), (
                "prompts('train') are not those of the environment"
            )
            assert worker.success == 1.0, f"its success is {worker.success}, the environment declares 1"
            assert worker.max_turns == 2, f"its max_turns is {worker.max_turns}, the environment declares 2"
            sessions = {f"session {prompt.id}": prompt for prompt in prompts}
            await worker.open(sessions)
            for turn in range(2):
                episodes = [_episode(prompt, name, turn) for name, prompt in sessions.items()]
                feedback = await worker.evaluate(episodes)
                found = [(each.reward, each.done, each.error) for each in feedback]
                expected = [(1.0, turn == 1, None)] * len(episodes)
                assert found == expected, f"in turn {turn} the feedback is {found}, expected {expected}"
            await worker.close(list(sessions))

        self._with_environment(story)

    def its_environments_survive_what_they_raise(self) -> None:
        async def story(worker: Any) -> None:
            prompts = await worker.prompts("validation")
            sessions = {f"session {prompt.id}": prompt for prompt in prompts[:2]}
            await worker.open(sessions)
            one, other = (_episode(prompt, name, 0) for name, prompt in sessions.items())
            (failed,) = await worker.evaluate([_episode(one.prompt, str(one.session), 0, said="raise")])
            assert failed.error is not None, "evaluate raised, and its feedback has no error"
            (fine,) = await worker.evaluate([other])
            assert fine.error is None, f"an episode after one that raised has the error {fine.error}"

        self._with_environment(story)

    def weights_that_are_retained_outlive_the_next_publication(self) -> None:
        """Check retained weights, which late engines read after newer ones were published."""

        async def story() -> None:
            writer, retain = SharedMemoryWriter(), self._placement.retain()
            first = [("a", torch.arange(10.0)), ("b", torch.ones(3, 5))]
            lease = await within(PATIENCE, retain(writer.write(0, first)), "the function of retain()")
            for version in (1, 2):
                writer.write(version, [(name, tensor + version) for name, tensor in first])
            assert lease.weights.version == 0, f"the lease is of version {lease.weights.version}, expected 0"
            if not lease.weights.location.startswith("/"):
                return  # not available in this process; workers read them
            try:
                found = read_weights(lease.weights)
            except Exception as error:
                raise AssertionError(f"retained weights cannot be read: {error}") from error
            for name, tensor in first:
                assert torch.equal(found[name], tensor), f"{name} of version 0 was overwritten"

        self._runner.run(story())

    def its_engines_generate_from_the_weights_that_they_are_sent(self) -> None:
        model = make_test_model(self._path, width=32)

        async def story() -> None:
            setup = EngineSetup(model=str(model), log_directory=str(self._path), deadline=PATIENCE)
            engine = self._placement.engine(0, ENGINE, setup)
            try:
                writer, retain = SharedMemoryWriter(), self._placement.retain()
                module = load_test_model(model)
                weights = writer.write(3, list(checkpoint_tensors(module).items()))
                lease = await retain(weights)
                await within(PATIENCE, engine.update_weights(lease.weights), "update_weights()")
                request = GenerationRequest(prompt_ids=(5, 6, 7), max_tokens=4, seed=1)
                (said,) = await within(PATIENCE, engine.generate([request]), "generate()")
                versions = said.versions.tolist()
                assert versions, "its engine generated no token"
                assert set(versions) == {3}, f"its engine says versions {versions}, it was sent version 3"
            finally:
                await within(PATIENCE, engine.aclose(), "aclose()")

        self._runner.run(story())

    # -------------------------------------------------------------------------- parts

    def _with_environment(self, story: Callable[[Any], Awaitable[None]]) -> None:
        file = self._path / "environment.py"
        file.write_text(ENVIRONMENT, encoding="utf-8")

        async def main() -> None:
            worker = self._placement.environment(0, EnvironmentSpec(task="task", env=f"{file}:Counting"))
            try:
                await within(PATIENCE, worker.start(), "start() of an environment's worker")
                await within(PATIENCE, story(worker), "a call of an environment's worker")
            finally:
                await within(PATIENCE, worker.aclose(), "aclose() of an environment's worker")

        self._runner.run(main())


def _episode(prompt: Prompt, session: str, turn: int, said: str | None = None) -> Episode:
    reply = str(prompt.answer) if said is None else said
    return Episode(
        prompt=prompt,
        messages=(*prompt.messages, {"role": "assistant", "content": reply}),
        turn=turn,
        session=session,
        group=prompt.id,
    )
