"""Plays the tasks that are written for verifiers: a right and a wrong reply to each; prints the rewards.

    PYTHON_WITH_VERIFIERS tests/benchmarks/five_tasks/play_verifiers.py

The tasksets are loaded by verifiers; the rewards, the tool and the game are called as its rollouts call them.
"""

import asyncio
import json
import os
import sys
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("OPENAI_API_KEY", "unused")
sys.path.insert(0, str(Path(__file__).parent / "with_verifiers"))

from judging import judge as serving
from verifiers.v1.utils.loaders import load_taskset, taskset_config_type

LETTERS = Path("letters.jsonl")


def tasks(name, **config):
    return list(load_taskset(taskset_config_type(name).model_validate({"id": name, **config})))


class Trace:
    """A stand-in for the record of a rollout."""

    def __init__(self, reply=""):
        self.last_reply, self.rewards, self.info, self.extra_usage = reply, {}, {}, None

    def record_reward(self, name, value, weight):
        self.rewards[name] = value * weight

    def __getattr__(self, name):
        return lambda *_, **__: None


async def guessed(task, guesses):
    """The reward of a game in which a player makes these guesses."""
    trace, left = Trace(), iter(guesses)

    class Interaction:
        async def turn(self, message=None):
            trace.last_reply = next(left)
            return SimpleNamespace(last_reply=trace.last_reply, terminated=False)

    @asynccontextmanager
    async def interaction(of):
        yield playing

    import game

    playing: Any = Interaction()
    playing.trace = trace
    player = SimpleNamespace(interaction=interaction)
    await game.Guess.run(SimpleNamespace(), task, SimpleNamespace(player=player))
    return trace.rewards["won"]


async def told():
    capital, question = tasks("exact")[0], tasks("tool")[0]
    round_ = next(task for task in tasks("game") if task.data.digit == "6")
    (prices,) = type(question).toolsets(question.config)
    price = await prices.price("aa")
    with serving() as url, tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        LETTERS.write_text('{"prompt": "Write a letter."}\n')
        letter = tasks("judge", task={"judge": {"base_url": url}})[0]
        judged = [await letter.polite(Trace(reply)) for reply in ("please", "now")]
        os.chdir("/")
    return {
        "exact": [await capital.exact(Trace(reply)) for reply in ("AAA", "aaa")],
        "game": [await guessed(round_, each) for each in ("46", "96")],
        "tool": [await question.exact(Trace(reply)) for reply in (price, "1")],
        "judge": judged,
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(told())))
