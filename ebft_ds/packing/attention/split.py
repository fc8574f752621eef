"""Packed attention in pieces: one causal call over each prompt, then its branches over [prompt; branch]. No mask of [T, T]."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ebft_ds.packing.attention.merged import kernel_takes, merged_attention
from ebft_ds.packing.attention.scores import capped_attention
from ebft_ds.packing.packed import PackedGroup, PackedLayout


@dataclass(frozen=True)
class _Call:
    """What one layer asks for, as far as it matters in one group: no window where all sequences are shorter."""

    scaling: float | None
    dropout: float
    window: int | None
    softcap: float | None

    @property
    def plain(self) -> bool:
        return self.window is None and self.softcap is None


class SplitAttention:
    """See `PackedAttention`. Where a mask is needed (a window, a soft cap, another device than the CPU) it is [branch, prompt + branch],
    made once a row and kept for every block."""

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
        pieces: list[Tensor] = []
        lengths = [group.length for group in self.layout.groups]
        # split, not slices: its backward is one concatenation, that of a slice fills a whole row with zeros for every piece
        groups = zip(self.layout.groups, *(x.split(lengths, dim=2) for x in (query, key, value)), strict=True)
        for group, group_query, group_key, group_value in groups:
            longest = group.prompt_length + max(group.branch_lengths, default=0)
            call = _Call(scaling, dropout, None if sliding_window is None or sliding_window >= longest else sliding_window, softcap)
            pieces.extend(self._group(group, group_query, group_key, group_value, call))
        pieces = [piece.transpose(1, 2) for piece in pieces]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)

    def _group(self, group: PackedGroup, query: Tensor, key: Tensor, value: Tensor, call: _Call) -> list[Tensor]:
        """[1, Hq, *, D] pieces, in order."""
        lengths = [group.prompt_length, *group.branch_lengths]
        lengths = [length for length in lengths if length]  # an empty prompt or completion has no tokens
        if len(lengths) < 2:
            return [self._attend(query, key, value, call)] if lengths else []
        if group.prompt_length and call.plain and not call.dropout and kernel_takes(query, key, value):
            return [merged_attention(query, key, value, lengths, call.scaling)]
        queries, keys, values = (x.split(lengths, dim=2) for x in (query, key, value))
        if not group.prompt_length:
            return [self._attend(*piece, call) for piece in zip(queries, keys, values, strict=True)]
        pieces = [self._attend(queries[0], keys[0], values[0], call)]
        for own_query, own_key, own_value in zip(queries[1:], keys[1:], values[1:], strict=True):
            pieces.append(self._attend(own_query, torch.cat([keys[0], own_key], 2), torch.cat([values[0], own_value], 2), call))
        return pieces

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, call: _Call) -> Tensor:
        """The queries are the last of the keys' positions."""
        queries, keys = query.shape[2], key.shape[2]
        causal = queries == keys and call.plain
        needs_mask = not causal and (queries > 1 or call.window is not None)
        mask = self._mask(queries, keys, call.window, query) if needs_mask else None
        if call.softcap is not None:
            return capped_attention(query, key, value, mask, scaling=call.scaling, dropout=call.dropout, softcap=call.softcap)
        grouped = query.shape[1] != key.shape[1]
        if grouped and mask is not None and query.device.type == "cuda":  # its fused kernels take grouped heads without a mask only
            repeats = query.shape[1] // key.shape[1]
            key, value, grouped = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1), False
        return scaled_dot_product_attention(
            query, key, value, mask, call.dropout, is_causal=causal and queries > 1, scale=call.scaling, enable_gqa=grouped
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
