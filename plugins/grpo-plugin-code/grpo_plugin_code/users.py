"""The user ids of sandboxes that root starts: those that the kernel lets it take.

Root itself may start any number of processes, so each program gets a user id of its own, on which its limits
hold.  Root of a container may take only the ids that its user namespace has, and sometimes no other at all.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

PREFERRED = range(200_000, 260_000)
"""Ids that no user of a machine has, as a rule."""
LOWEST, NOBODY = 10_000, 65_534
"""The ids of a container that are used begin above its own users, and end before the one of nobody."""
FEWEST = 1000
"""Fewest ids of a range that is used: programs that run at once must not share one."""
ROUND = 4096
"""Number of ids that are drawn at a time."""


def ids_of_sandboxes() -> range:
    """Return the ids for programs; there are none if this process is not root, or may take no other id."""
    if os.geteuid() != 0 or _read("setgroups").strip() == "deny":
        return range(0)
    return chosen(_read("uid_map"), _read("gid_map"))


def chosen(users: str, groups: str) -> range:
    """Return the ids that both maps of a user namespace have, in the text of /proc/self/uid_map."""
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
    """Yield ids without an end, in an order that no other process of the machine has.

    The kernel counts the processes of a user id on the whole machine, so two programs that share one could
    start fewer.
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
