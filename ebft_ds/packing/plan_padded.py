"""Plans of padded rows: a sequence a row, like lengths together so that padding stays small."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ebft_ds.packing.plan_bins import spread
from ebft_ds.packing.plan_groups import GroupTable

FAIR_SHARES = 1.5
"""A group that costs more than this many mean rank loads is split."""


def padded_batches(table: GroupTable, world_size: int, *, token_budget: int | None, max_sequences: int | None) -> list[list[list[int]]]:
    """Each rank's micro-batches, widest first: at most `max_sequences` rows, and `token_budget` tokens as rows x longest row.

    Groups go, costliest first, to the least loaded rank. They are split when there are fewer groups than ranks, and where one is
    costlier than a rank's fair share and a half. A sequence over the budget is a micro-batch of its own.
    """
    units = _units(table, world_size)
    lengths: list[int] = table.own_tokens.tolist()
    costs = table.own_costs
    shares = spread([int(costs[unit].sum()) for unit in units], world_size)
    return [_cut(sorted(i for u in share for i in units[u]), lengths, token_budget, max_sequences) for share in shares]


def _units(table: GroupTable, world_size: int) -> list[list[int]]:
    """Whole groups, or single sequences of groups that must be split, in the order of their first sequences."""
    groups = [members.tolist() for members in np.split(table.members, table.starts[1:-1])]
    heavy = table.costs * world_size > FAIR_SHARES * int(table.costs.sum())
    units: list[list[int]] = []
    for members, splits in zip(groups, heavy.tolist(), strict=True):
        if splits or len(groups) < world_size:
            units.extend([i] for i in members)
        else:
            units.append(members)
    return sorted(units, key=lambda unit: unit[0])


def _cut(share: Sequence[int], lengths: Sequence[int], token_budget: int | None, max_sequences: int | None) -> list[list[int]]:
    """By falling length, so the first row of a micro-batch is its widest and says how many fit."""
    batches: list[list[int]] = []
    rows = 0
    for i in sorted(share, key=lambda i: -lengths[i]):
        if not batches or len(batches[-1]) == rows:
            batches.append([])
            rows = len(share) if max_sequences is None else max_sequences
            if token_budget is not None:
                rows = max(1, min(rows, token_budget // max(lengths[i], 1)))
        batches[-1].append(i)
    return batches
