"""An environment with flawed rewards, which `grpo-core audit` finds.

grpo-core audit ./examples/capitals.py:Capitals
"""

import random

import grpo_core as grpo

CAPITALS = """Austria Vienna, Belgium Brussels, Bulgaria Sofia, Chile Santiago, Croatia Zagreb, Cuba Havana,
Denmark Copenhagen, Egypt Cairo, Finland Helsinki, France Paris, Germany Berlin, Ghana Accra, Greece Athens,
Hungary Budapest, Iceland Reykjavik, Iran Tehran, Ireland Dublin, Italy Rome, Japan Tokyo, Kenya Nairobi,
Latvia Riga, Lebanon Beirut, Nepal Kathmandu, Norway Oslo, Peru Lima, Poland Warsaw, Portugal Lisbon,
Romania Bucharest, Serbia Belgrade, Spain Madrid, Sweden Stockholm, Turkey Ankara, Ukraine Kyiv"""


class Capitals(grpo.Environment):
    """Name the capital of a country.  Any reply in which it stands is right, which is one of the mistakes."""

    success = 1.0

    def prompts(self, split):
        pairs = [pair.split() for pair in CAPITALS.split(",")]
        if split == "validation":
            pairs = random.Random(0).sample(pairs, 10)  # the other mistake: they are trained on as well
        return [grpo.Prompt(messages=f"What is the capital of {a}?", answer=b) for a, b in pairs]

    def evaluate(self, episodes):
        return [float(e.prompt.answer.lower() in e.reply.lower()) for e in episodes]
