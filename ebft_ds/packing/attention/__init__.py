"""Attention of packed rows: how it reaches a model's layers (`install_packed_attention`), and the back ends that compute it."""

from __future__ import annotations

from ebft_ds.packing.attention.choice import packed_attention
from ebft_ds.packing.attention.install import install_packed_attention

__all__ = ["install_packed_attention", "packed_attention"]
