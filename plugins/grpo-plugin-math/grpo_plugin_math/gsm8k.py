"""GSM8K, or other questions in its format, with boxed final answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import grpo_core as grpo
from grpo_plugin_math import answers

INSTRUCTION = "Think step by step, and put the final answer in \\boxed{}."


class GSM8K(grpo.Environment):
    """Word problems with exact answers, which come from the ``data`` of the task.

    The reward is 1 if the reply's last ``\\boxed{}``, or the text after its last ``####``, is the answer, and
    otherwise 0.

    Metric: ``answered``, the share of replies that give an answer in one of these forms.

    Args:
        instruction: text that follows each question.
    """

    success = 1.0

    def __init__(self, instruction: str = INSTRUCTION) -> None:
        self._instruction = instruction

    def prompts(self, split: str) -> list[grpo.Prompt]:
        raise grpo.ConfigError(
            'there are no questions: name the data of the task, as in data = "train.jsonl"'
        )

    def prompt(self, row: Mapping[str, Any]) -> grpo.Prompt:
        """Take the text after the last ``####`` as the reference, and add the instruction."""
        prompt = super().prompt(row)
        reference = str(prompt.answer if prompt.answer is not None else "").rpartition("####")[2].strip()
        if not reference:
            raise grpo.ConfigError(
                f"its answer is {prompt.answer!r:.80}, expected a result (after '####', if there is one); "
                "data_options.answer names the field of the answer"
            )
        *before, last = prompt.messages
        question = {**last, "content": self._question(str(last["content"]))}
        info = {**prompt.info, "solution": prompt.answer}
        return grpo.Prompt(messages=(*before, question), answer=reference, info=info)

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
    # right answers are one answer, in whatever form: a majority votes on it
    answer = None if given is None else answers.normalised(episode.prompt.answer if correct else given)
    return grpo.Feedback(reward=float(correct), metrics={"answered": float(given is not None)}, answer=answer)
