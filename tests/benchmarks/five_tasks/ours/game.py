import random

import grpo_core as grpo


class Guess(grpo.Environment):
    max_turns = 3
    success = 1.0

    def prompts(self, split):
        games = range(800) if split == "train" else range(800, 900)
        return [grpo.Prompt(messages=f"game {n}:", answer=random.Random(n).choice("1234567")) for n in games]

    def evaluate(self, episodes):
        return [self.feedback(e.reply.strip(), e.prompt.answer) for e in episodes]

    def feedback(self, guess, digit):
        if guess == digit or guess not in set("1234567"):
            return float(guess == digit)
        return grpo.Feedback(reward=0.0, done=False, messages="+" if guess < digit else "-")
