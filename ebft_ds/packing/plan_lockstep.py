"""The ranks' chunks in equally many micro-batches of like cost."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush, heapreplace

from ebft_ds.packing.plan_bins import RoomyBins, costliest_first, fewest_bins, pack
from ebft_ds.packing.plan_chunks import Chunks

_LOOK = 64
"""Ranks looked at for one chunk before a try is given up."""

_TRIES = 4
"""Divisions tried for fewer micro-batches: each costs as much as the whole plan."""

Batches = list[list[list[int]]]
"""Chunks by rank and micro-batch, each rank's costliest micro-batch first, so that like costs meet."""


def lockstep_batches(chunks: Chunks, shares: list[list[int]], token_budget: int) -> Batches:
    """Micro-batches of the ranks' `shares`; or, where some rank's share is hard to pack, of a new division of the same chunks.

    A new division is taken if it needs fewer micro-batches and the step costs no more. So no rank's load is more than the step's
    cost under the first one.
    """
    batches = _rank_by_rank(chunks, shares, token_budget)
    tokens = [chunks.tokens[part] for share in shares for chunk in share for part in chunks.parts(chunk)]
    fewest = -(-fewest_bins(tokens, token_budget) // len(shares))
    low = fewest
    for _ in range(_TRIES):
        count = (low + len(batches[0])) // 2  # below what is known to do
        if count >= len(batches[0]):
            break
        divided = _divide(chunks, shares, count, token_budget)
        if divided is None or step_cost(chunks, divided) > step_cost(chunks, batches):
            low = count + 1
        else:
            batches = divided
    return batches


def step_cost(chunks: Chunks, batches: Batches) -> int:
    """All ranks wait for the costliest in each micro-batch."""
    return sum(max(_cost(chunks, batch) for batch in together) for together in zip(*batches, strict=True))


def _rank_by_rank(chunks: Chunks, shares: list[list[int]], token_budget: int) -> Batches:
    """As many micro-batches as the rank that needs the most."""
    parts = [[part for chunk in share for part in chunks.parts(chunk)] for share in shares]
    packed = [_pack(chunks, share, token_budget, 1) for share in parts]
    count = max(map(len, packed))
    return _ordered(chunks, [_widened(chunks, bins, share, token_budget, count) for bins, share in zip(packed, parts, strict=True)])


def _pack(chunks: Chunks, share: list[int], token_budget: int, at_least: int) -> list[list[int]]:
    bins = pack([chunks.costs[c] for c in share], [chunks.tokens[c] for c in share], token_budget, at_least=at_least)
    return [[share[i] for i in bin_] for bin_ in bins]


def _widened(chunks: Chunks, bins: list[list[int]], share: list[int], token_budget: int, count: int) -> list[list[int]]:
    """The share in `count` micro-batches, at least as many as it has: of like cost if that goes, otherwise the same and empty ones."""
    if len(bins) == count:
        return bins
    wider = _pack(chunks, share, token_budget, count)
    return wider if len(wider) == count else bins + [[] for _ in range(count - len(bins))]


def _divide(chunks: Chunks, shares: list[list[int]], count: int, token_budget: int) -> Batches | None:
    """Costliest chunk first, each to the least loaded rank with room in its `count` micro-batches; None if one finds none.

    Chunks of a group that was split go to different ranks: together they would share their prompt, and be another chunk.
    """
    batches: Batches = [[[] for _ in range(count)] for _ in shares]
    roomy = [RoomyBins(count, token_budget) for _ in shares]
    heap = [(0, rank) for rank in range(len(shares))]
    units = sorted(chunk for share in shares for chunk in share)
    held: set[tuple[int, int]] = set()
    for u in costliest_first([chunks.costs[c] for c in units]):
        chunk, group = units[u], chunks.groups[units[u]]
        full: list[tuple[int, int]] = []
        while heap and len(full) < _LOOK and ((group, heap[0][1]) in held or not _place(chunks, chunk, roomy, heap[0][1], batches)):
            full.append(heappop(heap))
        if not heap or len(full) == _LOOK:
            return None
        load, rank = heap[0]
        held.add((group, rank))
        heapreplace(heap, (load + chunks.costs[chunk], rank))
        for entry in full:
            heappush(heap, entry)
    return _ordered(chunks, batches)


def _place(chunks: Chunks, chunk: int, roomy: list[RoomyBins], rank: int, batches: Batches) -> bool:
    """All parts of a chunk into the rank's micro-batches, or none of them."""
    parts = chunks.parts(chunk)
    if len(parts) > 1 and sum(chunks.tokens[part] for part in parts) > roomy[rank].room_left:
        return False
    bins = roomy[rank] if len(parts) == 1 else roomy[rank].copy()
    taken: list[int] = []
    for part in parts:
        b = bins.place(chunks.costs[part], chunks.tokens[part])
        if b is None:
            return False
        taken.append(b)
    roomy[rank] = bins
    for b, part in zip(taken, parts, strict=True):
        batches[rank][b].append(part)
    return True


def _ordered(chunks: Chunks, batches: Batches) -> Batches:
    return [sorted(share, key=lambda batch: _cost(chunks, batch), reverse=True) for share in batches]


def _cost(chunks: Chunks, batch: Sequence[int]) -> int:
    return sum(chunks.costs[chunk] for chunk in batch)
