"""From the rows of a step to optimizer updates, and from an update to micro-batches.  Pure."""

from __future__ import annotations

from collections.abc import Sequence

from grpo_core.records import Row

OVERHEAD = 64
"""What a further micro-batch costs besides its tokens, in tokens: padding is cut where that is cheaper."""


def split_updates(rows: Sequence[Row], n: int) -> list[list[Row]]:
    """Whole groups, dealt in turn to ``n`` updates (fewer if there are fewer groups; never an empty one).

    Dealing in turn mixes what a sampler delivers in blocks, such as one task after another.
    """
    groups: dict[int, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    updates: list[list[Row]] = [[] for _ in range(min(n, len(groups)))]
    for i, members in enumerate(groups.values()):
        updates[i % len(updates)].extend(members)
    return updates


def microbatches(lengths: Sequence[int], budget: int, *, overhead: int = OVERHEAD) -> list[list[int]]:
    """Indices of rows, grouped into micro-batches that are padded to their longest row.

    Every micro-batch holds (number of rows) x (longest length) <= ``budget`` tokens; a row that is longer
    than the budget comes alone.  Of all such divisions of the rows sorted by length it is one of least
    cost, which is the number of padded tokens + ``overhead`` per micro-batch: with ``overhead`` 0 no row is
    padded at all, with a large one there are as few micro-batches as the budget allows.

    Longest first, so that memory that does not suffice is noticed at once.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    n = len(order)
    # Only where the length changes, or where the budget forces it, can a cut pay: runs of equal length
    # are divided by the budget alone.
    starts = [k for k in range(n) if k == 0 or lengths[order[k]] != lengths[order[k - 1]]]
    best = [0.0] * (n + 1)  # best[k]: least cost of the rows order[k:]
    end = [n] * (n + 1)  # where the micro-batch that begins at k ends
    run_end = {start: stop for start, stop in zip(starts, [*starts[1:], n], strict=True)}
    stop = n
    for k in range(n - 1, -1, -1):
        if k in run_end:
            stop = run_end[k]
        length = lengths[order[k]]
        last = min(n, k + max(1, budget // length if length else n))
        best[k] = float("inf")
        for j in _cuts(k, last, starts):
            cost = (j - k) * length + overhead + best[j]
            if cost < best[k]:
                best[k], end[k] = cost, j
    divided, k = [], 0
    while k < n:
        divided.append(order[k : end[k]])
        k = end[k]
    return divided
