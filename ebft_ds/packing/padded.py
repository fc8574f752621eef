"""Right-padded rows: the plain way to forward sequences, and the reference that faster row layouts are held against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ebft_ds.packing.rows import Place, RowBatch, RowSequence


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

    def body_inputs(self) -> dict[str, Any]:
        return {"input_ids": self.input_ids, "attention_mask": self.attention_mask, "position_ids": self.position_ids}

    def check_forward(self, num_blocks: int) -> None:
        """Rows cannot see each other."""

    def flat_positions(self) -> Tensor:
        """int64 [real_tokens], row by row."""
        return self.attention_mask.flatten().nonzero().flatten()


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


def padded_batch(sequences: Sequence[RowSequence], *, device: torch.device | str = "cpu") -> RowBatch:
    """One row a sequence; without any the dummy row."""
    rows = pad_rows([[*s.prompt_ids, *s.completion_ids] for s in sequences], device=device)
    width = rows.input_ids.shape[1]
    places = [Place(b * width, len(s.prompt_ids), b * width + len(s.prompt_ids), len(s.completion_ids)) for b, s in enumerate(sequences)]
    return RowBatch(rows, places, sum(len(s.prompt_ids) + len(s.completion_ids) for s in sequences))
