"""Plays given replies against an environment in its process, and records their rewards."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence

from attrs import define, evolve, field

from grpo_core import Episode, Prompt
from grpo_core.kit import EnvironmentWorker
from grpo_core.text.response_formats import assistant_message
from grpo_plugin_audit.records import Reply, Solution, Trial

CHARACTERS = 4
"""Approximate number of characters of a token."""
BESIDE = ("I do not know.", "No.")
"""Other replies of a group, for environments that compare the rollouts of a group."""


@define(eq=False)
class _Game:
    """A running rollout."""

    reply: Reply
    episode: Episode
    error: str | None = None
    reward: float | None = None
    said: str = ""
    answers: tuple[str, ...] = ()
    turns: int = 0
    over: bool = False
    stuck: bool = False
    """Whether ``solve`` returned no reply for the next turn."""


@define(eq=False)
class Player:
    """Plays replies to the end of their rollouts, each in a new session.

    A reply is repeated in each turn; solutions come from ``solve`` in each turn.  Rewards of turns are added.

    Args:
        environment: a started environment.
        max_batch: number of episodes of the largest call.
        clock: returns the time in seconds.
    """

    environment: EnvironmentWorker
    max_batch: int
    episodes: int = 0
    """Number of episodes evaluated so far."""
    seconds: float = 0.0
    """Total time of all calls of ``evaluate``."""
    last_call: float = 0.0
    """Time of the last call of ``evaluate``."""
    clock: Callable[[], float] = time.perf_counter
    solutions: dict[str, str] = field(factory=dict)
    """Solutions by the id of their prompt."""
    _names: Iterator[int] = field(factory=itertools.count)
    _tools: bool = field(init=False, default=False)

    async def solve(self, prompts: Sequence[Prompt]) -> list[Solution]:
        """Return the environment's solutions of prompts."""
        texts = await self.environment.solve(prompts)
        found = [Solution(prompt=one, text=text) for one, text in zip(prompts, texts, strict=True)]
        self.solutions |= {one.prompt.id: one.text for one in found if one.text is not None}
        return found

    @property
    def per_episode(self) -> float:
        """Mean seconds of an episode so far."""
        return self.seconds / self.episodes if self.episodes else 0.0

    async def play(self, replies: Sequence[Reply]) -> list[Trial]:
        """Play replies in batches of at most ``max_batch`` episodes."""
        trials: list[Trial] = []
        for begin in range(0, len(replies), self.size):
            trials += await self.batch(replies[begin : begin + self.size])
        return trials

    @property
    def size(self) -> int:
        """Number of replies of a batch."""
        return max(1, self.max_batch // self._members)

    async def batch(self, replies: Sequence[Reply]) -> list[Trial]:
        """Play replies concurrently: each turn of all of them is one call."""
        games = await self._opened(replies)
        try:
            for turn in range(self.environment.about.max_turns):
                going = [game for game in games if not game.over]
                if not going:
                    break
                last = turn + 1 == self.environment.about.max_turns
                await self._say(going, last=last)
                going = [game for game in going if not game.over]
                await self._judge(going, games, last=last)
        finally:
            await self.environment.close([str(game.episode.session) for game in games])
        return [_trial(game) for game in games[:: self._members]]

    @property
    def _members(self) -> int:
        """Number of episodes for each reply: three if it compares a group's rollouts, else one."""
        return 3 if self.environment.about.needs_group else 1

    def _group(self, reply: Reply) -> list[Reply]:
        if not self.environment.about.needs_group:
            return [reply]
        known = self.solutions.get(reply.prompt.id)
        said = known if reply.text is None else reply.text
        others = [text for text in (*([] if known is None else [known]), *BESIDE) if text != said]
        rest = [evolve(reply, text=None if text == known else text) for text in others]
        return [reply, *rest][: self._members]

    async def _opened(self, replies: Sequence[Reply]) -> list[_Game]:
        given = [member for reply in replies for member in self._group(reply)]
        names = [f"audit {next(self._names)}" for _ in given]
        prompts = {name: reply.prompt for name, reply in zip(names, given, strict=True)}
        opened = await self.environment.open(prompts)
        games = []
        for index, (name, reply) in enumerate(zip(names, given, strict=True)):
            prompt = reply.prompt
            group = names[index - index % self._members]
            game = _Game(reply, Episode(prompt=prompt, messages=prompt.messages, session=name, group=group))
            if (error := opened[index].error) is not None:
                game.error, game.over = f"there is no session: {error}", True
            games.append(game)
        self._tools = any(one.tools for one in opened)
        return games

    async def _say(self, going: Sequence[_Game], *, last: bool) -> None:
        """Append the next reply to each rollout; a rollout without one ends and is marked as stuck."""
        asking = [game for game in going if game.reply.text is None]
        prompts = [evolve(game.episode.prompt, messages=game.episode.messages) for game in asking]
        solved = iter(await self.environment.solve(prompts) if asking else [])
        for game in going:
            said = (game.reply.text, *game.reply.then)
            text = next(solved) if game.reply.text is None else said[game.turns % len(said)]
            if text is None:
                game.over = game.stuck = True
                continue
            game.said = game.said if game.turns else text
            message = assistant_message(text, tools=self._tools)
            game.episode = evolve(
                game.episode,
                messages=(*game.episode.messages, message),
                turn=game.turns,
                # tools do not run after the last turn, since no turn would read their results
                finish_reason=(
                    "length" if game.reply.cut else "turns" if last and message.get("tool_calls") else "stop"
                ),
                completion_tokens=game.episode.completion_tokens + len(text) // CHARACTERS + 1,
            )
            game.turns += 1

    async def _judge(self, going: Sequence[_Game], games: Sequence[_Game], *, last: bool) -> None:
        """Evaluate the rollouts that continue, or the groups that they belong to."""
        if not going:
            return
        shown = going
        if self.environment.about.needs_group:
            groups = {game.episode.group for game in going}
            shown = [game for game in games if game.episode.group in groups and game.turns]
        begin = self.clock()
        judged = await self.environment.evaluate([game.episode for game in shown])
        self.last_call = self.clock() - begin
        self.seconds += self.last_call
        self.episodes += len(shown)
        for game, feedback in zip(shown, judged, strict=True):
            if game.over:  # evaluated again only as part of its group
                continue
            game.error = feedback.error
            if feedback.error is None and (feedback.reward is not None or not feedback.done):
                game.reward = (game.reward or 0.0) + (feedback.reward or 0.0)
            game.over = last or feedback.done or feedback.error is not None
            if not game.over:
                game.answers += tuple(str(message.get("content")) for message in feedback.messages)
                game.episode = evolve(game.episode, messages=(*game.episode.messages, *feedback.messages))


def _trial(game: _Game) -> Trial:
    return Trial(
        reply=game.reply,
        said=game.said,
        reward=None if game.error is not None else game.reward,
        error=game.error,
        ended=not game.stuck,
        answers=game.answers,
        turns=game.turns,
    )
