import itertools
import random

from datasets import Dataset
from trl import GRPOTrainer

NAMES = ["".join(letters) for letters in itertools.product("abcdefghijklmnop", repeat=2)]
PRICES = {name: str(random.Random(name).randrange(10, 100)) for name in NAMES}
HELD_OUT = random.Random(0).sample(NAMES, 40)


def price(item: str) -> str:
    """Looks a price up.

    Args:
        item: name of what is sold

    Returns:
        the price
    """
    return PRICES[item]


def rows(names):
    return Dataset.from_list(
        [{"prompt": [{"role": "user", "content": f"{name}?"}], "answer": PRICES[name]} for name in names]
    )


def exact(completions, answer, **kwargs):
    return [float(said[-1]["content"].strip() == right) for said, right in zip(completions, answer)]


if __name__ == "__main__":
    GRPOTrainer(
        model="Qwen/Qwen3-0.6B",
        reward_funcs=exact,
        tools=[price],
        train_dataset=rows([name for name in NAMES if name not in HELD_OUT]),
        eval_dataset=rows(HELD_OUT),
    ).train()
