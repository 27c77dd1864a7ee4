"""Counts the members, replacements and tokens of a pool of engines, for tests."""

from __future__ import annotations

from attrs import frozen

from grpo_plugin_scale.engines.pool import EnginePool


@frozen(kw_only=True)
class Statistics:
    """A snapshot of a pool."""

    serving: int
    """Number of members that serve requests."""
    members: int
    """Number of all members, including members that start, are behind, or are being replaced."""
    given_up: int
    replaced: int
    tokens: int
    """Number of tokens of the running requests: prompts plus the limits of completions."""


def statistics(pool: EnginePool) -> Statistics:
    return Statistics(
        serving=len(pool._serving()),
        members=len(pool._members),
        given_up=len(pool._given_up),
        replaced=pool._replaced,
        tokens=sum(member.tokens for member in pool._members),
    )
