"""Divides the rows of a step into optimizer updates, and an update into micro-batches.  Pure."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from attrs import evolve

from grpo_core.contracts.records import Row


def split_updates(rows: Sequence[Row], n: int) -> list[list[Row]]:
    """Deal whole groups in turn to ``n`` updates (fewer if there are fewer groups; never an empty one).

    Dealing in turn mixes blocks in a sampler's order, such as one task after another.
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
    if sampled.size and sampled[-1]:  # the common case; a step has thousands of rows
        return len(row.prompt_ids) + sampled.size - 1
    indices = np.flatnonzero(sampled)
    return len(row.prompt_ids) + int(indices[-1]) if indices.size else 0


def in_hinted_context(row: Row) -> Row | None:
    """Return a row whose prompt has its hint, to be scored and never trained; None if it has no hint.

    Everything after the first prompt stays as it is, in later segments as well.
    """
    own = row.prompt_ids[: len(row.hint_prefix)]
    if not row.hint_ids or not np.array_equal(own, row.hint_prefix):
        return None
    rest = row.prompt_ids[len(row.hint_prefix) :]
    return evolve(row, prompt_ids=np.concatenate([row.hint_ids, rest]))


def of_several_rows(rows: Sequence[Row]) -> list[list[int]]:
    """Return the indices of the rows of each rollout that has several."""
    indices: dict[int, list[int]] = {}
    for index, rollout in enumerate(rollouts(rows)):
        indices.setdefault(rollout, []).append(index)
    return [of_one for of_one in indices.values() if len(of_one) > 1]


def packs(lengths: Sequence[int], prompts: Sequence[tuple[Hashable, int]], budget: int) -> list[list[int]]:
    """Return indices of rows, grouped into micro-batches without padding of at most ``budget`` tokens.

    Rows with the same prompt stay together as far as the budget allows, and share it.  A row that is longer
    than the budget is alone.  Longest first, each into the first micro-batch that has room.

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


def microbatches(lengths: Sequence[int], budget: int, *, overhead: int = 16) -> list[list[int]]:
    """Return indices of rows, grouped into micro-batches that are padded to their longest row.

    Every micro-batch holds (number of rows) x (longest length) <= ``budget`` tokens; a row that is longer
    than the budget is alone.  Longest first, so that a lack of memory shows at once.  A micro-batch ends
    where it would have more than ``overhead`` tokens of padding, the cost of another one.
    """
    made: list[list[int]] = []
    longest = padding = 0
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        padding += longest - lengths[i]
        if made and (len(made[-1]) + 1) * longest <= budget and padding <= overhead:
            made[-1].append(i)
        else:
            made.append([i])
            longest, padding = lengths[i], 0
    return made
