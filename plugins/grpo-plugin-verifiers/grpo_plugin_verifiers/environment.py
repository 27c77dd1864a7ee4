"""The environment of a taskset: its tasks as prompts, its rewards as reward."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import grpo_core as grpo
from grpo_plugin_verifiers.tasksets import Tasks


class VerifiersTaskset(grpo.Environment):
    """A taskset of verifiers (v1) in score mode: each task is a prompt, and scores one reply.

    The reward is that of verifiers: the weighted sum of the task's rewards and judges.  Each of them and each
    metric is a metric here.  A reply is unscored if one of them raises or gives nothing.

    Args:
        taskset: id of the taskset: the name of an installed module.
        config: fields of the taskset's configuration.
        size: largest number of tasks that are taken, in their order.
        validation_size: number of tasks that are held out, at most half of them; 0 is a tenth.
        seed: seed of that choice.
        at_once: number of replies that are scored at once, for rewards that wait for a model.
        seconds: time limit of scoring a reply; it is then unscored.
        solution: field of a task's data with a reply that gets full marks, for ``grpo-core check`` and the
            model ``tiny``.

    Raises:
        ConfigError: there is no such taskset, it cannot be loaded, or it needs what is not supported here:
            tools, containers, several agents.
    """

    def __init__(
        self,
        taskset: str,
        *,
        config: Mapping[str, Any] | None = None,
        size: int = 10_000,
        validation_size: int = 0,
        seed: int = 0,
        at_once: int = 16,
        seconds: float = 60.0,
        solution: str = "",
    ) -> None:
        for option, value in {"size": size, "at_once": at_once, "seconds": seconds}.items():
            if not value > 0:
                raise grpo.ConfigError(f"{option} is {value!r}, expected more than 0")
        if validation_size < 0:
            raise grpo.ConfigError(f"validation_size is {validation_size}, expected a number of at least 0")
        self._tasks = Tasks(taskset, config or {}, size)
        self._validation_size, self._seed = validation_size, seed
        self.concurrency, self.deadline = at_once, seconds
        self._solution = solution

    def prompts(self, split: str) -> list[grpo.Prompt]:
        return self._prompts[split]

    def from_source(self, prompt: grpo.Prompt) -> grpo.Prompt:
        raise grpo.ConfigError(
            f"verifiers: {self._tasks.name} has tasks of its own: leave out the task's source"
        )

    def solve(self, prompt: grpo.Prompt) -> str | None:
        """Return what the task's data has in the field ``solution``.

        Raises ConfigError if there is no such field.
        """
        if not self._solution:
            return None
        data = self._tasks.tasks[prompt.info["task"]].data
        if not hasattr(data, self._solution):
            raise grpo.ConfigError(
                f"verifiers: solution = {self._solution!r} is no field of the data of {self._tasks.name}"
            )
        found = getattr(data, self._solution)
        return str(found) if isinstance(found, str | int | float) else None

    async def evaluate(self, episodes: Sequence[grpo.Episode]) -> list[grpo.Feedback]:
        return list(await asyncio.gather(*(self._judged(episode) for episode in episodes)))

    async def _judged(self, episode: grpo.Episode) -> grpo.Feedback:
        number, tasks = episode.prompt.info["task"], self._tasks.tasks
        task = tasks[number] if number < len(tasks) else None
        if task is None or self._tasks.digest(task) != episode.prompt.info.get("digest"):
            return grpo.Feedback(
                error=f"verifiers: {self._tasks.name} has another task in place {number} than when the "
                "prompt was made: each process and each start loads the tasks anew, so what shuffles or "
                "draws them needs a seed"
            )
        trace = await self._tasks.score(task, episode.reply)
        missing = sorted(name for name, reward in trace.rewards.items() if reward is None)
        if missing or not trace.rewards:
            return grpo.Feedback(
                error=f"verifiers: {self._tasks.name} gave no reward {', '.join(missing)}".strip()
            )
        parts = {name: reward.score for name, reward in trace.rewards.items()}
        metrics = {name: value for name, value in trace.metrics.items() if value is not None}
        return grpo.Feedback(reward=trace.reward, metrics={**metrics, **parts})

    @cached_property
    def _prompts(self) -> dict[str, list[grpo.Prompt]]:
        """Return the prompts of each split."""
        everything = [self._prompt(number, task) for number, task in enumerate(self._tasks.tasks)]
        held_out = max(1, min(self._validation_size or len(everything) // 10, len(everything) // 2))
        chosen = set(random.Random(f"verifiers {self._seed}").sample(range(len(everything)), held_out))
        return {
            "train": [prompt for number, prompt in enumerate(everything) if number not in chosen],
            "validation": [prompt for number, prompt in enumerate(everything) if number in chosen],
        }

    def _prompt(self, number: int, task: Any) -> grpo.Prompt:
        answer = getattr(task.data, "answer", None)
        return grpo.Prompt(
            messages=self._tasks.messages(task),
            answer=answer if isinstance(answer, str) else None,
            id=str(number),
            info={"task": number, "digest": self._tasks.digest(task)},
        )
