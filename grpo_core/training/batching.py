"""Divides the rows of a step into optimizer updates, and an update into micro-batches.  Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

import numpy as np
from attrs import frozen

from grpo_core.records import Row


def split_updates(rows: Sequence[Row], n: int) -> list[list[Row]]:
    """Deal whole groups in turn to ``n`` updates (fewer if there are fewer groups; never an empty one).

    Dealing in turn mixes what a sampler delivers in blocks, such as one task after another.
    """
    groups: dict[int, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    updates: list[list[Row]] = [[] for _ in range(min(n, len(groups)))]
    for i, members in enumerate(groups.values()):
        updates[i % len(updates)].extend(members)
    return updates


def rollouts(rows: Sequence[Row]) -> list[int]:
    """Return a number for each row that is equal for the rows of one rollout."""
    return [-1 - place if row.rollout is None else row.rollout for place, row in enumerate(rows)]


def length(row: Row) -> int:
    """Return the input tokens of a row: up to the one before the last sampled token."""
    sampled = row.tokens.sampled
    if sampled.size and sampled[-1]:  # nearly every row, of which a step has thousands
        return len(row.prompt_ids) + sampled.size - 1
    places = np.flatnonzero(sampled)
    return len(row.prompt_ids) + int(places[-1]) if places.size else 0


def of_several_rows(rows: Sequence[Row]) -> list[list[int]]:
    """Return the places of the rows of each rollout that has several."""
    places: dict[int, list[int]] = {}
    for place, rollout in enumerate(rollouts(rows)):
        places.setdefault(rollout, []).append(place)
    return [of_one for of_one in places.values() if len(of_one) > 1]


def packs(lengths: Sequence[int], prompts: Sequence[tuple[Hashable, int]], budget: int) -> list[list[int]]:
    """Return indices of rows, grouped into micro-batches without padding of at most ``budget`` tokens.

    Rows with the same prompt stay together as far as the budget allows: it is there once.  A row that is
    longer than the budget comes alone.  Longest first, each into the first micro-batch that has room.

    Args:
        lengths: tokens of each row.
        prompts: of each row, and the number of its tokens.
        budget: number of tokens.
    """
    units: list[tuple[int, list[int]]] = []
    newest: dict[Hashable, int] = {}
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        prompt, shared = prompts[i]
        place = newest.get(prompt)
        if place is not None and units[place][0] + lengths[i] - shared <= budget:
            units[place][1].append(i)
            units[place] = (units[place][0] + lengths[i] - shared, units[place][1])
        else:
            newest[prompt] = len(units)
            units.append((lengths[i], [i]))
    made: list[list[int]] = []
    left: list[int] = []
    for cost, members in sorted(units, key=lambda unit: (-unit[0], unit[1])):
        place = next((place for place, room in enumerate(left) if cost <= room), None)
        if place is None:
            made.append(list(members))
            left.append(budget - cost)
        else:
            made[place].extend(members)
            left[place] -= cost
    return made


@frozen(kw_only=True)
class Costs:
    """The size of a micro-batch, and what costs something whatever its size, all in tokens."""

    budget: int
    """Tokens of a micro-batch, padding included, at most."""
    overhead: int
    """Cost of a micro-batch."""
    packed: float
    """Cost of a token of a packed micro-batch; one of a padded micro-batch costs 1."""


def laid_out(
    lengths: Sequence[int], prompts: Sequence[tuple[Hashable, int]], packed: bool, costs: Costs
) -> list[list[int]]:
    """Divide rows into micro-batches, which are packed or padded.

    Args:
        lengths: tokens of each row.
        prompts: of each row, and the number of its tokens.
        packed: whether they are packed.
        costs: by which they are divided.
    """
    if packed:
        return packs(lengths, prompts, costs.budget)
    return microbatches(lengths, costs.budget, overhead=costs.overhead)


def layout_cost(
    lengths: Sequence[int], prompts: Sequence[tuple[Hashable, int]], packed: bool, costs: Costs
) -> float:
    """Return what the micro-batches of ``laid_out`` cost, in tokens of padded micro-batches."""
    divided = laid_out(lengths, prompts, packed, costs)
    if not packed:
        tokens = sum(len(rows) * max(lengths[i] for i in rows) for rows in divided)
        return tokens + costs.overhead * len(divided)
    tokens = 0
    for rows in divided:
        counts = Counter(prompts[i] for i in rows)
        tokens += sum(lengths[i] for i in rows) - sum((n - 1) * prompt[1] for prompt, n in counts.items())
    return (costs.packed * tokens if tokens else 0.0) + costs.overhead * len(divided)


def microbatches(lengths: Sequence[int], budget: int, *, overhead: int = 16) -> list[list[int]]:
    """Return indices of rows, grouped into micro-batches that are padded to their longest row.

    Every micro-batch holds (number of rows) x (longest length) <= ``budget`` tokens; a row that is longer
    than the budget comes alone.  Of all such divisions of the rows sorted by length it is one of least
    cost, which is the number of padded tokens + ``overhead`` per micro-batch: with ``overhead`` 0 no row is
    padded at all, with a large one there are as few micro-batches as the budget allows.

    Longest first, so that memory that does not suffice is noticed at once.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    n = len(order)
    runs: list[tuple[int, int, int]] = []  # (first place, tokens a row, rows that fit) of equal lengths
    cost, start = [0.0] * (n + 1), [0] * (n + 1)  # of the cheapest division of order[:j]; its last cut
    for j in range(1, n + 1):
        length = lengths[order[j - 1]]
        if not runs or runs[-1][1] != length:
            runs.append((j - 1, length, max(1, budget // max(1, length))))
        # A cut inside a run only pays where the budget forces it, so each run offers one first row.
        cost[j], after = float("inf"), j
        for first, longest, fit in reversed(runs):
            i = max(first, j - fit)
            if i >= after:
                break  # full already, and fuller still with the longer rows before
            total = cost[i] + (j - i) * longest + overhead
            if total < cost[j]:
                cost[j], start[j] = total, i
            after = first
    divided = []
    while n:
        divided.append(order[start[n] : n])
        n = start[n]
    return divided[::-1]
