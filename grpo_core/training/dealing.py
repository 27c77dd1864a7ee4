"""Deals rollouts to the ranks of a trainer where rows with the same prompt compute it once.  Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import product

from attrs import frozen

CLOSE = 1.02
"""The search ends at a division whose largest part is at most this many times a bound that none can beat."""
FEW = 96
"""If there are at most this many rollouts, each is a large part of a whole, and single ones are exchanged."""


@frozen(kw_only=True)
class Packable:
    """A rollout as packed micro-batches compute it."""

    prompt: Hashable
    """Key that is equal for the rollouts which share the prompt."""
    shared: int
    """Tokens of this prompt: a rank computes them once for all of its rollouts that have it."""
    own: int
    """All other tokens."""


def largest(rollouts: Sequence[Packable], divided: Sequence[Sequence[int]]) -> int:
    """Return the packed tokens of the part that has the most."""
    return max((packed_tokens([rollouts[place] for place in part]) for part in divided), default=0)


def packed_tokens(rollouts: Sequence[Packable]) -> int:
    """Return the tokens of rollouts, with each prompt once."""
    return sum(each.own for each in rollouts) + sum({each.prompt: each.shared for each in rollouts}.values())


def lower_bound(rollouts: Sequence[Packable], parts: int) -> int:
    """Return a number of packed tokens that the largest of ``parts`` has in every division.

    A part of T tokens has room for T - P tokens of the replies to a prompt of P tokens, so that replies of R
    tokens need their prompt in at least R / (T - P) parts.
    """
    bundles = [(shared, _own(rollouts, places)) for shared, places in _bundles(rollouts)]
    low = max((each.shared + each.own for each in rollouts), default=0)
    high = max(low, sum(shared + own for shared, own in bundles))

    def enough(limit: int) -> bool:
        needed = sum(own + shared * max(1, -(-own // max(1, limit - shared))) for shared, own in bundles)
        return needed <= parts * limit

    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle + 1, high)
    return low


def dealt(rollouts: Sequence[Packable], parts: int) -> list[list[int]]:
    """Divide rollouts among ``parts`` so that the largest number of packed tokens is small; return places.

    It looks for the smallest limit that ``_fitted`` keeps, as MULTIFIT does for things that share nothing
    (Coffman, Garey and Johnson 1978).
    """
    bundles = _bundles(rollouts)
    bound = low = lower_bound(rollouts, parts)
    high = packed_tokens(rollouts)
    found = [[*range(len(rollouts))], *([] for _ in range(parts - 1))]
    limit = bound
    while high > CLOSE * bound and high - low > max(1, (CLOSE - 1) / 4 * bound):
        fitted = _fitted(rollouts, bundles, parts, limit)
        if fitted is not None and (most := largest(rollouts, fitted)) < high:
            found, high = fitted, most
        else:
            low = limit
        limit = (low + min(high, 2 * low)) // 2
    return _exchanged(rollouts, found, CLOSE * bound) if len(rollouts) <= FEW else found


def _fitted(
    rollouts: Sequence[Packable], bundles: Sequence[tuple[int, list[int]]], parts: int, limit: int
) -> list[list[int]] | None:
    """Put the rollouts of each prompt into the part with the least room for all of them, the largest first.

    Where none has room for all, the emptiest part takes what fits.  Returns None if not even one rollout
    does.
    """
    divided: list[list[int]] = [[] for _ in range(parts)]
    room = [limit] * parts
    waiting = [(-shared - _own(rollouts, places), shared, places) for shared, places in bundles]
    heapify(waiting)
    while waiting:
        negative, shared, places = heappop(waiting)
        fits = [part for part in range(parts) if room[part] >= -negative]
        if fits:
            part = min(fits, key=room.__getitem__)
            divided[part] += places
            room[part] += negative
            continue
        part = max(range(parts), key=room.__getitem__)
        room[part] -= shared
        rest = []
        for place in places:
            if rollouts[place].own <= room[part]:
                divided[part].append(place)
                room[part] -= rollouts[place].own
            else:
                rest.append(place)
        if len(rest) == len(places):
            return None
        heappush(waiting, (-shared - _own(rollouts, rest), shared, rest))
    return divided


def _exchanged(
    rollouts: Sequence[Packable], divided: Sequence[Sequence[int]], enough: float
) -> list[list[int]]:
    """Move single rollouts out of the fullest part, or exchange them, while it has more than ``enough``."""
    parts = [list(places) for places in divided]
    loads = [packed_tokens([rollouts[place] for place in places]) for places in parts]
    while max(loads, default=0) > enough:
        fullest = loads.index(max(loads))
        best: tuple[int, int, int | None, int, list[int]] | None = None
        prompts = [Counter(rollouts[place].prompt for place in places) for places in parts]
        for other in range(len(parts)):
            for out, back in product(parts[fullest], (None, *parts[other]) if other != fullest else ()):
                leaves, comes = rollouts[out], None if back is None else rollouts[back]
                after = [
                    loads[fullest] + _change(prompts[fullest], leaves, comes),
                    loads[other] + _change(prompts[other], comes, leaves),
                ]
                if max(after) < (loads[fullest] if best is None else max(best[4])):
                    best = (other, out, back, fullest, after)
        if best is None:
            break
        other, out, back, fullest, (loads[fullest], loads[other]) = best
        parts[fullest].remove(out)
        parts[other].append(out)
        if back is not None:
            parts[other].remove(back)
            parts[fullest].append(back)
    return parts


def _change(prompts: Mapping[Hashable, int], leaves: Packable | None, comes: Packable | None) -> int:
    """Return by how many tokens a part with these prompts grows when one rollout leaves and one comes."""
    change = (comes.own if comes else 0) - (leaves.own if leaves else 0)
    if leaves and comes and leaves.prompt == comes.prompt:
        return change
    if leaves and prompts[leaves.prompt] == 1:
        change -= leaves.shared
    if comes and not prompts.get(comes.prompt):
        change += comes.shared
    return change


def _own(rollouts: Sequence[Packable], places: Sequence[int]) -> int:
    return sum(rollouts[place].own for place in places)


def _bundles(rollouts: Sequence[Packable]) -> list[tuple[int, list[int]]]:
    """Return the tokens of each prompt, and the places of its rollouts, that with most tokens first."""
    places: dict[Hashable, list[int]] = {}
    for place in sorted(range(len(rollouts)), key=lambda place: (-rollouts[place].own, place)):
        places.setdefault(rollouts[place].prompt, []).append(place)
    return [(rollouts[members[0]].shared, members) for members in places.values()]
