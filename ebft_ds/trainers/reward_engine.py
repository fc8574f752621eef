"""Engines of reward models: the one that is trained, and frozen ones that score for others."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftConfig

from ebft_ds.config import RecipeConfig, RewardConfig
from ebft_ds.config.deepspeed import build_deepspeed_config
from ebft_ds.config.derived_reward import RewardNumbers
from ebft_ds.config.sections import PeftSection
from ebft_ds.engine.build import ZeroEngine
from ebft_ds.engine.compiled import compile_blocks
from ebft_ds.engine.loading import load_reward_model
from ebft_ds.packing.packer import RowPacker
from ebft_ds.trainers.engines import row_packer
from ebft_ds.trainers.trained_engine import trained_engine


@dataclass(frozen=True)
class RewardEngine:
    """A reward model on ZeRO-3, and how its rows are laid out."""

    engine: ZeroEngine
    packer: RowPacker


def build_reward_engine(
    config: RewardConfig,
    derived: RewardNumbers,
    *,
    hidden_size: int | None,
    peft_config: PeftConfig | None,
    optimizer: torch.optim.Optimizer | None,
) -> RewardEngine:
    """The trained engine with its optimizer. Errors: as of `load_reward_model`."""
    deepspeed_config = build_deepspeed_config(config, derived, "actor", hidden_size)
    adapter = with_trained_head(peft_config) if peft_config is not None else None
    network = load_reward_model(config.model, config.peft, deepspeed_config, seed=config.run.seed, peft_config=adapter)
    if config.reward.torch_compile:
        compile_blocks(network)
    steps = derived.steps or config.run.max_steps
    engine = trained_engine(network, deepspeed_config, optim=config.optim, loss=config.loss, steps=steps, optimizer=optimizer)
    return RewardEngine(engine, row_packer(config, network, engine.device, "reward model"))


def load_frozen_reward_engine(config: RecipeConfig, model_name: str, deepspeed_config: dict[str, Any], seed: int = 0) -> RewardEngine:
    """A finished reward model that only scores.

    Args:
        config: any recipe; precision, attention and row layout are taken from it.
        model_name: folder or hub name of a classifier with one label and a head.
        deepspeed_config: of kind "feature" (`build_deepspeed_config`).

    Raises:
        ModelError: as of `load_reward_model`.
    """
    revision = config.model.model_revision if model_name == config.model.model_name_or_path else None
    model = config.model.model_copy(update={"model_name_or_path": model_name, "model_revision": revision})
    network = load_reward_model(model, PeftSection(), deepspeed_config, seed=seed, trained=False)
    engine = ZeroEngine(network, deepspeed_config)
    return RewardEngine(engine, row_packer(config, network, engine.device, f"reward model {model_name}"))


def with_trained_head(adapter: PeftConfig) -> PeftConfig:
    """A user's adapter with the new head trained and saved beside it, as a classifier's."""
    changed = copy.deepcopy(adapter)
    changed.task_type = "SEQ_CLS"
    changed.modules_to_save = list(dict.fromkeys([*(changed.modules_to_save or []), "score"]))
    return changed
