"""Small engines for the tests, built the way a run builds them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from peft import PeftConfig

from ebft_ds.collectives import Collectives
from ebft_ds.config import AsyncEBFTConfig
from ebft_ds.config.derived import derive
from ebft_ds.engine.loading import lora_config
from ebft_ds.policy.batch import PolicyPacker
from ebft_ds.trainers.engines import Engines, build_engines
from ebft_ds.trainers.policy_step import PolicyStep
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


def make_engines(config: AsyncEBFTConfig, world_size: int, num_layers: int = 4, peft_config: PeftConfig | None = None) -> Engines:
    derived = derive(config, world_size)
    return build_engines(config, derived, hidden_size=64, num_layers=num_layers, peft_config=peft_config, optimizer=None)


def random_adapter(config: AsyncEBFTConfig) -> PeftConfig:
    """The configuration's adapter, with random B matrices: a fresh adapter changes nothing and gives A no gradient.

    Scaled by 1: at alpha/r = 8 random matrices drown the weights and float32 itself is wrong by up to 4e-4 in a log-prob; at 1 by 2e-6.
    """
    adapter = lora_config(config.peft)
    adapter.lora_alpha = adapter.r
    adapter.init_lora_weights = False
    return adapter


def make_policy(
    config: AsyncEBFTConfig, engines: Engines, collectives: Collectives, packer: PolicyPacker | None = None, **loss: Any
) -> PolicyStep:
    """The configuration's PolicyStep over `packer`'s rows (default: as a run has them), with some loss fields changed."""
    return PolicyStep(
        engines.actor,
        engines.kl_reference,
        collectives,
        loss=config.loss.model_copy(update=loss),
        rollout=config.rollout,
        run=config.run,
        temperature=config.rollout.temperature,
        check_stop=lambda: None,
        packer=packer or PolicyPacker.for_run(engines.packer, config.run, max_seq_length=config.data.max_seq_length),
    )


def make_group(index: int, prompt: list[int], completions: list[list[int]], reference: list[int], *, logprob: float = -3.0) -> RolloutGroup:
    rollouts = [Rollout(ids, [logprob] * len(ids), [TokenSpan(0, len(ids), 0)] if ids else [], "stop") for ids in completions]
    return RolloutGroup(Prompt(index, index, 0, prompt, reference), rollouts)
