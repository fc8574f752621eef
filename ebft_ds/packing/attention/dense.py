"""Packed attention in one call with a mask [T, T]: the fewest calls, for short rows."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ebft_ds.packing.attention.scores import capped_attention
from ebft_ds.packing.attention.visibility import TokenMap
from ebft_ds.packing.packed import PackedLayout


class DenseAttention:
    """See `PackedAttention`. One mask a window size, made once a row and kept for every block."""

    def __init__(self, layout: PackedLayout) -> None:
        self.layout = layout
        self._masks: dict[tuple[int | None, torch.device], Tensor] = {}

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float | None,
        dropout: float,
        sliding_window: int | None,
        softcap: float | None,
    ) -> Tensor:
        index = (sliding_window, query.device)
        if index not in self._masks:
            self._masks[index] = TokenMap.of(self.layout, query.device).visible(sliding_window)[None, None]
        mask = self._masks[index]
        if softcap is not None:
            output = capped_attention(query, key, value, mask, scaling=scaling, dropout=dropout, softcap=softcap)
        else:
            gqa = query.shape[1] != key.shape[1]
            if gqa and query.device.type == "cuda":  # its fused kernels take grouped heads without a mask only
                repeats = query.shape[1] // key.shape[1]
                key, value, gqa = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1), False
            output = scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling, enable_gqa=gqa)
        return output.transpose(1, 2)
