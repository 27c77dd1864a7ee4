"""GSM8K, or other questions in its format, with the final answer in a box."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpo_core as grpo
from grpo_plugin_math import answers

INSTRUCTION = "Think step by step, and put the final answer in \\boxed{}."


class GSM8K(grpo.Environment):
    """Word problems with exact answers.

    The reward is 1 if the reply's last ``\\boxed{}``, or the text after its last ``####``, is the answer, and
    otherwise 0.  The questions come from ``path``, from ``dataset``, or from a ``source`` of the task.

    Metric: ``answered``, the share of replies that give an answer in one of these forms.

    Args:
        path: file of JSON lines for training, each with ``question`` and ``answer``; the reference is
            the text
            after the last ``####`` of the answer.
        validation_path: the same for validation; without it a tenth of ``path``, at most 500 rows, is held
            out.
        dataset: data set of the hub to use instead of ``path``, such as ``openai/gsm8k``; needs the package
            ``datasets``.  Its split ``test`` is used for validation.
        configuration: configuration of the data set.
        instruction: text that follows each question.
        seed: seed of the split of ``path``.

    Raises:
        ConfigError: the options name both path and dataset, or a row is not as described.
    """

    success = 1.0

    def __init__(
        self,
        path: Path | None = None,
        validation_path: Path | None = None,
        dataset: str | None = None,
        configuration: str = "main",
        instruction: str = INSTRUCTION,
        seed: int = 0,
    ) -> None:
        if path is not None and dataset is not None:
            raise grpo.ConfigError(
                "give either path (a file of JSON lines) or dataset (of the hub), not both"
            )
        self._instruction = instruction
        if dataset is not None:
            if validation_path is not None:
                raise grpo.ConfigError("validation_path belongs to path; a dataset brings its own split")
            rows = {name: _hub(dataset, configuration, split) for name, split in _HUB_SPLITS.items()}
        elif path is not None:
            rows = _from_files(path, validation_path, seed)
        elif validation_path is not None:
            raise grpo.ConfigError("validation_path belongs to path; give path, too")
        else:
            rows = {}
        self._rows = rows

    def prompts(self, split: str) -> list[grpo.Prompt]:
        if not self._rows:
            raise grpo.ConfigError(
                "there are no questions: give the option path (a file of JSON lines) or dataset (of the "
                "hub), or a source of the task"
            )
        return [
            grpo.Prompt(
                messages=self._question(row["question"]),
                answer=row["reference"],
                info={"solution": row["answer"]},
            )
            for row in self._rows[split]
        ]

    def from_source(self, prompt: grpo.Prompt) -> grpo.Prompt:
        """Take the text after the last ``####`` as the reference, and add the instruction."""
        reference = str(prompt.answer if prompt.answer is not None else "").rpartition("####")[2].strip()
        if not reference:
            raise grpo.ConfigError(
                f"its answer is {prompt.answer!r:.80}, expected a result (after '####', if there is one); "
                "source.answer names the field of the answer"
            )
        *before, last = prompt.messages
        asked = {**last, "content": self._question(str(last["content"]))}
        info = {**prompt.info, "solution": prompt.answer}
        return grpo.Prompt(messages=(*before, asked), answer=reference, info=info)

    def evaluate(self, episodes: Sequence[grpo.Episode]) -> list[grpo.Feedback]:
        return [_environment(episode) for episode in episodes]

    def solve(self, prompt: grpo.Prompt) -> str:
        return f"\\boxed{{{prompt.answer}}}"

    def _question(self, text: str) -> str:
        question = text.strip()
        return f"{question}\n{self._instruction}" if self._instruction else question


def _environment(episode: grpo.Episode) -> grpo.Feedback:
    given = answers.extract(episode.reply)
    correct = given is not None and answers.equal(given, episode.prompt.answer)
    return grpo.Feedback(reward=float(correct), metrics={"answered": float(given is not None)})


# ---------------------------------------------------------------------------------- rows

_HUB_SPLITS = {"train": "train", "validation": "test"}


def _from_files(path: Path, validation_path: Path | None, seed: int) -> dict[str, list[dict[str, str]]]:
    if validation_path is None:
        return _held_out(_read(path), seed)
    return {"train": _read(path), "validation": _read(validation_path)}


def _read(path: Path) -> list[dict[str, str]]:
    try:
        with open(path, encoding="utf-8") as file:
            return _checked(
                ((n, json.loads(line)) for n, line in enumerate(file, 1) if line.strip()), str(path)
            )
    except FileNotFoundError:
        raise grpo.ConfigError(f"{path}: there is no such file; expected JSON lines") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise grpo.ConfigError(f"{path}: not readable as JSON lines: {error}") from None


def _hub(dataset: str, configuration: str, split: str) -> list[dict[str, str]]:
    try:
        from datasets import load_dataset
    except ImportError:
        raise grpo.ConfigError(
            f"dataset {dataset!r}: the package 'datasets' is not installed; run `pip install "
            "'grpo-plugin-math[hub]'`, or give path"
        ) from None
    return _checked(enumerate(load_dataset(dataset, configuration, split=split)), f"{dataset} ({split})")


def _checked(rows: Iterable[tuple[int, Any]], source: str) -> list[dict[str, str]]:
    """Return the rows with ``question``, ``answer`` and ``reference``."""
    checked = []
    for number, row in rows:
        question, answer = (
            row.get(key) if isinstance(row, Mapping) else None for key in ("question", "answer")
        )
        if not isinstance(question, str) or not isinstance(answer, str):
            raise grpo.ConfigError(f"{source}, row {number}: expected a question and an answer, both texts")
        _, marker, reference = answer.rpartition("####")
        if not marker or not reference.strip():
            raise grpo.ConfigError(f"{source}, row {number}: the answer has no '####' with a result after it")
        checked.append({"question": question, "answer": answer, "reference": reference.strip()})
    if not checked:
        raise grpo.ConfigError(f"{source}: there are no rows")
    return checked


def _held_out(rows: list[dict[str, str]], seed: int) -> dict[str, list[dict[str, str]]]:
    if len(rows) < 2:
        raise grpo.ConfigError("a single row cannot be split into training and validation; give more rows")
    chosen = set(random.Random(seed).sample(range(len(rows)), min(500, len(rows) // 10 or 1)))
    return {
        "train": [row for index, row in enumerate(rows) if index not in chosen],
        "validation": [row for index, row in enumerate(rows) if index in chosen],
    }
