"""The contract of filters of groups, as checks for authors.

    def test_mine_keeps_the_contract():
        check_filter(my_filter, threshold=0.5)

Each check raises AssertionError.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from attrs import evolve

from grpo_core import Group, Rollout
from grpo_plugin_devkit.contracts import Contract, Noted
from grpo_plugin_devkit.objectives import a_group

REWARDS: tuple[tuple[float | None, ...], ...] = (
    (0.0, 1.0, 1.0, 0.25),
    (0.0, 0.0, 0.0, 1.0),
    (1.0, 1.0, 1.0, 0.0),
    (0.4, 0.5, 0.6, 0.55),
    (1.0, 1.0, 1.0, 1.0),
    (0.0, 0.0, 0.0, 0.0),
    (-3.0, 2.0, 0.5, 0.5),
)
"""Rewards of groups, from all failures to all successes."""
UNSCORED: tuple[tuple[float | None, ...], ...] = ((None, 1.0, 0.0, 1.0), (None, None, None, None))
"""Rewards of groups with truncated rollouts, under ``rollout.truncated = "unscored"``."""
LENGTHS = ((3, 6, 2, 9), (40, 30, 55, 61), (700, 400, 812, 90), (5000, 6000, 4000, 7000))
"""Sampled tokens of the rollouts of a group."""


def check_filter(function: Callable[..., Any], **options: Any) -> None:
    """Check a filter's contract.  Raises AssertionError."""
    FilterContract(lambda group: function(group, **options)).check()


class FilterContract(Contract):
    """The contract of a filter.

    Args:
        rejects: the filter with its options filled in.
    """

    def __init__(self, rejects: Callable[[Group], Any]) -> None:
        self._rejects = rejects

    def it_returns_a_text_that_says_why_or_none(self) -> None:
        for group in groups():
            self._reason(group)

    def it_takes_groups_with_unscored_rollouts(self) -> None:
        for rewards in UNSCORED:
            self._reason(_group(rewards))

    def it_takes_groups_of_any_size(self) -> None:
        for size in (2, 3, 16, 64):
            self._reason(_group([float(i % 2) for i in range(size)]))

    def it_lets_some_group_pass(self) -> None:
        reasons = [self._reason(group) for group in groups()]
        assert None in reasons, (
            f"it rejects all {len(reasons)} groups that were tried, of all rewards and lengths, so that "
            f"nothing would be trained; the first: {reasons[0]!r}"
        )

    def the_order_within_a_group_does_not_matter(self) -> None:
        for group in groups():
            turned = evolve(group, rollouts=tuple(group.rollouts[i] for i in (2, 0, 3, 1)))
            first, second = self._reason(group), self._reason(turned)
            assert (first is None) == (second is None), (
                f"rewards {group.rewards}: it says {first!r}, and {second!r} when the rollouts are in "
                "another order"
            )

    def it_returns_the_same_each_time_and_changes_no_group(self) -> None:
        for group in groups():
            before = _seen(group)
            first, second = self._reason(group), self._reason(group)
            assert first == second, f"it says {first!r}, and then {second!r} for the same group"
            assert _seen(group) == before, "it changed the group, which others see as well"

    def what_it_rejects(self) -> None:
        rejected = sum(self._reason(group) is not None for group in groups())
        raise Noted(f"{rejected} of the {len(groups())} groups that were tried")

    def _reason(self, group: Group) -> str | None:
        reason: str | None = self._rejects(group)
        expected = "expected a text that says why the group is not trained, or None"
        if reason is not None:
            assert isinstance(reason, str), f"it returned {type(reason).__name__} {reason!r:.60}; {expected}"
            assert reason.strip(), f"it returned {reason!r}, which says nothing; {expected}"
        return reason


def groups() -> list[Group]:
    """Return groups of four scored rollouts with all combinations of rewards and lengths."""
    return [_group(rewards, lengths) for lengths, rewards in itertools.product(LENGTHS, REWARDS)]


class _Parts(dict[str, float]):
    """Metrics that contain every name, because a filter may use the metrics of a specific environment."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self._value = value

    def __missing__(self, name: str) -> float:
        return self._value

    def get(self, name: str, default: Any = None) -> Any:
        return self._value


def _group(rewards: Sequence[float | None], lengths: Sequence[int] = LENGTHS[0]) -> Group:
    """Return a group with these rewards; a reward of 1 is a success."""
    made = a_group([reward or 0.0 for reward in rewards], lengths=lengths)

    def rollout(index: int, given: Rollout, reward: float | None) -> Rollout:
        return evolve(
            given,
            reward=reward,
            success=None if reward is None else reward >= 1.0,
            finish_reason="length" if reward is None else given.finish_reason,
            messages=({"role": "user", "content": "x"}, {"role": "assistant", "content": f"reply {index}"}),
            metrics=_Parts((index % 4) / 3),
        )

    both = zip(made.rollouts, rewards, strict=True)
    return evolve(made, rollouts=tuple(rollout(index, *each) for index, each in enumerate(both)))


def _seen(group: Group) -> list[Any]:
    """Return the parts of a group that a filter could modify."""
    return [
        (dict(rollout.metrics), [dict(message) for message in rollout.messages], rollout.reward)
        for rollout in group.rollouts
    ]
