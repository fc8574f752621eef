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

DENSE_BELOW = 128
"""On a CPU: rows of fewer tokens take the dense mask."""


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
