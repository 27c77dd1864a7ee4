"""Reward functions and environments for TRL; none of them imports TRL."""

import asyncio
import json
from pathlib import Path


def length(completions, **kwargs):
    return [float(len(completion[0]["content"])) for completion in completions]


def text_length(completions, prompts, **kwargs):
    assert all(isinstance(each, str) for each in [*completions, *prompts])
    return [float(len(completion)) for completion in completions]


def matches(prompts, completions, solution, level, **kwargs):
    """Return None where there is no solution."""
    return [
        None if right is None else float(reply[0]["content"] == right) * weight
        for reply, right, weight in zip(completions, solution, level, strict=True)
    ]


async def judged(completions, **kwargs):
    await asyncio.sleep(0)
    return [0.25 for _ in completions]


class Judge:
    async def __call__(self, completions, **kwargs):
        await asyncio.sleep(0)
        return [0.5 for _ in completions]


judge = Judge()


def logs(completions, log_metric, log_extra, **kwargs):
    log_extra("seen", [0] * len(completions))
    log_metric("calls/all", 3)
    return [1.0] * len(completions)


def tokens(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]


def reads_ids(completion_ids, **kwargs):
    return [float(ids[0]) for ids in completion_ids]


def reads_state(trainer_state, completions, **kwargs):
    return [trainer_state.global_step for _ in completions]


def too_few(completions, **kwargs):
    return [1.0] * (len(completions) - 1)


def in_words(completions, **kwargs):
    return ["good"] * len(completions)


def best_of_batch(completions, **kwargs):
    longest = max(len(completion[0]["content"]) for completion in completions)
    return [float(len(completion[0]["content"]) == longest) for completion in completions]


class Counter:
    """An environment as TRL's ``environment_factory`` takes it."""

    def __init__(self):
        self.count = 0

    def reset(self, start=0, **kwargs):
        self.count = start
        return f" The counter is at {start}."

    def add(self, number: int) -> str:
        """Adds to the counter.

        Args:
            number: what is added

        Returns:
            the counter's value
        """
        self.count += number
        return str(self.count)

    def get_reward(self):
        return float(self.count)


class Silent(Counter):
    """Its reset returns nothing, and its reward is async."""

    def reset(self, **kwargs):
        self.count = 1

    async def get_reward(self):
        await asyncio.sleep(0)
        return -float(self.count)


class Fickle(Counter):
    """Its reset returns something else each time."""

    calls = 0

    def reset(self, **kwargs):
        Fickle.calls += 1
        return str(Fickle.calls)


def final_count(environments, completions, **kwargs):
    return [float(environment.count == 7) for environment in environments]


class Recorded:
    """Answers what TRL's function of this name answered, to exactly the same arguments."""

    def __init__(self, function):
        lines = Path(__file__).with_name("recorded.jsonl").read_text().splitlines()
        self.answers = {
            (row["solution"], row["reply"], row["tokens"]): row["rewards"][function]
            for row in map(json.loads, lines)
        }

    def __call__(self, prompts, completions, completion_ids, solution, trainer_state, log_extra, log_metric):
        assert prompts == [[{"role": "user", "content": "?"}]] * len(completions)
        replies = [(message["role"], message["content"]) for (message,) in completions]
        assert {role for role, _ in replies} == {"assistant"}
        keys = zip(solution, (content for _, content in replies), map(len, completion_ids), strict=True)
        return [self.answers[key] for key in keys]
