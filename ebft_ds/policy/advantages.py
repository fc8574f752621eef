"""Advantages of a group's completions (METHOD section 1), and how further objectives join (section 3).

`ebft_rloo` is the exact leave-one-out baseline: the diversity part of a sibling's reward contains sample j, so a plain mean over the
siblings is not independent of sample j. With doubled alignment a, doubled diversity d, and e_j what j adds to its siblings' d
(e = d without completion weights):

    A_j = alpha (a_j - sum_{k != j} a_k / (n-1)) - eta (d_j - (sum_k d_k - d_j - e_j) / (n-2)),   the last fraction 0 for n <= 2

Expected gradient against the exact -grad L_FM (on-policy, no whitening):

    estimator   alignment part   diversity part
    ebft_rloo   1                1
    reinforce   1                1 (no baseline: the same mean, more variance)
    rloo        1                (n-2)/(n-1)
    group       (n-1)/n          (n-2)/n
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ebft_ds.errors import ConfigError, NumericsError
from ebft_ds.rewards.aggregation import ScaleRewards
from ebft_ds.rewards.feature_matching import FeatureRewards
from ebft_ds.rewards.statistics import STD_EPS, is_flat, masked_mean, masked_std

AdvantageEstimator = Literal["ebft_rloo", "rloo", "group", "reinforce"]


def group_advantages(
    rewards: FeatureRewards | Float[Tensor, "g n"],
    *,
    estimator: AdvantageEstimator | str = "ebft_rloo",
    scale_rewards: ScaleRewards | str = "none",
    mask: Bool[Tensor, "g n"] | None = None,
) -> Float[Tensor, "g n"]:
    """Advantages under one of the estimators of this module.

    Args:
        rewards: `FeatureRewards`, or plain rewards for `rloo`, `group` and `reinforce`.
        scale_rewards: `none`; `group` or `batch` divide by the rewards' Bessel-corrected std over the group or over all groups
            given, plus 1e-4. Division changes the objective: the gradient is then not that of L_FM.
        mask: valid completions. `FeatureRewards` bring their own, and a different one is refused: their diversity was computed with it.

    Returns:
        Advantages in the dtype of the rewards. 0 for invalid completions and in groups with fewer than two valid ones. Exactly 0 in a
        group whose rewards do not vary, for `rloo` and `group`, and for every estimator when rewards are scaled. Unscaled,
        `ebft_rloo` is exactly 0 where alignment and diversity do not vary (n >= 3); `reinforce`, and `ebft_rloo` with n = 2, have no
        diversity baseline and keep the reward there, or the expected gradient would not be exact.

    Raises:
        ConfigError: unknown estimator or scale, `ebft_rloo` on plain rewards, a mask that contradicts the rewards'.
        NumericsError: a non-finite reward of a valid completion.
    """
    if estimator not in get_args(AdvantageEstimator):
        raise ConfigError(f"advantage_estimator is {estimator!r}; use one of {', '.join(get_args(AdvantageEstimator))}")
    if scale_rewards not in get_args(ScaleRewards):
        raise ConfigError(f"scale_rewards is {scale_rewards!r}; use one of {', '.join(get_args(ScaleRewards))}")
    reward, valid = _reward_and_mask(rewards, mask)
    values = reward.double().masked_fill(~valid, 0.0)
    flat = is_flat(values, valid, precision=reward.dtype, scale=_rounding_scale(rewards))
    if estimator == "ebft_rloo":
        if not isinstance(rewards, FeatureRewards):
            raise ConfigError("ebft_rloo needs the FeatureRewards of group_feature_rewards; plain rewards take rloo, group or reinforce")
        advantages, zero = _ebft_rloo(rewards)
    else:
        advantages = _centre(values, valid, estimator)
        zero = torch.zeros_like(flat) if estimator == "reinforce" else flat
    if scale_rewards != "none":
        advantages = advantages / (_std(values, valid, scale_rewards) + STD_EPS)
        zero = zero | flat
    zero = zero | (valid.sum(dim=1, keepdim=True) < 2)
    return advantages.masked_fill(~valid | zero, 0.0).to(reward.dtype)


def zero_variance_groups(rewards: FeatureRewards | Float[Tensor, "g n"], *, mask: Bool[Tensor, "g n"] | None = None) -> Bool[Tensor, " g"]:
    """Groups whose valid rewards do not vary, or that have fewer than two; their share is `frac_reward_zero_std`."""
    reward, valid = _reward_and_mask(rewards, mask)
    values = reward.double().masked_fill(~valid, 0.0)
    return is_flat(values, valid, precision=reward.dtype, scale=_rounding_scale(rewards)).squeeze(1)


def combine_advantages(
    ebft: Float[Tensor, "g n"],
    others: Sequence[Float[Tensor, "g n"]],
    weights: Sequence[float],
    *,
    mask: Bool[Tensor, "g n"] | None = None,
) -> Float[Tensor, "g n"]:
    """A = w_0 A_ebft + sum_k w_k A_k, unscaled, with A_k the `rloo` advantages of the further rewards (METHOD section 3).

    Args:
        ebft: advantages from feature matching.
        others: rewards of the further objectives; NaN where one has no value, which leaves the completion out of that objective alone.
        weights: w_0, then one per further objective.

    Raises:
        ConfigError: a wrong number of weights.
        NumericsError: an infinite reward of a valid completion.
    """
    if len(weights) != 1 + len(others):
        raise ConfigError(
            f"reward_weights has {len(weights)} entries for feature matching and {len(others)} further objectives: give {1 + len(others)}"
        )
    valid = torch.ones_like(ebft, dtype=torch.bool) if mask is None else mask.bool()
    combined = weights[0] * ebft.masked_fill(~valid, 0.0)
    for weight, rewards in zip(weights[1:], others, strict=True):
        scored = valid & ~rewards.isnan()
        combined = combined + weight * group_advantages(rewards, estimator="rloo", mask=scored).to(ebft.dtype)
    return combined


def _reward_and_mask(rewards: FeatureRewards | Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    if isinstance(rewards, FeatureRewards):
        if mask is not None and not torch.equal(mask.bool(), rewards.mask):
            raise ConfigError("mask differs from the one the FeatureRewards were made with: pass it to group_feature_rewards")
        reward, valid = rewards.reward, rewards.mask
    else:
        reward, valid = rewards, torch.ones_like(rewards, dtype=torch.bool) if mask is None else mask.bool()
    bad = valid & ~reward.isfinite()
    if bool(bad.any()):
        group, completion = (int(index) for index in bad.nonzero()[0])
        raise NumericsError(f"non-finite reward of group {group}, completion {completion}: leave the completion out with mask")
    return reward, valid


def _rounding_scale(rewards: FeatureRewards | Tensor) -> float:
    """Feature rewards are sums of products of unit vectors, so their rounding is that of numbers near 1, even where they cancel."""
    return max(abs(rewards.alignment_coef), abs(rewards.diversity_coef)) if isinstance(rewards, FeatureRewards) else 0.0


def _ebft_rloo(rewards: FeatureRewards) -> tuple[Float[Tensor, "g n"], Bool[Tensor, "g 1"]]:
    """The exact advantages, and the groups where they are 0 but for rounding."""
    valid, precision = rewards.mask, rewards.reward.dtype
    alignment = rewards.alignment_coef * rewards.alignment.double()
    diversity = rewards.diversity_coef * rewards.diversity.double()
    to_siblings = rewards.diversity_coef * rewards.diversity_to_siblings.double()
    count = valid.sum(dim=1, keepdim=True)
    independent = (diversity.sum(dim=1, keepdim=True) - diversity - to_siblings) / (count - 2).clamp_min(1)
    advantages = _centre(alignment, valid, "rloo") - (diversity - independent.masked_fill(count <= 2, 0.0))
    scaled = ((alignment, rewards.alignment_coef), (diversity, rewards.diversity_coef), (to_siblings, rewards.diversity_coef))
    flat = [is_flat(part, valid, precision=precision, scale=abs(coef)) for part, coef in scaled]
    baselined = (count >= 3) | (diversity == 0.0).all(dim=1, keepdim=True)
    return advantages, flat[0] & flat[1] & flat[2] & baselined


def _centre(values: Float[Tensor, "g n"], valid: Bool[Tensor, "g n"], estimator: str) -> Float[Tensor, "g n"]:
    if estimator == "reinforce":
        return values
    if estimator == "group":
        return values - masked_mean(values, valid)
    siblings = (valid.sum(dim=1, keepdim=True) - 1).clamp_min(1)
    return values - (values.sum(dim=1, keepdim=True) - values) / siblings


def _std(values: Float[Tensor, "g n"], valid: Bool[Tensor, "g n"], scale_rewards: str) -> Tensor:
    if scale_rewards == "group":
        return masked_std(values, valid)
    return masked_std(values.view(1, -1), valid.view(1, -1))
