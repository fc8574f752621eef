"""Rewards: feature matching, and the aggregation of several objectives."""

from ebft_ds.rewards.aggregation import AggregationMode, ScaleRewards, aggregate_objectives
from ebft_ds.rewards.feature_matching import FeatureRewards, group_feature_rewards

__all__ = ["AggregationMode", "FeatureRewards", "ScaleRewards", "aggregate_objectives", "group_feature_rewards"]
