"""Which rank gets which groups. Whole ones, unless splitting some over ranks takes enough off the most loaded rank.

A group that is split repeats its prompt, and its features travel, so splits are tried, weighed and only then made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ebft_ds.packing.plan_bins import spread
from ebft_ds.packing.plan_chunks import Chunks

WORTH = 0.02
"""A split must lower the largest rank load by more than this share. A largest load this close to its lower bound is left alone."""
_STEP = 0.85
_FINEST = 8
"""Pieces below an eighth of a rank's mean load gain nothing more."""


def assign_to_ranks(chunks: Chunks, world_size: int, costliest_sequence: int) -> list[list[int]]:
    """Each rank's chunks. A chunk over the budget stands for its parts.

    Without a split the largest load is at most the mean load and the costliest group; splits are made only where they lower it.
    """
    whole = list(chunks.whole_groups)
    best = _assign(chunks, whole, world_size)
    largest = _largest(chunks, best)
    mean = sum(chunks.costs[c] for c in whole) / world_size
    good = max(mean, costliest_sequence) * (1 + WORTH)
    known: dict[tuple[int, int], list[int]] = {}
    for limit in _limits(max(chunks.costs[c] for c in whole), mean / _FINEST):
        if largest <= good:
            break
        pieces = [piece for chunk in whole for piece in _pieces(chunks, chunk, limit, known)]
        if sum(chunks.costs[c] for c in pieces) >= largest * world_size * (1 - WORTH):
            break  # the repeated prompts eat up what finer pieces gain
        # Pieces of a group that met on one rank share their prompt again.
        shares = [chunks.merged(share) for share in _assign(chunks, pieces, world_size)]
        if _largest(chunks, shares) < largest * (1 - WORTH):
            best, largest = shares, _largest(chunks, shares)
    return best


def _assign(chunks: Chunks, units: list[int], world_size: int) -> list[list[int]]:
    return [[units[i] for i in bin_] for bin_ in spread([chunks.costs[c] for c in units], world_size)]


def _largest(chunks: Chunks, shares: Sequence[Sequence[int]]) -> int:
    return max(sum(chunks.costs[c] for c in share) for share in shares)


def _limits(largest: int, smallest: float) -> Iterator[float]:
    """Falling thresholds."""
    limit = largest * _STEP
    while limit > smallest:
        yield limit
        limit *= _STEP


def _pieces(chunks: Chunks, chunk: int, limit: float, known: dict[tuple[int, int], list[int]]) -> list[int]:
    """The chunk, or if it costs more than `limit`, pieces of about that cost (single sequences at the finest) that fit the budget."""
    if chunks.costs[chunk] <= limit or chunks.size(chunk) == 1:
        return [chunk]
    once = chunks.once_cost(chunk)
    branches = chunks.costs[chunk] - once * len(chunks.parts(chunk))
    wanted = chunks.size(chunk) if limit <= once else -int(-branches // (limit - once))
    count = min(max(wanted, len(chunks.parts(chunk))), chunks.size(chunk))
    if (chunk, count) not in known:
        known[chunk, count] = chunks.cut(chunk, count)
    return known[chunk, count]
