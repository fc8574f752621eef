"""Rewards: feature matching, preferences, reward functions, and the aggregation of several objectives.

The names are loaded on first use, so that a worker process of reward functions does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ebft_ds.rewards.aggregation import AggregationMode, ScaleRewards, aggregate_objectives
    from ebft_ds.rewards.feature_matching import FeatureRewards, group_feature_rewards

_HOMES = {
    "AggregationMode": "aggregation",
    "FeatureRewards": "feature_matching",
    "ScaleRewards": "aggregation",
    "aggregate_objectives": "aggregation",
    "group_feature_rewards": "feature_matching",
}

__all__ = ["AggregationMode", "FeatureRewards", "ScaleRewards", "aggregate_objectives", "group_feature_rewards"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'ebft_ds.rewards' has no attribute {name!r}")
    return getattr(importlib.import_module(f"ebft_ds.rewards.{home}"), name)
