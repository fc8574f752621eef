"""Whitening a group's features, uncentred, in the n x n sample space (METHOD section 2).

X holds a group's n features, y its reference, X = U S V' is the thin SVD without singular values below rtol * s_max.

    feature   X~ = U V',  y~   = V S^-1 V' y          (the EBFT paper up to a factor sqrt(n))
    sample    X~ = U V',  y~_j = c_j y,  c = U S^-1 U' 1   (the authors' code)

A reward needs only inner products of these, and they are all functions of U, S and V'y: X~ X~' = U U', <x~_j, y~> = (U S^-1 V'y)_j
or c_j (U V'y)_j. So neither a D x D matrix nor X~ is ever formed. X' = Q R is factored in float64 first, and the SVD is that of
the small R: a float32 Gram matrix could not honour the cutoff.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ebft_ds.errors import ConfigError
from ebft_ds.features.pooling import NORM_EPS

WhiteningKind = Literal["feature", "sample"]


@dataclass(frozen=True)
class WhitenedGroups:
    """Inner products of whitened features, per group, in float64. Rows of invalid completions are 0."""

    cosine: Float[Tensor, "g n"]
    """cos(x~_j, y~_j); 0 where one of the two vectors is zero."""
    gram: Float[Tensor, "g n n"]
    """<x~_j, x~_k>."""
    rank: Int[Tensor, " g"]
    """Singular values kept."""
    kept_ratio: Float[Tensor, " g"]
    """Smallest kept singular value over the largest; NaN where a group has no nonzero feature."""
    gram_identity: Bool[Tensor, " g"]
    """The valid completions are linearly independent, so their Gram matrix is the identity and diversity is 0."""


def whitening_kind(use_whitening: bool | str | None) -> WhiteningKind | None:
    """`ebft_use_whitening` as a kind: true is `feature`; false and None are off.

    Raises:
        ConfigError: anything else but `feature` or `sample`.
    """
    if use_whitening is True:
        return "feature"
    if use_whitening is False or use_whitening is None:
        return None
    for kind in get_args(WhiteningKind):
        if use_whitening == kind:
            return cast(WhiteningKind, kind)
    raise ConfigError(f"whitening is {use_whitening!r}; use true, false, feature or sample")


def default_whitening_rtol(dtype: torch.dtype) -> float:
    """Cutoff for features that a network computed in `dtype`: 1e-2 for half precision, otherwise 1e-5."""
    return 1e-2 if dtype in (torch.bfloat16, torch.float16) else 1e-5


def whiten_groups(
    completions: Float[Tensor, "g n d"],
    references: Float[Tensor, "g d"],
    kind: WhiteningKind,
    *,
    mask: Bool[Tensor, "g n"],
    rtol: float,
) -> WhitenedGroups:
    """Whiten each group over its valid completions. Features are finite where `mask` is True and arbitrary elsewhere.

    Args:
        rtol: singular values below rtol * s_max are dropped (`ebft_whitening_rtol`).

    Raises:
        ConfigError: unknown kind, or rtol outside [0, 1).
    """
    if kind not in get_args(WhiteningKind):
        raise ConfigError(f"whitening is {kind!r}; use feature or sample")
    if not 0.0 <= rtol < 1.0:
        raise ConfigError(f"ebft_whitening_rtol is {rtol}; it must lie in [0, 1)")
    rows = completions.double().masked_fill(~mask[:, :, None], 0.0)
    reference = references.double()
    left, singular, projection = _thin_svd(rows, reference)
    kept = singular > rtol * singular[:, :1]  # strict: with s_max = 0 nothing is kept
    left = (left * kept[:, None, :]).masked_fill(rows.norm(dim=-1, keepdim=True) <= NORM_EPS, 0.0)
    inverse = torch.where(kept, 1.0 / singular.where(kept, torch.ones_like(singular)), 0.0)
    projection = projection * kept
    rank = kept.sum(dim=1)
    valid = mask.sum(dim=1)
    smallest = singular.masked_fill(~kept, torch.inf).amin(dim=1)
    return WhitenedGroups(
        cosine=_cosine(left, inverse, projection, reference, kind),
        gram=left @ left.mT,
        rank=rank,
        kept_ratio=torch.where(rank > 0, smallest / singular[:, 0], torch.nan),
        gram_identity=(rank == valid) & (valid > 0),
    )


def _thin_svd(
    rows: Float[Tensor, "g n d"], reference: Float[Tensor, "g d"]
) -> tuple[Float[Tensor, "g n k"], Float[Tensor, "g k"], Float[Tensor, "g k"]]:
    """U, S and V'y of X = U S V' by way of X' = Q R, R = A S U', V = Q A."""
    q, r = torch.linalg.qr(rows.mT)
    a, singular, u_t = torch.linalg.svd(r, full_matrices=False)
    projection = (a.mT @ (q.mT @ reference[:, :, None])).squeeze(-1)
    return u_t.mT, singular, projection


def _cosine(
    left: Float[Tensor, "g n k"],
    inverse: Float[Tensor, "g k"],
    projection: Float[Tensor, "g k"],
    reference: Float[Tensor, "g d"],
    kind: WhiteningKind,
) -> Float[Tensor, "g n"]:
    reference_norm = reference.norm(dim=-1, keepdim=True)
    # A reference outside the completions' span has only rounding left in V'y, whose direction means nothing.
    inside = projection.norm(dim=-1, keepdim=True) > NORM_EPS * reference_norm
    if kind == "feature":
        target = projection * inverse * inside
        products = (left @ target[:, :, None]).squeeze(-1)
        target_norm = target.norm(dim=-1, keepdim=True)
    else:
        # cos(x~_j, c_j y): only the sign of c_j is left.
        scalars = (left @ (inverse * left.sum(dim=1))[:, :, None]).squeeze(-1)
        noise = NORM_EPS * left.shape[1] * inverse.amax(dim=1, keepdim=True)  # rounding of sums that cancel
        sign = scalars.sign().masked_fill(scalars.abs() <= noise, 0.0)
        products = sign * (left @ (projection * inside)[:, :, None]).squeeze(-1)
        target_norm = reference_norm
    row_norm = left.norm(dim=-1)
    nonzero = (row_norm > NORM_EPS) & (target_norm > 0.0)
    scale = torch.where(nonzero, row_norm * target_norm, 1.0)
    return torch.where(nonzero, products / scale, 0.0)
