"""From scores (and further objectives) to the advantages of a step, and the metrics that describe them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ebft_ds.config.sections import LossSection
from ebft_ds.features.scorer import Scores
from ebft_ds.monitor.metrics import MetricsAccumulator
from ebft_ds.policy.advantages import combine_advantages, group_advantages, zero_variance_groups
from ebft_ds.rewards.aggregation import aggregate_objectives
from ebft_ds.rewards.feature_matching import FeatureRewards


def step_advantages(rewards: FeatureRewards, further: Sequence[Tensor], loss: LossSection) -> Tensor:
    """Advantages [G, n] (METHOD section 3): EBFT alone, or combined with `further` rewards, [G, n] each, NaN where there is none."""
    weights = loss.reward_weights or [1.0] * (1 + len(further))
    if not further:
        return weights[0] * group_advantages(rewards, estimator=loss.advantage_estimator, scale_rewards=loss.scale_rewards)
    if loss.advantage_estimator == "ebft_rloo":
        return combine_advantages(group_advantages(rewards), further, weights, mask=rewards.mask)
    stacked = torch.stack([rewards.reward, *(r.to(rewards.reward.dtype) for r in further)], dim=-1)
    groups, samples, objectives = stacked.shape
    flat = aggregate_objectives(
        stacked.view(groups * samples, objectives),
        samples,
        weights=weights,
        mode=loss.multi_objective_aggregation,
        scale_rewards=loss.scale_rewards,
        mask=rewards.mask.reshape(-1),
    )
    return flat.view(groups, samples)


def log_scores(scores: Scores, metrics: MetricsAccumulator) -> None:
    """The `ebft/*` and reward keys. Every rank holds the same scores, so they are logged on one rank only."""
    rewards = scores.rewards
    valid = int(rewards.mask.sum())
    for name in ("alignment", "diversity", "reward"):
        values: Tensor = getattr(rewards, name)
        metrics.mean(f"ebft/{name}", float(values[rewards.mask].mean()) if valid else 0.0, valid)
    for name in ("cfm_loss", "fm_loss_unbiased"):
        known = getattr(rewards, name)
        known = known[~known.isnan()]
        metrics.mean(f"ebft/{name}", float(known.mean()) if known.numel() else 0.0, known.numel())
    groups = rewards.mask.shape[0]
    metrics.mean("ebft/gram_identity_share", float(rewards.gram_identity.float().mean()), groups)
    kept = rewards.whitening_kept_ratio[~rewards.whitening_kept_ratio.isnan()]
    if kept.numel():
        metrics.min("ebft/min_singular_ratio", float(kept.min()))
    metrics.sum("ebft/empty_completions", scores.empty_completions)
    for values, mask in zip(rewards.reward, rewards.mask, strict=True):
        if int(mask.sum()) > 1:
            metrics.mean("reward_std", float(values[mask].std()))
    metrics.mean("frac_reward_zero_std", float(zero_variance_groups(rewards).float().mean()), groups)
