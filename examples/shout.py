"""The smallest plugin: an environment in a file, without installation.

grpo-core train --env ./examples/shout.py:Shout
"""

import itertools
import random

import grpo_core as grpo


class Shout(grpo.Environment):
    """Say a word in capitals: "hedge:" is answered by "HEDGE"."""

    success = 1.0  # the reward from which a reply counts as right

    def prompts(self, split):
        words = ["".join(letters) for letters in itertools.product("abcdefgh", repeat=5)]
        random.Random(0).shuffle(words)
        chosen = words[400:] if split == "train" else words[:400]
        return [grpo.Prompt(messages=f"{word}:", answer=word.upper()) for word in chosen]

    def evaluate(self, episodes):
        return [float(e.reply.strip() == e.prompt.answer) for e in episodes]


@grpo.hookimpl
def grpo_environments():
    return {"shout": Shout}
