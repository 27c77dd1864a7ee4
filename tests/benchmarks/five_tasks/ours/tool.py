import itertools
import random

import grpo_core as grpo

NAMES = ["".join(letters) for letters in itertools.product("abcdefghijklmnop", repeat=2)]
PRICES = {name: str(random.Random(name).randrange(10, 100)) for name in NAMES}
HELD_OUT = random.Random(0).sample(NAMES, 40)


def price(item: str) -> str:
    """Looks a price up.

    Args:
        item: name of what is sold
    """
    return PRICES[item]


class Shop(grpo.Environment):
    max_turns = 2
    success = 1.0
    tools = (price,)

    def prompts(self, split):
        names = HELD_OUT if split == "validation" else [name for name in NAMES if name not in HELD_OUT]
        return [grpo.Prompt(messages=f"{name}?", answer=PRICES[name]) for name in names]

    def evaluate(self, episodes):
        return [float(e.reply.strip() == e.prompt.answer) for e in episodes]
