"""The EBFT reward of a group: alignment with the reference, diversity among the completions (METHOD section 1).

    r_j = alpha * 2 cos(phi_j, phi_y) - eta * 2/(n-1) * sum_{k != j} <phi_j, phi_k>

With alpha = eta = 1, unit features and no whitening, E[1/n sum_j r_j grad log p_j] is exactly -grad of the feature-matching loss
L_FM = E || E phi(completion) - phi(reference) ||^2 (Jelassi et al. 2026, arXiv 2603.12248). n is the number of valid completions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.linalg import vector_norm

from ebft_ds.errors import NumericsError
from ebft_ds.features.pooling import NORM_EPS, unit_normalize
from ebft_ds.features.whitening import WhiteningKind, default_whitening_rtol, whiten_groups


@dataclass(frozen=True)
class FeatureRewards:
    """Rewards of G groups of n completions, with what the exact baseline needs. 0 where `mask` is False."""

    reward: Float[Tensor, "g n"]
    """alignment_coef * alignment - diversity_coef * diversity."""
    alignment: Float[Tensor, "g n"]
    """Doubled cosine with the reference, before the coefficient."""
    diversity: Float[Tensor, "g n"]
    """Doubled mean dot product with the siblings, before the coefficient; 0 for fewer than two valid completions."""
    diversity_to_siblings: Float[Tensor, "g n"]
    """What completion j adds to the sum of its siblings' `diversity`; equal to `diversity` unless completions carry weights."""
    cfm_loss: Float[Tensor, " g"]
    """|| mean_j phi_j - phi_y ||^2 on unwhitened unit features; NaN without a valid completion."""
    fm_loss_unbiased: Float[Tensor, " g"]
    """|| phi_y ||^2 - mean_j(2 <phi_j, phi_y> - mean_{k != j} <phi_j, phi_k>) on unwhitened unit features: an unbiased estimate of
    L_FM; NaN for fewer than two valid completions."""
    alignment_coef: float
    diversity_coef: float
    mask: Bool[Tensor, "g n"]
    """Valid completions; all the statistics are over these."""
    gram_identity: Bool[Tensor, " g"]
    """Whitening made the group's Gram matrix the identity, so diversity is 0; False without whitening."""
    whitening_kept_ratio: Float[Tensor, " g"]
    """Smallest kept singular value over the largest; NaN without whitening."""

    @property
    def valid_count(self) -> Int[Tensor, " g"]:
        """Valid completions per group; groups with fewer than two get advantages of 0."""
        return self.mask.sum(dim=1)


def group_feature_rewards(
    completions: Float[Tensor, "g n d"],
    references: Float[Tensor, "g d"],
    *,
    alignment_coef: float = 1.0,
    diversity_coef: float = 1.0,
    whitening: WhiteningKind | None = None,
    mask: Bool[Tensor, "g n"] | None = None,
    whitening_rtol: float | None = None,
    completion_weights: Float[Tensor, "g n"] | None = None,
) -> FeatureRewards:
    """Score groups of completions against their references. Pure; accumulates in float64.

    Args:
        completions: features as given; normalise them first (`pool_features` does). Alignment is a cosine in any case, diversity a plain
            dot product of what is given.
        references: one feature per group.
        whitening: None, `feature` or `sample` (see `ebft_ds.features.whitening`); acts on alignment and diversity only.
        mask: valid completions (default: all). The others are left out of every statistic and may hold anything.
        whitening_rtol: singular-value cutoff; default by the dtype of `completions`. Features that a half-precision network computed
            and that were widened afterwards need 1e-2 given here.
        completion_weights: `diversity_importance: sequence`, the sequence weights p/q of stale samples:
            diversity_j = 2/(n-1) sum_{k != j} w_k <phi_j, phi_k>.

    Returns:
        Rewards in the dtype of `completions` (half precision: float32).

    Raises:
        NumericsError: a non-finite feature or weight of a valid completion, or of the reference of a group with a valid one; names
            group and completion.
        ConfigError: an unknown whitening kind or a cutoff that cannot work.
    """
    valid = torch.ones(completions.shape[:2], dtype=torch.bool, device=completions.device) if mask is None else mask.bool()
    _check_finite(completions, references, completion_weights, valid)
    dtype = torch.float64 if completions.dtype == torch.float64 else torch.float32
    phi = completions.double().masked_fill(~valid[:, :, None], 0.0)
    # The reference of a group without valid completions may be anything; it must not turn masked zeros into NaN.
    target = references.double().masked_fill(~valid.any(dim=1, keepdim=True), 0.0)

    if whitening is None:
        cosine, gram = _cosine(phi, target), phi @ phi.mT
        gram_identity = torch.zeros(len(phi), dtype=torch.bool, device=phi.device)
        kept_ratio = torch.full((len(phi),), torch.nan, dtype=torch.float64, device=phi.device)
    else:
        rtol = default_whitening_rtol(completions.dtype) if whitening_rtol is None else whitening_rtol
        whitened = whiten_groups(phi, target, whitening, mask=valid, rtol=rtol)
        cosine, gram = whitened.cosine, whitened.gram
        gram_identity, kept_ratio = whitened.gram_identity, whitened.kept_ratio

    alignment = (2.0 * cosine).masked_fill(~valid, 0.0)
    weights = None if completion_weights is None else completion_weights.double()
    diversity, to_siblings = _diversity(gram, valid, weights)
    cfm_loss, unbiased = _losses(unit_normalize(phi), unit_normalize(target), valid)
    return FeatureRewards(
        reward=(alignment_coef * alignment - diversity_coef * diversity).to(dtype),
        alignment=alignment.to(dtype),
        diversity=diversity.to(dtype),
        diversity_to_siblings=to_siblings.to(dtype),
        cfm_loss=cfm_loss.to(dtype),
        fm_loss_unbiased=unbiased.to(dtype),
        alignment_coef=alignment_coef,
        diversity_coef=diversity_coef,
        mask=valid,
        gram_identity=gram_identity,
        whitening_kept_ratio=kept_ratio.to(dtype),
    )


def _check_finite(completions: Tensor, references: Tensor, weights: Tensor | None, valid: Tensor) -> None:
    bad = valid & ~completions.isfinite().all(dim=-1)
    if bool(bad.any()):
        group, completion = (int(index) for index in bad.nonzero()[0])
        raise NumericsError(
            f"non-finite feature of group {group}, completion {completion} ({int(bad.sum())} of {int(valid.sum())} valid completions): "
            "check the feature network's dtype, or leave the completion out with mask"
        )
    bad_reference = valid.any(dim=1) & ~references.isfinite().all(dim=-1)
    if bool(bad_reference.any()):
        group = int(bad_reference.nonzero()[0])
        raise NumericsError(f"non-finite feature of the reference of group {group}: check the feature network's dtype, or drop the group")
    if weights is not None and bool((bad := valid & ~weights.isfinite()).any()):
        group, completion = (int(index) for index in bad.nonzero()[0])
        raise NumericsError(f"non-finite completion_weights of group {group}, completion {completion}")


def _cosine(phi: Float[Tensor, "g n d"], target: Float[Tensor, "g d"]) -> Float[Tensor, "g n"]:
    products = (phi @ target[:, :, None]).squeeze(-1)
    norms: Tensor = vector_norm(phi, dim=-1).clamp_min(NORM_EPS) * vector_norm(target, dim=-1, keepdim=True).clamp_min(NORM_EPS)
    return products / norms


def _diversity(
    gram: Float[Tensor, "g n n"], valid: Bool[Tensor, "g n"], weights: Float[Tensor, "g n"] | None
) -> tuple[Float[Tensor, "g n"], Float[Tensor, "g n"]]:
    """2/(n-1) sum_{k != j} w_k G_jk, and 2/(n-1) w_j sum_{k != j} G_jk; 0 for n < 2."""
    others = (valid[:, :, None] & valid[:, None, :]).masked_fill(torch.eye(gram.shape[1], dtype=torch.bool, device=gram.device), False)
    siblings = gram.masked_fill(~others, 0.0)
    scale = 2.0 / (valid.sum(dim=1, keepdim=True) - 1).clamp_min(1).to(gram.dtype)
    plain = scale * siblings.sum(dim=2)
    if weights is None:
        return plain, plain
    weights = weights.masked_fill(~valid, 0.0)
    return scale * (siblings @ weights[:, :, None]).squeeze(-1), plain * weights


def _losses(
    phi: Float[Tensor, "g n d"], target: Float[Tensor, "g d"], valid: Bool[Tensor, "g n"]
) -> tuple[Float[Tensor, " g"], Float[Tensor, " g"]]:
    """cfm_loss and fm_loss_unbiased; invalid rows of phi are 0."""
    count = valid.sum(dim=1).double()
    total = phi.sum(dim=1)
    cfm_loss = (total / count[:, None] - target).square().sum(dim=-1)  # 0/0 = NaN for n = 0
    alignment = (total * target).sum(dim=-1) / count
    pairs = total.square().sum(dim=-1) - phi.square().sum(dim=(1, 2))  # sum over j != k of <phi_j, phi_k>
    diversity = pairs / (count * (count - 1.0))
    unbiased = target.square().sum(dim=-1) - 2.0 * alignment + diversity
    return cfm_loss, unbiased.masked_fill(count < 2, torch.nan)
