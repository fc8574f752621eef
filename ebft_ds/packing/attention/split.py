"""Packed attention in pieces: one causal call over each prompt, then one call a branch over [prompt; branch]. No mask of [T, T]."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ebft_ds.packing.attention.scores import capped_attention
from ebft_ds.packing.packed import PackedLayout


class SplitAttention:
    """See `PackedAttention`. Masks [branch, prompt + branch] are made once a row and kept for every block."""

    def __init__(self, layout: PackedLayout) -> None:
        self.layout = layout
        self._masks: dict[tuple[int, int, int | None, torch.dtype, torch.device], Tensor] = {}

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
        lengths = [length for group in self.layout.groups for length in (group.prompt_length, *group.branch_lengths)]
        # split, not slices: its backward is one concatenation, that of a slice fills a whole row with zeros for every piece
        queries, keys, values = (list(x.split(lengths, dim=2)) for x in (query, key, value))
        pieces: list[Tensor] = []

        def attend(piece: Tensor, seen_keys: Tensor, seen_values: Tensor) -> None:
            output = self._attend(piece, seen_keys, seen_values, scaling, dropout, sliding_window, softcap)
            pieces.append(output.transpose(1, 2))

        for group in self.layout.groups:
            count = 1 + len(group.branch_lengths)
            (prompt_query, *branch_queries), queries = queries[:count], queries[count:]
            (prompt_key, *branch_keys), keys = keys[:count], keys[count:]
            (prompt_value, *branch_values), values = values[:count], values[count:]
            attend(prompt_query, prompt_key, prompt_value)
            for branch_query, branch_key, branch_value in zip(branch_queries, branch_keys, branch_values, strict=True):
                attend(branch_query, torch.cat([prompt_key, branch_key], dim=2), torch.cat([prompt_value, branch_value], dim=2))
        return torch.cat(pieces, dim=1)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float | None,
        dropout: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """The queries are the last of the keys' positions."""
        queries, keys = query.shape[2], key.shape[2]
        window = window if window is not None and window < keys else None
        causal = queries == keys and window is None and softcap is None
        mask = None if causal or (queries == 1 and window is None) else self._mask(queries, keys, window, query)
        if softcap is not None:
            return capped_attention(query, key, value, mask, scaling=scaling, dropout=dropout, softcap=softcap)
        return scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=causal and queries > 1,
            dropout_p=dropout,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )

    def _mask(self, queries: int, keys: int, window: int | None, like: Tensor) -> Tensor:
        """Additive [queries, keys]."""
        index = (queries, keys, window, like.dtype, like.device)
        if index not in self._masks:
            seen = torch.ones(queries, keys, dtype=torch.bool, device=like.device).tril(keys - queries)
            if window is not None:
                seen &= torch.ones_like(seen).triu(keys - queries - window + 1)
            zero = torch.zeros(queries, keys, dtype=like.dtype, device=like.device)
            self._masks[index] = zero.masked_fill(~seen, float("-inf"))
        return self._masks[index]
