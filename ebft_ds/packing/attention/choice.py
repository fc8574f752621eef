"""Which back end computes the attention of a packed row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

from ebft_ds.packing.attention.dense import DenseAttention
from ebft_ds.packing.attention.flex import BLOCK, FlexAttention
from ebft_ds.packing.attention.split import SplitAttention
from ebft_ds.packing.packed import PackedAttention, PackedLayout

AttentionName = Literal["auto", "split", "dense", "flex"]

DENSE_BELOW = 192
"""On a CPU: rows of fewer tokens take the dense mask.

Milliseconds a block, forward / forward and backward, one group of a prompt and 4 branches (9 from 256 tokens on), the shapes of
SmolLM2-135M (9 heads, 3 key heads, 64 wide), float32, one thread:

    tokens   64           128          192          256          512
    dense    0.21 / 0.75  0.70 / 2.39  1.42 / 4.86  2.59 / 9.49  10.32 / 35.21
    split    0.53 / 1.51  0.90 / 3.03  1.72 / 4.38  2.50 / 8.43   6.68 / 21.58
"""


def packed_attention(name: AttentionName, *, device: torch.device | str) -> Callable[[PackedLayout], PackedAttention]:
    """A factory that makes the attention of one row from its layout.

    auto: on a GPU flex, but for rows of less than one of its blocks; on a CPU dense for short rows and split for the others.
    """
    if name == "split":
        return SplitAttention
    if name == "dense":
        return DenseAttention
    if name == "flex":
        return FlexAttention
    on_cpu = torch.device(device).type == "cpu"

    def choose(layout: PackedLayout) -> PackedAttention:
        if on_cpu:
            return DenseAttention(layout) if layout.length < DENSE_BELOW else SplitAttention(layout)
        return DenseAttention(layout) if layout.length < BLOCK else FlexAttention(layout)

    return choose
