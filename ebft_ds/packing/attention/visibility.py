"""Who sees whom in a packed row, by tensors: what masks are made from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ebft_ds.packing.packed import PackedLayout


@dataclass(frozen=True)
class TokenMap:
    """int32 [T] each. A segment is a prompt or a branch; segment ids are unique in the row."""

    segment: Tensor
    prompt: Tensor
    """Segment of the token's prompt; of a prompt token its own."""
    position: Tensor

    @classmethod
    def of(cls, layout: PackedLayout, device: torch.device | str) -> TokenMap:
        lengths: list[int] = []
        prompts: list[int] = []
        for group in layout.groups:
            prompts += [len(lengths)] * (1 + len(group.branch_lengths))
            lengths += [group.prompt_length, *group.branch_lengths]
        segment = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        columns = (segment, torch.tensor(prompts)[segment], layout.position_ids())
        return cls(*(column.to(device, torch.int32) for column in columns))

    def visible(self, sliding_window: int | None, first: int = 0, end: int | None = None) -> Tensor:
        """bool [end - first, T]: whether the query (row; all of them by default) sees the key (column)."""
        rows = slice(first, end)
        token = torch.arange(len(self.segment), device=self.segment.device)
        own, prompt = self.segment[rows, None] == self.segment, self.prompt[rows, None] == self.segment
        seen = (token[rows, None] >= token) & (own | prompt)
        if sliding_window is not None:
            seen &= self.position[rows, None] - self.position < sliding_window
        return seen
