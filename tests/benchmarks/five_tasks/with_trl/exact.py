import itertools
import random

from datasets import Dataset
from trl import GRPOTrainer

WORDS = ["".join(letters) for letters in itertools.product("abcdefgh", repeat=3)]
HELD_OUT = random.Random(0).sample(WORDS, 64)


def rows(words):
    return Dataset.from_list([{"prompt": f"{word}:", "answer": word.upper()} for word in words])


def exact(completions, answer, **kwargs):
    return [float(said.strip() == right) for said, right in zip(completions, answer)]


if __name__ == "__main__":
    GRPOTrainer(
        model="Qwen/Qwen3-0.6B",
        reward_funcs=exact,
        train_dataset=rows([word for word in WORDS if word not in HELD_OUT]),
        eval_dataset=rows(HELD_OUT),
    ).train()
