"""Which back end computes the attention of a packed row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

from ebft_ds.packing.attention.dense import DenseAttention
from ebft_ds.packing.attention.split import SplitAttention
from ebft_ds.packing.packed import PackedAttention, PackedLayout

AttentionName = Literal["auto", "split", "dense", "flex"]


def packed_attention(name: AttentionName, *, device: torch.device | str) -> Callable[[PackedLayout], PackedAttention]:
    """A factory that makes the attention of one row from its layout."""
    if name == "dense":
        return DenseAttention
    return SplitAttention
