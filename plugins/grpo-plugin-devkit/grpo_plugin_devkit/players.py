"""The contract of players, as checks for authors.

    def test_mine_keeps_the_contract():
        check_player(MyPlayer, length=3)

Each check raises AssertionError.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import define, field

from grpo_core import (
    Completion,
    Feedback,
    GenerationRequest,
    Player,
    PlayerSetup,
    Prompt,
    Rollout,
    Weights,
)
from grpo_core.testing import FakeEngine, FakeEnvironment, play_rollouts, run
from grpo_plugin_devkit.contracts import Contract

DEADLINE = 1000.0
"""Deadline of a rollout in seconds of virtual time."""
TURNS, TOKENS = 4, 12
"""Limits of the rollouts."""


def check_player(make: Callable[..., Player | None], **options: Any) -> None:
    """Check a player's contract.  Raises AssertionError.

    Args:
        make: the factory: a class, or a function of ``PlayerSetup``.
        options: its options.
    """
    PlayerContract(lambda setup: make(setup, **options)).check()


@define(eq=False)
class PlayerContract(Contract):
    """The contract of a player."""

    make: Callable[[PlayerSetup], Player | None]
    completions: list[Completion] = field(init=False, factory=list)
    """Completions of the last rollout."""

    def its_rollouts_get_a_reward(self) -> None:
        for rollout in self._played(4):
            assert rollout.error is None, f"a rollout is unscored: {rollout.error}"
            assert rollout.reward is not None, "a rollout has no reward"

    def all_that_was_sampled_is_trained_once(self) -> None:
        rollouts = self._played(4)
        trained = [
            (int(token), float(logprob))
            for rollout in rollouts
            for segment in rollout.segments
            for token, logprob, sampled in zip(
                segment.tokens.ids, segment.tokens.logprobs, segment.tokens.sampled, strict=True
            )
            if sampled
        ]
        completions = [
            (int(token), float(logprob))
            for completion in self.completions
            for token, logprob in zip(completion.token_ids, completion.logprobs, strict=True)
        ]
        assert sorted(trained) == sorted(completions), (
            f"the engine sampled {len(completions)} tokens, and the recordings have {len(trained)}; put "
            "Completion.tokens of each completion into one segment, as they are"
        )

    def it_keeps_to_the_limits(self) -> None:
        for limits in ({"max_turns": 1}, {"max_total_tokens": TOKENS + 4}):
            for rollout in self._played(4, **limits):
                most = limits.get("max_turns", TURNS)
                assert rollout.turns <= most, (
                    f"{rollout.turns} completions of a rollout with max_turns = {most}"
                )

    def rollouts_at_the_same_time_play_as_alone(self) -> None:
        together = self._played(4)
        alone = [rollout for seed in range(4) for rollout in self._played(1, first=seed)]
        for seed, (one, other) in enumerate(zip(together, alone, strict=True)):
            assert (one.messages, one.turns) == (other.messages, other.turns), (
                f"with the seed {seed}, a rollout that plays with others has the messages {one.messages}, "
                f"and alone {other.messages}; keep a rollout's state in variables of play"
            )

    def it_ends_when_it_is_cancelled(self) -> None:
        for rollout in self._played(2, deadline=0.5):
            assert rollout.error is not None
            assert rollout.finish_reason == "deadline", f"{rollout.finish_reason}: {rollout.error}"

    def _played(self, n: int, *, first: int = 0, deadline: float = DEADLINE, **limits: int) -> list[Rollout]:
        self.completions.clear()
        return run(self._play(range(first, first + n), deadline, limits))

    async def _play(self, seeds: Sequence[int], deadline: float, limits: Mapping[str, Any]) -> list[Rollout]:
        player = self.make(PlayerSetup(tasks={"task": False}))
        assert player is None or isinstance(player, Player), (
            f"the factory returned {type(player).__name__}; expected a subclass of grpo_core.Player"
        )
        environment = FakeEnvironment(lambda episode: Feedback(reward=1.0), max_turns=TURNS)
        environment.player = player
        if player is not None:
            await player.start()
        try:
            engine = _Overheard(self.completions)
            await engine.update_weights(Weights(version=0, location="", nbytes=0, tensors=()))
            return await play_rollouts(
                [Prompt(messages="?", id=f"{seed}", environment="task") for seed in seeds],
                engine=engine,
                environment=environment,
                deadline=deadline,
                first=seeds[0],
                max_tokens=TOKENS,
                **limits,
            )
        finally:
            if player is not None:
                await player.aclose()


class _Overheard(FakeEngine):
    """An engine that takes a second and records its completions."""

    def __init__(self, completions: list[Completion]) -> None:
        super().__init__(reply=_reply, latency=lambda rng: 1.0, update_seconds=0.0)
        self._completions = completions

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        completions = await super().generate(requests)
        self._completions += completions
        return completions


def _reply(request: GenerationRequest, rng: random.Random) -> str:
    return "".join(rng.choice("abc") for _ in range(min(3, request.max_tokens)))
