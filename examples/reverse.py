"""The smallest environment, in a file that need not be installed.

grpo-core check ./examples/reverse.py:Reverse
grpo-core train --env ./examples/reverse.py:Reverse
"""

import grpo_core as grpo


class Reverse(grpo.Environment):
    def prompts(self, split):
        words = ["alpha", "beta", "gamma"] if split == "train" else ["delta", "omega"]
        return [grpo.Prompt(messages=f"Spell backwards: {w}", answer=w[::-1]) for w in words]

    def evaluate(self, episodes):
        return [float(e.reply.strip() == e.prompt.answer) for e in episodes]
