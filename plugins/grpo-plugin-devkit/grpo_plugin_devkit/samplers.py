"""The contract of samplers, as a test for authors.

    from grpo_plugin_devkit.samplers import check_sampler

    def test_mine_keeps_the_contract():
        check_sampler(Mine)

Needs Hypothesis (``pip install 'grpo-core[testing]'``), which reports the shortest sequence of calls that
violates the contract.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

try:
    from hypothesis import HealthCheck, settings
    from hypothesis import strategies as st
    from hypothesis.errors import Flaky
    from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
except ImportError as error:
    raise ImportError("samplers are checked with Hypothesis: pip install 'grpo-core[testing]'") from error

from grpo_core import Group, Prompt, Rollout, Sampler, SampleRequest
from grpo_core.data.samplers import checked_sample
from grpo_core.testing import MemoryLoader

SMALL = 100_000
"""Largest size in bytes of a sampler's state as JSON, which is part of each checkpoint."""


class SamplerContract(RuleBasedStateMachine):
    """A state machine that calls a sampler like a run.

    It requests any number of prompts at any version, reports groups late, out of order, twice or never, and
    saves and resumes the sampler at any time.

    The contract:

    * the sampler returns exactly the requested number of prompts;
    * they contain each prompt that it took from the loaders once; it may generate the others;
    * the state is small JSON;
    * a resumed sampler draws like the uninterrupted one, and like another one resumed from the same state.

    ``make`` and ``tasks`` are set by ``check_sampler``.
    """

    make: Callable[[], Sampler]
    tasks: Mapping[str, int]

    def __init__(self) -> None:
        super().__init__()
        self.sampler = self.make()
        self.uninterrupted = self.make()
        assert isinstance(self.sampler, Sampler), f"{self.sampler!r} has no method sample(loaders, request)"
        self.loaders = {task: MemoryLoader(task, n) for task, n in self.tasks.items()}
        self.version = 0
        self.returned: list[Prompt] = []

    @rule(n=st.integers(1, 40), staleness=st.integers(0, 3), behind=st.integers(0, 3))
    def draw(self, n: int, staleness: int, behind: int) -> None:
        generation = max(0, self.version - behind)
        request = SampleRequest(
            generation_version=generation,
            target_version=max(self.version, generation + staleness),
            current_version=self.version,
            expected_prompts=n,
        )
        expected = _draw(self.uninterrupted, self.loaders_copied(), request)
        prompts = _draw(self.sampler, self.loaders, request)
        self.returned += prompts
        assert prompts == expected, "a resumed sampler draws other prompts than an uninterrupted one"

    @rule(by=st.integers(1, 3))
    def train(self, by: int) -> None:
        self.version += by

    @precondition(lambda self: self.returned)
    @rule(
        indices=st.lists(st.integers(0, 39), min_size=1, max_size=20),
        rewards=st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=2, max_size=4),
    )
    def hear_of_groups(self, indices: list[int], rewards: list[float]) -> None:
        slots = [index % len(self.returned) for index in indices]
        groups = [
            Group(
                prompt=self.returned[slot],
                rollouts=tuple(Rollout(reward=reward) for reward in rewards),
                generation_version=self.version,
                target_version=self.version,
                slot=slot,
            )
            for slot in slots
        ]
        for sampler in (self.sampler, self.uninterrupted):
            if hasattr(sampler, "observe"):
                sampler.observe(groups)

    @precondition(lambda self: self.returned)
    @rule(index=st.integers(0, 39))
    def lose_a_prompt(self, index: int) -> None:
        """Report a prompt that was filtered or skipped."""
        prompt = self.returned[index % len(self.returned)]
        for sampler in (self.sampler, self.uninterrupted):
            if hasattr(sampler, "untrained"):
                sampler.untrained(prompt, self.version)

    @rule()
    def save_and_resume(self) -> None:
        state = _state_of(self.sampler)
        self.sampler, other = self._resumed(state), self._resumed(state)
        request = SampleRequest(
            generation_version=self.version,
            target_version=self.version,
            current_version=self.version,
            expected_prompts=23,
        )
        futures = [
            _draw(sampler, self.loaders_copied(), request)
            for sampler in (other, self._resumed(_state_of(self.sampler)))
        ]
        assert futures[0] == futures[1], "two samplers resumed from one state draw other prompts"

    def loaders_copied(self) -> dict[str, MemoryLoader]:
        return {task: loader.copy() for task, loader in self.loaders.items()}

    def _resumed(self, state: Any) -> Sampler:
        sampler = self.make()
        if state is not None and hasattr(sampler, "load_state_dict"):
            sampler.load_state_dict(json.loads(state))
        return sampler


def _draw(sampler: Sampler, loaders: Mapping[str, MemoryLoader], request: SampleRequest) -> list[Prompt]:
    """Draw prompts with the checks of a run: each prompt from the loaders is returned once."""
    before = {task: len(loader.drawn) for task, loader in loaders.items()}
    prompts = checked_sample(sampler, type(sampler).__name__, loaders, request)
    loaded = _ids(prompt for task, loader in loaders.items() for prompt in loader.drawn[before[task] :])
    returned = _ids(prompts)
    twice = sorted(prompt for prompt in loaded if returned[prompt] > loaded[prompt])
    assert not loaded - returned, f"taken from the loaders and not returned: {sorted(loaded - returned)}"
    assert not twice, f"returned more often than taken: {twice}"
    return prompts


def _ids(prompts: Iterable[Prompt]) -> Counter[tuple[str, str]]:
    return Counter((prompt.environment, prompt.id) for prompt in prompts)


def _state_of(sampler: Sampler) -> str | None:
    """Return the state as JSON, as in a checkpoint."""
    if not hasattr(sampler, "state_dict"):
        return None
    state = json.dumps(sampler.state_dict(), allow_nan=False)
    assert len(state) <= SMALL, f"the state has {len(state):,} bytes, expected at most {SMALL:,}"
    return state


def check_sampler(
    make: Callable[[], Sampler], *, tasks: Mapping[str, int] | None = None, examples: int = 100
) -> None:
    """Run ``SamplerContract``; the test fails if the contract is violated.

    Args:
        make: returns a new sampler, the same each time, such as a class.
        tasks: number of prompts of each task.
        examples: number of generated runs.
    """
    machine = type(
        "Contract",
        (SamplerContract,),
        {"make": staticmethod(make), "tasks": dict(tasks or {"c": 50, "a": 3, "b": 7})},
    )
    chosen = settings(
        max_examples=examples,
        stateful_step_count=30,
        deadline=None,
        database=None,
        print_blob=False,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    try:
        run_state_machine_as_test(machine, settings=chosen)
    except Flaky as error:
        raise AssertionError(
            "the sampler is not determined by its options and calls: the same calls, repeated, gave other "
            "prompts"
        ) from error
