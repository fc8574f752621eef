"""Bins of like cost that hold no more tokens than they may. Bins are lists of positions into the given costs and tokens."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from heapq import heapify, heappop, heappush, heapreplace

_LOOK = 64
"""Bins looked at for one item before a spread is given up: it keeps the time linear where nearly all are full."""


def spread(costs: Sequence[int], count: int) -> list[list[int]]:
    """Costliest first, each to the cheapest bin so far. The costliest bin costs at most the mean and one item."""
    bins: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, b) for b in range(count)]
    for i in sorted(range(len(costs)), key=costs.__getitem__, reverse=True):
        load, b = heap[0]
        bins[b].append(i)
        heapreplace(heap, (load + costs[i], b))
    return bins


def pack(costs: Sequence[int], tokens: Sequence[int], capacity: int, *, at_least: int = 1) -> list[list[int]]:
    """Few bins, then like costs: `spread` if the smallest imaginable number of bins will do, otherwise as many as best fit needs.

    At least `at_least` bins, some of them empty if there are fewer items. An item over the capacity gets a bin of its own.
    """
    needed = sum(min(t, capacity) for t in tokens)
    fewest = max(at_least, -(-needed // capacity) if capacity > 0 else 1)
    spread_out = _spread_within(costs, tokens, capacity, fewest)
    if spread_out is not None:
        return spread_out
    tight = _best_fit(tokens, capacity)
    tight += [[] for _ in range(at_least - len(tight))]
    return _spread_within(costs, tokens, capacity, len(tight)) or tight


def _spread_within(costs: Sequence[int], tokens: Sequence[int], capacity: int, count: int) -> list[list[int]] | None:
    """As `spread`, each item to the cheapest bin that has room for it; None if one finds none."""
    bins: list[list[int]] = [[] for _ in range(count)]
    room = [capacity] * count
    heap = [(0, b) for b in range(count)]
    heapify(heap)
    for i in sorted(range(len(costs)), key=costs.__getitem__, reverse=True):
        full: list[tuple[int, int]] = []
        while heap and len(full) < _LOOK and tokens[i] > room[heap[0][1]] and bins[heap[0][1]]:
            full.append(heappop(heap))
        if not heap or len(full) == _LOOK:
            return None
        load, b = heap[0]
        bins[b].append(i)
        room[b] -= tokens[i]
        heapreplace(heap, (load + costs[i], b))
        for entry in full:
            heappush(heap, entry)
    return bins


def _best_fit(tokens: Sequence[int], capacity: int) -> list[list[int]]:
    """Longest first, each to the fullest bin that has room for it."""
    bins: list[list[int]] = []
    open_bins: list[tuple[int, int]] = []
    for i in sorted(range(len(tokens)), key=tokens.__getitem__, reverse=True):
        at = bisect_left(open_bins, (tokens[i], -1))
        if at < len(open_bins):
            room, b = open_bins.pop(at)
        else:
            room, b = capacity, len(bins)
            bins.append([])
        bins[b].append(i)
        insort(open_bins, (room - tokens[i], b))
    return bins
