"""A sentence of one of four forms becomes JSON: the keys are given, and their values are checked."""

import itertools
import json
import random

import grpo_core as grpo

NAMES = [
    "Anna",
    "Ben",
    "Clara",
    "David",
    "Emma",
    "Felix",
    "Grace",
    "Henry",
    "Iris",
    "Jack",
    "Kate",
    "Liam",
    "Maria",
    "Noah",
    "Olga",
    "Paul",
]
CITIES = [
    "Oslo",
    "Rome",
    "Paris",
    "Berlin",
    "Madrid",
    "Vienna",
    "Dublin",
    "Lisbon",
    "Athens",
    "Prague",
    "Warsaw",
    "Geneva",
]
FORMS = [
    "{name}, {age}, is from {city}.",
    "In {city} lives {name}, who is {age}.",
    "At {age}, {name} moved to {city}.",
    "{city} is the home of {name} (aged {age}).",
]


class Record(grpo.Environment):
    """Pays 0.2 for a JSON object, 0.2 for exactly the keys, and 0.2 for each right value of three."""

    success = 1.0

    def __init__(self) -> None:
        people = list(itertools.product(NAMES, range(18, 80), CITIES))
        random.Random(0).shuffle(people)
        self._people = {"validation": people[:200], "train": people[200:4200]}

    def prompts(self, split):
        return [
            grpo.Prompt(
                messages=f"{form.format(name=name, age=age, city=city)} Write this as JSON with the keys "
                '"city", "name" and "age" (a number).',
                answer=json.dumps({"city": city, "name": name, "age": age}),
            )
            for (name, age, city), form in zip(self._people[split], itertools.cycle(FORMS), strict=False)
        ]

    def evaluate(self, episodes):
        return [self._judged(episode.reply, json.loads(episode.prompt.answer)) for episode in episodes]

    def _judged(self, reply, wanted):
        try:
            given = json.loads(reply[reply.index("{") : reply.rindex("}") + 1])
        except (ValueError, RecursionError):
            given = None
        is_object = isinstance(given, dict)
        keys = is_object and given.keys() == wanted.keys()
        values = sum(is_object and key in given and given[key] == wanted[key] for key in wanted)
        parts = {"object": is_object, "keys": keys, "values": values / 3}
        return grpo.Feedback(reward=(is_object + keys + values) / 5, metrics=parts)

    def solve(self, prompt):
        return prompt.answer
