"""The environment ``judge:openai``: language models score each reply by a rubric."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median, pstdev
from types import MappingProxyType
from typing import Any, Literal

import grpo_core as grpo
from grpo_plugin_judge.asking import Asker, Cache, JudgeModel, Pace, away_by
from grpo_plugin_judge.rubric import PATTERN, TEMPLATE, Rubric

AGREES = 0.1
"""Largest difference of scores, from 0 to 1, that counts as agreement of two judges."""
SPARE = 10.0
"""Margin of a call's time limit over its requests, in seconds."""
LONGEST_WAIT = 8.0
"""Longest wait before a retry in seconds, unless the server requests more."""

_COMBINED: Mapping[str, Callable[[Sequence[float]], float]] = {"mean": fmean, "median": median, "min": min}


class Judge(grpo.Environment):
    """Scores each reply with language models; the reward is the combined score, from 0 to 1.

    A reply with too few scores is unscored, with the reason; an outage never counts as a reward of 0.

    Args:
        model: name of the model.
        url: base address of an API like OpenAI's, such as ``"http://127.0.0.1:8000/v1"``.
        key_variable: environment variable with the key; configurations must not contain the key.
        parameters: further fields of each request, such as ``temperature`` or ``reasoning_effort``.
        judges: several judges instead of one: tables of ``model``, ``url``, ``key_variable``, ``parameters``
            and ``name``; missing keys default to the options above.
        votes: number of answers of each judge, which are averaged.
        combine: combination of the judges' scores: "mean", "median" or "min".
        quorum: number of scores, over all judges and votes, that a reward needs; 0 needs all.
        rubric: criteria for the judges.
        template: Jinja template of the question, instead of the built-in one.
        pattern: regular expression with one group, which finds the score; the last match counts.
        scale: lowest and highest score that judges give.
        cache: SQLite file for a cache of answers; empty for none.
        requests_per_minute: limit of each judge in each worker, including retries; 0 is unlimited.
        requests_at_once: number of replies that are judged concurrently.
        timeout: seconds for each attempt of a request.
        retries: number of attempts after the first.
    """

    def __init__(
        self,
        *,
        rubric: str = "",
        model: str = "",
        url: str = "",
        key_variable: str = "OPENAI_API_KEY",
        parameters: Mapping[str, Any] = MappingProxyType({"temperature": 0.0, "max_tokens": 1024}),
        judges: Sequence[Mapping[str, Any]] = (),
        votes: int = 1,
        combine: Literal["mean", "median", "min"] = "mean",
        quorum: int = 0,
        template: str = TEMPLATE,
        pattern: str = PATTERN,
        scale: Sequence[float] = (0.0, 10.0),
        cache: Path | None = None,
        requests_per_minute: float = 0.0,
        requests_at_once: int = 16,
        timeout: float = 60.0,
        retries: int = 1,
    ) -> None:
        default = {"model": model, "url": url, "key_variable": key_variable, "parameters": dict(parameters)}
        models = [JudgeModel.of(given, default) for given in judges or [{}]]
        most = len(models) * votes
        if votes < 1 or not 0 <= quorum <= most:
            raise grpo.ConfigError(
                f"judge: votes = {votes} and quorum = {quorum}; expected votes >= 1, and a quorum of at most "
                f"{most}, the number of answers"
            )
        if requests_at_once < 1 or requests_per_minute < 0 or retries < 0 or timeout <= 0:
            raise grpo.ConfigError(
                f"judge: requests_at_once = {requests_at_once}, requests_per_minute = {requests_per_minute}, "
                f"retries = {retries}, timeout = {timeout}; expected at least 1, 0, 0, and more than 0"
            )
        self._rubric = Rubric(rubric, template, pattern, scale)
        self._combine, self._votes, self._quorum = combine, votes, quorum or most
        self._cache = Cache(cache)
        self._names = [model.name or str(number) for number, model in enumerate(models, 1)]
        if len({*self._names}) < len(self._names):
            raise grpo.ConfigError(f"judge: two judges have the same name: {', '.join(self._names)}")
        self._askers = [
            Asker(each, cache=self._cache, pace=Pace(requests_per_minute), timeout=timeout, retries=retries)
            for each in models
        ]
        self.concurrency = requests_at_once
        tries = requests_at_once * votes * (retries + 1)
        waits = tries * 60.0 / requests_per_minute if requests_per_minute else 0.0
        self.deadline = (retries + 1) * timeout + retries * LONGEST_WAIT + waits + SPARE

    def prompts(self, split: str) -> Sequence[grpo.Prompt]:
        raise grpo.ConfigError(
            "judge: a judge has no prompts; give them with tasks.NAME.data, or make it a "
            "part of the environment compose"
        )

    def solve(self, prompt: grpo.Prompt) -> str | None:
        return None

    async def aclose(self) -> None:
        for asker in self._askers:
            await asker.aclose()
        self._cache.close()

    async def score(self, episode: grpo.Episode) -> grpo.Feedback:
        messages = self._rubric.messages(episode)
        calls = [(asker, vote) for asker in self._askers for vote in range(self._votes)]
        answers = await asyncio.gather(
            *(asker.score(messages, vote, self._rubric.score) for asker, vote in calls),
            return_exceptions=True,
        )
        scores: list[list[float]] = [[] for _ in self._askers]
        failures: list[Exception] = []
        cached = 0
        for (asker, _), answer in zip(calls, answers, strict=True):
            if isinstance(answer, Exception):
                failures.append(answer)
            elif isinstance(answer, BaseException):
                raise answer
            else:
                scores[self._askers.index(asker)].append(answer[0])
                cached += answer[1]
        known = len(calls) - len(failures)
        metrics = {"cached": cached / len(calls), "failed_answers": float(len(failures))}
        if known < self._quorum:
            error = f"{known} of {len(calls)} answers have a score, {self._quorum} are needed: {failures[0]}"
            away = next(filter(None, map(away_by, failures)), None)
            return grpo.Feedback(error=error, unavailable=away, metrics=metrics)
        reward = _COMBINED[self._combine]([fmean(votes) for votes in scores if votes])
        return grpo.Feedback(reward=float(reward), metrics={**metrics, **self._spread(scores)})

    def _spread(self, scores: Sequence[Sequence[float]]) -> dict[str, float]:
        """Return the spread between judges, and between the votes of a judge, as metrics."""
        found: dict[str, float] = {}
        means = {name: fmean(votes) for name, votes in zip(self._names, scores, strict=True) if votes}
        if len(self._askers) > 1:
            found |= {f"score_{name}": mean for name, mean in means.items()}
        if pairs := list(itertools.combinations(means.values(), 2)):
            found["spread"] = max(means.values()) - min(means.values())
            found["agreement"] = fmean(float(grpo.advantages.reaches(AGREES, abs(a - b))) for a, b in pairs)
        if several := [votes for votes in scores if len(votes) > 1]:
            found["noise"] = fmean(pstdev(votes) for votes in several)
        return found
