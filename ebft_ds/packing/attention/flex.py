"""Packed attention by torch's flex_attention: one fused kernel that skips blocks of the mask where no query sees a key. For GPUs.

On a CPU it has no backward, and uncompiled it forms all scores: there it serves comparisons.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from ebft_ds.errors import ConfigError
from ebft_ds.packing.attention.visibility import TokenMap
from ebft_ds.packing.packed import PackedLayout

BLOCK = 128
"""Queries and keys per block of the block mask; flex_attention's default."""


class FlexAttention:
    """See `PackedAttention`. One block mask a window size, made once a row and kept for every block of the model.

    Args:
        compiled: compile the kernel; by default on every device but the CPU.
    """

    def __init__(self, layout: PackedLayout, *, compiled: bool | None = None) -> None:
        self.layout = layout
        self._compiled = compiled
        self._masks: dict[tuple[int | None, torch.device], BlockMask] = {}

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
        if dropout:
            raise ConfigError("packing_attention: flex has no dropout in attention; set disable_dropout: true, or packing_attention: split")
        on_cpu = query.device.type == "cpu"
        if on_cpu and torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)):
            raise ConfigError("packing_attention: flex has no backward on a CPU; set packing_attention: auto")
        kernel: Any = _compiled_kernel() if (not on_cpu if self._compiled is None else self._compiled) else flex_attention
        output: Tensor = kernel(
            query,
            key,
            value,
            score_mod=None if softcap is None else _soft_cap(softcap),
            block_mask=self._block_mask(sliding_window, query.device),
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return output.transpose(1, 2)

    def _block_mask(self, window: int | None, device: torch.device) -> BlockMask:
        index = (window, device)
        if index not in self._masks:
            self._masks[index] = block_mask(TokenMap.of(self.layout, device), window)
        return self._masks[index]


@functools.cache
def _compiled_kernel() -> Callable[..., Any]:
    # Rows have ever new lengths. Over the limit of recompilations an error, and not the uncompiled fallback with all its scores: the
    # variants are few (with and without gradient, window, soft cap, actor and frozen copy).
    kernel: Callable[..., Any] = torch.compile(flex_attention, dynamic=True, fullgraph=True, recompile_limit=64)  # type: ignore[call-overload]
    return kernel


def block_mask(tokens: TokenMap, window: int | None) -> BlockMask:
    """The mask of a row, found a block of queries at a time: nothing of [T, T] is ever formed."""
    total = len(tokens.segment)
    padding = -total % BLOCK
    some: list[Tensor] = []
    every: list[Tensor] = []
    for first in range(0, total, BLOCK):
        seen = tokens.visible(window, first, min(first + BLOCK, total))
        seen = torch.nn.functional.pad(seen, (0, padding, 0, BLOCK - len(seen)))
        blocks = seen.view(BLOCK, -1, BLOCK).transpose(0, 1).flatten(1)
        some.append(blocks.any(1))
        every.append(blocks.all(1))
    whole = torch.stack(every)
    partial = torch.stack(some) & ~whole
    return BlockMask.from_kv_blocks(
        *_ordered(partial),
        *_ordered(whole),
        BLOCK_SIZE=BLOCK,
        mask_mod=_mask_mod(tokens, window),
        seq_lengths=(total, total),
    )


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """(count [1, 1, Q], key blocks [1, 1, Q, K], the wanted ones first), int32."""
    blocks = blocks.int()[None, None]
    return blocks.sum(-1, dtype=torch.int32), blocks.argsort(dim=-1, descending=True, stable=True).int()


def _mask_mod(tokens: TokenMap, window: int | None) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    segment, prompt, position = tokens.segment, tokens.prompt, tokens.position

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & ((segment[q] == segment[k]) | (prompt[q] == segment[k]))

    if window is None:
        return visible

    def visible_in_window(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return visible(b, h, q, k) & (position[q] - position[k] < window)

    return visible_in_window


def _soft_cap(cap: float) -> Callable[..., Tensor]:
    def capped(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return capped
