"""The environment ``textarena:GAME``: prompts are openings, turns are moves."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from functools import cached_property
from numbers import Real
from types import MappingProxyType
from typing import Any

import attrs

import grpo_core as grpo
from grpo_plugin_textarena.games import Games, Play, drawing_from, seen

UNLIMITED = 50
"""Largest number of completions for a game without a limit of moves."""
TRIES = 1
"""Number of further seeds to try for each prompt, if seeds give equal openings."""


class TextArena(grpo.Environment):
    """A single-player game of TextArena, with the game's reward.

    A move is the text of the reply after its last ``</think>``.  The game's answer is the next message.
    Metrics: ``won`` (the reward is at least 1), ``finished``, ``moves``, ``invalid_move`` (an invalid move
    ended the game) and ``broken`` (the game raised on a move, or its reward is not a number).

    Args:
        game: TextArena's id of the game, such as ``GuessTheNumber-v0``; ``-v0`` may be left out.
        size: number of openings to train on.
        validation_size: number of held-out openings.  All openings are different; a game with too few offers
            all of them, a tenth for validation.  For a game with a constant opening, prompts differ only in
            the seed of later draws, if there are any.
        seed: seed of the openings.
        max_turns: largest number of completions of a rollout; 0 takes the game's limit of moves, plus the
            invalid moves that it allows, or 50 without a limit.
        unfinished: reward of an unfinished game: turns or tokens ran out, the game raised on a move, or its
            reward is not a number.
        options: options of the game: arguments of its class, such as ``max_number``.

    Raises:
        ConfigError: there is no such game, it is refused, or an option is wrong.
    """

    success = 1.0
    combine: Mapping[str, str] = MappingProxyType(
        dict.fromkeys(("won", "finished", "moves", "invalid_move", "broken"), "last")
    )
    deadline = 120.0  # creating a board may take a second, and a batch creates many

    def __init__(
        self,
        game: str,
        *,
        size: int = 200,
        validation_size: int = 50,
        seed: int = 0,
        max_turns: int = 0,
        unfinished: float = 0.0,
        **options: Any,
    ) -> None:
        for name, value, least in (
            ("size", size, 1),
            ("validation_size", validation_size, 1),
            ("max_turns", max_turns, 0),
        ):
            if value < least:
                raise grpo.ConfigError(f"{name} is {value!r}, expected a whole number of at least {least}")
        self._games = Games(game, options)
        self._sizes = {"train": size, "validation": validation_size}
        self._seed, self._unfinished = seed, unfinished
        self.max_turns = max_turns or (self._games.limit or UNLIMITED) * (1 + self._games.errors)

    def prompts(self, split: str) -> list[grpo.Prompt]:
        return self._prompts[split]

    def prompt(self, row: Mapping[str, Any]) -> grpo.Prompt:
        raise grpo.ConfigError(
            f"textarena:{self._games.name} plays its own openings: leave out the task's data"
        )

    def open(self, prompt: grpo.Prompt) -> Play:
        play = self._games.begin(prompt.info["seed"])
        if play.position != prompt.info["position"]:
            raise grpo.PluginError(
                f"textarena:{self._games.name} begins differently with the seed {prompt.info['seed']} than "
                "before: the game, or its version, has changed"
            )
        return play

    def evaluate(self, episodes: Sequence[grpo.Episode]) -> list[grpo.Feedback]:
        return [self._moved(episode) for episode in episodes]

    def _moved(self, episode: grpo.Episode) -> grpo.Feedback:
        play: Play = episode.session
        move = grpo.split_thought(episode.reply)[1].strip()
        try:
            with drawing_from(play.chance):
                done, _ = play.game.step(move)
                message = "" if done else seen(play.game)
        except Exception:  # rules are deterministic, so a retry would raise again
            return self._ended(play, episode, self._unfinished, broken=True)
        if done:
            return self._finished(play, episode)
        if episode.turn + 1 >= self.max_turns or episode.finish_reason != "stop":
            return self._ended(play, episode, self._unfinished)
        return grpo.Feedback(done=False, messages=message or "It is your move.")

    def _finished(self, play: Play, episode: grpo.Episode) -> grpo.Feedback:
        reward = (play.game.state.rewards or {}).get(0)
        if not isinstance(reward, Real) or not math.isfinite(reward):
            # a deterministic bug of the game: some return the message about an invalid move
            return self._ended(play, episode, self._unfinished, broken=True)
        return self._ended(play, episode, float(reward), finished=True)

    def _ended(
        self,
        play: Play,
        episode: grpo.Episode,
        reward: float,
        *,
        finished: bool = False,
        broken: bool = False,
    ) -> grpo.Feedback:
        info = play.game.state.game_info.get(0, {})
        return grpo.Feedback(
            reward=reward,
            metrics={
                "won": float(finished and grpo.advantages.reaches(reward, 1.0)),
                "finished": float(finished),
                "moves": float(episode.turn + 1),
                "invalid_move": float(bool(info.get("invalid_move"))),
                "broken": float(broken),
            },
        )

    @cached_property
    def _prompts(self) -> dict[str, list[grpo.Prompt]]:
        """Return the prompts of each split."""
        wanted, held_out = sum(self._sizes.values()), self._sizes["validation"]
        tried = [self._opening(seed) for seed in self._seeds(wanted)]
        found = {prompt.info["position"]: prompt for prompt in tried}
        if 1 < len(found) < wanted:
            for seed in self._seeds(TRIES * wanted, skip=wanted):
                prompt = self._opening(seed)
                found.setdefault(prompt.info["position"], prompt)
                if len(found) == wanted:
                    break
            if len(found) < wanted:
                held_out = min(held_out, len(found) // 10 or 1)
        openings = [
            attrs.evolve(prompt, id=str(number))
            for number, prompt in enumerate(tried if len(found) == 1 else found.values())
        ]
        return {"validation": openings[:held_out], "train": openings[held_out:]}

    def _opening(self, seed: int) -> grpo.Prompt:
        play = self._games.begin(seed)
        return grpo.Prompt(messages=play.opening, info={"seed": seed, "position": play.position})

    def _seeds(self, number: int, *, skip: int = 0) -> list[int]:
        chance = random.Random(f"textarena {self._games.name} {self._seed}")
        return [chance.getrandbits(31) for _ in range(skip + number)][skip:]
