"""The environments ``verifiers:TASKSET``: tasks become prompts, and their rewards the reward."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

import grpo_core as grpo
from grpo_plugin_verifiers.rollouts import Stage
from grpo_plugin_verifiers.tasksets import Tasks


def taskset(
    name: str,
    *,
    mode: Literal["auto", "score", "rollout"] = "auto",
    config: Mapping[str, Any] | None = None,
    environment: Mapping[str, Any] | None = None,
    size: int = 10_000,
    validation_size: int = 0,
    seed: int = 0,
    at_once: int = 16,
    seconds: float = 60.0,
    solution: str = "",
) -> grpo.Environment:
    """Create the environment of a taskset of verifiers (v1).

    The reward is verifiers' weighted sum of the task's rewards and judges.  Each reward, judge and metric is
    a metric here.  A reply or rollout is unscored if one of them raises or returns nothing.

    Args:
        name: id of the taskset: the name of an installed module.
        mode: "score" samples one reply in the core, which the task scores; "rollout" lets verifiers play
            rollouts, with tools, its environments, ``setup`` and ``finalize``.  "auto" selects "rollout" if
            the taskset needs it.
        config: fields of the taskset's configuration.
        environment: fields of the configuration of verifiers' environment, such as its ``id`` or agents; for
            rollouts only.
        size: largest number of tasks, in order.
        validation_size: number of held-out tasks, at most half of them; 0 holds out a tenth.
        seed: seed of the choice of held-out tasks.
        at_once: number of replies that are scored, or rollouts that run, concurrently.
        seconds: time limit for scoring a reply, which is then unscored.
        solution: field of a task's data with a reply with full marks, for ``grpo-core check`` and the model
            ``tiny``.  For rollouts it is the first reply.

    Raises:
        ConfigError: the taskset does not exist, cannot be loaded, or needs unsupported features: containers,
            shells, several trained agents.
    """
    for option, value in {"size": size, "at_once": at_once, "seconds": seconds}.items():
        if not value > 0:
            raise grpo.ConfigError(f"{option} is {value!r}, expected more than 0")
    if validation_size < 0:
        raise grpo.ConfigError(f"validation_size is {validation_size}, expected a number of at least 0")
    tasks = Tasks(name, config or {}, size)
    prompts = (tasks, validation_size, seed, solution)
    why = "the option environment is set" if environment else tasks.needs_rollout()
    if mode == "rollout" or (mode == "auto" and why):
        return Played(Stage(tasks, config or {}, environment or {}), at_once, *prompts)
    if why:
        tasks.refuse(f'{why}, which needs a rollout by verifiers: leave out mode = "score"')
    return Scored(at_once, seconds, *prompts)


class VerifiersTaskset(grpo.Environment):
    """Base class: a taskset of verifiers (v1), whose tasks are the prompts.

    Args:
        tasks: the taskset.
        validation_size: number of held-out tasks; 0 holds out a tenth.
        seed: seed of the choice of held-out tasks.
        solution: field of a task's data with a right reply; empty for none.
    """

    def __init__(self, tasks: Tasks, validation_size: int, seed: int, solution: str) -> None:
        self.tasks = tasks
        self._validation_size, self._seed, self._solution = validation_size, seed, solution

    def task(self, prompt: grpo.Prompt) -> Any:
        """Return the task of a prompt, or unscored feedback if the task has changed."""
        number, tasks = prompt.info["task"], self.tasks.tasks
        task = tasks[number] if number < len(tasks) else None
        if task is None or self.tasks.digest(task) != prompt.info.get("digest"):
            return grpo.Feedback(
                error=f"verifiers: {self.tasks.name} has another task in place {number} than when the "
                "prompt was made: each process and each start loads the tasks anew, so what shuffles or "
                "draws them needs a seed"
            )
        return task

    def solve(self, prompt: grpo.Prompt) -> str | None:
        """Return the field ``solution`` of the task's data.  Raises ConfigError if it is missing."""
        if not self._solution:
            return None
        data = self.tasks.tasks[prompt.info["task"]].data
        if not hasattr(data, self._solution):
            raise grpo.ConfigError(
                f"verifiers: solution = {self._solution!r} is not a field of the data of {self.tasks.name}"
            )
        found = getattr(data, self._solution)
        return str(found) if isinstance(found, str | int | float) else None

    def prompts(self, split: str) -> list[grpo.Prompt]:
        return self._prompts[split]

    def prompt(self, row: Mapping[str, Any]) -> grpo.Prompt:
        name = self.tasks.name
        raise grpo.ConfigError(f"verifiers: {name} brings its own tasks: leave out the task's data")

    @cached_property
    def _prompts(self) -> dict[str, list[grpo.Prompt]]:
        """Return the prompts of each split."""
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


class Scored(VerifiersTaskset):
    """A taskset whose tasks score one reply each.

    Args:
        at_once: number of replies that are scored concurrently, for rewards that wait for a model.
        seconds: time limit for scoring a reply.
        prompts: as ``VerifiersTaskset``.
    """

    def __init__(self, at_once: int, seconds: float, *prompts: Any) -> None:
        super().__init__(*prompts)
        self.concurrency, self.deadline = at_once, seconds
        self.tasks.check_rewards()

    async def score(self, episode: grpo.Episode) -> grpo.Feedback:
        task = self.task(episode.prompt)
        if isinstance(task, grpo.Feedback):
            return task
        return self.tasks.feedback(await self.tasks.score(task, episode.reply))


class Played(VerifiersTaskset):
    """A taskset whose rollouts are played by verifiers with the run's model.

    Args:
        stage: plays them.
        at_once: number of concurrent rollouts.
        prompts: as ``VerifiersTaskset``.
    """

    def __init__(self, stage: Stage, at_once: int, *prompts: Any) -> None:
        super().__init__(*prompts)
        self._stage, self.concurrency = stage, at_once

    async def run(self, prompt: grpo.Prompt, client: grpo.AgentClient) -> grpo.Feedback:
        task = self.task(prompt)
        return task if isinstance(task, grpo.Feedback) else await self._stage.play(task, client)

    def evaluate(self, episodes: Sequence[grpo.Episode]) -> list[grpo.Feedback]:
        """Return unscored feedback for rollouts that failed at a limit of the run."""
        return [grpo.Feedback(error="verifiers: the rollout gave no reward") for _ in episodes]

    async def aclose(self) -> None:
        await self._stage.aclose()
