"""Which rank forwards which sequence in which micro-batch. Pure and deterministic; every rank computes the same plan.

ZeRO-3 forwards are collectives: every rank must run the same number of them, and all wait for the slowest in each. So a plan gives
every rank the same number of micro-batches, costliest first, so that like costs meet; a rank with less work gets empty ones, for
which the caller runs a dummy forward of zero weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Literal

import msgspec
import numpy as np

from ebft_ds.errors import ConfigError
from ebft_ds.packing.cost import TOKENS_ONLY, UNITS_PER_TOKEN, Counts, TokenCost
from ebft_ds.packing.plan_chunks import Chunks
from ebft_ds.packing.plan_groups import GroupTable, group_table
from ebft_ds.packing.plan_lockstep import lockstep_batches
from ebft_ds.packing.plan_padded import padded_batches
from ebft_ds.packing.plan_ranks import assign_to_ranks
from ebft_ds.packing.rows import RowStyle

BudgetName = Literal["scoring_token_budget", "train_token_budget"]
Oversize = Literal["refuse", "alone"]


class PlannedSequence(msgspec.Struct, frozen=True, gc=False):
    """One sequence to forward. `group` ties sequences of one prompt, which should stay on one rank. Lengths in tokens.

    A struct, not a dataclass: a step may hold a million, and these are made four times as fast.
    """

    group: int
    prompt_length: int
    branch_length: int

    @property
    def length(self) -> int:
        return self.prompt_length + self.branch_length


@dataclass(frozen=True)
class Plan:
    """`ranks[r][m]` lists the indices (into the planned sequences) of rank r's micro-batch m; equally many m for all r."""

    ranks: list[list[list[int]]]
    tokens: int = 0
    """Of all forwards: shared prompts once a micro-batch, padding included. Dummies are not counted."""
    unshared_tokens: int = 0
    """Of all sequences, each with its own prompt and without padding."""
    costs: list[list[float]] = field(default_factory=list)
    """Estimated cost of `ranks[r][m]`, in tokens."""

    @property
    def micro_batches(self) -> int:
        return len(self.ranks[0])

    @property
    def imbalance(self) -> float:
        """Largest cost of a rank over the mean, less 1."""
        loads = [sum(costs) for costs in self.costs]
        return max(loads, default=0.0) * len(loads) / sum(loads) - 1.0 if sum(loads) else 0.0

    @property
    def lockstep_cost(self) -> float:
        """What the step takes when all ranks wait for each other in each micro-batch: the sum of the largest costs over ranks."""
        return sum(max(costs[m] for costs in self.costs) for m in range(self.micro_batches))

    def owner_of(self) -> dict[int, int]:
        """Sequence index -> rank."""
        owners: dict[int, int] = {}
        for rank, batches in enumerate(self.ranks):
            for batch in batches:
                owners.update(dict.fromkeys(batch, rank))
        return owners


def plan_micro_batches(
    sequences: Sequence[PlannedSequence],
    world_size: int,
    *,
    style: RowStyle = "padded",
    token_budget: int | None = None,
    max_sequences: int | None = None,
    cost: TokenCost = TOKENS_ONLY,
    budget_name: BudgetName = "scoring_token_budget",
    oversize: Oversize = "refuse",
) -> Plan:
    """Few micro-batches within the budget, like costs on all ranks, groups whole on a rank and in a micro-batch where they fit.

    A group over the budget is cut into as few chunks as possible, all on one rank. Groups are split over ranks only where that
    lowers the largest rank load (padded rows: by a fixed rule, see `padded_batches`). In shared rows every chunk repeats the
    prompt, and sequences of one group are neighbours in their micro-batch. Without any sequence every rank gets one empty
    micro-batch: an optimizer step must follow a backward, even when nothing is left to train.

    Args:
        style: what a micro-batch's tokens are: `shared` prompts once, `unshared` lengths summed, `padded` rows x longest row.
        token_budget: most tokens in a micro-batch of one rank.
        max_sequences: most rows in a micro-batch; packed ones have one row, so it holds for `padded` only.
        budget_name: the setting that an error names.
        oversize: what becomes of a single sequence over the budget; `alone`: a micro-batch of its own.

    Raises:
        ConfigError: a sequence over the budget, unless `oversize` is `alone`.
    """
    if not sequences:
        return Plan([[[]] for _ in range(world_size)], costs=[[0.0] for _ in range(world_size)])
    count = len(sequences)
    groups, prompts, branches = (
        np.fromiter(map(attrgetter(name), sequences), np.int64, count) for name in ("group", "prompt_length", "branch_length")
    )
    if token_budget is not None and oversize == "refuse":
        _check_lengths(prompts, branches, token_budget, budget_name)
    table = group_table(groups, prompts, branches, style=style, cost=cost)
    unshared = int(prompts.sum() + branches.sum())
    if style == "padded":
        rows = padded_batches(table, world_size, token_budget=token_budget, max_sequences=max_sequences)
        return _padded_plan(table, rows, unshared)
    chunks = Chunks(table, token_budget)
    shares = assign_to_ranks(chunks, world_size, table.costliest_sequence)
    batches = [[share] for share in shares] if token_budget is None else lockstep_batches(chunks, shares, token_budget)
    return _packed_plan(chunks, batches, unshared)


def _check_lengths(prompts: Counts, branches: Counts, token_budget: int, budget_name: str) -> None:
    over = np.flatnonzero(prompts + branches > token_budget)
    if len(over):
        i = int(over[0])
        raise ConfigError(
            f"sequence {i} has {prompts[i] + branches[i]} tokens, over {budget_name}={token_budget} (prompt {prompts[i]}, then "
            f"{branches[i]}; {len(over)} of {len(prompts)} sequences are over it): set {budget_name} to at least "
            f"{(prompts + branches).max()}, or lower max_seq_length"
        )


def _packed_plan(chunks: Chunks, batches: list[list[list[int]]], unshared_tokens: int) -> Plan:
    merged = [[chunks.merged(batch) for batch in share] for share in batches]
    ranks = [[chunks.members(*batch) for batch in share] for share in merged]
    costs = [[sum(chunks.costs[chunk] for chunk in batch) / UNITS_PER_TOKEN for batch in share] for share in merged]
    tokens = sum(chunks.tokens[chunk] for share in merged for batch in share for chunk in batch)
    return Plan(ranks, tokens, unshared_tokens, costs)


def _padded_plan(table: GroupTable, batches: list[list[list[int]]], unshared_tokens: int) -> Plan:
    count = max(1, *map(len, batches))
    ranks = [share + [[] for _ in range(count - len(share))] for share in batches]
    # Widest first: a padded row costs what the first one does.
    lengths: list[int] = table.own_tokens.tolist()
    row_costs: list[int] = table.own_costs.tolist()
    tokens = sum(len(batch) * lengths[batch[0]] for share in batches for batch in share)
    costs = [[len(batch) * row_costs[batch[0]] / UNITS_PER_TOKEN if batch else 0.0 for batch in share] for share in ranks]
    return Plan(ranks, tokens, unshared_tokens, costs)
