"""The environments of a taskset: its tasks as prompts, its rewards as reward."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import grpo_core as grpo
from grpo_plugin_verifiers.rollouts import Stage
from grpo_plugin_verifiers.tasksets import Tasks

MODES = ("auto", "score", "rollout")


def taskset(
    name: str,
    *,
    mode: str = "auto",
    config: Mapping[str, Any] | None = None,
    environment: Mapping[str, Any] | None = None,
    size: int = 10_000,
    validation_size: int = 0,
    seed: int = 0,
    at_once: int = 16,
    seconds: float = 60.0,
    solution: str = "",
) -> grpo.Environment:
    """Make the environment of a taskset of verifiers (v1).

    The reward is that of verifiers: the weighted sum of the task's rewards and judges.  Each of them and each
    metric is a metric here.  A reply or a rollout is unscored if one of them raises or gives nothing.

    Args:
        name: id of the taskset: the name of an installed module.
        mode: "score" has the core ask for one reply, which the task scores; "rollout" lets verifiers play
            each rollout, with tools, environments of its own, ``setup`` and ``finalize``.  "auto" plays
            rollouts if the taskset needs them.
        config: fields of the taskset's configuration.
        environment: fields of the configuration of verifiers' environment, such as its ``id`` or its agents;
            for rollouts only.
        size: largest number of tasks that are taken, in their order.
        validation_size: number of tasks that are held out, at most half of them; 0 is a tenth.
        seed: seed of that choice.
        at_once: number of replies that are scored, or of rollouts that are played, at once.
        seconds: time limit of scoring a reply; it is then unscored.
        solution: field of a task's data with a reply that gets full marks, for ``grpo-core check`` and the
            model ``tiny``.  Where rollouts are played it is the first reply.

    Raises:
        ConfigError: there is no such taskset, it cannot be loaded, or it needs what is not supported here:
            containers, shells, several agents that are trained.
    """
    for option, value in {"size": size, "at_once": at_once, "seconds": seconds}.items():
        if not value > 0:
            raise grpo.ConfigError(f"{option} is {value!r}, expected more than 0")
    if validation_size < 0:
        raise grpo.ConfigError(f"validation_size is {validation_size}, expected a number of at least 0")
    if mode not in MODES:
        raise grpo.ConfigError(f"mode is {mode!r}, expected one of {', '.join(MODES)}")
    tasks = Tasks(name, config or {}, size)
    split = Split(tasks, validation_size, seed, solution)
    why = "the option environment is set" if environment else tasks.needs_rollout()
    if mode == "rollout" or (mode == "auto" and why):
        return Played(split, Stage(tasks, config or {}, environment or {}), at_once)
    if why:
        tasks.refuse(f'{why}, which needs a rollout by verifiers: leave out mode = "score"')
    return Scored(split, at_once, seconds)


class Split:
    """The tasks of a taskset as prompts.

    Args:
        tasks: the taskset.
        validation_size: number of tasks that are held out; 0 is a tenth.
        seed: seed of that choice.
        solution: field of a task's data with a right reply; empty if there is none.
    """

    def __init__(self, tasks: Tasks, validation_size: int, seed: int, solution: str) -> None:
        self.tasks = tasks
        self._validation_size, self._seed, self._solution = validation_size, seed, solution

    def task(self, prompt: grpo.Prompt) -> Any:
        """Return the task of a prompt, or feedback without a reward if it is no longer the same."""
        number, tasks = prompt.info["task"], self.tasks.tasks
        task = tasks[number] if number < len(tasks) else None
        if task is None or self.tasks.digest(task) != prompt.info.get("digest"):
            return grpo.Feedback(
                error=f"verifiers: {self.tasks.name} has another task in place {number} than when the "
                "prompt was made: each process and each start loads the tasks anew, so what shuffles or "
                "draws them needs a seed"
            )
        return task

    def solution(self, prompt: grpo.Prompt) -> str | None:
        """Return what the task's data has in the field.  Raises ConfigError if there is no such field."""
        if not self._solution:
            return None
        data = self.tasks.tasks[prompt.info["task"]].data
        if not hasattr(data, self._solution):
            raise grpo.ConfigError(
                f"verifiers: solution = {self._solution!r} is not a field of the data of {self.tasks.name}"
            )
        found = getattr(data, self._solution)
        return str(found) if isinstance(found, str | int | float) else None

    @cached_property
    def prompts(self) -> dict[str, list[grpo.Prompt]]:
        """The prompts of each split."""
        everything = [self._prompt(number, task) for number, task in enumerate(self.tasks.tasks)]
        held_out = max(1, min(self._validation_size or len(everything) // 10, len(everything) // 2))
        chosen = set(random.Random(f"verifiers {self._seed}").sample(range(len(everything)), held_out))
        return {
            "train": [prompt for number, prompt in enumerate(everything) if number not in chosen],
            "validation": [prompt for number, prompt in enumerate(everything) if number in chosen],
        }

    def _prompt(self, number: int, task: Any) -> grpo.Prompt:
        answer = getattr(task.data, "answer", None)
        return grpo.Prompt(
            messages=self.tasks.messages(task),
            answer=answer if isinstance(answer, str) else None,
            id=str(number),
            info={"task": number, "digest": self.tasks.digest(task)},
        )


class VerifiersTaskset(grpo.Environment):
    """A taskset of verifiers (v1): its tasks are the prompts."""

    def __init__(self, split: Split) -> None:
        self.split = split

    def prompts(self, split: str) -> list[grpo.Prompt]:
        return self.split.prompts[split]

    def from_source(self, prompt: grpo.Prompt) -> grpo.Prompt:
        raise grpo.ConfigError(
            f"verifiers: {self.split.tasks.name} brings its own tasks: leave out the task's source"
        )

    def solve(self, prompt: grpo.Prompt) -> str | None:
        """Return what the task's data has in the field ``solution``."""
        return self.split.solution(prompt)


class Scored(VerifiersTaskset):
    """A taskset whose tasks score one reply each.

    Args:
        split: the tasks.
        at_once: number of replies that are scored at once, for rewards that wait for a model.
        seconds: time limit of scoring a reply.
    """

    def __init__(self, split: Split, at_once: int, seconds: float) -> None:
        super().__init__(split)
        self.concurrency, self.deadline = at_once, seconds
        split.tasks.check_rewards()

    async def evaluate(self, episodes: Sequence[grpo.Episode]) -> list[grpo.Feedback]:
        return list(await asyncio.gather(*(self._judged(episode) for episode in episodes)))

    async def _judged(self, episode: grpo.Episode) -> grpo.Feedback:
        task = self.split.task(episode.prompt)
        if isinstance(task, grpo.Feedback):
            return task
        tasks = self.split.tasks
        return tasks.feedback(await tasks.score(task, episode.reply))


class Played(VerifiersTaskset):
    """A taskset whose rollouts verifiers plays, with the model of the run.

    Args:
        split: the tasks.
        stage: plays them.
        at_once: number of rollouts that are played at once.
    """

    def __init__(self, split: Split, stage: Stage, at_once: int) -> None:
        super().__init__(split)
        self._stage, self.concurrency = stage, at_once

    async def run(self, prompt: grpo.Prompt, client: grpo.AgentClient) -> grpo.Feedback:
        task = self.split.task(prompt)
        return task if isinstance(task, grpo.Feedback) else await self._stage.play(task, client)

    def evaluate(self, episodes: Sequence[grpo.Episode]) -> list[grpo.Feedback]:
        """Judge what verifiers has not: a rollout that failed where a limit of the run ended it."""
        return [grpo.Feedback(error="verifiers: the rollout gave no reward") for _ in episodes]

    async def aclose(self) -> None:
        await self._stage.aclose()
