"""Divides a step among the ranks of a trainer.  Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, Literal

from attrs import evolve, frozen

from grpo_core.records import Batch, Row
from grpo_core.tokens import digest_of, fetched
from grpo_core.training.batching import Costs, layout_cost, length, rollouts, split_updates
from grpo_core.training.dealing import Packable, dealt

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
    packed: bool
    """Whether the rows of its update are packed, so that rows with the same prompt have it once."""


@frozen(kw_only=True)
class Layout:
    """How a trainer makes micro-batches of rows, which decides what a rank has to compute."""

    packing: Literal[False, True, "auto"]
    """As ``trainer.packing``; False if the model cannot be packed."""
    costs: Costs
    together: bool = False
    """Whether a rollout of several rows is a micro-batch of its own, which shares no prompt with others."""


PADDED = Layout(packing=False, costs=Costs(budget=8192, overhead=16, packed=1.0))
"""Rows side by side."""


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


def shares(batch: Batch, *, updates: int, ranks: int = 1, layout: Layout = PADDED) -> list[Share]:
    """Divide a batch into optimizer updates of whole groups, and each update among the ranks.

    The rows of a rollout go to one rank.  The ranks get about as many tokens of each update; where rows are
    packed, a prompt that rollouts of a rank share counts once.
    """
    rows = [row for row in batch.rows if row.tokens.n_sampled]
    places = {id(row): place for place, row in enumerate(rows)}
    divided = [tuple(places[id(row)] for row in update) for update in split_updates(rows, updates)]
    of_rollouts = rollouts(rows)
    lengths = [length(row) for row in rows]
    prompts = _prompts(rows, of_rollouts, together=layout.together)
    packed = [False] * len(rows)
    mine: list[dict[int, Row]] = [{} for _ in range(ranks)]
    for update in divided:
        units: dict[int, list[int]] = {}
        for place in update:
            units.setdefault(of_rollouts[place], []).append(place)
        parts, packs = _dealt(list(units.values()), lengths, prompts, ranks, layout)
        for rank, part in enumerate(parts):
            mine[rank] |= {place: rows[place] for place in part}
        for place in update:
            packed[place] = packs
    facts = tuple(
        RowFacts(
            group=row.group,
            rollout=of_rollouts[place],
            sampled=row.tokens.n_sampled,
            length=lengths[place],
            correct=row.correct,
            packed=packed[place],
        )
        for place, row in enumerate(rows)
    )
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


def _prompts(
    rows: Sequence[Row], of_rollouts: Sequence[int], *, together: bool
) -> list[tuple[Hashable, int]]:
    """Return of each row what it has in common with the rows that may share its prompt, and its tokens."""
    counts = Counter(of_rollouts)
    return [
        (
            (digest_of(row.prompt_ids), rollout if together and counts[rollout] > 1 else None),
            len(row.prompt_ids),
        )
        for row, rollout in zip(rows, of_rollouts, strict=True)
    ]


def _dealt(
    units: Sequence[Sequence[int]],
    lengths: Sequence[int],
    prompts: Sequence[tuple[Hashable, int]],
    ranks: int,
    layout: Layout,
) -> tuple[list[list[int]], bool]:
    """Deal the rows of an update to the ranks; return whether they are packed.

    ``"auto"`` takes the way in which the rank that has the most to compute has less.
    """
    ways = []
    for packed in (False, True) if layout.packing == "auto" else (layout.packing,):
        if packed:
            chosen = dealt(_packables(units, lengths, prompts, layout.costs.budget), ranks)
        else:
            chosen = balanced([sum(lengths[place] for place in unit) for unit in units], ranks)
        parts = [[place for number in numbers for place in units[number]] for numbers in chosen]
        ways.append((parts, packed))
    if len(ways) == 1:
        return ways[0]

    def cost(way: tuple[list[list[int]], bool]) -> float:
        parts, packed = way
        return max(
            layout_cost([lengths[i] for i in part], [prompts[i] for i in part], packed, layout.costs)
            for part in parts
        )

    return min(ways, key=cost)


def _packables(
    units: Sequence[Sequence[int]],
    lengths: Sequence[int],
    prompts: Sequence[tuple[Hashable, int]],
    budget: int,
) -> list[Packable]:
    """Return each rollout as packed micro-batches compute it.

    A rollout shares with others the prompt of its rows that most rollouts have.  Rollouts share a prompt as
    far as they are together in a micro-batch: what goes beyond the budget has it once more.
    """
    counts = Counter(prompt for unit in units for prompt in {prompts[place] for place in unit})
    made: list[Packable] = []
    filled: dict[Hashable, tuple[int, int]] = {}
    for unit in units:
        of_unit = {prompts[place] for place in unit}
        tokens = sum(lengths[place] - prompts[place][1] for place in unit) + sum(n for _, n in of_unit)
        prompt, shared = max(
            (prompts[place] for place in unit), key=lambda each: (counts[each] > 1, each[1], counts[each])
        )
        number, room = filled.get(prompt, (0, budget - shared))
        if room < tokens - shared:
            number, room = number + 1, budget - shared
        filled[prompt] = number, room - (tokens - shared)
        made.append(Packable(prompt=(prompt, number), shared=shared, own=tokens - shared))
    return made


def with_tokens(share: Share) -> Share:
    """Return the share with the tokens of its rows in this process, if a data plane keeps them."""
    rows = share.rows.values()
    found: Iterator[Any] = iter(fetched([part for row in rows for part in (row.prompt_ids, row.tokens)]))
    return evolve(
        share,
        rows={
            place: row if row.tokens is tokens else evolve(row, prompt_ids=ids, tokens=tokens)
            for (place, row), ids, tokens in zip(share.rows.items(), found, found, strict=True)
        },
    )


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
