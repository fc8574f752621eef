"""Small reward engines for the tests, built the way a run builds them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import torch
from peft import PeftConfig
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from ebft_ds.config import RewardConfig
from ebft_ds.config.derived_reward import derive_reward
from ebft_ds.engine.network import ScoreWork
from ebft_ds.packing.packer import RowPacker
from ebft_ds.packing.whole_groups import WholeGroup, build_group_rows
from ebft_ds.trainers.reward_engine import RewardEngine, build_reward_engine
from tests.distributed.engines import PARTITION_ALL
from tests.distributed.small import token_rows


def reward_config(model: Path, **fields: Any) -> RewardConfig:
    """A float32 configuration over a small model."""
    defaults: dict[str, Any] = {
        "model_name_or_path": str(model),
        "dtype": "float32",
        "learning_rate": 1e-2,
        "max_steps": 10,
        "max_length": 64,
        "per_device_train_batch_size": 4,
        "deepspeed": PARTITION_ALL,
    }
    return RewardConfig(**(defaults | fields))


def reward_engine(config: RewardConfig, world_size: int, *, hidden_size: int = 32, peft_config: PeftConfig | None = None) -> RewardEngine:
    return build_reward_engine(
        config, derive_reward(config, world_size, 100), hidden_size=hidden_size, peft_config=peft_config, optimizer=None
    )


def random_groups(seed: int, count: int, responses: tuple[int, ...] = (2,)) -> list[WholeGroup]:
    """Groups of different lengths; `responses`: how many each has, in turn."""
    found = []
    for i in range(count):
        size = responses[i % len(responses)]
        prefix, *branches = token_rows(seed + i, [3 + (seed + 5 * i) % 7, *(2 + (3 * i + 4 * k) % 6 for k in range(size))])
        found.append(WholeGroup(prefix, branches))
    return found


def score_work(groups: list[WholeGroup], packer: RowPacker) -> ScoreWork:
    built = build_group_rows(groups, packer)
    return ScoreWork(built.rows, built.ends)


def classifier(model: Path, folder: Path, labels: int = 1) -> Path:
    """The causal model's body with a random head, as a checkpoint with its tokenizer."""
    torch.manual_seed(1)
    network = AutoModelForSequenceClassification.from_pretrained(model, num_labels=labels, dtype=torch.float32)
    torch.nn.init.normal_(network.score.weight, std=0.3)
    network.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder


def gathered(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Collective: a copy of the whole parameter."""
    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().clone()
