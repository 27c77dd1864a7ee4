"""Train from Python: a reward function and its prompts.

python examples/train.py
"""

import itertools
import random

import grpo_core


def ordered(reply, answer):
    return float(reply.strip() == answer)


if __name__ == "__main__":
    words = ["".join(letters) for letters in itertools.permutations("abcdef", 4)]
    rows = [{"prompt": f"{word}>", "answer": "".join(sorted(word))} for word in words]
    random.Random(0).shuffle(rows)  # held-out rows look like the others
    data = {"train": rows[40:], "validation": rows[:40]}
    run = grpo_core.train(env=ordered, data=data, trainer={"steps": 60})
    print(run, run.validations()[-1]["reward"])
