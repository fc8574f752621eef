"""Policy mathematics: advantages, mismatch weights, losses, KL, coefficient schedules."""

from ebft_ds.policy.advantages import AdvantageEstimator, combine_advantages, group_advantages, zero_variance_groups
from ebft_ds.policy.coefficients import ce_coefficient, in_warm_start, rl_coefficient
from ebft_ds.policy.denominators import LossDenominators
from ebft_ds.policy.importance import ImportanceMode, importance_weights, sequence_importance
from ebft_ds.policy.kl import KlEstimator, per_token_kl
from ebft_ds.policy.losses import LossType, PolicyLoss, policy_loss, reference_cross_entropy

__all__ = [
    "AdvantageEstimator",
    "ImportanceMode",
    "KlEstimator",
    "LossDenominators",
    "LossType",
    "PolicyLoss",
    "ce_coefficient",
    "combine_advantages",
    "group_advantages",
    "importance_weights",
    "in_warm_start",
    "per_token_kl",
    "policy_loss",
    "reference_cross_entropy",
    "rl_coefficient",
    "sequence_importance",
    "zero_variance_groups",
]
