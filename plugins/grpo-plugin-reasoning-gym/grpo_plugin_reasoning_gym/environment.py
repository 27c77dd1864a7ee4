"""The environment ``reasoning_gym:TASK``."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from reasoning_gym.factory import DATASETS, create_dataset

import grpo_core as grpo
from grpo_plugin_reasoning_gym.tasks import REFUSED, is_answer, make_safe, score

INSTRUCTION = "Think step by step, and write the final answer between <answer> and </answer>."
GIVEN_BY_US = {"size", "seed"}


class ReasoningGym(grpo.Environment):
    """Generated prompts, with the score of the task's scorer (0 to 1) as reward.

    Metric: ``answered``, the share of replies with an answer.

    Args:
        task: reasoning-gym's name of the task, such as ``chain_sum``.
        size: number of training prompts.
        validation_size: number of held-out prompts.  All prompts are different; a task with too few different
            prompts offers all of them, a tenth for validation.
        seed: seed of the prompts.
        tags: expect the answer in the reply's last pair of ``<answer>`` and ``</answer>``, and end prompts
            with ``instruction``; if false, the whole reply is the answer.
        instruction: text that follows each question if there are tags.
        options: options of the task: fields of its configuration.

    Raises:
        ConfigError: the task is unknown or refused (see ``REFUSED``), or an option is wrong.
    """

    success = 1.0

    def __init__(
        self,
        task: str,
        *,
        size: int = 1000,
        validation_size: int = 100,
        seed: int = 0,
        tags: bool = True,
        instruction: str = INSTRUCTION,
        **options: Any,
    ) -> None:
        for name, value in {"size": size, "validation_size": validation_size}.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise grpo.ConfigError(f"{name} is {value!r}, expected a whole number of at least 1")
        self._task = _known(task)
        self._sizes = {"train": size, "validation": validation_size}
        self._seed = seed
        self._tags = tags
        self._instruction = instruction if tags else ""
        self._options = _checked(task, options)
        self._scorer = self._dataset(1, seed).score_answer

    def prompts(self, split: str) -> list[grpo.Prompt]:
        return [self._prompt(f"{split}-{n}", entry) for n, entry in enumerate(self._entries[split])]

    def evaluate(self, episodes: Sequence[grpo.Episode]) -> list[grpo.Feedback]:
        return [self._environment(episode) for episode in episodes]

    def solve(self, prompt: grpo.Prompt) -> str | None:
        if not isinstance(prompt.answer, str):
            return None
        return f"<answer>{prompt.answer}</answer>" if self._tags else prompt.answer

    def _environment(self, episode: grpo.Episode) -> grpo.Feedback:
        entry = episode.prompt.info.get("entry")
        if entry is None:
            raise grpo.ConfigError(
                f"reasoning_gym:{self._task} judges its own prompts only: this one has no info['entry']; "
                "leave out the task's source"
            )
        answer = last_answer(episode.reply) if self._tags else episode.reply.strip()
        if answer is None:
            return grpo.Feedback(reward=0.0, metrics={"answered": 0.0})
        reward = score(self._scorer, answer, entry) if is_answer(self._task, answer) else 0.0
        return grpo.Feedback(reward=reward, metrics={"answered": 1.0}, answer=answer)

    def _prompt(self, name: str, entry: dict[str, Any]) -> grpo.Prompt:
        question = entry["question"].strip()
        text = f"{question}\n{self._instruction}" if self._instruction else question
        return grpo.Prompt(messages=text, answer=entry["answer"], id=name, info={"entry": entry})

    @cached_property
    def _entries(self) -> dict[str, list[dict[str, Any]]]:
        """Return the entries of each split."""
        seen: set[str] = set()
        validation = self._distinct("validation", seen)
        train = self._distinct("train", seen)
        if len(train) < self._sizes["train"]:
            everything = validation + train
            held_out = min(self._sizes["validation"], len(everything) // 10 or 1)
            validation, train = everything[:held_out], everything[held_out:]
        if not train:
            raise grpo.ConfigError(
                f"reasoning_gym:{self._task} makes {len(validation)} different prompts with these options, "
                "expected at least 2"
            )
        return {"train": train, "validation": validation}

    def _distinct(self, split: str, seen: set[str]) -> list[dict[str, Any]]:
        """Return the requested number of solvable entries with distinct questions.

        At most twice as many entries are tried.
        """
        size = self._sizes[split]
        # entry i of seed s is entry 0 of seed s + i, so nearby seeds share most entries
        seed = random.Random(f"{self._seed} {split}").getrandbits(31)
        with _same_chance(seed):
            dataset = self._dataset(2 * size, seed)
        found: list[dict[str, Any]] = []
        for index in range(2 * size):
            if len(found) == size:
                break
            with _same_chance(seed + index):
                entry = dataset[index]
            if entry["question"] not in seen and self._solvable(entry):
                seen.add(entry["question"])
                found.append(entry)
        return found

    def _solvable(self, entry: dict[str, Any]) -> bool:
        """Whether the task's answer gets the full score; a task without answers passes."""
        answer = entry["answer"]
        return not isinstance(answer, str) or (
            is_answer(self._task, answer) and score(self._scorer, answer, entry) >= 1
        )

    def _dataset(self, size: int, seed: int) -> Any:
        try:
            dataset = create_dataset(self._task, size=size, seed=seed, **self._options)
        except Exception as error:
            given = ", ".join(f"{name}={value!r}" for name, value in self._options.items())
            raise grpo.ConfigError(
                f"reasoning_gym:{self._task} does not accept {given or 'its own defaults'}: "
                f"{type(error).__name__}: {error}"
            ) from error
        make_safe(self._task, dataset)
        return dataset


def last_answer(reply: str) -> str | None:
    """Return the text in the last complete pair of tags, without outer white space."""
    before, closing, _ = reply.rpartition("</answer>")
    _, opening, answer = before.rpartition("<answer>")
    return answer.strip() if closing and opening else None


def _known(task: str) -> str:
    if task in REFUSED:
        raise grpo.ConfigError(f"reasoning_gym:{task} is refused: {REFUSED[task]}")
    if task not in DATASETS:
        tasks = sorted(set(DATASETS) - set(REFUSED))
        raise grpo.ConfigError(
            f"reasoning_gym has no task {task!r}.{grpo.did_you_mean(task, set(tasks))} "
            f"Its tasks: {', '.join(tasks)}"
        )
    return task


def _checked(task: str, options: dict[str, Any]) -> dict[str, Any]:
    """Validate the options against the task's configuration, and return them."""
    fields = {f.name: f for f in dataclasses.fields(DATASETS[task][1]) if f.name not in GIVEN_BY_US}
    for name in options:
        if name not in fields:
            known = ", ".join(f"{key}={_default(field)!r}" for key, field in fields.items())
            raise grpo.ConfigError(
                f"reasoning_gym:{task} has no option {name!r}.{grpo.did_you_mean(name, set(fields))} "
                f"Its options: {known or 'none'}; and those of all tasks: size, validation_size, seed, tags, "
                "instruction"
            )
    return options


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default_factory() if callable(field.default_factory) else field.default


@contextlib.contextmanager
def _same_chance(seed: int) -> Iterator[None]:
    """Seed the global generators, which some tasks draw from."""
    state = random.getstate()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(state)
