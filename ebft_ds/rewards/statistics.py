"""Masked statistics over the last axis, shared by reward aggregation and advantages."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

STD_EPS = 1e-4
"""Added to a standard deviation before dividing by it (TRL)."""


def masked_mean(values: Float[Tensor, "*batch n"], valid: Bool[Tensor, "*batch n"]) -> Float[Tensor, "*batch 1"]:
    """Mean over valid entries; 0 where there is none."""
    total = values.masked_fill(~valid, 0.0).sum(dim=-1, keepdim=True)
    return total / valid.sum(dim=-1, keepdim=True).clamp_min(1)


def masked_std(values: Float[Tensor, "*batch n"], valid: Bool[Tensor, "*batch n"]) -> Float[Tensor, "*batch 1"]:
    """Bessel-corrected standard deviation over valid entries; 0 for fewer than two."""
    deviation = (values - masked_mean(values, valid)).masked_fill(~valid, 0.0)
    freedom = (valid.sum(dim=-1, keepdim=True) - 1).clamp_min(1)
    return (deviation.square().sum(dim=-1, keepdim=True) / freedom).sqrt()


def is_flat(
    values: Float[Tensor, "*batch n"], valid: Bool[Tensor, "*batch n"], *, precision: torch.dtype = torch.float64, scale: float = 0.0
) -> Bool[Tensor, "*batch 1"]:
    """Whether valid entries differ by no more than rounding, or there are fewer than two.

    Args:
        precision: the dtype the values were computed in.
        scale: smallest magnitude to measure rounding against, for values that are differences of larger ones.
    """
    few = valid.sum(dim=-1, keepdim=True) < 2
    highest = values.masked_fill(~valid, -torch.inf).amax(dim=-1, keepdim=True)
    lowest = values.masked_fill(~valid, torch.inf).amin(dim=-1, keepdim=True)
    magnitude = values.masked_fill(~valid, 0.0).abs().amax(dim=-1, keepdim=True).clamp_min(scale)
    return few | (highest - lowest <= 8.0 * torch.finfo(precision).eps * magnitude)
