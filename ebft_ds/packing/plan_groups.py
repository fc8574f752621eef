"""Sequences of a plan group by group, and what they weigh: columns, because a step may hold a million of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ebft_ds.packing.cost import Counts, TokenCost, branch_pairs, causal_pairs
from ebft_ds.packing.rows import RowStyle


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
    """[N], in units of `cost.UNITS_PER_TOKEN`, as all costs here."""
    once_tokens: Counts
    """[G]: what the group holds once wherever some of it is."""
    once_costs: Counts

    @cached_property
    def tokens(self) -> Counts:
        """[G], of whole groups."""
        whole: Counts = self.once_tokens + np.add.reduceat(self.own_tokens[self.members], self.starts[:-1])
        return whole

    @cached_property
    def costs(self) -> Counts:
        """[G], of whole groups."""
        whole: Counts = self.once_costs + np.add.reduceat(self.own_costs[self.members], self.starts[:-1])
        return whole

    @cached_property
    def costliest_sequence(self) -> int:
        """Cost of the costliest sequence, alone in its row."""
        return int((self.once_costs + np.maximum.reduceat(self.own_costs[self.members], self.starts[:-1])).max())


def group_table(groups: Counts, prompts: Counts, branches: Counts, *, style: RowStyle, cost: TokenCost) -> GroupTable:
    """Args: [N] each, by sequence: group, prompt tokens, tokens behind the prompt. N is at least 1."""
    shared = style == "shared"
    members = np.argsort(groups, kind="stable")
    new_group = np.diff(groups[members]) != 0
    if shared and bool((new_group < (np.diff(prompts[members]) != 0)).any()):
        members = np.lexsort((prompts, groups))
        new_group = (np.diff(groups[members]) != 0) | (np.diff(prompts[members]) != 0)
    starts = np.concatenate([[0], np.flatnonzero(new_group) + 1, [len(members)]])
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
    order = np.argsort(members[starts[:-1]])
    sizes = np.diff(starts)[order]
    new_starts = np.concatenate([[0], np.cumsum(sizes)])
    shift = np.repeat(starts[:-1][order] - new_starts[:-1], sizes)
    return members[np.arange(len(members)) + shift], new_starts
