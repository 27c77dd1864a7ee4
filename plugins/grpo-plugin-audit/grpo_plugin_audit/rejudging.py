"""Judges stored rollouts again: an environment in its own process evaluates each turn.

The replies of the model are unchanged.  Turns are evaluated in order, as in the run, with a new session if
the environment has sessions; tools run again, because they may change the session.  If the environment's
messages differ from the stored ones, the rest of the conversation is still judged, and the difference is
counted.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from math import fsum, inf
from typing import Any

from attrs import define, evolve, field

from grpo_core import (
    ConfigError,
    Episode,
    Group,
    GrpoError,
    Message,
    PluginError,
    Prompt,
    Rollout,
    advantages,
    rewards,
)
from grpo_core.app.tasks import Tasks
from grpo_core.contracts.playing import EnvironmentClient
from grpo_core.contracts.protocols import Description
from grpo_core.kit import Judgement

AT_ONCE = 256
"""Number of rollouts that are judged concurrently; groups are not split."""
ROWS = 1000
"""Number of prompts of a task that are compared in one slice."""

_SESSIONS = itertools.count()


@define(eq=False)
class Judged:
    """A stored rollout whose turns are judged again."""

    group: int
    """Index of the group in its file."""
    prompt: Prompt
    stored: Rollout
    about: Description
    """Facts about the environment that judges."""
    ends: list[int] = field(init=False)
    """Number of messages up to each completion."""
    tokens: list[int] = field(init=False)
    """Cumulative number of completion tokens up to each turn."""
    session: str = field(init=False, factory=lambda: f"again {next(_SESSIONS)}")
    turn: int = 0
    turn_rewards: list[float] = field(init=False)
    """Rewards of the turns; the environment may end the rollout before the last one."""
    turn_states: list[str] = field(init=False)
    values: dict[str, list[float]] = field(factory=dict)
    """Values that the turns gave for each metric."""
    left_out: Collection[str] = ()
    """Metrics that are not finite numbers in a turn."""
    answer: str | None = None
    train: bool = True
    error: str | None = None
    """Reason for a missing reward."""
    answers_differ: bool = False
    """Whether a message of the environment differs from the stored one."""
    unfinished: bool = False
    """Whether the environment continues after the end of the stored conversation."""
    done: bool = False

    def __attrs_post_init__(self) -> None:
        said = self.stored.messages
        first = len(self.prompt.messages)
        self.ends = [i + 1 for i in range(first, len(said)) if said[i]["role"] == "assistant"]
        self.tokens = list(itertools.accumulate(self.stored.turn_tokens))
        self.turn_rewards, self.turn_states = [0.0] * len(self.ends), [""] * len(self.ends)
        if not self.ends or not len(self.ends) == len(self.tokens) == self.stored.turns:
            self.fail(f"its {self.stored.turns} turns cannot be found in its {len(said)} messages")

    def episode(self) -> Episode:
        said = self.stored.messages[: self.ends[self.turn]]
        # only the last finish reason is stored
        ended: Any = self.stored.finish_reason if self.turn == len(self.ends) - 1 else "stop"
        if ended not in ("length", "tokens") and not said[-1].get("tool_calls"):
            ended = "stop"  # the limit was met after this turn was evaluated
        return Episode(
            prompt=self.prompt,
            messages=said,
            turn=self.turn,
            session=self.session,
            group=str(self.group),
            finish_reason=ended,
            completion_tokens=self.tokens[self.turn],
        )

    def take(self, feedback: Judgement) -> None:
        """Record the feedback on the current turn."""
        if self.done:  # evaluated again only as part of its group
            return
        if feedback.error is not None or (feedback.done and feedback.reward is None):
            self.fail(feedback.error or "the environment returned no feedback")
            return
        self.turn_rewards[self.turn], self.turn_states[self.turn] = feedback.reward or 0.0, feedback.state
        for name, value in feedback.metrics.items():
            self.values.setdefault(name, []).append(value)
        self.left_out = {*self.left_out, *feedback.left_out}
        self.answer = self.answer if feedback.answer is None else feedback.answer
        self.train = self.train and feedback.train
        last = self.turn == len(self.ends) - 1
        if not last:
            answer = self.stored.messages[self.ends[self.turn] : self.ends[self.turn + 1] - 1]
            said = () if feedback.done else feedback.messages
            self.answers_differ = self.answers_differ or _texts(answer) != _texts(said)
        self.unfinished = last and not feedback.done and self.stored.finish_reason == "stop"
        self.done = last or feedback.done
        self.turn += not self.done

    def fail(self, error: str) -> None:
        self.done, self.error = True, error

    @property
    def reward(self) -> float | None:
        """The new reward, or None after an error."""
        return None if self.error is not None else fsum(self.turn_rewards)

    @property
    def success(self) -> bool | None:
        if self.about.success is None or (reward := self.reward) is None:
            return None
        return advantages.reaches(reward, self.about.success, self.turn_rewards)

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of all turns, without those that are not finite numbers in a turn."""
        return {
            name: rewards.combined(values, name, self.about.combine)
            for name, values in self.values.items()
            if name not in self.left_out
        }

    @property
    def moved(self) -> bool:
        """Whether the reward changed by more than rounding."""
        old, new = self.stored.reward, self.reward
        if old is None or new is None:
            return old is not new
        return not advantages.equal([old, new])

    @property
    def change(self) -> float:
        """Absolute change of the reward; infinite if only one of the judgements has a reward."""
        old, new = self.stored.reward, self.reward
        return inf if old is None or new is None else abs(new - old)

    @property
    def changed(self) -> bool:
        """Whether the reward changed, or the success of a rollout that stays scored."""
        return self.moved or (self.reward is not None and self.stored.success is not self.success)


async def judge(
    groups: Sequence[tuple[int, Group]], environments: Mapping[str, EnvironmentClient]
) -> list[Judged]:
    """Judge the rollouts of groups again, in the order of the file.

    Args:
        groups: groups with their current prompts, each with its index in its file.
        environments: started environments of their tasks.
    """
    found: list[Judged] = []
    by_task: dict[str, list[tuple[int, Group]]] = defaultdict(list)
    for index, group in groups:
        by_task[group.prompt.environment].append((index, group))
    for task, part in by_task.items():
        for some in _parts(part):
            replays = [
                Judged(index, group.prompt, rollout, environments[task].about)
                for index, group in some
                for rollout in group.rollouts
            ]
            await _replay(replays, environments[task])
            found += replays
    return sorted(found, key=lambda each: each.group)


def _parts(groups: Sequence[tuple[int, Group]]) -> Iterator[list[tuple[int, Group]]]:
    part: list[tuple[int, Group]] = []
    for each in groups:
        if part and sum(len(group.rollouts) for _, group in [*part, each]) > AT_ONCE:
            yield part
            part = []
        part.append(each)
    yield part


async def _replay(replays: Sequence[Judged], environment: EnvironmentClient) -> None:
    """Evaluate the turns of rollouts of one environment again."""
    waiting = [each for each in replays if not each.done]
    try:
        started = await environment.open({each.session: each.prompt for each in waiting})
        for each, start in zip(waiting, started, strict=True):
            if start.error is not None:
                each.fail(start.error)
        while shown := _to_show(replays, environment.about.needs_group):
            feedback = await environment.evaluate([each.episode() for each in shown])
            for each, said in zip(shown, feedback, strict=True):
                each.take(said)
    finally:
        await environment.close([each.session for each in waiting])


def _to_show(replays: Sequence[Judged], whole_groups: bool) -> list[Judged]:
    """Return the rollouts to evaluate next; tool calls come before the comparison of a group."""
    live = [each for each in replays if not each.done]
    if not whole_groups:
        return live
    episodes = [each.episode() for each in live]
    calls = [one.finish_reason == "stop" and one.messages[-1].get("tool_calls") for one in episodes]
    if calling := [each for each, call in zip(live, calls, strict=True) if call]:
        return calling
    groups = {each.group for each in live}
    return [each for each in replays if each.group in groups and each.error is None]


def _texts(messages: Sequence[Message]) -> list[tuple[str, str]]:
    return [(message["role"], str(message.get("content") or "")) for message in messages]


# ---------------------------------------------------------------------------------- prompts


@define
class KnownPrompts:
    """The current prompts of stored rollouts, with ``info``.

    A prompt with the same id but another text is a different prompt.
    """

    prompts: dict[tuple[str, str], Prompt] = field(factory=dict)
    missing: dict[str, list[str]] = field(factory=dict)
    """Ids of prompts that no longer exist, by task."""
    others: dict[str, list[str]] = field(factory=dict)
    """Ids of prompts whose text changed, by task."""

    def of(self, group: Group) -> Group | None:
        """Return the group with its current prompt, or None if it is not known."""
        prompt = self.prompts.get((group.prompt.environment, group.prompt.id))
        return None if prompt is None else evolve(group, prompt=prompt)


async def look_up(
    tasks: Tasks, wanted: Mapping[str, Mapping[str, Prompt]], *, held_out: bool
) -> KnownPrompts:
    """Find stored prompts by task and id; ``held_out`` selects the split that is searched first."""
    known = KnownPrompts()
    left = {task: dict(prompts) for task, prompts in wanted.items()}
    others: dict[str, set[str]] = defaultdict(set)
    refused: dict[str, GrpoError] = {}
    for split in ("validation", "train") if held_out else ("train", "validation"):
        for task in [task for task, prompts in left.items() if prompts]:
            try:
                prompts = (await tasks.prompts(split, tasks=[task]))[task]
            except (PluginError, ConfigError) as error:
                if task in refused:
                    raise refused[task] from error
                refused[task] = error  # environments may lack a split
            else:
                await asyncio.to_thread(_match, prompts, left[task], others[task], task, known)
    for task, ids in left.items():
        if ids:
            known.others[task] = [id for id in ids if id in others[task]]
            known.missing[task] = [id for id in ids if id not in others[task]]
    return known


def _match(
    prompts: Sequence[Prompt], left: dict[str, Prompt], others: set[str], task: str, known: KnownPrompts
) -> None:
    """Move prompts with a match from ``left`` to ``known``."""
    for begin in range(0, len(prompts), ROWS):
        for prompt in prompts[begin : begin + ROWS]:
            if (stored := left.get(prompt.id)) is None:
                continue
            if _plain(prompt.messages) == _plain(stored.messages):
                known.prompts[task, prompt.id] = evolve(prompt, environment=task)
                del left[prompt.id]
            else:
                others.add(prompt.id)
        if not left:
            return


def _plain(messages: Sequence[Message]) -> list[dict[str, Any]]:
    return [dict(message) for message in messages]
