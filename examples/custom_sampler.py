r"""A sampler in a file: adds a hard task in the second half of the run.

grpo-core train examples/two_tasks.toml --set sampler.name=./examples/custom_sampler.py:HardLater \
    --set tasks.sort.weight=1
"""

from collections.abc import Mapping, Sequence

import grpo_core as grpo


class HardLater:
    """A sampler that implements the protocol only: ``sample``, and a state of JSON values.

    Args:
        easy: name of the task of the beginning.
        hard: name of the task that joins it, turn by turn.
        start: first step that trains the hard task.
    """

    def __init__(self, easy: str = "reverse", hard: str = "sort", start: int = 150) -> None:
        self.easy, self.hard, self.start = easy, hard, start
        self.drawn = 0

    def sample(self, loaders: Mapping[str, grpo.Loader], request: grpo.SampleRequest) -> list[grpo.Prompt]:
        tasks = [self.easy, self.hard] if request.target_version >= self.start else [self.easy]
        places = range(self.drawn, self.drawn + request.expected_prompts)
        self.drawn += request.expected_prompts
        return grpo.take_prompts(loaders, [tasks[place % len(tasks)] for place in places])

    def state_dict(self) -> dict[str, int]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.drawn = state["drawn"]


class Fading(grpo.WeightedTaskSampler):
    """The same idea with a base class that draws at random by weights, and keeps the state."""

    name = "fading"

    def weights(self, tasks: Sequence[str], request: grpo.SampleRequest) -> list[float]:
        return [1 + place * request.target_version / 100 for place, _ in enumerate(tasks)]


@grpo.hookimpl
def grpo_samplers() -> dict[str, type]:
    return {"hard_later": HardLater, "fading": Fading}
