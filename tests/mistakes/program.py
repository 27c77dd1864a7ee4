"""A newcomer's program: ``python program.py NAME`` trains on the reward function NAME."""

import sys
from pathlib import Path

import numpy as np
import torch

import grpo_core as grpo


def boolean(reply):
    return "a" in reply


async def co(reply):
    return float("a" in reply)


def listed(reply):
    return [1.0]


def nan(reply):
    return float("nan")


def none(reply):
    return None


def noret(reply):
    float("a" in reply)


def nparr(reply):
    return np.array([1.0, 0.0])


def npf(reply):
    return np.float32("a" in reply)


def raising(reply):
    return 1 / len(reply[:0])


def retco(reply):
    return co(reply)


def string(reply):
    return "1.0"


def tensor(reply):
    return torch.tensor(float("a" in reply))


def trl_style(completions, **kwargs):
    return [1.0 for _ in completions]


def trl_style2(prompts, completions, answer):
    return [1.0 for _ in completions]


def unknown(reply, solution):
    return float(reply == solution)


def forever(reply):
    Path(__file__).with_name("looping").touch()
    while True:
        pass


if __name__ == "__main__":
    name = sys.argv[1]
    run = grpo.train(
        env=(lambda reply: float("a" in reply)) if name == "lambda" else globals()[name],
        data=[{"prompt": f"{i}:", "answer": "a"} for i in range(40)],
        trainer={"steps": 2, "prompts_per_step": 4},
        rollout={"group_size": 4},
        model={"options": {"warm_start_steps": 2}},
    )
    print("DONE", run)
