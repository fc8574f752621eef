"""A trained reward model as a folder that AutoModelForSequenceClassification, `ebft-ds score` and vLLM load."""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch

from ebft_ds.checkpoint.export import export_final
from ebft_ds.config import RewardConfig
from ebft_ds.data.preference.arrays import pad_id
from ebft_ds.trainers.reward_evaluation import RewardScale
from ebft_ds.trainers.reward_parts import RewardParts


def export_reward_model(config: RewardConfig, parts: RewardParts, scale: RewardScale | None, target: Path) -> Path:
    """Collective. `final/` with its tokenizer and reward_encoding.json; with PEFT also `adapter/`. Errors: as `export_final`.

    Args:
        scale: of the rewards on held-out rows; None: not measured.
    """
    network = parts.reward.engine.network
    model = network.base_model
    model.config.architectures = [type(model).__name__]  # the checkpoint's may be a causal model's
    model.config.pad_token_id = pad_id(parts.tokenizer)  # without one the library's forward refuses batches
    measured = scale is not None and scale.usable
    encoding = msgspec.structs.replace(
        parts.encoding, mean=scale.mean if scale and measured else None, std=scale.std if scale and measured else None
    )
    return export_final(
        network,
        parts.tokenizer,
        target,
        parts.collectives,
        dtype=getattr(torch, config.model.dtype),
        merged=config.checkpoint.export_merged,
        generation_config=None,
        write_beside=encoding.save,
    )
