"""Plays the tasks that are written for TRL: a right and a wrong reply to each; prints the rewards.

    PYTHON_WITH_TRL tests/benchmarks/five_tasks/play_trl.py

The functions and classes are called as GRPOTrainer calls them; no model is trained.
"""

import asyncio
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("OPENAI_API_KEY", "unused")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parent / "with_trl"))

import exact
import game
import judge
import mixed
import tool
from judging import judge as serving


def said(text):
    return [{"role": "assistant", "content": text}]


def played(guesses):
    environment = game.Game()
    environment.reset(digit="6")
    for guess in guesses:
        environment.guess(guess)
    return environment


def main():
    rows = exact.rows(["abc"])[0]
    right = tool.price(item="ab")
    with serving() as url:
        judge.JUDGE.base_url = url
        judged = asyncio.run(judge.polite(prompts=["?", "?"], completions=["please", "now"]))
    both = mixed.rows(["abc"], [0])
    environments = [played(["4", "6"]), played(["1", "2", "3"]), mixed.Capitals()]
    told = {
        "exact": exact.exact(completions=["ABC", "abc"], answer=[rows["answer"]] * 2),
        "game": [played(each).get_reward() for each in (["4", "6"], ["9", "6"])],
        "tool": tool.exact(completions=[said(right), said("1")], answer=[right, right]),
        "judge": judged,
        "mixed": [
            sorted(both["environment"]),
            mixed.won(environments=environments),
            mixed.exact(completions=[said("ABC"), said("x")], answer=["ABC", None]),
        ],
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
