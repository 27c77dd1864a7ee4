"""Environments as newcomers write them: each class makes the mistake of its name."""

import asyncio
import os
from pathlib import Path

import numpy as np

import grpo_core as grpo


class Base(grpo.Environment):
    """The environment without a mistake: the reply is one letter."""

    max_turns = 1

    def prompts(self, split):
        count = 40 if split == "train" else 8
        return [grpo.Prompt(messages=f"{split[0]}{i}:", answer="abcdefgh"[i % 8]) for i in range(count)]

    def evaluate(self, episodes):
        return [self.judge(e) for e in episodes]

    def judge(self, e):
        return float(e.reply == e.prompt.answer)


class Strings(Base):
    def judge(self, e):
        return "1.0"


class Nones(Base):
    def judge(self, e):
        return None


class NoReturn(Base):
    def evaluate(self, episodes):
        [self.judge(e) for e in episodes]


class Short(Base):
    def evaluate(self, episodes):
        return [self.judge(e) for e in episodes][1:]


class Numpy(Base):
    def evaluate(self, episodes):
        return np.array([self.judge(e) for e in episodes])


class Coroutine(Base):
    def evaluate(self, episodes):
        async def f():
            await asyncio.sleep(0)
            return 1.0

        return [f() for _ in episodes]


class Raises(Base):
    def evaluate(self, episodes):
        return [1 / 0 for e in episodes]


class Scalar(Base):
    def evaluate(self, episodes):
        return 1.0


class Bools(Base):
    def judge(self, e):
        return e.reply == e.prompt.answer


class Flood(Base):
    def evaluate(self, episodes):
        for _ in range(20_000):
            print("flood " * 10)
        return super().evaluate(episodes)


class Forever(Base):
    def evaluate(self, episodes):
        Path(__file__).with_name("looping").touch()
        while True:
            pass


class Empty(Base):
    def prompts(self, split):
        return []


class NoAnswer(grpo.Environment):
    def prompts(self, split):
        return [grpo.Prompt(messages="say a letter:")] * 8

    def evaluate(self, episodes):
        return [float(e.reply[:1] == "a") for e in episodes]


class Dicts(Base):
    def prompts(self, split):
        return [{"prompt": "a:", "answer": "a"}]


class Imports(Base):
    def __init__(self):
        import pandass

        self.read = pandass.read_csv


class Typo(grpo.Environment):
    def prompts(self, split):
        return [grpo.Prompt(messages="a:", answer="a")]

    def evalute(self, episodes):
        return [1.0 for _ in episodes]


class Exits(Base):
    def evaluate(self, episodes):
        os._exit(3)
