"""Rewards of encoded responses under a reward model on a ZeRO-3 engine: one forward per response, packed, in lockstep over ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ebft_ds.collectives import Collectives
from ebft_ds.engine.build import ZeroEngine
from ebft_ds.engine.network import ScoreWork
from ebft_ds.errors import NumericsError
from ebft_ds.packing.packer import RowPacker
from ebft_ds.packing.whole_groups import WholeGroup, build_group_rows, plan_whole_groups


def score_groups(
    engine: ZeroEngine,
    packer: RowPacker,
    groups: Sequence[WholeGroup],
    collectives: Collectives,
    *,
    token_budget: int,
    max_groups: int | None = None,
    check_stop: Callable[[], None] | None = None,
) -> list[list[float]]:
    """Collective: every rank passes the same groups and gets one reward per branch of each, as the model gives it.

    `check_stop`: collective, called before every micro-batch; what it raises ends the scoring on every rank.

    Raises:
        ConfigError: a group over `token_budget` (scoring_token_budget).
        NumericsError: a reward that is not finite, on every rank, naming the group.
    """
    plan = plan_whole_groups(
        groups, collectives.world_size, packer, token_budget=token_budget, max_groups=max_groups, budget_name="scoring_token_budget"
    )
    own: list[tuple[int, list[float]]] = []
    for indices in plan.ranks[collectives.rank]:  # as many on every rank
        if check_stop is not None:
            check_stop()
        rows = build_group_rows([groups[i] for i in indices], packer, device=engine.device)
        rewards = engine.frozen_scores(ScoreWork(rows.rows, rows.ends)).cpu().tolist()
        start = 0
        for index, count in zip(indices, rows.counts, strict=True):
            own.append((index, rewards[start : start + count]))
            start += count
    found: list[list[float]] = [[] for _ in groups]
    for share in collectives.all_gather(own):
        for index, values in share:
            found[index] = _equal_where_ids_are(groups[index], values)
    for index, values in enumerate(found):
        if not all(map(math.isfinite, values)):
            raise NumericsError(f"the reward model gives group {index} of {len(groups)} a reward that is not finite: {values}")
    return found


def _equal_where_ids_are(group: WholeGroup, values: Sequence[float]) -> list[float]:
    """Equal responses get one reward: computed at two places of a row they differ in the last digit, and a tie would be won by place."""
    first: dict[tuple[int, ...], float] = {}
    return [first.setdefault(tuple(branch), value) for branch, value in zip(group.branches, values, strict=True)]
