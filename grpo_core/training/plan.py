"""Divides a step among the ranks of a trainer.  Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import evolve, frozen

from grpo_core.records import Batch, Row
from grpo_core.tokens import fetched
from grpo_core.training.batching import length, rollouts, split_updates

CLOSE = 1.01
"""Ranks that differ by less from the best conceivable division are not balanced any further."""


@frozen(kw_only=True)
class RowFacts:
    """The facts about a row that every rank knows."""

    group: int
    rollout: int
    """Identifier that is equal for the rows of one rollout, and for no others."""
    sampled: int
    """Sampled tokens."""
    length: int
    """Input tokens."""
    correct: bool


@frozen(kw_only=True)
class Share:
    """The part of a step that one rank computes, and what it knows about the other parts."""

    step: int
    """Version of the weights that the step trains."""
    temperature: float
    facts: tuple[RowFacts, ...]
    """All rows of the step that have sampled tokens."""
    updates: tuple[tuple[int, ...], ...]
    """Places in ``facts`` of the rows of each optimizer update."""
    rows: Mapping[int, Row]
    """The rows that this rank computes, by their places in ``facts``."""


def shares(batch: Batch, *, updates: int, ranks: int = 1) -> list[Share]:
    """Divide a batch into optimizer updates of whole groups, and each update among the ranks.

    The rows of a rollout go to one rank.  The ranks get about as many tokens of each update.
    """
    rows = [row for row in batch.rows if row.tokens.n_sampled]
    places = {id(row): place for place, row in enumerate(rows)}
    divided = [tuple(places[id(row)] for row in update) for update in split_updates(rows, updates)]
    facts = tuple(
        RowFacts(
            group=row.group,
            rollout=rollout,
            sampled=row.tokens.n_sampled,
            length=length(row),
            correct=row.correct,
        )
        for row, rollout in zip(rows, rollouts(rows), strict=True)
    )
    mine: list[dict[int, Row]] = [{} for _ in range(ranks)]
    for update in divided:
        of_rollout: dict[int, list[int]] = {}
        for place in update:
            of_rollout.setdefault(facts[place].rollout, []).append(place)
        units = list(of_rollout.values())
        costs = [sum(facts[place].length for place in unit) for unit in units]
        for rank, chosen in enumerate(balanced(costs, ranks)):
            mine[rank] |= {place: rows[place] for unit in chosen for place in units[unit]}
    return [
        Share(
            step=batch.step,
            temperature=batch.temperature,
            facts=facts,
            updates=tuple(divided),
            rows=own,
        )
        for own in mine
    ]


def with_tokens(share: Share) -> Share:
    """Return the share with the tokens of its rows in this process, if a data plane keeps them."""
    tokens = fetched([row.tokens for row in share.rows.values()])
    rows = {
        place: row if row.tokens is its else evolve(row, tokens=its)
        for (place, row), its in zip(share.rows.items(), tokens, strict=True)
    }
    return evolve(share, rows=rows)


def balanced(costs: Sequence[int], parts: int) -> list[list[int]]:
    """Divide things among ``parts`` so that the largest sum of costs is small; return their places.

    The costliest goes first, to the part with the least so far (LPT, Graham 1969: at most 4/3 of the
    optimum); then things move out of the fullest part, or are exchanged for cheaper ones, while that helps.
    """
    divided: list[list[int]] = [[] for _ in range(parts)]
    sums = [0] * parts
    for place in sorted(range(len(costs)), key=lambda place: (-costs[place], place)):
        least = min(range(parts), key=sums.__getitem__)
        divided[least].append(place)
        sums[least] += costs[place]
    enough = CLOSE * max(max(costs, default=0), sum(costs) / parts)
    while max(sums) > enough and (better := _improvement(costs, divided, sums)) is not None:
        fullest, other, out, back = better
        divided[fullest].remove(out)
        divided[other].append(out)
        if back is not None:
            divided[other].remove(back)
            divided[fullest].append(back)
        moved = costs[out] - (0 if back is None else costs[back])
        sums[fullest] -= moved
        sums[other] += moved
    return divided


def _improvement(
    costs: Sequence[int], divided: Sequence[Sequence[int]], sums: Sequence[int]
) -> tuple[int, int, int, int | None] | None:
    """Find what to move out of the fullest part, and what to take for it, so that both sums get smaller.

    Of all such moves it is the one whose larger sum is smallest.
    """
    fullest = max(range(len(sums)), key=sums.__getitem__)
    best, found = sums[fullest], None
    for other in range(len(sums)):
        if other == fullest:
            continue
        for back in (None, *divided[other]):
            for out in divided[fullest]:
                moved = costs[out] - (0 if back is None else costs[back])
                larger = max(sums[fullest] - moved, sums[other] + moved)
                if larger < best:
                    best, found = larger, (fullest, other, out, back)
    return found
