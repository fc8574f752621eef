"""Where features lie after the forwards, which rank makes each group's rewards, and how it gets what it lacks.

A group whose sequences were forwarded on one rank is rewarded there, so that nothing of feature width travels. Only for groups that
were split over ranks, and for cached references that another rank holds, vectors go to the one rank that needs them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor

from ebft_ds.collectives import Collectives
from ebft_ds.features.scoring_layout import ScoringLayout


def group_owners(layout: ScoringLayout, forwarded: Mapping[int, int], cached: Mapping[int, int], world_size: int) -> list[int]:
    """The rank that makes each group's rewards: the one with most of its features, which for a whole group is all but a cached reference.

    Args:
        forwarded, cached: sequence -> the rank that forwards it, or that holds it in its cache.
    """
    owners = []
    for g in range(len(layout.reference)):
        counts = Counter(forwarded[i] for i in layout.members(g) if i in forwarded)
        counts = counts or Counter(cached[i] for i in layout.members(g))
        # Ties in turn, or the first rank would collect the features of every group that is spread evenly.
        owners.append(min(counts, key=lambda r: (-counts[r], (r - g) % world_size)))
    return owners


def gather_at_owners(
    features: dict[int, Tensor], layout: ScoringLayout, rank_of: Mapping[int, int], owners: list[int], width: int, collectives: Collectives
) -> None:
    """Collective where anything must travel. Afterwards `features` (sequence -> [width], float32, CPU) holds all of this rank's groups."""
    moves = [(rank_of[i], owner, i) for g, owner in enumerate(owners) for i in layout.members(g) if rank_of[i] != owner]
    if not moves:
        return
    moves.sort()
    sent = [(destination, i) for source, destination, i in moves if source == collectives.rank]
    received = [(source, i) for source, destination, i in moves if destination == collectives.rank]
    rows = torch.stack([features[i] for _, i in sent]) if sent else torch.empty(0, width)
    send_counts = Counter(destination for destination, _ in sent)
    receive_counts = Counter(source for source, _ in received)
    ranks = range(collectives.world_size)
    arrived = collectives.exchange_rows(rows, [send_counts[r] for r in ranks], [receive_counts[r] for r in ranks])
    features.update(zip((i for _, i in received), arrived, strict=True))
