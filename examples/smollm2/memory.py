"""Two turns about where three people live: who lives in a city, then in which city somebody else lives."""

import random

import grpo_core as grpo

NAMES = ["Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Henry", "Iris", "Jack", "Kate", "Liam"]
CITIES = ["Oslo", "Rome", "Paris", "Berlin", "Madrid", "Vienna", "Dublin", "Lisbon", "Athens", "Prague"]


class Memory(grpo.Environment):
    """Pays 1 if the second reply names the right city and no other one."""

    success = 1.0
    max_turns = 2

    def __init__(self) -> None:
        chance = random.Random(0)
        self._cases = [
            (chance.sample(NAMES, 3), chance.sample(CITIES, 3), chance.randrange(3)) for _ in range(2200)
        ]

    def prompts(self, split):
        cases = self._cases[:200] if split == "validation" else self._cases[200:]
        return [
            grpo.Prompt(
                messages=" ".join(
                    f"{name} lives in {city}." for name, city in zip(names, cities, strict=True)
                )
                + f" Who lives in {cities[(asked + 1) % 3]}? Reply with the name only.",
                answer=[names[asked], cities[asked]],
            )
            for names, cities, asked in cases
        ]

    def evaluate(self, episodes):
        return [self._judged(episode) for episode in episodes]

    def _judged(self, episode):
        name, wanted = episode.prompt.answer
        if episode.turn == 0:
            return grpo.Feedback(
                done=False, messages=f"And in which city does {name} live? Reply with the city only."
            )
        named = [city for city in CITIES if city in episode.reply]
        return grpo.Feedback(reward=float(named == [wanted]))
