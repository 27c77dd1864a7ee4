import itertools
import random

import grpo_core as grpo

WORDS = ["".join(letters) for letters in itertools.product("abcdefgh", repeat=3)]
HELD_OUT = random.Random(0).sample(WORDS, 64)


class Capitals(grpo.Environment):
    success = 1.0

    def prompts(self, split):
        words = HELD_OUT if split == "validation" else [word for word in WORDS if word not in HELD_OUT]
        return [grpo.Prompt(messages=f"{word}:", answer=word.upper()) for word in words]

    def evaluate(self, episodes):
        return [float(e.reply.strip() == e.prompt.answer) for e in episodes]
