"""Groups that must stay in one micro-batch: a preference loss needs the rewards of all of a row's responses at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ebft_ds.packing.packer import RowPacker
from ebft_ds.packing.plan import BudgetName, Plan, PlannedSequence, plan_micro_batches
from ebft_ds.packing.rows import RowStyle, TokenRows


@dataclass(frozen=True)
class WholeGroup:
    """Sequences with a common prefix; every branch holds at least one token."""

    prefix_ids: Sequence[int]
    branches: Sequence[Sequence[int]]

    def tokens(self, style: RowStyle) -> tuple[int, int]:
        """(shared, other) tokens that it takes in a row of that style."""
        prefix, lengths = len(self.prefix_ids), [len(branch) for branch in self.branches]
        if style == "shared":
            return prefix, sum(lengths)
        if style == "unshared":
            return 0, len(lengths) * prefix + sum(lengths)
        return 0, len(lengths) * (prefix + max(lengths))


@dataclass(frozen=True)
class GroupSequence:
    """One sequence of a whole group (a `RowSequence`)."""

    group: int
    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]


@dataclass(frozen=True)
class GroupRows:
    """Rows of one micro-batch, and where its sequences end."""

    rows: TokenRows
    ends: Tensor
    """int64 [N]: flat position of every sequence's last token, group by group. One dummy position where there is no group."""
    counts: list[int]
    """Sequences of each group."""
    unshared_tokens: int


def plan_whole_groups(
    groups: Sequence[WholeGroup],
    world_size: int,
    packer: RowPacker,
    *,
    token_budget: int | None = None,
    max_groups: int | None = None,
    budget_name: BudgetName = "train_token_budget",
) -> Plan:
    """Indices of groups by rank and micro-batch, no group ever split; arguments and errors as in `plan_micro_batches`.

    `max_groups` holds for padded rows only. Plan.tokens counts each group as `WholeGroup.tokens` does.
    """
    units = [PlannedSequence(i, *group.tokens(packer.style)) for i, group in enumerate(groups)]
    return plan_micro_batches(
        units,
        world_size,
        style=packer.style,
        token_budget=token_budget,
        max_sequences=max_groups,
        cost=packer.cost,
        budget_name=budget_name,
    )


def build_group_rows(groups: Sequence[WholeGroup], packer: RowPacker, *, device: torch.device | str = "cpu") -> GroupRows:
    """The rows of one micro-batch; without a group the dummy that keeps ranks in lockstep."""
    sequences = [GroupSequence(g, group.prefix_ids, branch) for g, group in enumerate(groups) for branch in group.branches]
    built = packer.build(sequences, device=device)
    ends = [place.flat(place.prompt_length + place.branch_length - 1) for place in built.places] or [0]
    return GroupRows(
        built.rows,
        torch.tensor(ends, dtype=torch.int64, device=device),
        [len(group.branches) for group in groups],
        built.unshared_tokens,
    )
