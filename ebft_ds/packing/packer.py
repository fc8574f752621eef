"""One place that decides how sequences become forwards: plan over ranks and micro-batches, then rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ebft_ds.errors import ConfigError
from ebft_ds.packing.cost import TOKENS_ONLY, TokenCost
from ebft_ds.packing.packed import PackedAttention, PackedLayout, packed_batch
from ebft_ds.packing.padded import padded_batch
from ebft_ds.packing.plan import BudgetName, Oversize, Plan, PlannedSequence, plan_micro_batches
from ebft_ds.packing.rows import RowBatch, RowSequence, RowStyle


@dataclass(frozen=True)
class RowPacker:
    """How the rows of one network are laid out.

    Args:
        style: see `RowStyle`.
        attention: makes the attention of a packed row; needed by every style but `padded`.
        cost: what its plans balance over ranks.
    """

    style: RowStyle = "padded"
    attention: Callable[[PackedLayout], PackedAttention] | None = None
    cost: TokenCost = TOKENS_ONLY

    def __post_init__(self) -> None:
        if self.style != "padded" and self.attention is None:
            raise ConfigError(f"{self.style} rows need an attention of their own")

    def plan(
        self,
        sequences: Sequence[RowSequence],
        world_size: int,
        *,
        token_budget: int | None = None,
        max_sequences: int | None = None,
        budget_name: BudgetName = "scoring_token_budget",
        oversize: Oversize = "refuse",
    ) -> Plan:
        """Pure: the same on every rank. Arguments and errors as in `plan_micro_batches`."""
        planned = [PlannedSequence(s.group, len(s.prompt_ids), len(s.completion_ids)) for s in sequences]
        return plan_micro_batches(
            planned,
            world_size,
            style=self.style,
            token_budget=token_budget,
            max_sequences=max_sequences,
            cost=self.cost,
            budget_name=budget_name,
            oversize=oversize,
        )

    def build(self, sequences: Sequence[RowSequence], *, device: torch.device | str = "cpu") -> RowBatch:
        """The rows of one micro-batch; without a sequence the dummy that keeps ranks in lockstep."""
        if self.attention is None or self.style == "padded":
            return padded_batch(sequences, device=device)
        return packed_batch(sequences, self.attention, share=self.style == "shared", device=device)
