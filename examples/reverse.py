"""The smallest plugin: an environment in a file, which need not be installed.

grpo-core train --env ./examples/reverse.py:Reverse
"""

import grpo_core as grpo


class Reverse(grpo.Environment):
    def prompts(self, split):
        words = ["alpha", "beta", "gamma"] if split == "train" else ["delta", "omega"]
        return [grpo.Prompt(messages=f"Spell backwards: {w}", answer=w[::-1]) for w in words]

    def evaluate(self, episodes):
        return [float(e.reply.strip() == e.prompt.answer) for e in episodes]


@grpo.hookimpl
def grpo_environments():
    return {"reverse": Reverse}
