"""The environment ``inspect:TASK``: samples become prompts, solvers turns, and scorers the reward."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import grpo_core as grpo
from grpo_plugin_inspect.loading import load_task
from grpo_plugin_inspect.playing import Played, Player, Reply
from grpo_plugin_inspect.scores import judged

SOLVED_BY = {
    "match": "{}",
    "includes": "{}",
    "exact": "{}",
    "f1": "{}",
    "answer": "ANSWER: {}",
    "choice": "ANSWER: {}",
}
"""Scorers of Inspect whose full score follows from a sample's target, with the solution's format."""


class InspectTask(grpo.Environment):
    """A task of Inspect: its solvers make the prompts, and its scorers the rewards.

    The reward is the mean of the scorers' values, converted like in Inspect's metrics ("C" is 1, "P" is 0.5);
    several values of a score are averaged.  Each scorer's value is a metric.  A reply is unscored if a scorer
    raises, returns ``None`` or ``Score.unscored()``, or reports a failed grader.

    Args:
        name: ``module@task``, ``./file.py@task``, or the name of a registered task.
        arguments: arguments of the task.
        weights: weight of each scorer by name; default 1.  A scorer with weight 0 is only a metric.
        validation_size: number of held-out samples, at most half of them; 0 holds out a tenth.
        seed: seed of the choice of held-out samples.
        grader: name of a model of Inspect, such as ``openai/gpt-5``, for scorers that use a model without
            naming it.
        max_turns: largest number of completions of a rollout, for solvers with several.  A rollout at the
            limit is scored as it is.
        at_once: number of replies that are scored concurrently, for scorers that wait for a model.
        seconds: time limit for scoring a reply, which is then unscored.

    Raises:
        ConfigError: the task does not exist, cannot be created, or needs unsupported features: tools,
            sandboxes, images.
    """

    success = 1.0

    def __init__(
        self,
        name: str,
        *,
        arguments: Mapping[str, Any] | None = None,
        weights: Mapping[str, float] | None = None,
        validation_size: int = 0,
        seed: int = 0,
        grader: str = "",
        max_turns: int = 8,
        at_once: int = 16,
        seconds: float = 120.0,
    ) -> None:
        for option, value in {"max_turns": max_turns, "at_once": at_once, "seconds": seconds}.items():
            if not value > 0:
                raise grpo.ConfigError(f"{option} is {value!r}, expected more than 0")
        if validation_size < 0:
            raise grpo.ConfigError(f"validation_size is {validation_size}, expected a number of at least 0")
        self._name, self._validation_size, self._seed = name, validation_size, seed
        task = load_task(name, arguments or {})
        self._samples = list(task.dataset)
        self._player = Player(name, task, grader)
        self._weights = self._checked(weights or {})
        self._solution = self._template()
        self.max_turns, self.concurrency, self.deadline = max_turns, at_once, seconds

    def prompts(self, split: str) -> list[grpo.Prompt]:
        return self._prompts[split]

    def prompt(self, row: Mapping[str, Any]) -> grpo.Prompt:
        raise grpo.ConfigError(f"inspect: {self._name} brings its own samples: leave out the task's data")

    def solve(self, prompt: grpo.Prompt) -> str | None:
        return None if self._solution is None else self._solution.format(prompt.answer)

    async def score(self, episode: grpo.Episode) -> grpo.Feedback:
        number = episode.prompt.info["sample"]
        sample = self._samples[number] if number < len(self._samples) else None
        if sample is None or _digest(sample) != episode.prompt.info.get("digest"):
            return grpo.Feedback(
                error=f"inspect: {self._name} has another sample in place {number} than when the prompt was "
                "made: each process and each start loads the data set anew, so what shuffles it, or its "
                "choices, needs a seed"
            )
        played = await self._player.play(sample, _replies(episode))
        if played.waits and episode.turn + 1 < self.max_turns and episode.finish_reason == "stop":
            return self._asks(episode, played)
        found = judged(await self._player.score(played.state), self._weights)
        if found.reward is None:
            return grpo.Feedback(metrics=found.metrics, error=f"inspect: {self._name}: {found.why}")
        return grpo.Feedback(reward=found.reward, metrics=found.metrics)

    def _asks(self, episode: grpo.Episode, played: Played) -> grpo.Feedback:
        said = len(episode.messages)
        before, new = played.messages[:said], played.messages[said:]
        same = [_plain(message) for message in episode.messages] == [_plain(message) for message in before]
        if not same or not new:
            return grpo.Feedback(
                error=f"inspect: the solvers of {self._name} rewrite the conversation, or make another one "
                "from the same replies; only those that add to it can be trained on"
            )
        return grpo.Feedback(done=False, messages=new)

    @cached_property
    def _prompts(self) -> dict[str, list[grpo.Prompt]]:
        """Return the prompts of each split."""
        everything = asyncio.run(self._openings())
        wanted = self._validation_size or len(everything) // 10
        held_out = max(1, min(wanted, len(everything) // 2))
        chosen = set(random.Random(f"inspect {self._seed}").sample(range(len(everything)), held_out))
        return {
            "train": [prompt for number, prompt in enumerate(everything) if number not in chosen],
            "validation": [prompt for number, prompt in enumerate(everything) if number in chosen],
        }

    async def _openings(self) -> list[grpo.Prompt]:
        return [await self._prompt(number, sample) for number, sample in enumerate(self._samples)]

    async def _prompt(self, number: int, sample: Any) -> grpo.Prompt:
        begun, again = [await self._player.play(sample, ()) for _ in range(2)]
        where = f"inspect: {self._name} is refused: with sample {sample.id!r}"
        if not begun.waits:
            raise grpo.PluginError(f"{where} its solvers never call the model")
        if begun.messages != again.messages:
            raise grpo.PluginError(
                f"{where} its solvers make other messages each time; shuffle the choices in the data set, "
                "with a seed"
            )
        target = sample.target if isinstance(sample.target, str) else ", ".join(sample.target)
        return grpo.Prompt(
            messages=begun.messages,
            answer=target,
            id=f"{number}" if sample.id is None else f"{sample.id}-{number}",
            info={"sample": number, "digest": _digest(sample)},
        )

    def _checked(self, weights: Mapping[str, float]) -> Mapping[str, float]:
        names = self._player.scorers
        for name, weight in weights.items():
            if name not in names:
                raise grpo.ConfigError(
                    f"weights names {name!r}, which is not a scorer of {self._name}."
                    f"{grpo.did_you_mean(name, set(names))} Its scorers: {', '.join(names)}"
                )
            if not weight >= 0:
                raise grpo.ConfigError(f"the weight of {name} is {weight}, expected a number of at least 0")
        if not any(weights.get(name, 1.0) for name in names):
            raise grpo.ConfigError("weights gives 0 to every scorer, so that there is no reward")
        return weights

    def _template(self) -> str | None:
        names = self._player.scorers
        return SOLVED_BY.get(names[0]) if len(names) == 1 else None


def _digest(sample: Any) -> str:
    """Return a digest of everything that affects the score of a reply to a sample."""
    said = sample.input
    if not isinstance(said, str):  # message ids differ between processes
        said = [(message.role, message.text) for message in said]
    plain = json.dumps([said, sample.choices, sample.target])
    return hashlib.sha256(plain.encode()).hexdigest()[:16]


def _replies(episode: grpo.Episode) -> list[Reply]:
    """Return the model's replies in an episode, after the messages of its prompt."""
    new = episode.messages[len(episode.prompt.messages) :]
    texts = [str(message.get("content") or "") for message in new if message.get("role") == "assistant"]
    last = len(texts) - 1
    return [
        Reply(text=text, truncated=episode.truncated and index == last) for index, text in enumerate(texts)
    ]


def _plain(message: Mapping[str, Any]) -> tuple[str, str]:
    """Return a message without thinking, which a chat template may drop from the history."""
    text = str(message.get("content") or "")
    return str(message.get("role")), text.rpartition("</think>")[2].strip()
