"""Bins of like cost that hold no more tokens than they may. Bins are lists of positions into the given costs and tokens."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from heapq import heappop, heappush, heapreplace

_LOOK = 64
"""Bins looked at for one item before it counts as placed nowhere: it keeps the time linear where nearly all are full."""


class RoomyBins:
    """Bins of one capacity in tokens. An item goes to the cheapest bin that has room for it, one over the capacity to an empty one."""

    def __init__(self, count: int, capacity: int) -> None:
        self._heap = [(0, b) for b in range(count)]
        self._room = [capacity] * count
        self._empty = [True] * count
        self.room_left = count * capacity
        """Over all bins."""

    def place(self, cost: int, tokens: int) -> int | None:
        """The bin that took the item; None if there is none."""
        heap, room, empty = self._heap, self._room, self._empty
        full: list[tuple[int, int]] = []
        taken = None
        while heap and len(full) < _LOOK:
            load, b = heap[0]
            if tokens <= room[b] or empty[b]:
                taken = b
                room[b] -= tokens
                self.room_left -= tokens
                empty[b] = False
                heapreplace(heap, (load + cost, b))
                break
            full.append(heappop(heap))
        for entry in full:
            heappush(heap, entry)
        return taken

    def copy(self) -> RoomyBins:
        other = RoomyBins(0, 0)
        other._heap, other._room, other._empty = self._heap.copy(), self._room.copy(), self._empty.copy()
        other.room_left = self.room_left
        return other


def costliest_first(costs: Sequence[int]) -> list[int]:
    """Positions; equal costs in their order."""
    return sorted(range(len(costs)), key=costs.__getitem__, reverse=True)


def spread(costs: Sequence[int], count: int) -> list[list[int]]:
    """Costliest first, each to the cheapest bin so far. The costliest bin costs at most the mean and one item."""
    bins: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, b) for b in range(count)]
    for i in costliest_first(costs):
        load, b = heap[0]
        bins[b].append(i)
        heapreplace(heap, (load + costs[i], b))
    return bins


def fewest_bins(tokens: Sequence[int], capacity: int) -> int:
    """No fewer can do: by the sum, and because at most k items over 1/(k+1) of the capacity share a bin."""
    if capacity < 1:
        return 1
    by_sum = -(-sum(min(t, capacity) for t in tokens) // capacity)
    by_size = (-(-sum(t * (k + 1) > capacity for t in tokens) // k) for k in (1, 2, 3))
    return max(1, by_sum, *by_size)


def pack(costs: Sequence[int], tokens: Sequence[int], capacity: int, *, at_least: int = 1) -> list[list[int]]:
    """Few bins, then like costs: the smallest imaginable number of bins if it will do, otherwise as many as best fit needs.

    At least `at_least` bins, some of them empty if there are fewer items. An item over the capacity gets a bin of its own.
    """
    filled = _fill(costs, tokens, capacity, max(at_least, fewest_bins(tokens, capacity)))
    if filled is not None:
        return filled
    tight = _best_fit(tokens, capacity)
    tight += [[] for _ in range(at_least - len(tight))]
    return _fill(costs, tokens, capacity, len(tight)) or tight


def _fill(costs: Sequence[int], tokens: Sequence[int], capacity: int, count: int) -> list[list[int]] | None:
    """As `spread`, but within the capacity; None if an item finds no room."""
    bins: list[list[int]] = [[] for _ in range(count)]
    roomy = RoomyBins(count, capacity)
    for i in costliest_first(costs):
        b = roomy.place(costs[i], tokens[i])
        if b is None:
            return None
        bins[b].append(i)
    return bins


def _best_fit(tokens: Sequence[int], capacity: int) -> list[list[int]]:
    """Longest first, each to the fullest bin that has room for it."""
    bins: list[list[int]] = []
    open_bins: list[tuple[int, int]] = []
    for i in costliest_first(tokens):
        at = bisect_left(open_bins, (tokens[i], -1))
        if at < len(open_bins):
            room, b = open_bins.pop(at)
        else:
            room, b = capacity, len(bins)
            bins.append([])
        bins[b].append(i)
        insort(open_bins, (room - tokens[i], b))
    return bins
