"""Energy-Based Fine-Tuning of language models on DeepSpeed ZeRO-3.

The public names are loaded on first use, so that `import ebft_ds` (and `ebft-ds --help`) does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ebft_ds.config import AsyncEBFTConfig, RewardConfig
    from ebft_ds.data.preference import RewardCollator
    from ebft_ds.features.layers import feature_layer_indices
    from ebft_ds.features.pooling import pool_hidden_states
    from ebft_ds.features.scorer import EBFTScorer
    from ebft_ds.policy.advantages import group_advantages
    from ebft_ds.policy.importance import importance_weights
    from ebft_ds.rewards.aggregation import aggregate_objectives
    from ebft_ds.rewards.feature_matching import group_feature_rewards
    from ebft_ds.rewards.preference_loss import pairwise_loss
    from ebft_ds.rollout.loop import EBFTRolloutLoop
    from ebft_ds.trainers.async_ebft import AsyncEBFTTrainer
    from ebft_ds.trainers.reward import RewardTrainer

__version__ = "0.1.0"

_HOMES = {
    "feature_layer_indices": "ebft_ds.features.layers",
    "pool_hidden_states": "ebft_ds.features.pooling",
    "group_feature_rewards": "ebft_ds.rewards.feature_matching",
    "group_advantages": "ebft_ds.policy.advantages",
    "aggregate_objectives": "ebft_ds.rewards.aggregation",
    "importance_weights": "ebft_ds.policy.importance",
    "pairwise_loss": "ebft_ds.rewards.preference_loss",
    "AsyncEBFTConfig": "ebft_ds.config",
    "AsyncEBFTTrainer": "ebft_ds.trainers.async_ebft",
    "RewardConfig": "ebft_ds.config",
    "RewardTrainer": "ebft_ds.trainers.reward",
    "EBFTScorer": "ebft_ds.features.scorer",
    "RewardCollator": "ebft_ds.data.preference",
    "EBFTRolloutLoop": "ebft_ds.rollout.loop",
}

__all__ = [
    "AsyncEBFTConfig",
    "AsyncEBFTTrainer",
    "EBFTRolloutLoop",
    "EBFTScorer",
    "RewardCollator",
    "RewardConfig",
    "RewardTrainer",
    "__version__",
    "aggregate_objectives",
    "feature_layer_indices",
    "group_advantages",
    "group_feature_rewards",
    "importance_weights",
    "pairwise_loss",
    "pool_hidden_states",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'ebft_ds' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_HOMES))
