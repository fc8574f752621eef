"""Small engines for the tests, built the way a run builds them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ebft_ds.config import AsyncEBFTConfig
from ebft_ds.config.derived import derive
from ebft_ds.trainers.assembly import Engines, build_engines
from ebft_ds.types import Prompt, Rollout, RolloutGroup, TokenSpan

PARTITION_ALL = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
"""So that even the tests' small parameters are really split."""


def make_config(model: Path, **fields: Any) -> AsyncEBFTConfig:
    """A float32 configuration over the tiny model."""
    defaults: dict[str, Any] = {
        "model_name_or_path": str(model),
        "dtype": "float32",
        "learning_rate": 1e-2,
        "max_steps": 10,
        "max_seq_length": 128,
        "max_completion_length": 32,
        "deepspeed": PARTITION_ALL,
        "feature_deepspeed": PARTITION_ALL,
        "ebft_feature_layers": [1, 2],
    }
    return AsyncEBFTConfig(**(defaults | fields))


def make_engines(config: AsyncEBFTConfig, world_size: int, num_layers: int = 4) -> Engines:
    derived = derive(config, world_size)
    return build_engines(config, derived, hidden_size=64, num_layers=num_layers, peft_config=None, optimizer=None)


def make_group(index: int, prompt: list[int], completions: list[list[int]], reference: list[int], *, logprob: float = -3.0) -> RolloutGroup:
    rollouts = [Rollout(ids, [logprob] * len(ids), [TokenSpan(0, len(ids), 0)] if ids else [], "stop") for ids in completions]
    return RolloutGroup(Prompt(index, index, 0, prompt, reference), rollouts)
