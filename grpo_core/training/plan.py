"""Divides a step among the ranks of a trainer.  Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, TypeVar

from attrs import evolve, frozen

from grpo_core.contracts.records import Batch, Row
from grpo_core.contracts.tokens import digest_of, fetched
from grpo_core.training.batching import length, rollouts, split_updates

T = TypeVar("T")


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
class Layout:
    """How a trainer makes micro-batches of rows, which decides what a rank has to compute."""

    packed: bool = False
    """Whether rows are packed, so that rows with the same prompt share it."""
    together: bool = False
    """Whether a rollout of several rows is a separate micro-batch, which shares no prompt with others."""


PADDED = Layout()
"""Rows with padding."""


@frozen(kw_only=True)
class Share:
    """The part of a step that one rank computes, and facts about the other parts."""

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

    The rows of a rollout go to one rank.  Where rows are packed, a prompt that rows of a rank share is
    computed once, so whole groups go to one rank; they are divided if there are fewer groups than ranks.
    """
    rows = [row for row in batch.rows if row.tokens.n_sampled]
    indices = {id(row): index for index, row in enumerate(rows)}
    divided = [tuple(indices[id(row)] for row in update) for update in split_updates(rows, updates)]
    of_rollouts = rollouts(rows)
    lengths = [length(row) for row in rows]
    prompts = _prompts(rows, of_rollouts, together=layout.together)
    mine: list[dict[int, Row]] = [{} for _ in range(ranks)]
    for update in divided:
        one_rank = _together(update, [of_rollouts[index] for index in update])
        groups = _together(one_rank, [rows[first].group for first, *_ in one_rank])
        for rank, part in enumerate(_dealt(groups, lengths, prompts, ranks, packed=layout.packed)):
            mine[rank] |= {index: rows[index] for index in part}
    facts = tuple(
        RowFacts(
            group=row.group,
            rollout=of_rollouts[index],
            sampled=row.tokens.n_sampled,
            length=lengths[index],
            correct=row.correct,
        )
        for index, row in enumerate(rows)
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
    """Return for each row a key that is equal for rows that may share its prompt, and the prompt's tokens."""
    counts = Counter(of_rollouts)
    return [
        (
            (digest_of(row.prompt_ids), rollout if together and counts[rollout] > 1 else None),
            len(row.prompt_ids),
        )
        for row, rollout in zip(rows, of_rollouts, strict=True)
    ]


def _together(things: Iterable[T], keys: Iterable[int]) -> list[list[T]]:
    """Group things with equal keys, in the order in which the keys occur."""
    found: dict[int, list[T]] = {}
    for thing, key in zip(things, keys, strict=True):
        found.setdefault(key, []).append(thing)
    return list(found.values())


def _dealt(
    groups: Sequence[list[list[int]]],
    lengths: Sequence[int],
    prompts: Sequence[tuple[Hashable, int]],
    ranks: int,
    *,
    packed: bool,
) -> list[list[int]]:
    """Deal the rows of an update to the ranks: whole groups if they are packed, else rollouts.

    ``groups`` are the rollouts of each group, each with the indices of its rows.  Returns the indices of each
    rank's rows.
    """

    def tokens(indices: Sequence[int]) -> int:
        shared = sum(prompts[i][1] for i in indices) - sum(n for _, n in {prompts[i] for i in indices})
        return sum(lengths[i] for i in indices) - (shared if packed else 0)

    units = [[*chain(*part)] for part in _enough(groups, ranks)] if packed else [*chain(*groups)]
    chosen = balanced([tokens(unit) for unit in units], ranks)
    return [[index for number in numbers for index in units[number]] for numbers in chosen]


def _enough(groups: Sequence[list[T]], ranks: int) -> list[list[T]]:
    """Divide groups, the largest first, until there is a part for each rank."""
    parts = list(groups)
    while len(parts) < ranks and len(largest := max(parts, key=len, default=[])) > 1:
        parts.remove(largest)
        parts += [largest[::2], largest[1::2]]
    return parts


def with_tokens(share: Share) -> Share:
    """Return the share with the tokens of its rows in this process, if a data plane keeps them."""
    rows = share.rows.values()
    found: Iterator[Any] = iter(fetched([part for row in rows for part in (row.prompt_ids, row.tokens)]))
    return evolve(
        share,
        rows={
            index: row if row.tokens is tokens else evolve(row, prompt_ids=ids, tokens=tokens)
            for (index, row), ids, tokens in zip(share.rows.items(), found, found, strict=True)
        },
    )


def balanced(costs: Sequence[int], parts: int) -> list[list[int]]:
    """Divide things among ``parts``, the costliest first, each to the part with the lowest sum so far.

    The largest sum is at most 4/3 of the smallest that is possible (Graham 1969).  Returns their indices.
    """
    divided: list[list[int]] = [[] for _ in range(parts)]
    sums = [0] * parts
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        least = min(range(parts), key=sums.__getitem__)
        divided[least].append(index)
        sums[least] += costs[index]
    return divided
