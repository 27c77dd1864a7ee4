"""User ids for sandboxes that root starts.

The kernel does not limit the processes of root, so each program gets a separate user id.  Root of a container
can only use ids that are mapped in its user namespace, which may be none.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

PREFERRED = range(200_000, 260_000)
"""Ids that are usually unused."""
LOWEST, NOBODY = 10_000, 65_534
"""Bounds of the ids used in a container: above its users, below nobody."""
FEWEST = 1000
"""Smallest usable range of ids: concurrent programs must not share an id."""
ROUND = 4096
"""Number of ids that are drawn at a time."""


def ids_of_sandboxes() -> range:
    """Return the ids for programs; empty if this process is not root or cannot change its id."""
    if os.geteuid() != 0 or _read("setgroups").strip() == "deny":
        return range(0)
    return chosen(_read("uid_map"), _read("gid_map"))


def chosen(users: str, groups: str) -> range:
    """Return the ids mapped by both the user and group map of a namespace, as in /proc/self/uid_map."""
    both = [
        range(max(user.start, group.start), min(user.stop, group.stop))
        for user in _ranges(users)
        for group in _ranges(groups)
    ]
    if any(PREFERRED[0] in each and PREFERRED[-1] in each for each in both):
        return PREFERRED
    usable = [range(max(each.start, LOWEST), each.stop) for each in both]
    usable = [range(each.start, NOBODY) if NOBODY in each else each for each in usable]
    return max((each for each in usable if len(each) >= FEWEST), key=len, default=range(0))


def in_random_order(ids: Sequence[int]) -> Iterator[int]:
    """Yield ids endlessly in random order.

    The kernel counts the processes of a user id on the whole machine, so programs of two runs should not
    share an id.
    """
    drawn = random.SystemRandom()
    while True:
        yield from drawn.sample(ids, min(ROUND, len(ids)))


def _ranges(text: str) -> list[range]:
    lines = [list(map(int, line.split())) for line in text.splitlines()]
    return [range(begin, begin + count) for begin, _, count in lines]


def _read(name: str) -> str:
    path = Path("/proc/self") / name
    return path.read_text() if path.exists() else ""
