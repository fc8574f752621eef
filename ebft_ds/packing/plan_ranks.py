"""Which rank gets which groups. Whole ones, unless splitting some over ranks takes enough off the most loaded rank.

A group that is split repeats its prompt, and its features travel, so splits are tried, weighed and only then made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ebft_ds.packing.plan_bins import spread
from ebft_ds.packing.plan_groups import Chunk, GroupTable

WORTH = 0.02
"""A split must lower the largest rank load by more than this share. A largest load this close to its lower bound is left alone."""
_STEP = 0.85
_FINEST = 8
"""Splits into pieces below an eighth of a rank's mean load gain nothing more."""


def assign_to_ranks(table: GroupTable, world_size: int, token_budget: int | None) -> list[list[Chunk]]:
    """Each rank's chunks, all within the budget (one over it is a single sequence).

    Without a split the largest load is at most the mean load and the costliest group; splits are made only where they lower it.
    """
    units = [table.cut(chunk, token_budget) for chunk in table.whole()]
    best = _assign(units, world_size)
    mean = sum(map(_cost, units)) / world_size
    bound = max(mean, int(table.sequence_costs.max()))
    largest = max(map(_cost, best))
    cache: dict[tuple[int, int], list[list[Chunk]]] = {}
    for limit in _limits(max(map(_cost, units)), mean / _FINEST):
        if largest <= bound * (1 + WORTH):
            break
        pieces = [piece for unit in units for piece in _pieces(table, unit, limit, token_budget, cache)]
        if sum(map(_cost, pieces)) >= largest * world_size * (1 - WORTH):
            break  # repeated prompts eat up what finer pieces gain
        shares = [_together(table, share, token_budget) for share in _assign(pieces, world_size)]
        load = max(map(_cost, shares))
        if load < largest * (1 - WORTH):
            best, largest = shares, load
    return best


def _cost(chunks: Sequence[Chunk]) -> int:
    return sum(chunk.cost for chunk in chunks)


def _assign(units: list[list[Chunk]], world_size: int) -> list[list[Chunk]]:
    bins = spread([unit[0].cost if len(unit) == 1 else _cost(unit) for unit in units], world_size)
    return [[chunk for i in bin_ for chunk in units[i]] for bin_ in bins]


def _limits(largest: int, smallest: float) -> Iterator[float]:
    """Falling thresholds."""
    limit = largest * _STEP
    while limit > smallest:
        yield limit
        limit *= _STEP


def _pieces(
    table: GroupTable, unit: list[Chunk], limit: float, token_budget: int | None, cache: dict[tuple[int, int], list[list[Chunk]]]
) -> list[list[Chunk]]:
    """The unit, or if it costs more than `limit`, pieces of about that cost (single sequences at the finest), each for any rank."""
    cost = _cost(unit)
    if cost <= limit:
        return [unit]
    whole = table.merged(unit)[0]
    once = int(table.once_costs[whole.group])
    wanted = len(whole.members) if limit <= once else -int(-(whole.cost - once) // (limit - once))
    count = max(1, len(unit), min(wanted, len(whole.members)))
    key = (whole.group, count)
    if key not in cache:
        cache[key] = [[chunk] for chunk in table.cut(whole, token_budget, at_least=count)]
    return cache[key]


def _together(table: GroupTable, chunks: list[Chunk], token_budget: int | None) -> list[Chunk]:
    """Pieces of a group that met on one rank share their prompt again, as far as the budget allows."""
    if len({chunk.group for chunk in chunks}) == len(chunks):
        return chunks
    return [piece for chunk in table.merged(chunks) for piece in table.cut(chunk, token_budget)]
