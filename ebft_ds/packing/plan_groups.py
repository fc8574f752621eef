"""Sequences of a plan group by group, and what they weigh: columns, because a step may hold a million of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ebft_ds.packing.cost import Counts, TokenCost, branch_pairs, causal_pairs
from ebft_ds.packing.plan_bins import pack
from ebft_ds.packing.rows import RowStyle


class Chunk(NamedTuple):
    """Sequences of one group that are forwarded in one micro-batch."""

    group: int
    """Row of the `GroupTable`."""
    members: list[int]
    tokens: int
    cost: int
    """In units of `cost.UNITS_PER_TOKEN`; like `tokens`, the shared prompt included."""


@dataclass(frozen=True)
class GroupTable:
    """N sequences in G groups, groups in the order of their first sequences.

    Only in shared rows does a group hold something once: its prompt. There, sequences of one group whose prompts have different
    lengths are groups of their own, since they cannot share.
    """

    members: Counts
    """[N]: sequence indices, group by group, rising within a group."""
    starts: Counts
    """[G + 1]: where each group begins in `members`."""
    own_tokens: Counts
    """[N], by sequence: what it adds to its group."""
    own_costs: Counts
    once_tokens: Counts
    """[G]: what a chunk of the group holds once."""
    once_costs: Counts

    @cached_property
    def sequence_costs(self) -> Counts:
        """[N], in the order of `members`: the cost of each sequence alone."""
        return self.own_costs[self.members] + np.repeat(self.once_costs, np.diff(self.starts))

    @cached_property
    def tokens(self) -> Counts:
        """[G], of whole groups."""
        return self.once_tokens + np.add.reduceat(self.own_tokens[self.members], self.starts[:-1])

    @cached_property
    def costs(self) -> Counts:
        """[G], of whole groups."""
        return self.once_costs + np.add.reduceat(self.own_costs[self.members], self.starts[:-1])

    def whole(self) -> list[Chunk]:
        """Every group in one chunk, whatever its size."""
        members, starts = self.members.tolist(), self.starts.tolist()
        tokens, costs = self.tokens.tolist(), self.costs.tolist()
        return [Chunk(g, members[starts[g] : starts[g + 1]], tokens[g], costs[g]) for g in range(len(tokens))]

    def cut(self, chunk: Chunk, token_budget: int | None, *, at_least: int = 1) -> list[Chunk]:
        """The chunk's sequences in as few chunks of like cost as the budget allows, but at least so many. One over it stays alone."""
        if at_least == 1 and (token_budget is None or chunk.tokens <= token_budget):
            return [chunk]
        own_tokens, own_costs = self.own_tokens[chunk.members].tolist(), self.own_costs[chunk.members].tolist()
        once_tokens, once_cost = int(self.once_tokens[chunk.group]), int(self.once_costs[chunk.group])
        capacity = sum(own_tokens) if token_budget is None else token_budget - once_tokens
        return [
            Chunk(
                chunk.group,
                sorted(chunk.members[i] for i in bin_),
                once_tokens + sum(own_tokens[i] for i in bin_),
                once_cost + sum(own_costs[i] for i in bin_),
            )
            for bin_ in pack(own_costs, own_tokens, capacity, at_least=at_least)
            if bin_
        ]

    def merged(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """Chunks of one group as one, in the order of their first ones."""
        by_group: dict[int, Chunk] = {}
        for chunk in chunks:
            other = by_group.get(chunk.group)
            if other is not None:
                tokens = other.tokens + chunk.tokens - int(self.once_tokens[chunk.group])
                cost = other.cost + chunk.cost - int(self.once_costs[chunk.group])
                chunk = Chunk(chunk.group, sorted(other.members + chunk.members), tokens, cost)
            by_group[chunk.group] = chunk
        return list(by_group.values())


def group_table(groups: Counts, prompts: Counts, branches: Counts, *, style: RowStyle, cost: TokenCost) -> GroupTable:
    """Args: [N] each, by sequence: group, prompt tokens, tokens behind the prompt. N is at least 1."""
    shared = style == "shared"
    members = np.lexsort((prompts, groups)) if shared else np.argsort(groups, kind="stable")
    new = np.diff(groups[members]) != 0
    if shared:
        new |= np.diff(prompts[members]) != 0
    starts = np.concatenate([[0], np.flatnonzero(new) + 1, [len(members)]])
    members, starts = _by_first_sequence(members, starts)
    if shared:
        once = prompts[members[starts[:-1]]]
        own, pairs = branches, branch_pairs(prompts, branches)
    else:
        once = np.zeros(len(starts) - 1, dtype=np.int64)
        own = prompts + branches
        pairs = causal_pairs(own)
    return GroupTable(members, starts, own, cost.units(own, pairs), once, cost.units(once, causal_pairs(once)))


def _by_first_sequence(members: Counts, starts: Counts) -> tuple[Counts, Counts]:
    """The same groups, in the order of their first sequences."""
    firsts, sizes = members[starts[:-1]], np.diff(starts)
    order = np.argsort(firsts)
    if np.array_equal(order, np.arange(len(order))):
        return members, starts
    new_starts = np.concatenate([[0], np.cumsum(sizes[order])])
    shift = np.repeat(starts[:-1][order] - new_starts[:-1], sizes[order])
    return members[np.arange(len(members)) + shift], new_starts
