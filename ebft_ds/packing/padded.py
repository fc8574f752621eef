"""Right-padded rows: the plain way to forward sequences, and the reference that faster row layouts are held against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PaddedRows:
    """Token rows for one forward. Positions restart at 0 in every row; padding is masked and never read."""

    input_ids: Tensor
    """int64 [B, T]."""
    attention_mask: Tensor
    """int64 [B, T], 1 on real tokens."""
    position_ids: Tensor
    """int64 [B, T]."""

    @property
    def real_tokens(self) -> int:
        return int(self.attention_mask.sum())


def pad_rows(rows: Sequence[Sequence[int]], *, device: torch.device | str = "cpu") -> PaddedRows:
    """Pads on the right with token 0 (masked). No rows give the dummy of one masked-in token that keeps ranks in lockstep."""
    rows = rows or [[0]]
    longest = max(len(r) for r in rows)
    input_ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    attention_mask = torch.zeros_like(input_ids)
    for b, row in enumerate(rows):
        input_ids[b, : len(row)] = torch.tensor(row, dtype=torch.int64)
        attention_mask[b, : len(row)] = 1
    position_ids = torch.arange(longest).expand(len(rows), -1)
    return PaddedRows(input_ids.to(device), attention_mask.to(device), position_ids.to(device).contiguous())
