"""Which rank gets which groups. Whole ones, unless splitting some over ranks takes enough off the most loaded rank.

A group that is split repeats its prompt, and its features travel, so splits are tried, weighed and only then made.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush, heapreplace
from math import sqrt

from ebft_ds.packing.plan_bins import spread
from ebft_ds.packing.plan_chunks import Chunks

WORTH = 0.02
"""Splits must lower the largest rank load by more than this share. A largest load this close to its lower bound is left alone."""


def assign_to_ranks(chunks: Chunks, world_size: int, costliest_sequence: int) -> list[list[int]]:
    """Each rank's chunks. A chunk over the budget stands for its parts.

    Whole groups go, costliest first, to the least loaded rank: the largest load is at most the mean load and the costliest group.
    Splits are made only where they lower it.
    """
    whole = spread([chunks.costs[c] for c in chunks.whole_groups], world_size)
    largest = _largest(chunks, whole)
    low = max(sum(chunks.costs[c] for c in chunks.whole_groups) / world_size, costliest_sequence)
    best, best_load = whole, largest * (1 - WORTH)
    high, limit = float(largest), low * (1 + WORTH)
    while high > limit > low:
        shares = _filled_to(chunks, world_size, limit)
        if shares is None:
            low = limit
        else:
            high = limit
            if _largest(chunks, shares) < best_load:
                best, best_load = shares, _largest(chunks, shares)
        # Where the first limit would do, nothing finer is worth a search.
        limit = sqrt(low * high) if high > low * (1 + WORTH) else low
    return best


def _largest(chunks: Chunks, shares: Sequence[Sequence[int]]) -> int:
    return max(sum(chunks.costs[c] for c in share) for share in shares)


def _filled_to(chunks: Chunks, world_size: int, limit: float) -> list[list[int]] | None:
    """Costliest first, each to the least loaded rank; of a group that would lift it over the limit, the rank takes what it can, and
    the rest waits for its turn. None if a rank cannot take a single sequence."""
    shares: list[list[int]] = [[] for _ in range(world_size)]
    loads = [(0, rank) for rank in range(world_size)]
    costs = chunks.costs
    queue = sorted(chunks.whole_groups, key=costs.__getitem__)
    rests: list[tuple[int, int]] = []
    while queue or rests:
        chunk = queue.pop() if not rests or (queue and costs[queue[-1]] >= -rests[0][0]) else heappop(rests)[1]
        load, rank = loads[0]
        if load + costs[chunk] > limit:
            pieces = chunks.split(chunk, limit - load)
            if pieces is None:
                return None
            chunk, rest = pieces
            heappush(rests, (-costs[rest], rest))
        shares[rank].append(chunk)
        heapreplace(loads, (load + costs[chunk], rank))
    # Pieces of a group that met on one rank share their prompt again.
    return [chunks.merged(share) for share in shares]
