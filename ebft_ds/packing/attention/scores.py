"""Attention with explicit scores, for what fused kernels do not compute: Gemma 2's soft cap."""

from __future__ import annotations

import torch
from torch import Tensor


def capped_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, scaling: float | None, dropout: float, softcap: float
) -> Tensor:
    """softmax(c * tanh(scores / c)) over the visible keys, applied to the values.

    query [B, Hq, Q, D], key and value [B, Hkv, K, D]; mask, broadcastable to [B, Hq, Q, K]: bool, true where a key is seen, or
    additive; None: every query sees every key. -> [B, Hq, Q, D]. Softmax in float32, as transformers' eager attention has it.
    """
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min) if mask.dtype == torch.bool else scores + mask
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.nn.functional.dropout(weights, p=dropout) @ value
